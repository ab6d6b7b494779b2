"""Sums of training data that are not stored: one pass for all networks and methods, kept under the checksums of networks and data.

A fit in progress keeps checkpoints, and the processes of a team divide the data among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

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
    """A folder of sums, computed on demand by networks on a device."""

    def __init__(self, directory: Path, device: str | torch.device = "cpu") -> None:
        self.directory, self.device = directory, torch.device(device)
        self._loaded: dict[str, mola.MoLA] = {}

    def _path(self, networks: Sequence[Network], source: Source, structure: str) -> Path:
        return self.directory / checksum([network.checksum for network in networks], source.checksum, structure)

    def compute(
        self, networks: Sequence[Network], source: Source, structure: str, progress: Progress, team: Team
    ) -> None:
        """Run all networks over a training set, unless the sums are there; all processes of a team call this."""
        if source.open_part is None and team.size > 1:
            raise OptionError(f"{source.title} can only be read from its start: stream it with one process.")
        path = self._path(networks, source, structure)
        if team.share(path.exists()):  # rank 0 decides: another rank may look later
            return
        posterior = mola.fit(
            [network.to(self.device) for network in _load(networks, source)],
            _Shard(source, team, progress),
            structure=structure,
            team=team,
            checkpoint=path.with_suffix(".under-way"),
            checkpoint_every=CHECKPOINT,
            progress=False,
        )
        if team.first:
            posterior.save(path)
        team.collect(None)  # no process reads the file before it is complete

    def read(self, networks: Sequence[Network], source: Source, structure: str, heads: Sequence[HeadOnly]) -> mola.MoLA:
        """Return the posterior at its first prior precision, over heads of the first networks or of all."""
        path = self._path(networks, source, structure)
        if path.name not in self._loaded:
            self._loaded[path.name] = mola.load(path, _load(networks, source))
        fitted = self._loaded[path.name]
        components: list[Component] = []
        for component, head in zip(fitted.components, heads, strict=False):
            layer, place = component.require_layer("streamed sums"), head_by_name(head, "head")
            components.append(Component(head, place, layer, component.prior_precision, component.likelihood))
        return mola.MoLA(components, fitted.link, "uniform")


def _load(networks: Sequence[Network], source: Source) -> list[nn.Module]:
    example = next(iter(source.open()))[0][:1]
    return [fast_network(network.load(), example) for network in networks]


class _Shard:
    # This process's slices of a training set, read anew each time.

    def __init__(self, source: Source, team: Team, progress: Progress) -> None:
        self.source, self.team, self.progress = source, team, progress

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        source, team, done = self.source, self.team, 0
        starts = range(team.rank * SLICE, source.count, team.size * SLICE)
        parts = (
            [source.open()]
            if source.open_part is None
            else (source.open_part(s, min(s + SLICE, source.count)) for s in starts)
        )
        for part in parts:
            for inputs, labels in part:
                yield inputs, labels
                done += len(labels)
                self.progress(f"sums over {source.title}", min(1.0, done * team.size / source.count))
