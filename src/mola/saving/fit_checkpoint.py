"""Checkpoints of a fit under way: the sums so far, and what they belong to.

Sums are additive, so an interrupted fit goes on from its last checkpoint, bit for bit. The identity of the fit (networks, heads,
structure, likelihood) keeps sums of different fits apart, and a running checksum of the batches recognises changed data.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mola.errors import StorageError
from mola.laplace.sums import Sums
from mola.options import whole_number
from mola.saving.files import DOCUMENT, read_folder, write_folder
from mola.saving.schema import Optional

KIND = "fit-checkpoint"
SUMS = [{"count": int, "log_likelihood": Optional(float)}]
SCHEMA = {"identity": {}, "batches": int, "inputs": int, "used_inputs": int, "checksum": str, "sums": SUMS}
PROBES = 64  # values of each tensor that enter the checksum one by one: all of them would cost more than some networks' passes
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}  # by bytes per element


@dataclass(frozen=True)
class FitProgress:
    """How far a fit is."""

    sums: Sequence[Sums]
    """One for each network."""
    batches: int = 0
    inputs: int = 0
    """Inputs in these batches."""
    used_inputs: int = 0
    """Inputs with rows in the sums; those whose labels are all missing have none."""
    checksum: str = ""
    """Checksum of these batches, by `batch_checksum`."""


class FitCheckpoint:
    """Keeps the progress of a fit in a folder; without a folder, nowhere.

    Args:
        folder: of the whole fit, or None.
        every: batches between two checkpoints.
        rank: of this process, which keeps the sums of its own shard.
        size: number of processes.
    """

    def __init__(self, folder: str | Path | None, every: int = 100, rank: int = 0, size: int = 1) -> None:
        self.every: int = whole_number(every, "checkpoint_every")
        self.folder: Path | None = None if folder is None else Path(folder)
        self.size: int = size
        self.place: Path = Path(folder or "") / f"rank-{rank}-of-{size}"

    def due(self, batches: int) -> bool:
        """Return True if a checkpoint is due after this number of batches."""
        return self.folder is not None and batches % self.every == 0

    def load(self, identity: Mapping[str, Any]) -> FitProgress | None:
        """The progress of an interrupted fit, with sums on the CPU, or None; `StorageError` if it belongs to another fit.

        The identity is JSON: "networks" with a checksum for each, and any other entries.
        """
        if self.folder is None:
            return None
        for found in self.folder.glob("rank-*-of-*"):
            size = re.fullmatch(r"rank-\d+-of-(\d+)", found.name)
            if size is not None and int(size[1]) != self.size:
                raise StorageError(
                    f"{self.folder} is the checkpoint of a fit by {size[1]} processes, got {self.size}: the data was split "
                    f"differently. Start {size[1]} processes, or delete the folder to start from zero."
                )
        if not (self.place / DOCUMENT).exists():
            return None
        document, tensors = read_folder(self.place, KIND, SCHEMA)
        words = _difference(document["identity"], identity)
        if words is not None:
            raise StorageError(
                f"{self.folder} is the checkpoint of another fit: {words}. Pass the networks and options of that fit, or delete the "
                f"folder to start from zero."
            )
        foreign = [name for name, one in tensors.items() if one.dtype != torch.float64 or not one.isfinite().all()]
        if foreign or len(document["sums"]) != len(identity["networks"]):
            raise StorageError(
                f"{self.place} is damaged: expected finite float64 sums of {len(identity['networks'])} networks. Delete the folder "
                f"to start from zero."
            )
        progress = {name: document[name] for name in ("batches", "inputs", "used_inputs", "checksum")}
        return FitProgress(unpack_sums(document["sums"], tensors), **progress)

    def save(self, identity: Mapping[str, Any], progress: FitProgress) -> None:
        """Replace the checkpoint in one step."""
        entries, tensors = pack_sums(progress.sums)
        rest = {name: getattr(progress, name) for name in ("batches", "inputs", "used_inputs", "checksum")}
        write_folder(self.place, {"kind": KIND, "identity": dict(identity), **rest, "sums": entries}, tensors)

    def remove(self) -> None:
        """Remove the checkpoint of a fit that is done, and the folder if it is then empty."""
        if self.folder is not None:
            shutil.rmtree(self.place, ignore_errors=True)
            with suppress(OSError):  # other processes' checkpoints, or files of the user
                self.folder.rmdir()


def pack_sums(sums: Sequence[Sums]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Counts and log-likelihoods as JSON, and all tensors with the index of their component before the name."""
    entries = [{"count": one.count, "log_likelihood": one.log_likelihood} for one in sums]
    return entries, {f"{index}.{name}": value for index, one in enumerate(sums) for name, value in one.tensors.items()}


def unpack_sums(entries: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> list[Sums]:
    """Undo `pack_sums`."""
    return [
        Sums(
            {name.partition(".")[2]: value for name, value in tensors.items() if name.startswith(f"{index}.")},
            entry["count"],
            entry["log_likelihood"],
        )
        for index, entry in enumerate(entries)
    ]


def skip(batches: Iterator[Any], progress: FitProgress) -> None:
    """Read past the batches that are in the sums already; `StorageError` if the loader yields different batches."""
    checksum = ""
    for index in range(progress.batches):
        try:
            checksum = batch_checksum(checksum, next(batches))
        except StopIteration:
            raise StorageError(
                f"the checkpoint holds sums of {progress.batches} batches, but the training loader has only {index}. Pass the loader "
                f"that this fit began with, or delete the checkpoint to start from zero."
            ) from None
    if checksum != progress.checksum:
        raise StorageError(
            f"the first {progress.batches} batches of the training loader differ from those in the checkpoint: the data, their order "
            f"or the batch size has changed, and some data would be counted twice and others never. Pass the same data unshuffled, or "
            f"delete the checkpoint to start from zero."
        )


def batch_checksum(so_far: str, batch: Any) -> str:
    """The checksum after one more batch: shapes, dtypes, some values and the sum of all bits of its tensors.

    Some values alone could all belong to an image's margin. Integers add up to the same sum in any order, on any machine.
    """
    digest = hashlib.sha256(so_far.encode())
    for tensor in _tensors(batch):
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        values = tensor.detach().reshape(-1).contiguous()
        probes = values[:: max(1, -(-len(values) // PROBES))].contiguous().cpu()
        digest.update(probes.view(torch.uint8).numpy().tobytes())
        digest.update(str(int(values.view(INTEGERS[values.element_size()]).sum(dtype=torch.int64))).encode())
    return digest.hexdigest()


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _tensors(part)
    elif isinstance(batch, (list, tuple)) and not all(isinstance(one, (int, float)) for one in batch):
        for part in batch:
            yield from _tensors(part)
    else:
        with suppress(TypeError, ValueError, RuntimeError):  # text, say, which has no checksum
            yield torch.as_tensor(batch, device="cpu")


def _difference(expected: Mapping[str, Any], got: Mapping[str, Any]) -> str | None:
    # The first difference between the identities of two fits, in words.
    for name in {**expected, **got}:
        first, second = expected.get(name), got.get(name)
        if name == "networks" and isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
            changed = [index for index, one in enumerate(first) if one != second[index]]
            if changed:
                return f"networks {changed} have other weights"
        if first != second:
            return f"{name}: expected {first}, got {second}"
    return None
