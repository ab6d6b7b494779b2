"""Arrays as sets: `.npz` with inputs and labels or `.npy` with inputs alone, read batch by batch; and tensors in memory.

The members of an archive are read as streams, so memory holds a batch and not the array. Bytes are pixels and are normalised;
floating-point numbers are network inputs already. Nothing is unpickled.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mola.app.jobs.preparation import Intake
from mola.app.jobs.rows import Rows, checked_rows, readable
from mola.errors import DataError
from mola.likelihoods import CATEGORICAL, Likelihood
from mola.likelihoods.bernoulli import MISSING

INPUTS = ("x", "inputs", "images", "data", "arr_0")
LABELS = ("y", "labels", "targets", "label", "arr_1")

DAMAGE = (ValueError, OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)
"""What readers raise on files that are no whole arrays; RuntimeError is that of an archive with a password."""

Header = tuple[tuple[int, ...], bool, np.dtype[Any]]
"""Shape, whether columns come first, and type of an array in a file."""


@dataclass(frozen=True)
class Arrays:
    """Rows of an array in a file, with labels.

    Attributes:
        name: as the user named it.
        path: of the file.
        member: of the archive, that holds the inputs; "" for a file with one array.
        header: of the inputs.
        labels: class indices (n,), or numbers for each output (n, C), or None.
        outputs: number of classes, where it is known.
        intake: from a row to an input.
        likelihood: what labels mean.
        classes: always None: arrays do not name classes.
    """

    name: str
    path: Path
    member: str
    header: Header
    labels: Tensor | None
    outputs: int | None
    intake: Intake
    likelihood: Likelihood = CATEGORICAL
    classes: tuple[str, ...] | None = None

    @property
    def count(self) -> int:
        """How many rows."""
        return self.header[0][0]

    def taken_by(self, intake: Intake) -> Arrays:
        """The same rows, prepared otherwise."""
        return replace(self, intake=intake)

    def __iter__(self) -> Iterator[Rows]:
        start = 0
        for values in _portions(self.path, self.member, self.intake.batch_size):
            end = start + len(values)
            inputs = self._inputs(values)
            labels = None if self.labels is None else self.labels[start:end]
            names = [f"{self.path.name}[{index}]" for index in range(start, end)]
            yield checked_rows(
                names,
                inputs,
                labels,
                classes=self.outputs,
                dtype=self.intake.torch_dtype,
                likelihood=self.likelihood,
            )
            start = end

    def _inputs(self, values: NDArray[Any]) -> Tensor:
        if values.dtype != np.uint8:
            inputs = torch.from_numpy(values.astype(values.dtype.newbyteorder("="), copy=True))
        else:
            pixels = torch.from_numpy(values.copy())
            if pixels.ndim == 3:
                pixels = pixels[:, None]
            elif pixels.ndim == 4 and pixels.shape[-1] in (1, 3) and pixels.shape[1] not in (1, 3):
                pixels = pixels.permute(0, 3, 1, 2)
            inputs = self.intake.normalise(pixels) if pixels.ndim == 4 else pixels
        shape = self.intake.shape
        if shape is not None and tuple(inputs.shape[1:]) != shape:
            raise DataError(f"{self.path} holds inputs of shape {tuple(inputs.shape[1:])}, expected {shape}.")
        return inputs


@dataclass(frozen=True)
class InMemory:
    """A set that is read as a whole: pixels in bytes, or network inputs.

    Attributes:
        name: as the user named it.
        values: (n, ...).
        labels: (n,), or None.
        outputs: number of classes of the networks, where it is known.
        intake: from pixels to inputs.
        classes: always None: these sets do not name their classes.
    """

    name: str
    values: Tensor
    labels: Tensor | None
    outputs: int | None
    intake: Intake
    classes: tuple[str, ...] | None = None

    @property
    def count(self) -> int:
        """How many."""
        return len(self.values)

    def taken_by(self, intake: Intake) -> InMemory:
        """The same inputs, prepared otherwise."""
        return replace(self, intake=intake)

    def __iter__(self) -> Iterator[Rows]:
        size = self.intake.batch_size
        for start in range(0, len(self.values), size):
            values = self.values[start : start + size]
            inputs = values if values.is_floating_point() else self.intake.normalise(values)
            if self.intake.shape is not None and tuple(inputs.shape[1:]) != self.intake.shape:
                raise DataError(
                    f"{self.name} holds inputs of shape {tuple(inputs.shape[1:])}, expected {self.intake.shape}."
                )
            labels = None if self.labels is None else self.labels[start : start + size]
            names = [f"{self.name}[{index}]" for index in range(start, start + len(values))]
            yield checked_rows(names, inputs, labels, classes=self.outputs, dtype=self.intake.torch_dtype)


def open_arrays(
    path: Path, outputs: int | None, intake: Intake, *, labelled: bool, likelihood: Likelihood = CATEGORICAL
) -> Arrays:
    """Look into a file of arrays.

    Args:
        path: `.npz` or `.npy`.
        outputs: number of classes, where it is known.
        intake: from a row to an input.
        labelled: whether labels are asked for.
        likelihood: what labels mean.

    Returns:
        The rows; inputs are not read yet.
    """
    names = _members(path)
    inputs = _choose(names, INPUTS) if path.suffix == ".npz" else ""
    labels = _choose(names, LABELS) if path.suffix == ".npz" else None
    if inputs is None or (labelled and labels is None):
        wanted, known = ("inputs", INPUTS) if inputs is None else ("labels", LABELS)
        raise DataError(
            f"{path} holds no {wanted}: expected an array called {', '.join(known)}; found {', '.join(names) or 'one array'}."
        )
    header = _header(path, inputs)
    shape, _, dtype = header
    if dtype.kind not in "fiub" or dtype.itemsize > 8 or len(shape) < 2 or shape[0] == 0:
        raise DataError(
            f"{path}: {inputs or 'the array'} has shape {shape} and type {dtype}: expected numbers, a row for each input, of 64 bits "
            f"at most."
        )
    found = _labels(path, labels, shape[0], likelihood) if labelled and labels is not None else None
    return Arrays(str(path), path, inputs, header, found, outputs, intake, likelihood)


def _labels(path: Path, member: str, count: int, likelihood: Likelihood) -> Tensor:
    values = np.concatenate(list(_portions(path, member, 2**20)))
    if not likelihood.mutually_exclusive:
        if values.dtype.kind not in "biuf" or len(values) != count:
            raise DataError(
                f"{path}: {member} has shape {values.shape} and type {values.dtype}: expected {count} rows of numbers, one for each "
                f"output of the networks, or for each output at each position."
            )
        unlike = values.dtype.kind in "iu" or values.ndim == 1
        if (
            likelihood.discrete
            and unlike
            and not bool(readable(torch.from_numpy(values.astype(np.float64)), likelihood).all())
        ):
            strange = values[(values != 0) & (values != 1) & (values != MISSING) & ~np.isnan(values.astype(np.float64))]
            raise DataError(
                f"{path}: {member} holds {strange.flat[0]:g}, and likelihood {likelihood.name!r} takes 0 and 1 for each output, NaN "
                f"or {MISSING} where a label is missing. Class indices, of which one is right for each input, are for --likelihood "
                f"categorical."
            )
        # At many positions they stay as small as they are in the file, but for types that torch has not.
        return torch.from_numpy(values.astype(np.float64 if values.ndim < 3 else np.float32))
    if values.ndim > 1 and values.dtype.kind in "iu" and len(values) == count:
        # A label for each position. They stay as small as they are in the file: there may be millions.
        return torch.from_numpy(values.astype(values.dtype if values.dtype.itemsize == 1 else np.int32))
    whole = values.ndim == 1 and values.dtype.kind in "iuf" and bool(np.all(values == np.floor(values)))
    if not whole or len(values) != count:
        message = (
            f"{path}: {member} has shape {values.shape} and type {values.dtype}: expected {count} whole numbers, the class of each "
            f"input, counted from 0; or, of an integer type, the class of each of its positions."
        )
        if values.dtype.kind == "f" and bool(np.any(np.isfinite(values) & (values != np.floor(values)))):
            message += " Numbers to predict are for --likelihood gaussian."
        raise DataError(message)
    return torch.from_numpy(values.astype(np.int64))


def _choose(names: Sequence[str], known: Sequence[str]) -> str | None:
    return next((name for wanted in known for name in names if name.lower() == wanted), None)


def _members(path: Path) -> list[str]:
    if path.suffix == ".npy":
        return []
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except (zipfile.BadZipFile, OSError) as error:
        raise DataError(f"{path} is not an intact .npz file: {error}.") from error


@contextmanager
def _stream(path: Path, member: str) -> Iterator[IO[bytes]]:
    if not member:
        with open(path, "rb") as plain:
            yield plain
        return
    with zipfile.ZipFile(path) as archive, archive.open(f"{member}.npy") as stream:
        yield stream


def _read_header(stream: IO[bytes]) -> Header:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(stream)


def _header(path: Path, member: str) -> Header:
    try:
        with _stream(path, member) as stream:
            return _read_header(stream)
    except DAMAGE as error:
        raise DataError(f"{path} is damaged{f' at {member}' if member else ''}: {error}.") from error


def _portions(path: Path, member: str, rows: int) -> Iterator[NDArray[Any]]:
    try:
        with _stream(path, member) as stream:
            header = _read_header(stream)
            if header[2].hasobject:
                raise DataError(
                    f"{path}: {member or 'the array'} holds Python objects, which are not read: save numbers."
                )
            yield from _read_rows(stream, header, rows)
    except DataError:
        raise
    except DAMAGE as error:
        raise DataError(f"{path} is damaged{f' at {member}' if member else ''}: {error}.") from error


def _read_rows(stream: IO[bytes], header: Header, rows: int) -> Iterator[NDArray[Any]]:
    shape, columns_first, dtype = header
    if columns_first and len(shape) > 1:
        # Rows are spread over the whole file: there is no way but to read all of it.
        whole = np.frombuffer(stream.read(), dtype).reshape(shape, order="F")
        yield from (whole[start : start + rows] for start in range(0, shape[0], rows))
        return
    width = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
    for start in range(0, shape[0], rows):
        count = min(rows, shape[0] - start)
        content = stream.read(count * width)
        if len(content) < count * width:
            raise ValueError(f"it is cut off at row {start} of {shape[0]}")
        yield np.frombuffer(content, dtype).reshape(count, *shape[1:])
