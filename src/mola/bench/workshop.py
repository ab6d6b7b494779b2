"""Where methods work that need more than stored activations: whole networks, training data, a folder to keep things in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import nn

from mola.bench.activations import Activations, Network
from mola.bench.opinions import Opinions
from mola.bench.suite import DataOptions, Source, Suite, TrainingData, checksum
from mola.data.labelled import Labelled
from mola.errors import OptionError
from mola.training.loop import member_seeds

__all__ = ["Workshop"]


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
    def opinions(self) -> Opinions:
        """Predictions that were made before."""
        return Opinions(self.activations.directory / "opinions", self.device)

    @cached_property
    def training(self) -> TrainingData:
        """What networks of the suite are trained on.

        Raises:
            OptionError: if the suite trains nothing.
        """
        if self.suite.training_data is None:
            message = f"the {self.suite.name} suite has no training data to train SWAG or MIMO with."
            raise OptionError(message)
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
