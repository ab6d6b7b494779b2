"""Readers for image file formats: idx (MNIST and related sets), CIFAR's binary files, and NumPy and MATLAB arrays.

**idx** files consist of two zero bytes, the type of the values (8 for unsigned bytes), the number of dimensions, each dimension in
four bytes (most significant first), and the values in row-major order. These files are often compressed with gzip.

**CIFAR binary** files consist of records: one label byte (for CIFAR-100, a coarse and a fine label), followed by the red, green
and blue planes of 32 x 32 pixels. The Python versions of these sets, which are pickle files, are not supported.

**Array** files are either NumPy .npz files with `images` (n, 32, 32, 3) and optional `labels` (n,), or SVHN's .mat files with X (32,
32, 3, n) and y (n, 1).
"""

from __future__ import annotations

import gzip
import math
import struct
import zipfile
import zlib
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from molaplace.errors import DataError, importing
from molaplace.images import Images
from molaplace_lab.data.download import FETCH_AGAIN

SIDE = 32


def read_bytes(path: Path) -> bytes:
    """Read a file, and decompress it if its name ends in .gz."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} ({path.stat().st_size:,} bytes) is truncated or not a gzip file: {error}. {FETCH_AGAIN}"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}.") from error


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read an idx file of unsigned bytes with the given number of dimensions: 3 for images or 1 for labels."""
    content = read_bytes(path)
    start = 4 + 4 * dimensions
    magic = bytes([0, 0, 8, dimensions])
    if content[:4] != magic or len(content) < start:
        raise DataError(
            f"{path} is not an idx file of unsigned bytes with {dimensions} dimensions: expected a header of {start} bytes that "
            f"begins with {magic.hex(' ')}, got {content[:4].hex(' ') or 'nothing'}. {FETCH_AGAIN}"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if len(content) != start + math.prod(shape):
        raise DataError(
            f"{path} contains {len(content):,} bytes, but its header specifies {start + math.prod(shape):,} bytes "
            f"for the shape {shape}. {FETCH_AGAIN}"
        )
    # Copy the array, because writing to a tensor backed by immutable bytes is undefined behaviour.
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy())


def read_idx_pair(paths: Sequence[Path], *, first_label: int = 0, transposed: bool = False) -> Images:
    """Read greyscale images (n, 1, height, width) and labels. EMNIST stores its images transposed, and its labels start at 1."""
    pixels = read_idx(paths[0], 3)
    labels = read_idx(paths[1], 1)
    if len(pixels) != len(labels):
        raise DataError(f"{paths[0]} contains {len(pixels)} images, but {paths[1]} contains {len(labels)} labels.")
    if transposed:
        pixels = pixels.transpose(1, 2).contiguous()
    return Images(pixels[:, None], labels.long() - first_label)


def read_cifar_binary(paths: Sequence[Path], *, label_bytes: int) -> Images:
    """Read images (n, 3, 32, 32) from binary files of CIFAR-10 (one label byte) or CIFAR-100 (a coarse and a fine label byte)."""
    record = label_bytes + 3 * SIDE * SIDE
    rows = []
    for path in paths:
        content = np.frombuffer(read_bytes(path), np.uint8)
        if len(content) == 0 or len(content) % record:
            raise DataError(
                f"{path} contains {len(content):,} bytes; expected a multiple of {record:,}: {label_bytes} label bytes and "
                f"3 x {SIDE} x {SIDE} pixel bytes for each image. {FETCH_AGAIN}"
            )
        rows.append(content.reshape(-1, record))
    joined = torch.from_numpy(np.concatenate(rows))
    return Images(
        joined[:, label_bytes:].reshape(-1, 3, SIDE, SIDE).contiguous(), joined[:, label_bytes - 1].long().contiguous()
    )


def open_npy(path: Path) -> np.ndarray:
    """Open an array of integers stored in a NumPy file. The array is memory-mapped, so only the parts that are used are read."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{path} ({path.stat().st_size:,} bytes) is not a complete .npy file: {error}. {FETCH_AGAIN}"
        ) from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "ui":
        raise DataError(f"{path} is not an array of integers. {FETCH_AGAIN}")
    return array


# SciPy and NumPy do not document which exceptions they raise for damaged files. In tests, they raised these exceptions for truncated
# and overwritten files.
BROKEN = (OSError, EOFError, LookupError, ValueError, TypeError, NotImplementedError, zlib.error, zipfile.BadZipFile)


def read_arrays(paths: Sequence[Path]) -> Images:
    """Read images (n, 3, 32, 32) from an .npz or .mat file. Missing labels become 0, as does SVHN's label 10."""
    (path,) = paths
    content = BytesIO(read_bytes(path))
    try:
        if path.name.removesuffix(".gz").endswith(".mat"):
            pixels, stored_labels = _matlab(content)
        else:
            with np.load(content, allow_pickle=False) as arrays:
                pixels = arrays["images"]
                stored_labels = arrays.get("labels")
    except BROKEN as error:
        raise DataError(
            f"{path} ({path.stat().st_size:,} bytes) is not a complete file of image arrays: {type(error).__name__}: {error}. "
            f"{FETCH_AGAIN}"
        ) from error
    labels = np.zeros(len(pixels), np.int64) if stored_labels is None else stored_labels.reshape(-1).astype(np.int64)
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), SIDE, SIDE, 3):
        raise DataError(
            f"{path}: expected uint8 images of shape ({len(labels)}, {SIDE}, {SIDE}, 3); got {pixels.shape} of type {pixels.dtype}."
        )
    labels[labels == 10] = 0
    return Images(torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))), torch.from_numpy(labels))


def _matlab(content: BytesIO) -> tuple[np.ndarray, np.ndarray]:
    with importing("reading SVHN's .mat files", "scipy", "lab"):
        from scipy import io
    try:
        arrays = io.loadmat(content, variable_names=["X", "y"])
    except io.matlab.MatReadError as error:  # MatReadError derives directly from Exception
        raise ValueError(error) from error
    return arrays["X"].transpose(3, 0, 1, 2), arrays["y"]
