"""Arrays as sets: `.npz` with inputs and labels, `.npy` with inputs alone, and tensors in memory.

Files are read batch by batch, so memory holds a batch and not the array. Bytes are pixels and are normalised; floating-point numbers
are network inputs already. Nothing is unpickled.
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
from mola.app.jobs.rows import Rows, finite_rows
from mola.errors import DataError
from mola.likelihoods import CATEGORICAL, Likelihood

INPUTS = ("x", "inputs", "images", "data", "arr_0")
LABELS = ("y", "labels", "targets", "label", "arr_1")

Header = tuple[tuple[int, ...], bool, np.dtype[Any]]
"""Shape, whether the order is Fortran's, and type of an array in a file."""


@dataclass(frozen=True)
class Arrays:
    """Rows of an array in a file, with labels.

    Attributes:
        name: as the user named the file.
        path: of the file.
        member: array of the archive that holds the inputs; "" for a file with one array.
        header: of the inputs.
        labels: (n,), (n, C), or one for each position; or None.
        intake: from a row to an input.
        classes: always None: arrays do not name classes.
    """

    name: str
    path: Path
    member: str
    header: Header
    labels: Tensor | None
    intake: Intake
    classes: tuple[str, ...] | None = None

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.header[0][0]

    def taken_by(self, intake: Intake) -> Arrays:
        """The same rows with another preparation."""
        return replace(self, intake=intake)

    def __iter__(self) -> Iterator[Rows]:
        start = 0
        for values in _read(self.path, self.member, self.intake.batch_size):
            native = torch.from_numpy(values.astype(values.dtype.newbyteorder("="), copy=True))
            yield _rows(native, self.labels, start, self.intake, self.path.name, str(self.path))
            start += len(values)


@dataclass(frozen=True)
class InMemory:
    """A set in memory: pixels in bytes, or network inputs.

    Attributes:
        name: as the user named it.
        values: (n, ...).
        labels: (n,), or None.
        intake: from pixels to inputs.
        classes: always None: these sets do not name their classes.
    """

    name: str
    values: Tensor
    labels: Tensor | None
    intake: Intake
    classes: tuple[str, ...] | None = None

    @property
    def count(self) -> int:
        """Number of inputs."""
        return len(self.values)

    def taken_by(self, intake: Intake) -> InMemory:
        """The same inputs with another preparation."""
        return replace(self, intake=intake)

    def __iter__(self) -> Iterator[Rows]:
        start = 0
        for values in torch.split(self.values, self.intake.batch_size):
            yield _rows(values, self.labels, start, self.intake, self.name, self.name)
            start += len(values)


def _rows(values: Tensor, labels: Tensor | None, start: int, intake: Intake, name: str, where: str) -> Rows:
    # The batch that begins at row `start`, prepared and named.
    end = start + len(values)
    if values.dtype == torch.uint8:
        if values.ndim == 3:
            values = values[:, None]
        elif values.ndim == 4 and values.shape[-1] in (1, 3) and values.shape[1] not in (1, 3):
            values = values.permute(0, 3, 1, 2)
        values = intake.normalise(values) if values.ndim == 4 else values
    if intake.shape is not None and tuple(values.shape[1:]) != intake.shape:
        raise DataError(f"{where} holds inputs of shape {tuple(values.shape[1:])}, expected {intake.shape}.")
    names = [f"{name}[{index}]" for index in range(start, end)]
    return finite_rows(names, values, None if labels is None else labels[start:end], intake.torch_dtype)


def open_arrays(path: Path, intake: Intake, *, labelled: bool, likelihood: Likelihood = CATEGORICAL) -> Arrays:
    """Look into a file of arrays; the inputs are not read yet.

    Args:
        path: `.npz` or `.npy`.
        intake: from a row to an input.
        labelled: read labels.
        likelihood: meaning of the labels.
    """
    names: list[str] = []
    inputs: str | None = ""
    labels: str | None = None
    if path.suffix == ".npz":
        with _damage_named(path), zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
        inputs, labels = _choose(names, INPUTS), _choose(names, LABELS)
    if inputs is None or (labelled and labels is None):
        wanted, known = ("inputs", INPUTS) if inputs is None else ("labels", LABELS)
        raise DataError(
            f"{path} holds no {wanted}: expected an array called {', '.join(known)}; found {', '.join(names) or 'one array'}."
        )
    with _stream(path, inputs) as stream:
        shape, _, dtype = header = _read_header(stream)
    if dtype.kind not in "fiub" or dtype.itemsize > 8 or len(shape) < 2 or shape[0] == 0:
        raise DataError(
            f"{path}: {inputs or 'the array'} has shape {shape} and type {dtype}: expected numbers of at most 64 bits, a row for each "
            f"input."
        )
    found = _labels(path, labels, shape[0], likelihood) if labelled and labels is not None else None
    return Arrays(str(path), path, inputs, header, found, intake)


def _labels(path: Path, member: str, count: int, likelihood: Likelihood) -> Tensor:
    # In types that torch has. Labels at many positions stay small; the library checks what they mean.
    values = np.concatenate(list(_read(path, member, 2**20)))
    if values.dtype.kind not in "biuf" or len(values) != count:
        raise DataError(
            f"{path}: {member} has shape {values.shape} and type {values.dtype}: expected {count} rows of numbers, the labels of the "
            f"{count} inputs."
        )
    if not likelihood.mutually_exclusive:
        return torch.from_numpy(values.astype(np.float64 if values.ndim < 3 else np.float32))
    if values.dtype.kind in "iu" and values.ndim > 1:
        return torch.from_numpy(values.astype(np.uint8 if values.dtype == np.uint8 else np.int32))
    whole = values.dtype.kind in "iu" or bool(np.all(values == np.floor(values)))
    return torch.from_numpy(values.astype(np.int64 if whole else np.float64))


def _choose(names: Sequence[str], known: Sequence[str]) -> str | None:
    return next((name for wanted in known for name in names if name.lower() == wanted), None)


@contextmanager
def _damage_named(path: Path, member: str = "") -> Iterator[None]:
    try:
        yield
    # RuntimeError is that of an archive with a password.
    except (ValueError, OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is damaged{f' at {member}' if member else ''}: {error}.") from error


@contextmanager
def _stream(path: Path, member: str) -> Iterator[IO[bytes]]:
    with _damage_named(path, member):
        if not member:
            with open(path, "rb") as plain:
                yield plain
        else:
            with zipfile.ZipFile(path) as archive, archive.open(f"{member}.npy") as stream:
                yield stream


def _read_header(stream: IO[bytes]) -> Header:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(stream)


def _read(path: Path, member: str, rows: int) -> Iterator[NDArray[Any]]:
    with _stream(path, member) as stream:
        shape, is_fortran, dtype = _read_header(stream)
        if dtype.hasobject:
            raise DataError(f"{path}: {member or 'the array'} holds Python objects, which are not read: save numbers.")
        if is_fortran and len(shape) > 1:  # rows are spread over the whole file
            whole = np.frombuffer(stream.read(), dtype).reshape(shape, order="F")
            yield from (whole[start : start + rows] for start in range(0, shape[0], rows))
            return
        width = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        for start in range(0, shape[0], rows):
            count = min(rows, shape[0] - start)
            content = stream.read(count * width)
            if len(content) < count * width:
                raise DataError(f"{path} is damaged: it is cut off at row {start} of {shape[0]}.")
            yield np.frombuffer(content, dtype).reshape(count, *shape[1:])
