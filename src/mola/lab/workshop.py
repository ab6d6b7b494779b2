"""What methods use that need more than stored activations: whole networks, training data, and predictions kept on disk."""

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

Voice = Callable[[Tensor], Tensor]
"""From a batch of inputs to probabilities (n, C): one draw, one member."""


@dataclass(frozen=True)
class StoredPrediction:
    """The mean of some voices on some data."""

    probs: Tensor
    """(n, C)"""
    own_entropy: Tensor
    """(n,): the mean of the voices' own entropies."""

    @property
    def mutual_information(self) -> Tensor:
        """How much the voices disagree, (n,)."""
        return (entropy(self.probs) - self.own_entropy).clamp(min=0)

    def answer(self, voices: int) -> Answer:
        """Probabilities, and the scores that can be made of them."""
        given = {"max probability": max_probability_score(self.probs, CATEGORICAL), "entropy": entropy(self.probs)}
        if voices > 1:  # one voice alone disagrees with nobody
            given["mutual information"] = self.mutual_information
        return Answer(self.probs, given=given)

    @staticmethod
    def mean(opinions: Iterable[StoredPrediction]) -> StoredPrediction:
        """The voices of all of them together, each opinion with the same weight."""
        every = list(opinions)
        return StoredPrediction(
            torch.stack([one.probs for one in every]).mean(0), torch.stack([one.own_entropy for one in every]).mean(0)
        )


PORTION = 64 * BATCH
"""Data whose opinions are read at once."""


class StoredPredictions:
    """A folder of opinions; what is missing is asked for."""

    def __init__(self, directory: Path, device: str = "cpu") -> None:
        self.directory, self.device = directory, torch.device(device)

    def ask(self, key: str, source: Source, voices: Callable[[], Iterable[Voice]]) -> Iterator[StoredPrediction]:
        """The opinion of a method on a set.

        Args:
            key: of the method: the same key means the same voices.
            source: the set.
            voices: makes the voices, one after the other, if they have not been asked before.

        Yields:
            The opinion, some of the data at a time.
        """
        path = self.directory / key / f"{source.checksum}.safetensors"
        if not path.exists():
            found = StoredPrediction.mean(_asked(voice, source, self.device) for voice in voices())
            with written_rows(path, source.count, {}, {"set": source.name}) as writer:
                writer.add({"probs": found.probs, "entropy": found.own_entropy})
        file = TensorFile(path, "predictions")
        for start in range(0, source.count, PORTION):
            part = (start, start + PORTION)
            yield StoredPrediction(file.read("probs", *part), file.read("entropy", *part))


def _asked(voice: Voice, source: Source, device: torch.device) -> StoredPrediction:
    with torch.no_grad():
        probs = torch.cat([voice(fast_inputs(inputs.to(device))).float().cpu() for inputs, _ in source.open()])
    return StoredPrediction(probs, entropy(probs))


@dataclass(frozen=True)
class Workshop:
    """What is shared by all runs of a suite."""

    suite: Suite
    network: str
    """Name of the architecture."""
    build: Callable[[], nn.Module]
    options: DataOptions
    sources: Mapping[str, Source]
    activations: Activations

    @property
    def device(self) -> str:
        """Where networks are run and trained."""
        return str(self.activations.device)

    @property
    def opinions(self) -> StoredPredictions:
        """Predictions that were made before."""
        return StoredPredictions(self.activations.directory / "opinions", self.device)

    @cached_property
    def training(self) -> TrainingData:
        """What networks of the suite are trained on."""
        if self.suite.training_data is None:
            raise OptionError(f"the {self.suite.name} suite has no training data to train SWAG or MIMO with.")
        read = self.suite.training_data(self.options, self.suite.recipe)
        moved = Labelled(read.data.inputs.to(self.device), read.data.labels.to(self.device))
        return TrainingData(moved, read.prepare)

    def seed(self, run: int) -> int:
        """Of what is trained anew in a run."""
        return member_seeds(run + 1, 0)[run]

    def folder(self, kind: str, *identity: object) -> Path:
        """Where a training is kept: one folder for each that differs in data, recipe or anything of `identity`."""
        recipe = self.suite.recipe.describe()
        key = checksum(self.suite.name, self.network, self.sources["train"].checksum, recipe["augment"], *identity)
        return self.activations.directory / kind / key

    def load(self, network: Network) -> nn.Module:
        """A trained network, where networks are run."""
        return network.load().to(self.device)


@dataclass(frozen=True)
class Context(Material):
    """What a method may use in one run of a suite."""

    networks: tuple[Network, ...]
    """The run's."""
    run: int
    workshop: Workshop
    """For methods that need whole networks, or train."""

    def labelled(
        self, name: str, parts: Iterable[Iterable[StoredPrediction]]
    ) -> Iterator[tuple[list[StoredPrediction], Tensor]]:
        """What several predictors say of a set, portion by portion, with the labels."""
        labels = torch.split(self.read(name).labels, PORTION)
        return ((list(some), label) for *some, label in zip(*parts, labels, strict=True))
