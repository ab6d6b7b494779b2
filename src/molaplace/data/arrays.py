"""Arrays as data sets: `.npz` files with inputs and labels, `.npy` files with inputs only, and built-in data sets.

Bytes are treated as pixels and normalised. Floating-point numbers are passed to the networks unchanged. Nothing is unpickled.
`.npy` files are memory-mapped and may be larger than memory.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from molaplace.data.dataset import Dataset, InputBatch, finite_rows
from molaplace.data.preprocessing import Preprocessing
from molaplace.errors import DataError
from molaplace.likelihoods import CATEGORICAL, Likelihood

NAMES = {"x": ("x", "inputs"), "y": ("y", "labels")}
"""Accepted names for the arrays of inputs and labels in a file."""

LARGEST_LABEL = 2**53
"""Bound on class indices: float64 represents all smaller integers."""


@dataclass(frozen=True, kw_only=True)
class ArrayDataset(Dataset):
    """Rows of an array, with labels of shape (n,) or (n, C), or with a label for each position."""

    values: NDArray[Any]
    """Network inputs (n, ...), or pixels as bytes (n, height, width), (n, channels, height, width) or (n, height, width, channels)."""

    def batches(self, first: int = 0, step: int = 1) -> Iterator[InputBatch]:
        """Yield the batches with indices `first`, `first + step`, ..."""
        size = self.preprocessing.batch_size
        shape = self.preprocessing.shape
        for start in range(first * size, len(self.values), step * size):
            rows = self.values[start : start + size]
            values = torch.from_numpy(rows.astype(rows.dtype.newbyteorder("="), copy=True))
            if self.has_pixels:
                if values.ndim == 3:
                    values = values[:, None]
                elif values.shape[-1] in (1, 3) and values.shape[1] not in (1, 3):
                    values = values.permute(0, 3, 1, 2)
                values = self.preprocessing.normalise(values)
            if shape is not None and tuple(values.shape[1:]) != shape:
                raise DataError(f"{self.name} contains inputs of shape {tuple(values.shape[1:])}; expected {shape}.")
            names = [f"{Path(self.name).name}[{index}]" for index in range(start, start + len(values))]
            labels = None if self.labels is None else self.labels[start : start + size]
            yield finite_rows(names, values, labels, self.preprocessing.torch_dtype)


def open_arrays(
    path: Path, preprocessing: Preprocessing, *, labelled: bool, likelihood: Likelihood = CATEGORICAL
) -> ArrayDataset:
    """Open a `.npz` or `.npy` file."""
    try:
        content = np.load(path, mmap_mode="r")
        arrays = {"x": content} if isinstance(content, np.ndarray) else _members(content)
    # A password-protected archive raises RuntimeError.
    except (ValueError, OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, MemoryError) as error:
        raise DataError(f"{path} cannot be read: {error}. Pass numbers saved by numpy.save or numpy.savez.") from error
    for name in ("x", "y") if labelled else ("x",):
        if name not in arrays:
            raise DataError(
                f"{path} contains no {' or '.join(NAMES[name])}. Use numpy.savez({path.name!r}, x=inputs, y=labels)."
            )
    values = arrays["x"]
    labels = arrays["y"] if labelled else None
    if not values.size:
        raise DataError(f"{path}: expected at least one input, got inputs of shape {values.shape}.")
    if values.dtype.kind not in "fiub" or values.dtype.itemsize > 8 or values.ndim < 2:
        raise DataError(
            f"{path}: expected numbers of at most 64 bits, with one row for each input; got inputs of shape {values.shape} and type "
            f"{values.dtype}."
        )
    targets = None if labels is None else _as_labels(path, labels, len(values), likelihood)
    return ArrayDataset(
        name=str(path),
        preprocessing=preprocessing,
        values=values,
        labels=targets,
        count=len(values),
        has_pixels=values.dtype == np.uint8 and values.ndim in (3, 4),
    )


def _members(archive: Any) -> dict[str, NDArray[Any]]:
    with archive:
        return {kind: archive[name] for kind, names in NAMES.items() for name in names if name in archive}


def _as_labels(path: Path, values: NDArray[Any], count: int, likelihood: Likelihood) -> Tensor:
    # Convert labels to types that torch supports. To save memory, dense labels are given types of at most 32 bits where
    # possible. The library checks the values.
    if values.dtype.kind not in "biuf" or values.ndim == 0 or len(values) != count:
        raise DataError(
            f"{path}: expected {count} rows of numbers, one for each input; got labels of shape {values.shape} and type "
            f"{values.dtype}."
        )
    if not likelihood.mutually_exclusive:
        return torch.from_numpy(values.astype(np.float64 if values.ndim < 3 else np.float32))
    whole = values.dtype.kind in "iub" or bool(np.all(values == np.floor(values)))
    if not whole:
        return torch.from_numpy(values.astype(np.float64))
    low, high = (values.min(), values.max()) if values.size else (0, 0)
    if low <= -LARGEST_LABEL or high >= LARGEST_LABEL:
        wrong = low if low <= -LARGEST_LABEL else high
        raise DataError(f"{path}: expected class indices from 0 as labels, got {wrong}.")
    if values.dtype.kind not in "iu" or values.ndim == 1:
        return torch.from_numpy(values.astype(np.int64))
    if values.dtype == np.uint8:
        return torch.from_numpy(values.astype(np.uint8))
    return torch.from_numpy(values.astype(np.int32 if low >= -(2**31) and high < 2**31 else np.int64))
