"""Arrays as a set: `.npz` with inputs and labels, `.npy` with inputs alone, and built-in data sets.

Bytes are pixels and are normalised; floating-point numbers are network inputs already. Nothing is unpickled. `.npy` files are
memory-mapped, and may be larger than memory.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class Arrays:
    """Rows of an array, with labels."""

    name: str
    values: NDArray[Any]
    """(n, ...), pixels in bytes or network inputs."""
    labels: Tensor | None
    """(n,), (n, C), or one for each position; or None."""
    intake: Intake
    classes: tuple[str, ...] | None = None
    """Always None: arrays do not name classes."""

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self.values)

    def __iter__(self) -> Iterator[Rows]:
        size, shape = self.intake.batch_size, self.intake.shape
        for start in range(0, self.count, size):
            some = self.values[start : start + size]
            values = torch.from_numpy(some.astype(some.dtype.newbyteorder("="), copy=True))
            if values.dtype == torch.uint8:
                if values.ndim == 3:
                    values = values[:, None]
                elif values.ndim == 4 and values.shape[-1] in (1, 3) and values.shape[1] not in (1, 3):
                    values = values.permute(0, 3, 1, 2)
                values = self.intake.normalise(values) if values.ndim == 4 else values
            if shape is not None and tuple(values.shape[1:]) != shape:
                raise DataError(f"{self.name} holds inputs of shape {tuple(values.shape[1:])}, expected {shape}.")
            names = [f"{Path(self.name).name}[{index}]" for index in range(start, start + len(values))]
            labels = None if self.labels is None else self.labels[start : start + size]
            yield finite_rows(names, values, labels, self.intake.torch_dtype)


def open_arrays(path: Path, intake: Intake, *, labelled: bool, likelihood: Likelihood = CATEGORICAL) -> Arrays:
    """Open a `.npz` or `.npy` file."""
    found = _load(path)
    names = found if isinstance(found, list) else []
    inputs, labels = _choose(names, INPUTS), _choose(names, LABELS)
    if (found is names and inputs is None) or (labelled and labels is None):
        wanted, known = ("inputs", INPUTS) if found is names and inputs is None else ("labels", LABELS)
        raise DataError(
            f"{path} holds no {wanted}: expected an array called {', '.join(known)}; found {', '.join(names) or 'one array'}."
        )
    values = found if inputs is None else _load(path, inputs)
    if not values.size:
        raise DataError(f"{path}: {inputs or 'the array'} is empty: shape {values.shape}.")
    if values.dtype.kind not in "fiub" or values.dtype.itemsize > 8 or values.ndim < 2:
        raise DataError(
            f"{path}: {inputs or 'the array'} has shape {values.shape} and type {values.dtype}: expected numbers of at most 64 "
            f"bits, a row for each input."
        )
    targets = _labels(path, labels, len(values), likelihood) if labelled and labels else None
    return Arrays(str(path), values, targets, intake)


def _load(path: Path, member: str = "") -> Any:
    # The array of a .npy file; an array of an archive, or the names of all.
    try:
        found = np.load(path, mmap_mode="r")
        if isinstance(found, np.ndarray):
            return found
        with found:
            if not member:
                return list(found)
            values = found[member]
        if not isinstance(values, np.ndarray):
            raise ValueError("it is not an array")
        return values
    # RuntimeError is that of an archive with a password.
    except (ValueError, OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, MemoryError) as error:
        if "pickled" in str(error):  # NumPy's words for every file that is not its own
            raise DataError(
                f"{path} is not {'an .npz archive' if path.suffix == '.npz' else 'a .npy array'}."
            ) from error
        at = f" at {member}" if member else ""
        raise DataError(f"{path} is damaged{at}, or holds objects that are not numbers: {error}.") from error


def _labels(path: Path, member: str, count: int, likelihood: Likelihood) -> Tensor:
    # In types that torch has. Labels at many positions stay small; the library checks what they mean.
    values = _load(path, member)
    if values.dtype.kind not in "biuf" or values.ndim == 0 or len(values) != count:
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
