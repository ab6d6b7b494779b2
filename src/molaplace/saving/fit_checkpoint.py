"""Checkpoints of a fit in progress: the sums so far, the fit's identity and a checksum of its data.

Because sums are additive, an interrupted fit can resume from its last checkpoint and give a bitwise identical result. Comparing
identities (networks, heads, structure, likelihood) prevents a fit from resuming with the sums of a different fit. A running checksum
of the batches reveals whether the data have changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from molaplace.errors import StorageError
from molaplace.numerics import as_tensor
from molaplace.options import whole_number
from molaplace.saving.files import file_name, read_folder, remove_folder, write_folder
from molaplace.saving.schema import from_json
from molaplace.sums import Sums

KIND = "fit-checkpoint"
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""Integer dtypes, keyed by the number of bytes per element."""


@dataclass(frozen=True)
class SavedSums:
    """The numbers of a `Sums`, whose tensors are stored beside the document."""

    count: int
    log_likelihood: float | None
    extra_rows: int

    @classmethod
    def of(cls, sums: Sums) -> SavedSums:
        """Return the numbers of the sums."""
        return cls(sums.count, sums.log_likelihood, sums.extra_rows)


@dataclass(frozen=True)
class SavedProgress:
    """The document of a checkpoint; its fields are described in `FitProgress`."""

    identity: dict[str, Any]
    sums: tuple[SavedSums, ...]
    batches: int
    inputs: int
    used_inputs: int
    checksum: str


@dataclass
class FitProgress:
    """Sums, counts and checksum of the batches that a fit has processed so far."""

    sums: Sequence[Sums]
    """Sums over the processed batches, one `Sums` for each network."""
    batches: int = 0
    inputs: int = 0
    """Number of inputs in the processed batches."""
    used_inputs: int = 0
    """Number of inputs that contribute rows to the sums. An input whose labels are all missing contributes none."""
    checksum: str = ""
    """Checksum of the processed batches, from `batch_checksum`."""


class FitCheckpoint:
    """A folder that stores the progress of a fit.

    Args:
        folder: folder shared by all processes of the fit, or None to store nothing.
        every: number of batches between checkpoints.
        rank: rank of this process; each process stores the sums over its own shard.
        size: number of processes.
    """

    def __init__(self, folder: str | Path | None, every: int = 100, rank: int = 0, size: int = 1) -> None:
        self.every: int = whole_number(every, "checkpoint_every")
        self.folder: Path | None = None if folder is None else Path(folder)
        self.size: int = size
        self.rank_folder: Path = Path(folder or "") / f"rank-{rank}-of-{size}"

    def load(self, identity: Mapping[str, Any]) -> FitProgress | None:
        """Return the progress of an interrupted fit, with the sums on the CPU, or None if there is no checkpoint.

        Raises `StorageError` if the checkpoint belongs to a different fit. The identity is a JSON-serialisable mapping. Its entry
        "networks" contains a checksum of each network.
        """
        if self.folder is None:
            return None
        for shard_folder in self.folder.glob("rank-*-of-*"):
            size = shard_folder.name.rpartition("-")[2]
            if size.isdigit() and int(size) != self.size:
                raise StorageError(
                    f"{self.folder} is a checkpoint from a fit with {size} processes, but this fit has "
                    f"{self.size}, so the data are split differently. Use {size} processes, or delete the folder to start again."
                )
        if not (self.rank_folder / file_name(KIND)).exists():
            return None
        document, tensors = read_folder(self.rank_folder, KIND)
        saved = from_json(SavedProgress, document)
        for name in {**saved.identity, **identity}:
            before = saved.identity.get(name)
            current = identity.get(name)
            if before != current:
                words = "network weights" if name == "networks" else f"{name} ({before} instead of {current})"
                raise StorageError(
                    f"{self.folder} is a checkpoint from a fit with different {words}. Pass the networks and options of that "
                    f"fit, or delete the folder to start again."
                )
        if len(saved.sums) != len(identity["networks"]):
            raise StorageError(f"{self.rank_folder} is damaged. Delete the folder to start again.")
        sums = unpack_sums(saved.sums, tensors)
        return FitProgress(sums, saved.batches, saved.inputs, saved.used_inputs, saved.checksum)

    def resume(self, batches: Iterator[Any], progress: FitProgress) -> Iterator[Any]:
        """Yield the batches that are not yet included in the sums; raise `StorageError` if the earlier batches have changed."""
        if self.folder is None:
            yield from batches
            return
        checksum = ""
        for batch in islice(batches, progress.batches):
            checksum = batch_checksum(checksum, batch)
        if checksum != progress.checksum:
            raise StorageError(
                f"the training loader does not begin with the {progress.batches} batches in the checkpoint: the data, their order "
                f"or the batch size has changed. If the fit continued, some data would be counted twice and others "
                f"not at all. Pass the same data, unshuffled, or delete the checkpoint to start again."
            )
        for batch in batches:
            progress.checksum = batch_checksum(progress.checksum, batch)
            yield batch

    def save(self, identity: Mapping[str, Any], progress: FitProgress, *, last: bool = False) -> None:
        """Replace the checkpoint atomically if a new one is due or if `last` is True."""
        if self.folder is None or not (last or progress.batches % self.every == 0):
            return
        saved = SavedProgress(
            dict(identity),
            tuple(map(SavedSums.of, progress.sums)),
            progress.batches,
            progress.inputs,
            progress.used_inputs,
            progress.checksum,
        )
        write_folder(self.rank_folder, {"kind": KIND, **asdict(saved)}, named_tensors(progress.sums))

    def remove(self) -> None:
        """Remove the checkpoint of a finished fit, and then the folder if it is empty."""
        if self.folder is not None:
            remove_folder(self.rank_folder)
            with suppress(OSError):  # the folder may contain other processes' checkpoints or the user's files
                self.folder.rmdir()


def named_tensors(sums: Sequence[Sums]) -> dict[str, Tensor]:
    """Return the tensors of the sums of all components, with each name prefixed by the component's index."""
    return {
        f"{index}.{name}": value
        for index, component_sums in enumerate(sums)
        for name, value in component_sums.tensors.items()
    }


def unpack_sums(saved: Sequence[SavedSums], tensors: Mapping[str, Tensor]) -> list[Sums]:
    """Return the sums of each component, given all tensors by name; raise `StorageError` unless all are finite, in float64."""
    # A file may hold further tensors, such as the validation scores of `molaplace fit`.
    sums = [
        Sums(
            {name.partition(".")[2]: value for name, value in tensors.items() if name.startswith(f"{index}.")},
            numbers.count,
            numbers.log_likelihood,
            numbers.extra_rows,
        )
        for index, numbers in enumerate(saved)
    ]
    for component_sums in sums:
        for name, value in component_sums.tensors.items():
            if value.dtype != torch.float64 or not value.isfinite().all():
                raise StorageError(f"the saved sums {name!r} are damaged: expected finite float64 values.")
    return sums


def batch_checksum(so_far: str, batch: Any) -> str:
    """Update the checksum with each tensor of a batch: its shape, its dtype and, for each datum, the sum of its bits.

    The bits are summed as integers, so that the checksum is the same on every machine.
    """
    digest = hashlib.sha256(so_far.encode())
    for part in tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch):
        with suppress(TypeError, ValueError, RuntimeError):  # skip parts, such as text, that cannot become tensors
            values = as_tensor(part).detach()
            bits = values.reshape(values.shape or (1,)).contiguous().view(INTEGERS[values.element_size()])
            digest.update(f"{tuple(values.shape)} {values.dtype}".encode())
            digest.update(
                (bits.flatten(1).sum(1, dtype=torch.int64) if bits.dim() > 1 else bits.long()).cpu().numpy().tobytes()
            )
    return digest.hexdigest()
