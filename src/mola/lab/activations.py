"""The networks of a suite and their activations, computed once and kept on disk for every method and ablation.

One file for each network and set, named by their checksums, so that nothing stale is read and an interrupted run loses only the
file in progress. Files are read in slices. A set larger than `SLICE` is kept in several files, which
the processes of a team divide among them.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mola.compare.activations_file import Stored, written_rows
from mola.distributed import Team
from mola.errors import OptionError, located
from mola.lab.suite import Batches, Source
from mola.likelihoods import CATEGORICAL
from mola.network import evaluating, find_head, find_heads, peek, stream
from mola.saving.weights import load_weights

Progress = Callable[[str, float], None]

SLICE = 1024
"""Data in a file, for sets that can be read from any place: an interrupted run loses no more."""

LOADED = 8
"""Networks in memory at once, for sets in slices."""

LARGEST_IN_MEMORY = 2**29
"""Bytes of a set that is prepared (corrupted, rotated) once for all networks instead of once for each."""


def fast_inputs(inputs: Tensor) -> Tensor:
    """Return images in the fastest memory layout."""
    return inputs.contiguous(memory_format=torch.channels_last) if _has_colours(inputs) else inputs


def fast_network(network: nn.Module, inputs: Tensor) -> nn.Module:
    """Bring a network to the fastest memory layout for such images, and return it."""
    if _has_colours(inputs):
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network


def _has_colours(inputs: Tensor) -> bool:
    return inputs.dim() == 4 and inputs.shape[1] > 1


@dataclass(frozen=True)
class Network:
    """A trained network, built on demand."""

    path: Path | None
    """File of its weights; None if `build` returns a trained network."""
    build: Callable[[], nn.Module]
    checksum: str
    name: str = ""
    """The user's name for the network, if networks are named individually."""

    @property
    def label(self) -> str:
        """Label for messages and progress."""
        return self.name or (self.path.name if self.path is not None else self.checksum)

    def load(self) -> nn.Module:
        """Return the network with its trained weights, in float32 and eval mode."""
        network = self.build()
        if self.path is not None:
            load_weights(network, self.path)
        return network.float().eval()


def open_networks(paths: Sequence[Path], build: Callable[[], nn.Module], name: str) -> list[Network]:
    """Open networks of one architecture, which `build` makes, by their weights files."""
    return [Network(path, build, network_checksum(Network(path, build, "").load(), name)) for path in paths]


def network_checksum(network: nn.Module, name: str) -> str:
    """Return a checksum of weights, name, layers and the layers' source code."""
    digest = hashlib.sha256(f"{name}\n{network!r}\n".encode())
    for kind in sorted({type(module) for module in network.modules()}, key=lambda kind: kind.__qualname__):
        if not kind.__module__.startswith("torch."):
            with contextlib.suppress(OSError, TypeError):  # typed into a console, for example: name and layers suffice
                digest.update(inspect.getsource(kind).encode())
    for key, tensor in sorted(network.state_dict().items()):
        digest.update(key.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


class Activations:
    """A folder of activations, computed on demand."""

    def __init__(self, directory: Path, device: str = "cpu") -> None:
        self.directory, self.device = directory, torch.device(device)

    def paths(self, network: Network, source: Source) -> list[Path]:
        """Return the files of a set: one, or one for each slice."""
        folder = self.directory / network.checksum
        if not _is_sliced(source):
            return [folder / f"{source.checksum}.safetensors"]
        return [folder / source.checksum / f"{start:09d}.safetensors" for start in range(0, source.count, SLICE)]

    def compute(
        self, networks: Sequence[Network], sources: Sequence[Source], progress: Progress, team: Team | None = None
    ) -> None:
        """Compute missing activations; processes divide the work by networks and sets, or by slices of a large set."""
        team = team or Team.single()
        # Networks, a set and a slice of it, by their indices. Rank 0 decides: another rank may look later.
        tasks: list[tuple[list[int], int, int]] = []
        for place, source in enumerate(sources):
            paths = [self.paths(network, source) for network in networks]
            for part in range(len(paths[0]) if paths else 0):
                missing = [index for index, files in enumerate(paths) if not files[part].exists()]
                # The images of a slice are decoded once for all networks.
                groups = [missing] if _is_sliced(source) else [[index] for index in missing]
                tasks += [(group, place, part) for group in groups if group]
        tasks = team.share(tasks)
        if tasks:
            _check_outputs(networks, sources[0])
        own = tasks[team.rank :: team.size]
        load = lru_cache(maxsize=LOADED)(Network.load)
        held: dict[int, list[tuple[Tensor, Tensor]] | None] = {}
        for done, (indices, place, part) in enumerate(own):
            chosen, source = [networks[index] for index in indices], sources[place]
            names = [network.label for network in chosen]
            progress(f"{', '.join(names)} on {source.title}", done / len(own))
            if _is_sliced(source) and source.open_part is not None:
                start, stop = part * SLICE, min((part + 1) * SLICE, source.count)
                count, batches = stop - start, source.open_part(start, stop)
            else:
                if place not in held:
                    held = {place: _in_memory(source)}
                count, batches = source.count, held[place] or source.open()
            files = [self.paths(network, source)[part] for network in chosen]
            self._run(files, [load(network) for network in chosen], batches, source, count, names)
        team.collect(None)  # no process reads files before all of them are complete
        progress("activations are ready", 1.0)

    def _run(
        self,
        paths: Sequence[Path],
        networks: Sequence[nn.Module],
        batches: Batches,
        source: Source,
        count: int,
        names: Sequence[str],
    ) -> None:
        # Write each network's activations: one pass over the data for all networks.
        device = self.device
        # Outliers belong to no class of the network: their labels, if any, are not used.
        labelled = source.role != "outlier"
        given: Iterable[Any] = (
            (inputs.to(device), labels.to(device)) if labelled else [inputs.to(device)] for inputs, labels in batches
        )
        networks = [network.to(device) for network in networks]
        if source.show is not None:
            example = source.show(1)
            networks = [fast_network(network, example) for network in networks]
        with ExitStack() as stack:
            stack.enter_context(evaluating(*networks))
            first, every = peek(given, source.title)
            heads = find_heads(networks, [None] * len(networks), first[0], CATEGORICAL)
            writers = [
                stack.enter_context(
                    written_rows(path, count, _layer(head.layer), {"set": source.name, "network": name})
                )
                for path, head, name in zip(paths, heads, names, strict=True)
            ]
            captured = stream(networks, heads, every, where=source.title, likelihood=CATEGORICAL)
            for rows in (rows for batch in captured for rows in batch.chunks()):
                labels = torch.zeros(len(rows)).long() if rows.labels is None else rows.labels
                for add, head, phi, outputs in zip(writers, heads, rows.phi, rows.outputs, strict=True):
                    dtype = head.layer.weight.dtype  # the networks' own: float64 adds no digits
                    features, logits = phi[:, : head.inputs].to(dtype), outputs.to(dtype)
                    add({"features": features, "logits": logits, "labels": labels})

    def read(self, networks: Sequence[Network], source: Source) -> Stored:
        """Return the stored activations of a set, or of a part of a set."""
        whole = source.whole or source
        stored = Stored.open([self.paths(network, whole) for network in networks])
        return stored if source.whole is None else stored.at(source.places)


def _check_outputs(networks: Sequence[Network], source: Source) -> None:
    (inputs, _), _ = peek(source.open(), source.title)
    outputs: dict[str, int] = {}
    for network in networks:
        loaded = network.load()
        with evaluating(loaded), located(network.label):
            outputs[network.label] = find_head(loaded, inputs[:1]).layer.weight.shape[0]
    if len(set(outputs.values())) > 1:
        listed = ", ".join(f"{name}: {count}" for name, count in outputs.items())
        raise OptionError(f"the networks of a mixture must have the same classes, got numbers of outputs ({listed}).")


def _layer(head: nn.Module) -> dict[str, Any]:
    return {"weight": head.weight} | ({} if head.bias is None else {"bias": head.bias})


def _is_sliced(source: Source) -> bool:
    return source.open_part is not None and source.count > SLICE


def _in_memory(source: Source) -> list[tuple[Tensor, Tensor]] | None:
    kept: list[tuple[Tensor, Tensor]] = []
    for inputs, labels in source.open():
        if not kept and inputs.nbytes / len(labels) * source.count > LARGEST_IN_MEMORY:
            return None
        kept.append((inputs, labels))
    return kept
