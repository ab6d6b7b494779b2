"""The networks of a suite, and what each makes of each set: computed once and kept on disk for every method and ablation.

One file for each network and set, named by their checksums, so that nothing stale is ever read and an interrupted run
loses the file under way alone. Files are written batch by batch and read in slices.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mola.compare.activations_file import Stored, written_rows
from mola.distributed import Team
from mola.lab.suite import Batches, Source
from mola.network import find_heads, peek, stream, undisturbed
from mola.saving.weights_files import load_weights

__all__ = [
    "Activations",
    "Keyed",
    "Network",
    "Progress",
    "fast_inputs",
    "fast_network",
    "network_checksum",
    "open_networks",
]


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
    """A trained network on disk; built when it is asked for, in the precision of its inputs."""

    path: Path
    build: Callable[[], nn.Module]
    checksum: str

    def load(self) -> nn.Module:
        """The network with its trained weights, in eval mode."""
        network = self.build()
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
        """Where they are kept."""
        return self.directory / network.checksum / f"{source.checksum}.safetensors"

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
            team: the processes that divide the work among them: a network on a set is the work of one. None is this one alone.
        """
        together = Team.alone() if team is None else team
        with together.work("activations"):
            missing = [
                (index, place)
                for place, source in enumerate(sources)
                for index, network in enumerate(networks)
                if not self.path(network, source).exists()
            ]
            # Listed by one: others may see files that were written meanwhile.
            mine = together.share(missing)[together.rank :: together.size]
            self._compute([(networks[index], sources[place]) for index, place in mine], sources, progress)

    def _compute(self, todo: list[tuple[Network, Source]], sources: Sequence[Source], progress: Progress) -> None:
        total, done = sum(source.count for _, source in todo), 0
        for source in sources:
            waiting = [network for network, other in todo if other is source]
            if not waiting:
                continue
            progress(f"preparing {source.title}", done / total)
            batches = list(source.open()) if len(waiting) > 1 and _fits(source) else None
            for network in waiting:
                progress(f"{network.path.stem} on {source.title}", done / total)
                given = source.open() if batches is None else batches
                self._run([self.path(network, source)], [network.load()], given, source, [network.path.name])
                done += source.count
        progress("activations are ready", 1.0)

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
        """Write what each network makes of a set: one pass over the data for all."""
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
            stack.enter_context(undisturbed(*networks))
            first, every = peek(given, source.title)
            heads = find_heads(networks, [None] * len(networks), first[0])
            writers = [
                stack.enter_context(
                    written_rows(path, source.count, _layer(head.layer), {"set": source.name, "network": name})
                )
                for path, head, name in zip(paths, heads, names, strict=True)
            ]
            for seen, labels in stream(networks, heads, every, where=source.title, progress=False):
                for writer, one in zip(writers, seen, strict=True):
                    known = torch.zeros(len(one.logits)).long() if labels is None else labels
                    writer.add({"features": one.features, "logits": one.logits, "labels": known})

    def read(self, networks: Sequence[Keyed], source: Source) -> Stored:
        """What the networks' heads see of a set that was computed already."""
        return Stored.open([self.path(network, source) for network in networks])


def _layer(head: nn.Module) -> dict[str, Any]:
    return {"weight": head.weight} | ({} if head.bias is None else {"bias": head.bias})


LARGEST_IN_MEMORY = 2**29
"""Bytes of a set that is prepared once for all networks, rather than once for each."""


def _fits(source: Source) -> bool:
    return source.show is None or 4 * source.count * source.show(1)[0].numel() <= LARGEST_IN_MEMORY
