"""Checkpoints of a fit: the sums so far, what they belong to, and which batches are in them.

Sums are additive, so a fit continues from there. They belong to networks, heads and a structure, described as a JSON document; sums
of other ones are never added. A checksum that grows with each batch notices a loader that yields other data.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mola.errors import OptionError, StorageError
from mola.laplace import Factors, Structure
from mola.likelihood import Likelihood
from mola.network import Head, head_by_name
from mola.network.fingerprint import NETWORK, fingerprint, same_signature, signature
from mola.saving import storage
from mola.saving.storage import DOCUMENT
from mola.schema import Optional

__all__ = [
    "START",
    "Kept",
    "SumsCheckpoint",
    "batch_checksum",
    "describe_heads",
    "difference",
    "empty_factors",
    "heads_from",
    "identity_of",
    "on_device",
    "with_tensors",
]


def empty_factors(structure: Structure, features: int, outputs: int, log_likelihood: float | None) -> Factors:
    """The neutral element of `+`: sums over nothing."""
    shapes = structure.empty(features, outputs)
    zeros = {name: torch.zeros(shape, dtype=torch.float64, device="cpu") for name, shape in shapes.items()}
    return structure.restore(0, log_likelihood, zeros)


def with_tensors(like: Factors, count: int, log_likelihood: float | None, tensors: dict[str, Tensor]) -> Factors:
    """Factors of the same kind with other numbers."""
    changes: dict[str, Any] = {"count": count, "log_likelihood": log_likelihood, **tensors}
    return replace(like, **changes)


def on_device(factors: Factors, device: torch.device) -> Factors:
    """The same sums on another device."""
    there = {name: tensor.to(device) for name, tensor in factors.tensors().items()}
    return with_tensors(factors, factors.count, factors.log_likelihood, there)


def identity_of(networks: Sequence[nn.Module], structure: Structure, likelihood: Likelihood) -> dict[str, Any]:
    """Networks by their numbers, and what is summed. Call it inside `undisturbed(*networks)`."""
    return {
        "networks": [signature(network) for network in networks],
        "structure": {"name": structure.name, **structure.settings()},
        "likelihood": likelihood.name,
    }


def describe_heads(heads: Sequence[Head]) -> list[dict[str, Any]]:
    """The heads by name, size and a checksum of their weights."""
    return [
        {
            "name": head.name,
            "classes": head.classes,
            "features": head.width,
            "every_position": head.every_position,
            "weights": fingerprint(head.weights())["float64"],
        }
        for head in heads
    ]


def heads_from(networks: Sequence[nn.Module], described: Sequence[dict[str, Any]]) -> list[Head]:
    """The heads that were described, without a pass of the networks; `HeadError` if a network has none of that name."""
    return [
        replace(head_by_name(network, entry["name"]), every_position=entry["every_position"])
        for network, entry in zip(networks, described, strict=True)
    ]


def difference(first: dict[str, Any], second: dict[str, Any]) -> str | None:
    """The first difference between two documents, in words: what, expected, got.

    Args:
        first: what is expected.
        second: what came; entries that are None in either are not compared.

    Returns:
        Words, or None where they agree.
    """
    for name, expected in first.items():
        got = second.get(name)
        if expected is None or got is None:
            continue
        if name == "networks":
            words = _other_network(expected, got)
        elif isinstance(expected, list) and isinstance(got, list) and name == "heads":
            pairs = zip(expected, got, strict=False)
            words = next(
                (f"the head of models[{k}]: {_shortened(a, b)}" for k, (a, b) in enumerate(pairs) if a != b), None
            )
        else:
            words = None if expected == got else f"{name}: expected {expected}, got {got}"
        if words is not None:
            return words
    return None


def _shortened(expected: dict[str, Any], got: dict[str, Any]) -> str:
    """The entries of two heads that differ."""
    differing = [name for name in expected if expected[name] != got.get(name)]
    if differing == ["weights"]:
        return "its weights are other ones"
    return ", ".join(
        f"{name} expected {expected[name]}, got {got.get(name)}" for name in differing if name != "weights"
    )


def _other_network(expected: list[dict[str, Any]], got: list[dict[str, Any]]) -> str | None:
    if len(expected) != len(got):
        return f"models: expected {len(expected)}, got {len(got)}"
    for index, (one, other) in enumerate(zip(expected, got, strict=True)):
        if "tensors" not in one:
            return f"an older version of mola wrote it, which cannot tell whether models[{index}] is the same"
        if not same_signature(other, one):
            return f"models[{index}] is another network: its numbers are other ones"
    return None


START = ""
"""Before the first batch."""

PROBES = 64
"""Numbers of each tensor that go into the checksum one by one. All of them would cost more than some networks' passes."""

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""Whole numbers by their size in bytes."""


def batch_checksum(so_far: str, batch: Any) -> str:
    """The checksum after one more batch: shapes, types, some numbers and the sum of all bits of its tensors.

    Some numbers alone may all be of an image's margin. Whole numbers add up to the same in any order and on any machine.
    """
    digest = hashlib.sha256(so_far.encode())
    for tensor in _tensors(batch):
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        numbers = tensor.detach().reshape(-1)
        probes = numbers[:: max(1, -(-len(numbers) // PROBES))].contiguous().cpu()
        digest.update(probes.view(torch.uint8).numpy().tobytes())
        words = numbers.contiguous().view(WORDS[numbers.element_size()])
        digest.update(str(int(words.sum(dtype=torch.int64))).encode())
    return digest.hexdigest()


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(part)


KIND = "fit-checkpoint"
SCHEMA = {
    "rank": int,
    "size": int,
    "identity": {
        "networks": [NETWORK],
        "structure": {"name": str},
        "likelihood": str,
    },
    "heads": [{"name": str, "classes": int, "features": int, "every_position": bool, "weights": str}],
    "batches": int,
    "trail": str,
    "labelled": bool,
    "counts": [int],
    "log_likelihoods": [Optional(float)],
}


@dataclass(frozen=True)
class Kept:
    """How far a fit is."""

    batches: int = 0
    checksum: str = START
    labelled: bool | None = None
    heads: list[dict[str, Any]] | None = None
    totals: Sequence[Factors] | None = None


class SumsCheckpoint:
    """Where a fit under way is kept; with no folder, nowhere.

    Args:
        folder: given by the user, or None.
        every: batches between two checkpoints.
        rank: of this process.
        size: number of processes; each keeps its own sums, of its own shard.

    Raises:
        OptionError: if `every` is not a whole number above 0.
    """

    def __init__(self, folder: str | Path | None, every: int, rank: int, size: int) -> None:
        """Note the place.

        Raises:
            OptionError: if `every` is not a whole number above 0.
        """
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            message = f"checkpoint_every must be a whole number of batches above 0, got {every!r}."
            raise OptionError(message)
        self.every, self.rank, self.size = every, rank, size
        self.folder = None if folder is None else Path(folder)

    @property
    def active(self) -> bool:
        """Whether anything is kept."""
        return self.folder is not None

    @property
    def place(self) -> Path:
        """The folder of this process."""
        return Path(self.folder or "") / f"rank-{self.rank}-of-{self.size}"

    def load(self, identity: dict[str, Any], structure: Structure) -> Kept:
        """What was kept of this fit; nothing, if none was.

        Args:
            identity: of networks and structure.
            structure: makes factors of saved tensors.

        Returns:
            How far the fit was.

        Raises:
            StorageError: if the folder holds another fit, or is damaged.
        """
        if self.folder is None:
            return Kept()
        self._refuse_other_teams()
        if not (self.place / DOCUMENT).exists():
            return Kept()
        document, tensors = storage.read(self.place, KIND, SCHEMA)
        words = difference(document["identity"], identity)
        if words is not None:
            message = (
                f"{self.folder} is the checkpoint of another fit: {words}. Pass what that fit was given, or delete the folder to "
                f"start from zero."
            )
            raise StorageError(message)
        lengths = {name: len(document[name]) for name in ("heads", "counts", "log_likelihoods")}
        if set(lengths.values()) != {len(identity["networks"])}:
            message = f"{self.place} is garbled: entries for {lengths} networks. Delete the folder to start from zero."
            raise StorageError(message)
        totals = [
            self._factors(index, entry, document, tensors, structure) for index, entry in enumerate(document["heads"])
        ]
        return Kept(document["batches"], document["trail"], document["labelled"], document["heads"], totals)

    def _refuse_other_teams(self) -> None:
        """Refuse a folder that another number of processes wrote.

        Raises:
            StorageError: if it did.
        """
        for found in Path(self.folder or "").glob("rank-*-of-*"):
            size = re.fullmatch(r"rank-\d+-of-(\d+)", found.name)
            if size is not None and int(size[1]) != self.size:
                message = (
                    f"{self.folder} is the checkpoint of a fit by {size[1]} processes, got {self.size}: their shards were other ones. "
                    f"Start {size[1]} processes, or delete the folder to start from zero."
                )
                raise StorageError(message)

    def _factors(
        self,
        index: int,
        head: dict[str, Any],
        document: dict[str, Any],
        tensors: dict[str, Tensor],
        structure: Structure,
    ) -> Factors:
        empty = empty_factors(structure, head["features"], head["classes"], None)
        named = {name.partition(".")[2]: one for name, one in tensors.items() if name.startswith(f"{index}.")}
        for name, like in empty.tensors().items():
            if name not in named or named[name].shape != like.shape or named[name].dtype != like.dtype:
                message = f"{self.place}: tensor {index}.{name} is missing or of another shape. Delete the folder to start from zero."
                raise StorageError(message)
        return with_tensors(empty, document["counts"][index], document["log_likelihoods"][index], named)

    def save(self, identity: dict[str, Any], kept: Kept) -> None:
        """Keep how far the fit is; the folder always holds a whole state.

        Args:
            identity: of networks and structure.
            kept: how far it is, with heads and totals.
        """
        totals = list(kept.totals or ())
        document = {
            "rank": self.rank,
            "size": self.size,
            "identity": identity,
            "heads": kept.heads,
            "batches": kept.batches,
            "trail": kept.checksum,
            "labelled": bool(kept.labelled),
            "counts": [total.count for total in totals],
            "log_likelihoods": [total.log_likelihood for total in totals],
        }
        tensors = {f"{k}.{name}": one for k, total in enumerate(totals) for name, one in total.tensors().items()}
        storage.write(self.place, document, tensors, kind=KIND)

    def remove(self) -> None:
        """The fit is done: forget how far it was."""
        if self.folder is None:
            return
        shutil.rmtree(self.place, ignore_errors=True)
        with suppress(OSError):  # other processes' checkpoints, or files of the user's, are still there
            self.folder.rmdir()
