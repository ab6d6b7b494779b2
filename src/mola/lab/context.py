"""Context of methods that need more than stored activations: whole networks, training data, and predictions kept on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from mola.compare.activations_file import BATCH, TensorFile, written_rows
from mola.compare.methods import Material
from mola.compare.tally import Answer
from mola.errors import OptionError
from mola.lab.activations import Activations, Network, fast_inputs
from mola.lab.suite import DataOptions, Source, Suite, TrainingData, checksum
from mola.lab.training import Labelled, member_seeds
from mola.likelihoods import CATEGORICAL
from mola.outliers import max_probability_score
from mola.uncertainty import entropy

Predictor = Callable[[Tensor], Tensor]
"""From a batch of inputs to probabilities (n, C): one draw, one member."""

CHUNK = 64 * BATCH
"""Data whose predictions are read at once."""


@dataclass(frozen=True)
class StoredPrediction:
    """Mean prediction of several predictors."""

    probs: Tensor
    """(n, C)"""
    own_entropy: Tensor
    """(n,): mean over predictors of their entropies."""

    def answer(self, predictors: int) -> Answer:
        """Return the probabilities with their outlier scores; mutual information needs at least two predictors."""
        total = entropy(self.probs)
        given = {"max probability": max_probability_score(self.probs, CATEGORICAL), "entropy": total}
        if predictors > 1:
            given["mutual information"] = (total - self.own_entropy).clamp(min=0)
        return Answer(self.probs, given=given)

    @staticmethod
    def mean(predictions: Iterable[StoredPrediction]) -> StoredPrediction:
        """Return the mean of several predictions, with equal weights."""
        every = list(predictions)
        return StoredPrediction(
            torch.stack([one.probs for one in every]).mean(0), torch.stack([one.own_entropy for one in every]).mean(0)
        )


@dataclass(frozen=True)
class TrainingContext:
    """Data, networks and cache of one run, for methods that train or need whole networks."""

    suite: Suite
    network: str
    """Name of the architecture."""
    build: Callable[[], nn.Module]
    options: DataOptions
    sources: Mapping[str, Source]
    activations: Activations

    @property
    def device(self) -> str:
        """Device to run and train networks on."""
        return str(self.activations.device)

    @cached_property
    def training(self) -> TrainingData:
        """Training data of the suite's networks."""
        if self.suite.training_data is None:
            raise OptionError(f"the {self.suite.name} suite has no training data to train SWAG or MIMO with.")
        read = self.suite.training_data(self.options, self.suite.recipe)
        moved = Labelled(read.data.inputs.to(self.device), read.data.labels.to(self.device))
        return TrainingData(moved, read.prepare)

    def seed(self, run: int) -> int:
        """Return the seed of networks that are trained in a run."""
        return member_seeds(run + 1, 0)[run]

    def folder(self, kind: str, *identity: object) -> Path:
        """Return the cache folder of a training; it depends on data, augmentation and `identity`."""
        augment = self.suite.recipe.augment
        key = checksum(self.suite.name, self.network, self.sources["train"].checksum, augment, *identity)
        return self.activations.directory / kind / key

    def load(self, network: Network) -> nn.Module:
        """Load a trained network onto the device."""
        return network.load().to(self.device)

    def predictions(
        self, key: str, name: str, predictors: Callable[[], Iterable[Predictor]]
    ) -> Iterator[StoredPrediction]:
        """Yield the mean predictions for a set, chunk by chunk, computed once and kept on disk.

        Args:
            key: identifies the predictors.
            name: name of the set.
            predictors: makes the predictors one after the other, if their predictions are not stored yet.
        """
        source = self.sources[name]
        path = self.activations.directory / "opinions" / key / f"{source.checksum}.safetensors"
        if not path.exists():
            found = StoredPrediction.mean(self._predict(predictor, source) for predictor in predictors())
            with written_rows(path, source.count, {}, {"set": source.name}) as add:
                add({"probs": found.probs, "entropy": found.own_entropy})
        file = TensorFile(path, "predictions")
        for start in range(0, source.count, CHUNK):
            rows = (start, start + CHUNK)
            yield StoredPrediction(file.read("probs", *rows), file.read("entropy", *rows))

    def _predict(self, predictor: Predictor, source: Source) -> StoredPrediction:
        with torch.no_grad():
            batches = (fast_inputs(inputs.to(self.device)) for inputs, _ in source.open())
            probs = torch.cat([predictor(inputs).float().cpu() for inputs in batches])
        return StoredPrediction(probs, entropy(probs))


@dataclass(frozen=True)
class Context(Material):
    """What a method may use in one run of a suite."""

    networks: tuple[Network, ...]
    """The run's networks."""
    run: int
    training: TrainingContext

    def labelled(
        self, name: str, parts: Iterable[Iterable[StoredPrediction]]
    ) -> Iterator[tuple[list[StoredPrediction], Tensor]]:
        """Yield several predictors' predictions for a set, chunk by chunk, with the labels."""
        labels = torch.split(self.read(name).labels, CHUNK)
        return ((list(some), label) for *some, label in zip(*parts, labels, strict=True))
