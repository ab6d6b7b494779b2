"""The networks of a suite, and what each makes of each set: computed once and kept on disk for every method and ablation.

One file for each network and set, named by their checksums, so that nothing stale is ever read and an interrupted run
loses the file under way alone. Files are written batch by batch and read in slices. A set that is larger than `SLICE` is kept in
several files: the processes of a job divide them among them, each read once for all networks.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mola.compare.activations_file import Stored, written_rows
from mola.distributed import Team
from mola.errors import OptionError, located
from mola.lab.suite import Batches, Source
from mola.likelihoods import CATEGORICAL
from mola.network import evaluating, find_head, find_heads, peek, stream
from mola.saving.weights import load_weights


def fast_inputs(inputs: Tensor) -> Tensor:
    """Images in the layout that is fastest."""
    return inputs.contiguous(memory_format=torch.channels_last) if _has_colours(inputs) else inputs


def fast_network(network: nn.Module, inputs: Tensor) -> nn.Module:
    """A network in the layout that is fastest for images like these; the same object."""
    if _has_colours(inputs):
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network


def _has_colours(inputs: Tensor) -> bool:
    return inputs.dim() == 4 and inputs.shape[1] > 1


Progress = Callable[[str, float], None]


class Keyed(Protocol):
    """A network whose activations are kept under a checksum."""

    @property
    def checksum(self) -> str:
        """Of its weights and its architecture."""


@dataclass(frozen=True)
class Network:
    """A trained network; built when it is asked for, in the precision of its inputs."""

    path: Path | None
    """Of its weights; None where what builds it brings them."""
    build: Callable[[], nn.Module]
    checksum: str
    name: str = ""
    """As the user wrote it, where networks are named one by one."""

    @property
    def label(self) -> str:
        """For messages and progress."""
        return self.name or (self.path.name if self.path is not None else self.checksum)

    def load(self) -> nn.Module:
        """The network with its trained weights, in eval mode."""
        network = self.build()
        if self.path is not None:
            load_weights(network, self.path)
        return network.float().eval()


def open_networks(paths: Sequence[Path], build: Callable[[], nn.Module], name: str) -> list[Network]:
    """Networks of one architecture, by their files.

    Args:
        paths: the weights files.
        build: makes the architecture.
        name: of the architecture.

    Returns:
        The networks. Their checksums are of weights, name, layers and the layers' own code: the same weights in another
        architecture are another network.
    """
    return [Network(path, build, network_checksum(Network(path, build, "").load(), name)) for path in paths]


def network_checksum(network: nn.Module, name: str) -> str:
    """A checksum of weights, name, layers and the layers' own code."""
    digest = hashlib.sha256(f"{name}\n{network!r}\n".encode())
    for kind in sorted({type(module) for module in network.modules()}, key=lambda kind: kind.__qualname__):
        if not kind.__module__.startswith("torch."):
            with contextlib.suppress(OSError, TypeError):  # typed into a console, say: its name and layers must do
                digest.update(inspect.getsource(kind).encode())
    for key, tensor in sorted(network.state_dict().items()):
        digest.update(key.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


class Activations:
    """A folder of activations; what is missing is computed."""

    def __init__(self, directory: Path, device: str = "cpu") -> None:
        self.directory, self.device = directory, torch.device(device)

    def path(self, network: Keyed, source: Source) -> Path:
        """Where they are kept: a file, or a folder of files of `SLICE` data each."""
        folder = self.directory / network.checksum
        return folder / (source.checksum if _sliced(source) else f"{source.checksum}.safetensors")

    def paths(self, network: Keyed, source: Source) -> list[Path]:
        """All the files of a set."""
        if not _sliced(source):
            return [self.path(network, source)]
        folder = self.path(network, source)
        return [folder / f"{start:09d}.safetensors" for start in range(0, source.count, SLICE)]

    def compute(
        self,
        networks: Sequence[Network],
        sources: Sequence[Source],
        progress: Progress,
        team: Team | None = None,
    ) -> None:
        """Run the networks over the sets where that has not been done; the data are made once for all networks.

        Args:
            networks: the trained networks.
            sources: the sets.
            progress: told what is being done, and which share of the images is done.
            team: the processes that divide the work among them: a network on a set, or all networks on a slice of a large set,
                is the work of one. None is this one alone.
        """
        together = Team.single() if team is None else team
        missing = [
            (index, place)
            for place, source in enumerate(sources)
            for index, network in enumerate(networks)
            if not _sliced(source) and not self.path(network, source).exists()
        ]
        slices = [
            (place, number)
            for place, source in enumerate(sources)
            for number in range(-(-source.count // SLICE) if _sliced(source) else 0)
            if not all(self.paths(network, source)[number].exists() for network in networks)
        ]
        # Listed by one: others may see files that were written meanwhile.
        missing, slices = together.share((missing, slices))
        if missing or slices:
            _check_outputs(networks, sources[0])
        mine = missing[together.rank :: together.size]
        self._compute([(networks[index], sources[place]) for index, place in mine], sources, progress)
        ours = slices[together.rank :: together.size]
        loaded = {network.checksum: network.load() for network in networks} if ours else {}
        for done, (place, number) in enumerate(ours):
            source = sources[place]
            progress(f"all networks on {source.title}, slice {number + 1}", done / len(ours))
            waiting = [one for one in networks if not self.paths(one, source)[number].exists()]
            self._compute_slice(waiting, [loaded[one.checksum] for one in waiting], source, number)
        together.collect(None)  # all files are written before anybody reads them
        progress("activations are ready", 1.0)

    def _compute_slice(
        self, networks: Sequence[Network], loaded: Sequence[nn.Module], source: Source, number: int
    ) -> None:
        start, stop = number * SLICE, min((number + 1) * SLICE, source.count)
        assert source.open_part is not None  # else the set is in one file
        paths = [self.paths(network, source)[number] for network in networks]
        names = [network.label for network in networks]
        self._run(paths, loaded, source.open_part(start, stop), replace(source, count=stop - start), names)

    def _compute(self, todo: list[tuple[Network, Source]], sources: Sequence[Source], progress: Progress) -> None:
        total, done = sum(source.count for _, source in todo), 0
        for source in sources:
            waiting = [network for network, other in todo if other is source]
            if not waiting:
                continue
            progress(f"preparing {source.title}", done / total)
            batches = _held(source) if len(waiting) > 1 else None
            for network in waiting:
                progress(f"{network.label} on {source.title}", done / total)
                given = source.open() if batches is None else batches
                self._run([self.path(network, source)], [network.load()], given, source, [network.label])
                done += source.count

    def compute_together(self, keys: Sequence[Keyed], load: Callable[[], Sequence[nn.Module]], source: Source) -> None:
        """Run networks that share a trunk over a set, all in one pass, where that has not been done.

        Args:
            keys: of the networks.
            load: makes the networks, if they are needed.
            source: the set.
        """
        if all(self.path(key, source).exists() for key in keys):
            return
        self._run(
            [self.path(key, source) for key in keys], load(), source.open(), source, [key.checksum for key in keys]
        )

    def _run(
        self,
        paths: Sequence[Path],
        networks: Sequence[nn.Module],
        batches: Batches,
        source: Source,
        names: Sequence[str],
    ) -> None:
        # Write what each network makes of a set: one pass over the data for all.
        device = self.device
        # Outliers belong to no class of the network: their labels, if any, are not its own.
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
                    written_rows(path, source.count, _layer(head.layer), {"set": source.name, "network": name})
                )
                for path, head, name in zip(paths, heads, names, strict=True)
            ]
            for rows in stream(networks, heads, every, where=source.title, likelihood=CATEGORICAL):
                known = torch.zeros(len(rows)).long() if rows.labels is None else rows.labels
                for writer, head, phi, outputs in zip(writers, heads, rows.features, rows.outputs, strict=True):
                    dtype = head.layer.weight.dtype  # what the networks computed: float64 adds no digits
                    features, logits = phi[:, : head.inputs].to(dtype), outputs.to(dtype)
                    writer.add({"features": features, "logits": logits, "labels": known})

    def read(self, networks: Sequence[Keyed], source: Source) -> Stored:
        """What the networks' heads see of a set that was computed already, or of a part of one."""
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
        raise OptionError(
            f"the networks of a mixture tell the same classes apart, got different numbers of outputs ({listed})."
        )


def _layer(head: nn.Module) -> dict[str, Any]:
    return {"weight": head.weight} | ({} if head.bias is None else {"bias": head.bias})


SLICE = 1024
"""Data of a file, of sets that can be read from any place on: what an interrupted run loses."""


def _sliced(source: Source) -> bool:
    return source.open_part is not None and source.count > SLICE


LARGEST_IN_MEMORY = 2**29
"""Bytes of a set that is prepared once for all networks, rather than once for each."""


def _held(source: Source) -> list[tuple[Tensor, Tensor]] | None:
    kept: list[tuple[Tensor, Tensor]] = []
    for inputs, labels in source.open():
        if not kept and inputs.nbytes / len(labels) * source.count > LARGEST_IN_MEMORY:
            return None
        kept.append((inputs, labels))
    return kept
