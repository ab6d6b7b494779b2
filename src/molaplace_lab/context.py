"""The context in which a method runs: stored activations, whole networks, training data, and predictions stored on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from molaplace.evaluation import outlier_scores
from molaplace.uncertainty import entropy
from molaplace_lab.activations import ActivationCache, Network
from molaplace_lab.activations_file import BATCH, StoredActivations, TensorFile, write_rows
from molaplace_lab.checksums import checksum
from molaplace_lab.measures import BatchPrediction
from molaplace_lab.models import fast_inputs
from molaplace_lab.suite import Source, Suite, TrainingData

Predictor = Callable[[Tensor], Tensor]
"""Function that maps a batch of inputs to the class probabilities (n, C) predicted by one draw or one ensemble member."""

RESUMED = "the fit time covers only this command, not any earlier training that it resumed."
"""Note in the records of methods that are trained or fitted on whole networks, and that store what they computed."""

CHUNK = 64 * BATCH
"""Number of examples whose predictions are read at once."""


@dataclass(frozen=True)
class StoredPrediction:
    """The mean prediction of several predictors."""

    probs: Tensor
    """Mean probabilities (n, C)."""
    mean_entropy: Tensor
    """Mean entropy (n,) of the predictions of the individual predictors."""

    def with_scores(self, predictors: int) -> BatchPrediction:
        """Return the probabilities and OOD scores; the mutual information is included if there are at least two predictors."""
        scores = outlier_scores(self.probs)
        if predictors > 1:
            scores["mutual information"] = (entropy(self.probs) - self.mean_entropy).clamp(min=0)
        return BatchPrediction(self.probs, scores)

    @staticmethod
    def mean(predictions: Iterable[StoredPrediction]) -> StoredPrediction:
        """Return the equally weighted mean of several predictions."""
        members = list(predictions)
        probs = torch.stack([member.probs for member in members]).mean(0)
        return StoredPrediction(probs, torch.stack([member.mean_entropy for member in members]).mean(0))


@dataclass(frozen=True)
class Context:
    """The data and networks of one run."""

    read: Callable[[str], StoredActivations]
    """Function that returns the stored features and logits of a set, given its name. Last-layer methods need nothing else."""
    threshold: float | None
    """Target confidence of the paper's rule."""
    suite: Suite
    network: str
    """Name of the architecture."""
    networks: tuple[Network, ...]
    """The run's networks."""
    run: int
    sources: Mapping[str, Source]
    activations: ActivationCache
    training: Callable[[], TrainingData]
    """Function that loads the training data of the suite's networks onto the device."""

    @property
    def device(self) -> str:
        """Device on which networks are run and trained."""
        return str(self.activations.device)

    def folder(self, kind: str, *identity: object) -> Path:
        """Return a training run's cache folder, whose name is a checksum of the training setup and `identity`."""
        augment = self.suite.recipe.augment
        key = checksum(self.suite.name, self.network, self.sources["train"].checksum, augment, *identity)
        return self.activations.directory / kind / key

    def predictions(
        self, name: str, predictors: Mapping[str, Sequence[Predictor]]
    ) -> Iterator[tuple[list[StoredPrediction], Tensor]]:
        """Yield mean predictions and labels for a set in chunks. Predictions are computed once and stored on disk.

        `predictors` maps keys, which identify the stored predictions, to predictors whose predictions are averaged.
        """
        source = self.sources[name]
        files = []
        for key, members in predictors.items():
            path = self.activations.directory / "predictions" / key / f"{source.checksum}.safetensors"
            if not path.exists():
                mean = StoredPrediction.mean(self._predict(predictor, source) for predictor in members)
                columns = {"probs": mean.probs, "entropy": mean.mean_entropy}
                write_rows(path, [columns], source.count, {}, {"set": source.name})
            files.append(TensorFile(path, "predictions"))
        for index, labels in enumerate(torch.split(self.read(name).labels, CHUNK)):
            rows = (index * CHUNK, (index + 1) * CHUNK)
            yield [StoredPrediction(file.read("probs", *rows), file.read("entropy", *rows)) for file in files], labels

    def _predict(self, predictor: Predictor, source: Source) -> StoredPrediction:
        with torch.no_grad():
            batches = (fast_inputs(inputs.to(self.device)) for inputs, _ in source.open())
            probs = torch.cat([predictor(inputs).float().cpu() for inputs in batches])
        return StoredPrediction(probs, entropy(probs))
