"""A suite's networks and their activations; activations are computed once, stored on disk and shared by all methods and ablations.

The activations of a network on a data set are stored in a file whose path contains the checksums of both. Outdated files are
therefore never read, and an interrupted run loses only the files it was computing. A large set is split into several files, which
the processes of a team compute in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from molaplace.distributed import Team
from molaplace.errors import HeadError, OptionError
from molaplace.likelihoods import Categorical
from molaplace.network import evaluating, find_head, find_heads, peek, stream
from molaplace.progress import Progress
from molaplace.saving.weights import load_weights
from molaplace_lab.activations_file import StoredActivations, write_rows
from molaplace_lab.checksums import network_checksum
from molaplace_lab.models import fast_network
from molaplace_lab.suite import Source

SLICE = 1024
"""Number of examples in each file of a large set; an interrupted process loses the activations of at most this many examples."""

LOADED = 8
"""Maximum number of networks kept in memory at once."""


@dataclass(frozen=True)
class Network:
    """A trained network that is built on demand."""

    path: Path | None
    """File that contains the weights, or None if `build` returns a network that is already trained."""
    build: Callable[[], nn.Module]
    checksum: str
    name: str = ""
    """Name given by the user, if the networks are listed individually."""

    @property
    def label(self) -> str:
        """Label shown in messages and progress bars."""
        return self.name or (self.path.name if self.path is not None else self.checksum)

    def load(self) -> nn.Module:
        """Return the network with its trained weights, in float32 and in evaluation mode."""
        network = self.build()
        if self.path is not None:
            load_weights(network, self.path)
        return network.float().eval()


def open_networks(paths: Sequence[Path], build: Callable[[], nn.Module], architecture: str) -> list[Network]:
    """Open the networks stored in `paths`; `build` returns a network with their common architecture."""
    return [Network(path, build, network_checksum(Network(path, build, "").load(), architecture)) for path in paths]


class ActivationCache:
    """A folder that stores activations and, for training sets whose activations are not stored, sums over the data."""

    def __init__(self, directory: Path, device: str = "cpu") -> None:
        self.directory = directory
        self.device = torch.device(device)

    def paths(self, network: Network, source: Source) -> list[Path]:
        """Return the paths of a network's activations on a set: one file, or one file per slice of a large set."""
        folder = self.directory / network.checksum
        if len(parts := _parts(source)) == 1:
            return [folder / f"{source.checksum}.safetensors"]
        return [folder / source.checksum / f"{rows.start:09d}.safetensors" for rows in parts]

    def compute(
        self, networks: Sequence[Network], sources: Sequence[Source], progress: Progress, team: Team | None = None
    ) -> None:
        """Compute the missing activations, dividing the work among the processes by network, set and slice."""
        team = team or Team.single()
        # A task consists of a list of network indices, a set index and a slice index. All ranks use rank 0's tasks, because a rank
        # that looks for files later may find more of them.
        tasks: list[tuple[list[int], int, int]] = []
        for set_index, source in enumerate(sources):
            paths = [self.paths(network, source) for network in networks]
            for slice_index in range(len(paths[0]) if paths else 0):
                missing = [index for index, files in enumerate(paths) if not files[slice_index].exists()]
                # The data for a task are prepared (decoded, corrupted, rotated) once for all of its networks.
                size = min(LOADED, -(-len(missing) // team.size)) or 1
                tasks += [
                    (missing[first : first + size], set_index, slice_index) for first in range(0, len(missing), size)
                ]
        tasks = team.share(tasks)
        if tasks:
            _check_outputs(networks, sources[0])
        tasks_of_rank = tasks[team.rank :: team.size]
        load = lru_cache(maxsize=LOADED)(Network.load)
        for done, (indices, set_index, slice_index) in enumerate(tasks_of_rank):
            chosen = [networks[index] for index in indices]
            source = sources[set_index]
            labels = [network.label for network in chosen]
            progress(f"{', '.join(labels)} on {source.title}", done / len(tasks_of_rank))
            files = [self.paths(network, source)[slice_index] for network in chosen]
            self._run(
                files,
                labels,
                [load(network).to(self.device) for network in chosen],
                source,
                _parts(source)[slice_index],
            )
        team.collect(None)  # wait, so that no process reads a file before all files are complete
        progress("activations are ready", 1.0)

    def _run(
        self,
        paths: Sequence[Path],
        labels: Sequence[str],
        networks: Sequence[nn.Module],
        source: Source,
        rows: range,
    ) -> None:
        # Compute and write the activations of all networks in a single pass over the data.
        device = self.device
        # Outliers do not belong to any class of the network, so their labels are not used.
        labelled = source.role != "outlier"
        batches: Iterable[Any] = (
            (inputs.to(device), targets.to(device)) if labelled else [inputs.to(device)]
            for inputs, targets in source.read(rows)
        )
        written: list[list[dict[str, Tensor]]] = [[] for _ in networks]
        with evaluating(*networks):
            first, every = peek(batches, source.title)
            networks = [fast_network(network, first[0]) for network in networks]
            heads, first_batch = find_heads(networks, [None] * len(networks), first[0], Categorical())
            captured = stream(networks, heads, every, where=source.title, likelihood=Categorical(), first=first_batch)
            for chunk in (chunk for batch in captured for chunk in batch.chunks()):
                targets = torch.zeros(len(chunk)).long() if chunk.labels is None else chunk.labels
                for rows_of_network, head, phi, outputs in zip(written, heads, chunk.phi, chunk.outputs, strict=True):
                    # Keep the network's precision, because float64 would add no accuracy.
                    dtype = head.module.weight.dtype
                    features = phi[:, : head.inputs].to(dtype)
                    logits = outputs.to(dtype)
                    row = {"features": features, "logits": logits, "labels": targets}
                    rows_of_network.append({name: values.detach().cpu() for name, values in row.items()})
        for path, rows_of_network, head, label in zip(paths, written, heads, labels, strict=True):
            metadata = {"set": source.name, "network": label}
            write_rows(path, rows_of_network, len(rows), _layer(head.module), metadata)

    def read(self, networks: Sequence[Network], source: Source) -> StoredActivations:
        """Return the networks' stored activations on a set or part of a set."""
        whole = source.whole or source
        stored = StoredActivations.open([self.paths(network, whole) for network in networks])
        return stored if source.whole is None else stored.at(source.indices)


def _check_outputs(networks: Sequence[Network], source: Source) -> None:
    (inputs, _), _ = peek(source, source.title)
    outputs: dict[str, int] = {}
    for network in networks:
        loaded = network.load()
        try:
            outputs[network.label] = find_head(loaded, inputs[:1]).module.weight.shape[0]
        except HeadError as error:
            error.place = network.label
            raise
    if len(set(outputs.values())) > 1:
        listed = ", ".join(f"{name}: {count}" for name, count in outputs.items())
        raise OptionError(f"the networks of a mixture must have the same number of outputs; got {listed}.")


def _layer(head: nn.Module) -> dict[str, Any]:
    return {"weight": head.weight} | ({} if head.bias is None else {"bias": head.bias})


def _parts(source: Source) -> list[range]:
    size = SLICE if source.large else max(source.count, 1)
    return [range(start, min(start + size, source.count)) for start in range(0, source.count, size)]
