"""How images lie in memory: colours beside each other give the same numbers, and a third more speed on CPUs.

What each network makes of each set, computed once and kept on disk: every method, lambda and ablation reads it.

One file for each network and set, named by their checksums, so that nothing stale is ever read and an interrupted run
loses the file under way alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mola.errors import OptionError, StorageError
from mola.lab.suite import Batches, Source
from mola.laplace.memory import free_memory
from mola.network import find_heads, peek, stream, undisturbed
from mola.saving.storage import read_sealed_tensors, sealed_tensors, write_atomically
from mola.saving.weights_files import load_weights

__all__ = [
    "Activations",
    "HeadOnly",
    "Keyed",
    "Network",
    "Progress",
    "Seen",
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


@dataclass(frozen=True)
class Seen:
    """What the heads of K networks see of a set."""

    features: Tensor
    """(n, K, P)"""
    logits: Tensor
    """(n, K, C)"""
    labels: Tensor
    heads: tuple[HeadOnly, ...]
    """The K last layers, as networks over the features."""

    def __len__(self) -> int:
        """Number of data."""
        return len(self.labels)

    @property
    def bytes(self) -> int:
        """Memory it takes."""
        return 4 * (self.features.numel() + self.logits.numel() + 2 * self.labels.numel())

    def loader(self, size: int = 1024) -> list[tuple[Tensor, Tensor]]:
        """Batches of (features, labels) for networks that are `HeadOnly`."""
        return list(zip(torch.split(self.features, size), torch.split(self.labels, size), strict=True))

    def first(self, count: int) -> Seen:
        """The first `count` networks alone."""
        return Seen(self.features[:, :count], self.logits[:, :count], self.labels, self.heads[:count])


class HeadOnly(nn.Module):
    """A network's last layer over features (n, K, P) that are known: the rest of the network has been run already."""

    def __init__(self, weight: Tensor, bias: Tensor | None, index: int) -> None:
        super().__init__()
        self.head = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
        self.head.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
        self.index = index

    def forward(self, features: Tensor) -> Tensor:
        """Logits of this network."""
        logits: Tensor = self.head(features[:, self.index])
        return logits


class Activations:
    """A folder of activations; what is missing is computed."""

    def __init__(self, directory: Path, device: str = "cpu") -> None:
        self.directory, self.device = directory, torch.device(device)

    def path(self, network: Keyed, source: Source) -> Path:
        """Where they are kept."""
        return self.directory / network.checksum / f"{source.checksum}.safetensors"

    def missing(self, networks: Sequence[Network], sources: Sequence[Source]) -> list[tuple[Network, Source]]:
        """What is still to be computed."""
        return [
            (network, source) for network in networks for source in sources if not self.path(network, source).exists()
        ]

    def compute(self, networks: Sequence[Network], sources: Sequence[Source], progress: Progress) -> None:
        """Run the networks over the sets where that has not been done; the data are made once for all networks.

        Args:
            networks: the trained networks.
            sources: the sets.
            progress: told what is being done, and which share of the images is done.
        """
        todo = self.missing(networks, sources)
        if todo:
            self._check_memory(networks[0], sources)
        total, done = sum(source.count for _, source in todo), 0
        for source in sources:
            waiting = [network for network, other in todo if other is source]
            if not waiting:
                continue
            progress(f"preparing {source.title}", done / total)
            batches = list(source.open()) if len(waiting) > 1 and _fits(source) else None
            for network in waiting:
                progress(f"{network.path.stem} on {source.title}", done / total)
                found = _run([network.load()], source.open() if batches is None else batches, source, self.device)
                self._write(network, source, found[0], network.path.name)
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
        for key, tensors in zip(keys, _run(load(), source.open(), source, self.device), strict=True):
            self._write(key, source, tensors, key.checksum)

    def _write(self, network: Keyed, source: Source, tensors: dict[str, Tensor], name: str) -> None:
        path = self.path(network, source)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, sealed_tensors(tensors, {"set": source.name, "network": name}))

    @staticmethod
    def _check_memory(network: Network, sources: Sequence[Source]) -> None:
        """Refuse, before hours of work, what could not be held while a method is fitted.

        Raises:
            OptionError: with the numbers.
        """
        heads = [module for module in network.load().modules() if isinstance(module, nn.Linear)]
        if not heads:
            return
        largest = max(sources, key=lambda source: source.count)
        # Features and logits, as they are collected and as they are joined.
        needed = 2 * 4 * largest.count * (heads[-1].in_features + heads[-1].out_features)
        free = free_memory()
        if free is not None and needed > free:
            message = (
                f"the activations of {largest.title} ({largest.count:,} images) need {needed / 2**30:.0f} GiB of memory, and "
                f"{free / 2**30:.0f} GiB are free. Use fewer images (--train-images, --test-images), or another machine."
            )
            raise OptionError(message)

    def read(self, networks: Sequence[Keyed], source: Source) -> Seen:
        """What the networks' heads see of a set.

        Args:
            networks: the trained networks.
            source: the set; computed already.

        Returns:
            Features, logits and labels.
        """
        parts = [_read(self.path(network, source)) for network in networks]
        return Seen(
            torch.stack([part["features"] for part in parts], dim=1),
            torch.stack([part["logits"] for part in parts], dim=1),
            parts[0]["labels"],
            tuple(HeadOnly(part["weight"], part.get("bias"), index).eval() for index, part in enumerate(parts)),
        )


LARGEST_IN_MEMORY = 2 * 2**30
"""Bytes of a set that is prepared once for all networks, rather than once for each."""


def _fits(source: Source) -> bool:
    return 4 * source.count * source.show(1)[0].numel() <= LARGEST_IN_MEMORY


def _run(
    networks: Sequence[nn.Module], batches: Batches, source: Source, device: torch.device
) -> list[dict[str, Tensor]]:
    """What each network makes of a set: one pass over the data for all."""
    features: list[list[Tensor]] = [[] for _ in networks]
    logits: list[list[Tensor]] = [[] for _ in networks]
    labels = []
    # Outliers belong to no class of the network: their labels, if any, are not its own.
    labelled = source.role != "outlier"
    given: Iterable[Any] = (
        (inputs.to(device), labels.to(device)) if labelled else [inputs.to(device)] for inputs, labels in batches
    )
    example = source.show(1)
    networks = [fast_network(network.to(device), example) for network in networks]
    with undisturbed(*networks):
        first, every = peek(given, source.title)
        heads = find_heads(networks, [None] * len(networks), first[0])
        for seen, batch_labels in stream(networks, heads, every, where=source.title, progress=False):
            for index, one in enumerate(seen):
                features[index].append(one.features.cpu().clone())
                logits[index].append(one.logits.cpu().clone())
            count = len(seen[0].logits)
            labels.append(torch.zeros(count).long() if batch_labels is None else batch_labels.cpu().clone())
    return [
        {
            "features": torch.cat(features[index]),
            "logits": torch.cat(logits[index]),
            "labels": torch.cat(labels),
            "weight": head.layer.weight.detach().cpu(),
            **({} if head.layer.bias is None else {"bias": head.layer.bias.detach().cpu()}),
        }
        for index, head in enumerate(heads)
    ]


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return read_sealed_tensors(path)[0]
    except StorageError as error:
        message = f"{path} is not a whole file of activations ({error}) Delete it: it will be computed again."
        raise StorageError(message) from error
