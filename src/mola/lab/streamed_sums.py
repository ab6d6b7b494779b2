"""Training data that are stored nowhere: they go into the sums as they are read, once for all networks and methods.

The sums of K networks over a training set are kept under the checksums of both; every method that takes them reads them from there.
A fit under way keeps checkpoints, and the processes of a job divide the data among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mola
from mola.compare.activations_file import HeadOnly
from mola.component import Component
from mola.distributed import Team
from mola.errors import OptionError
from mola.lab.activations import SLICE, Network, Progress, fast_network
from mola.lab.suite import Source, checksum
from mola.network import head_by_name

CHECKPOINT = 200
"""Batches between two checkpoints of the sums."""


class StreamedSums:
    """A folder of sums; what is missing is computed.

    Args:
        directory: where they are kept.
        device: where networks are run.
    """

    def __init__(self, directory: Path, device: str | torch.device = "cpu") -> None:
        self.directory, self.device = directory, torch.device(device)
        self._loaded: dict[str, mola.MoLA] = {}

    def path(self, networks: Sequence[Network], source: Source, structure: str) -> Path:
        """Where sums are kept."""
        return self.directory / checksum([network.checksum for network in networks], source.checksum, structure)

    def compute(
        self, networks: Sequence[Network], source: Source, structure: str, progress: Progress, team: Team
    ) -> None:
        """Run all networks over a training set, unless that has been done.

        Args:
            networks: the trained networks.
            source: the training set.
            structure: of the curvature.
            progress: told which share of the data this process has read.
            team: the processes that divide the data among them; all of them call this.
        """
        if source.open_part is None and team.size > 1:
            raise OptionError(f"{source.title} can only be read from its first datum on: stream it with one process.")
        path = self.path(networks, source, structure)
        # One looks: others may see what is written meanwhile.
        done = team.share(path.exists())
        if done:
            return
        posterior = mola.fit(
            [network.to(self.device) for network in self._networks(networks, source)],
            _Shard(source, team, progress),
            structure=structure,
            team=team,
            checkpoint=path.with_suffix(".under-way"),
            checkpoint_every=CHECKPOINT,
            progress=False,
        )
        if team.first:
            posterior.save(path)
        team.collect(None)  # written before anybody reads it

    def read(self, networks: Sequence[Network], source: Source, structure: str, heads: Sequence[HeadOnly]) -> mola.MoLA:
        """The posterior at its first prior precision, over heads whose features are known.

        Args:
            networks: that the sums were computed for.
            source: the training set.
            structure: of the curvature.
            heads: of the first of the networks, or of all.

        Returns:
            The posterior of these heads.
        """
        path = self.path(networks, source, structure)
        if path.name not in self._loaded:
            self._loaded[path.name] = mola.load(path, self._networks(networks, source))
        fitted = self._loaded[path.name]
        components: list[Component] = []
        for component, head in zip(fitted.components, heads, strict=False):
            layer, place = component.require_layer("streamed sums"), head_by_name(head, "head")
            components.append(Component(head, place, layer, component.prior_precision, component.likelihood))
        return mola.MoLA(components, fitted.link, "uniform")

    @staticmethod
    def _networks(networks: Sequence[Network], source: Source) -> list[nn.Module]:
        example = next(iter(source.open()))[0][:1]
        return [fast_network(network.load(), example) for network in networks]


class _Shard:
    # The batches of a training set that are one process's: every so many slices, read anew each time.

    def __init__(self, source: Source, team: Team, progress: Progress) -> None:
        self.source, self.team, self.progress = source, team, progress

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        done = 0
        for start, stop, read in self._slices():
            for inputs, labels in read(start, stop):
                yield inputs, labels
                done += len(labels)
                self.progress(f"sums over {self.source.title}", min(1.0, done * self.team.size / self.source.count))

    def _slices(self) -> Iterator[tuple[int, int, Callable[[int, int], Any]]]:
        count, read = self.source.count, self.source.open_part
        if read is None:
            yield 0, count, lambda start, stop: self.source.open()
            return
        for start in range(self.team.rank * SLICE, count, self.team.size * SLICE):
            yield start, min(start + SLICE, count), read
