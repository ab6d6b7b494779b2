"""What the last layers of K networks see of a set, on disk and read in slices: never a whole set of features in memory.

One safetensors file for each network and set, with a checksum of its content. It is written batch by batch and read by position
rather than mapped into memory, where the pages that were read would count as the process's own.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mola.errors import DataError, OptionError, StorageError
from mola.saving.files import partial_file
from mola.saving.schema import SEAL

BATCH = 1024
"""Rows of a batch that is fitted on or predicted."""

NUMBERS_AT_ONCE = 2**23
"""Features of one network in a slice."""

BYTES_AT_ONCE = 2**24
"""Of a file whose checksum is computed."""

WHOLE = ("weight", "bias")
"""Of the head: not a row for each datum."""

KINDS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64}
NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.int64: "I64"}


@dataclass(frozen=True)
class _Layout:
    start: int
    """Bytes before the first tensor."""
    entries: dict[str, dict[str, Any]]
    metadata: dict[str, str]

    @classmethod
    def plan(cls, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> _Layout:
        """Of a file that is to be written."""
        entries, offset = {}, 0
        # The widest numbers first, so that all are aligned.
        for name, (dtype, shape) in sorted(shapes.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
            end = offset + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        planned = cls(0, entries, {**metadata, SEAL: "0" * 64})
        return replace(planned, start=len(planned.header()))

    @classmethod
    def read(cls, file: BinaryIO) -> _Layout:
        """Of a file that is there."""
        size = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(size))
        metadata = entries.pop("__metadata__", {})
        return cls(8 + size, entries, metadata)

    def header(self) -> bytes:
        """The bytes before the first tensor."""
        text = json.dumps({"__metadata__": self.metadata, **self.entries}).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def place(self, name: str) -> int:
        """Where a tensor begins."""
        return self.start + int(self.entries[name]["data_offsets"][0])

    def digest(self, path: Path) -> str:
        """Checksum of all of the file but the checksum itself."""
        texts = {name: text for name, text in self.metadata.items() if name != SEAL}
        kinds = {kind: str(one) for one, kind in NAMES.items()}
        shapes = {name: [kinds[entry["dtype"]], *entry["shape"]] for name, entry in self.entries.items()}
        digest = hashlib.sha256(json.dumps([texts, shapes], sort_keys=True).encode())
        with open(path, "rb") as file:
            for name in sorted(self.entries):
                begin, end = self.entries[name]["data_offsets"]
                file.seek(self.start + begin)
                for left in range(end - begin, 0, -BYTES_AT_ONCE):
                    digest.update(file.read(min(left, BYTES_AT_ONCE)))
        return digest.hexdigest()


class TensorFile:
    """A safetensors file whose tensors are read by rows.

    Args:
        path: of the file.
        content: what it holds, in words for messages.
    """

    _sound: dict[Path, tuple[int, int]] = {}  # noqa: RUF012  (files whose checksum has been compared, by size and time)

    def __init__(self, path: Path, content: str = "activations") -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self.layout = _Layout.read(file)
            found = path.stat()
            ends = [entry["data_offsets"][1] for entry in self.layout.entries.values()]
            whole = self.layout.start + max(ends) == found.st_size
            state, seal = (found.st_size, found.st_mtime_ns), self.layout.metadata.get(SEAL)
            if whole and self._sound.get(path) != state and seal is not None:
                whole = seal == self.layout.digest(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
            whole, reason = False, f" ({error})"
        else:
            reason = ""
        if not whole:
            raise StorageError(f"{path} is not a whole file of {content}{reason}. Delete it: it will be made again.")
        self._sound[path] = state

    def __contains__(self, name: str) -> bool:
        return name in self.layout.entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return tuple(self.layout.entries[name]["shape"])

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Some rows of a tensor.

        Args:
            name: of the tensor.
            start: the first row.
            stop: the row after the last; None is all that follow.

        Returns:
            The rows.
        """
        kind, (count, *rest) = np.dtype(KINDS[self.layout.entries[name]["dtype"]]), self.shape(name)
        width = int(np.prod(rest, dtype=np.int64))
        rows = max(0, (count if stop is None else min(stop, count)) - start)
        offset = self.layout.place(name) + start * width * kind.itemsize
        return torch.from_numpy(np.fromfile(self.path, kind, rows * width, offset=offset)).reshape(rows, *rest)

    def rows(self, name: str, places: Tensor) -> Tensor:
        """The rows of a tensor at some places, in their order; neighbours are read at once."""
        if len(places) == 0:
            return self.read(name, 0, 0)
        breaks = torch.nonzero(places[1:] != places[:-1] + 1).flatten().add(1).tolist()
        runs = zip([0, *breaks], [*breaks, len(places)], strict=True)
        return torch.cat([self.read(name, int(places[one]), int(places[end - 1]) + 1) for one, end in runs])


class TensorFiles:
    """Several files that hold the rows of one set, one after the other; read like one.

    Args:
        paths: of the files, in the order of their rows.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.parts = [TensorFile(path) for path in paths]
        ends = torch.tensor([part.shape("labels")[0] for part in self.parts]).cumsum(0).tolist()
        self.starts, self.count = [0, *ends[:-1]], int(ends[-1])

    def __contains__(self, name: str) -> bool:
        return name in self.parts[0]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor with a row for each datum."""
        return self.count, *self.parts[0].shape(name)[1:]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Some rows of a tensor, or all of one that every file holds (`WHOLE`)."""
        if name in WHOLE:
            return self.parts[0].read(name)
        last = self.count if stop is None else min(stop, self.count)
        found = [
            part.read(name, max(0, start - first), last - first)
            for part, first in zip(self.parts, self.starts, strict=True)
            if first < last and start < first + part.shape("labels")[0]
        ]
        return torch.cat(found) if found else self.parts[0].read(name, 0, 0)

    def rows(self, name: str, places: Tensor) -> Tensor:
        """The rows of a tensor at some places, in their order."""
        if len(places) == 0:
            return self.read(name, 0, 0)
        part = torch.searchsorted(torch.tensor(self.starts), places, right=True) - 1
        found = torch.empty(len(places), *self.shape(name)[1:], dtype=self.parts[0].read(name, 0, 0).dtype)
        for index in sorted(set(part.tolist())):
            mine = torch.nonzero(part == index).flatten()
            found[mine] = self.parts[index].rows(name, places[mine] - self.starts[index])
        return found


@contextmanager
def written_rows(
    path: Path, count: int, whole: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Iterator[RowWriter]:
    """Write a file for `TensorFile` batch by batch; readers see all of it or nothing.

    Args:
        path: of the file; its folder is made.
        count: rows of all batches together.
        whole: tensors that are written as they are.
        metadata: short texts by name.

    Yields:
        What takes the batches.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with partial_file(path) as partial, open(partial, "wb") as file:
        writer = RowWriter(file, count, whole, metadata)
        yield writer
        writer.finish(partial)


class RowWriter:
    """A file for `TensorFile` under way."""

    def __init__(self, file: BinaryIO, count: int, whole: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        self.file, self.count, self.whole, self.metadata = file, count, whole, metadata
        self.layout: _Layout | None = None
        self.done = 0

    def add(self, batch: Mapping[str, Tensor]) -> None:
        """Write more rows; `DataError` if there are more than expected."""
        if self.layout is None:
            shapes = {name: (rows.dtype, (self.count, *rows.shape[1:])) for name, rows in batch.items()}
            shapes |= {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.whole.items()}
            self.layout = _Layout.plan(shapes, self.metadata)
            for name, tensor in self.whole.items():
                self._write(self.layout.place(name), tensor)
        size = len(next(iter(batch.values())))
        self._require(self.done + size <= self.count, self.done + size)
        for name, rows in batch.items():
            row = rows[:1].numel() * rows.element_size()
            self._write(self.layout.place(name) + self.done * row, rows)
        self.done += size

    def _write(self, place: int, tensor: Tensor) -> None:
        self.file.seek(place)
        self.file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)

    def _require(self, holds: bool, found: int) -> None:
        if not holds:
            raise DataError(f"expected {self.count} data of {self.metadata.get('set', 'the set')}, got {found}.")

    def finish(self, path: Path) -> None:
        """Write the header with the checksum of what was written; `DataError` if there are fewer rows than expected."""
        self._require(self.layout is not None and self.done == self.count, self.done)
        assert self.layout is not None  # there were rows
        self.file.flush()
        sealed = replace(self.layout, metadata={**self.layout.metadata, SEAL: self.layout.digest(path)})
        self.file.seek(0)
        self.file.write(sealed.header())
        self.file.flush()
        os.fsync(self.file.fileno())


class HeadOnly(nn.Module):
    """A network's last layer over features (n, K, P) that are known: the rest of the network has been run already.

    P is that of the widest network; one that has fewer features finds its own in front.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, index: int) -> None:
        super().__init__()
        self.head = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
        self.head.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
        self.index = index

    def forward(self, features: Tensor) -> Tensor:
        """Logits of this network."""
        logits: Tensor = self.head(features[:, self.index, : self.head.in_features])
        return logits

    def cooled(self, temperature: float) -> HeadOnly:
        """The same head with its logits divided by a temperature: a linear layer again."""
        bias = None if self.head.bias is None else self.head.bias.detach() / temperature
        return HeadOnly(self.head.weight.detach() / temperature, bias, self.index).eval()


@dataclass(frozen=True)
class Seen:
    """What the heads of K networks see of some data."""

    features: Tensor
    """(n, K, P), with zeros behind those of networks that have fewer than the widest."""
    logits: Tensor
    """(n, K, C)"""
    labels: Tensor
    widths: tuple[int, ...]
    """Features of each network."""

    def by_network(self) -> list[Tensor]:
        """The features of each network alone: K of (n, its own number)."""
        return [self.features[:, index, :width] for index, width in enumerate(self.widths)]

    def batches(self) -> list[Tensor]:
        """The features in batches, for networks that are `HeadOnly`."""
        return list(torch.split(self.features, BATCH))


@dataclass(frozen=True)
class Stored:
    """What the heads of K networks see of a set; a loader of (features, labels) for networks that are `HeadOnly`."""

    files: tuple[TensorFile | TensorFiles, ...]
    places: tuple[int, ...] | None = None
    """Which data of the files, and in which order; None is all of them."""

    @classmethod
    def open(cls, paths: Sequence[Path | Sequence[Path]]) -> Stored:
        """From one file for each network, or from its files in the order of their rows; all of the same set."""
        listed = [[one] if isinstance(one, Path) else list(one) for one in paths]
        files = tuple(TensorFile(one[0]) if len(one) == 1 else TensorFiles(one) for one in listed)
        outputs = [file.shape("logits")[1] for file in files]
        if len(set(outputs)) > 1:
            raise OptionError(
                f"the networks of a mixture tell the same classes apart, got {outputs} outputs: leave out those that differ."
            )
        return cls(files)

    def first(self, count: int | None) -> Stored:
        """The first `count` networks alone; None is all of them."""
        return Stored(self.files[:count], self.places)

    def only(self, network: int) -> Stored:
        """One network alone; its features are still (n, 1, P)."""
        return Stored(self.files[network : network + 1], self.places)

    def at(self, places: Sequence[int]) -> Stored:
        """Some of the data, in this order."""
        return Stored(self.files, tuple(places))

    @cached_property
    def heads(self) -> tuple[HeadOnly, ...]:
        """The K last layers, as networks over the features."""
        return tuple(
            HeadOnly(file.read("weight"), file.read("bias") if "bias" in file else None, index).eval()
            for index, file in enumerate(self.files)
        )

    @cached_property
    def labels(self) -> Tensor:
        """Class of each datum (n,)."""
        return self._read(self.files[0], "labels", 0, self.count)

    @property
    def count(self) -> int:
        """Number of data."""
        return self.files[0].shape("labels")[0] if self.places is None else len(self.places)

    def _read(self, file: TensorFile | TensorFiles, name: str, start: int, stop: int) -> Tensor:
        if self.places is None:
            return file.read(name, start, stop)
        return file.rows(name, torch.tensor(self.places[start:stop], dtype=torch.int64))

    def slices(self) -> Iterator[Seen]:
        """All data, in slices of a bounded size that are whole batches but for the last."""
        widths = tuple(file.shape("features")[1] for file in self.files)
        rows = max(1, NUMBERS_AT_ONCE // max(widths) // BATCH) * BATCH
        for start in range(0, self.count, rows):
            features, logits = (
                [self._read(file, name, start, start + rows) for file in self.files] for name in ("features", "logits")
            )
            if len(set(widths)) > 1:
                features = [functional.pad(one, (0, max(widths) - one.shape[1])) for one in features]
            labels = self.labels[start : start + rows]
            yield Seen(torch.stack(features, dim=1), torch.stack(logits, dim=1), labels, widths)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for seen in self.slices():
            yield from zip(seen.batches(), torch.split(seen.labels, BATCH), strict=True)

    def logits(self) -> Tensor:
        """(K, n, C), of all data: for sets as small as validation data."""
        every = [self._read(file, "logits", 0, self.count) for file in self.files]
        return torch.stack(every, dim=1).transpose(0, 1)
