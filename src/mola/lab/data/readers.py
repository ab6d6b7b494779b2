"""Readers of published image sets: idx (MNIST and its relatives), CIFAR's binary and Python files, SVHN's arrays.

**idx**: two zero bytes, the type of the values (8: unsigned bytes), the number of dimensions, each dimension in four bytes (most
significant first), then the values with the last dimension running fastest. Often compressed by gzip.

**CIFAR-10 and CIFAR-100**: a record of the binary version is one label byte (CIFAR-100: two, the coarse and the fine label), then
the red, the green and the blue plane of 32 x 32 pixels. The Python version holds the same planes and labels in a pickled
dictionary, which is read without running anything that it names.

**SVHN**: the published MATLAB file has X (32, 32, 3, n) and y (n, 1), in which 10 stands for the digit 0. The same arrays in NumPy's
.npz are `images` (n, 32, 32, 3) and `labels` (n,), with the digit 0 as either 0 or 10.
"""

from __future__ import annotations

import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mola.errors import DataError, MissingExtraError
from mola.lab.data.files import FETCH_AGAIN, read_bytes
from mola.lab.data.images import Images


class _Array:
    # Stands for NumPy's `_reconstruct` and for the array that it makes: NumPy itself never sees the file's values.

    value: np.ndarray | None = None

    def __init__(self, *_: Any) -> None:
        # Arguments make an empty array; the state that follows holds its values.
        ...

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype) or dtype.code not in ("u1", "uint8", "|u1"):
            raise pickle.UnpicklingError("it holds an array of something other than unsigned bytes")
        data = data.encode("latin-1") if isinstance(data, str) else data
        sized = isinstance(shape, tuple) and all(type(one) is int and one >= 0 for one in shape)
        if not sized or not isinstance(data, bytes) or math.prod(shape) != len(data):
            raise pickle.UnpicklingError(f"it holds an array of shape {shape} in another number of bytes")
        # bytearray: a tensor over immutable bytes could be written to by mistake.
        self.value = np.frombuffer(bytearray(data), np.uint8).reshape(shape, order="F" if fortran else "C")


class _Dtype:
    # Stands for NumPy's `dtype`; its state is the byte order, which single bytes do not have.

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = code.decode("latin-1") if isinstance(code, bytes) else code

    def __setstate__(self, state: Any) -> None:
        pass


class _PlainUnpickler(pickle._Unpickler):
    # Python's own reader, in which only NumPy's names for rebuilding an array have a meaning, and a harmless one. The
    # reader in Python, not the one in C, which would fill tens of gigabytes for a file of ten bytes that uses a high
    # number of the memo. The one instruction with the same fault here, for a bytearray, is left out.

    NAMES = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy._core.multiarray", "_reconstruct"): _Array,  # from NumPy 2 on
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Dtype,
    }
    dispatch = {code: run for code, run in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]}  # noqa: RUF012

    def find_class(self, module: str, name: str) -> Any:
        """What a name stands for."""
        if (module, name) not in self.NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which data do not need and which will not be run")
        return self.NAMES[module, name]


DAMAGE = (
    IndexError,
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
    EOFError,
    OverflowError,
    MemoryError,
)
"""What Python's reader raises where the instructions of a pickle do not fit together."""


def read_plain_pickle(path: Path) -> Any:
    """The value in a pickle of plain data, without running anything that it names.

    Args:
        path: the file.

    Returns:
        The value. In a dictionary, keys are text, and arrays are of unsigned bytes.
    """
    try:
        # Python 2 wrote text and bytes alike: as Latin-1, every byte is kept.
        value = _PlainUnpickler(BytesIO(read_bytes(path)), encoding="latin-1").load()
    except (pickle.UnpicklingError, struct.error, *DAMAGE) as error:
        reason = str(error) if isinstance(error, pickle.UnpicklingError) else "it is truncated or damaged"
        raise DataError(
            f"{path} is not plain pickled data: {reason}. {FETCH_AGAIN} The binary version of the set needs no pickle."
        ) from error
    return _finished(value)


def _finished(value: Any) -> Any:
    if isinstance(value, dict):
        return {key.decode("latin-1") if isinstance(key, bytes) else key: _finished(one) for key, one in value.items()}
    return value.value if isinstance(value, _Array) else value


UNSIGNED_BYTES = 8


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read a file of unsigned bytes.

    Args:
        path: ends in .gz if it is compressed.
        dimensions: how many it must have: 3 for images, 1 for labels.

    Returns:
        The numbers in uint8.
    """
    content = read_bytes(path)
    start = 4 + 4 * dimensions
    expected = bytes([0, 0, UNSIGNED_BYTES, dimensions])
    if content[:4] != expected:
        raise DataError(
            f"{path} is no idx file of unsigned bytes with {dimensions} dimension{'s' * (dimensions > 1)}: expected it to "
            f"begin with {expected.hex(' ')}, got {content[:4].hex(' ') or 'nothing'}. {FETCH_AGAIN}"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:start]) if len(content) >= start else None
    if shape is None or len(content) != start + math.prod(shape):
        size = f"{start + math.prod(shape):,} bytes for {shape}" if shape else f"at least {start} bytes"
        raise DataError(
            f"{path} holds {len(content):,} bytes where its header says {size}: it was cut off or changed. {FETCH_AGAIN}"
        )
    if math.prod(shape) == 0:
        return torch.zeros(shape, dtype=torch.uint8)
    # A bytearray, since a tensor over immutable bytes could be written to by mistake.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).view(shape)


def read_idx_pair(images: Path, labels: Path, *, first_label: int = 0, upright: bool = False) -> Images:
    """Images and labels from two files.

    Args:
        images: the file with three dimensions.
        labels: the file with one.
        first_label: the file's name for class 0.
        upright: whether to exchange rows and columns. EMNIST's files are written column by column.

    Returns:
        Grey images, (n, 1, height, width).
    """
    pixels, targets = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(targets):
        raise DataError(
            f"{images} holds {len(pixels)} images but {labels} {len(targets)} labels: they do not belong together."
        )
    if upright:
        pixels = pixels.transpose(1, 2).contiguous()
    return Images(pixels[:, None], targets.long() - first_label)


SIDE = 32
PIXELS = 3 * SIDE * SIDE


def read_cifar_binary(paths: Sequence[Path], label_bytes: int) -> Images:
    """Images of some binary files, one after the other.

    Args:
        paths: the files.
        label_bytes: 1 for CIFAR-10, 2 for CIFAR-100, whose second is the fine label.

    Returns:
        Images (n, 3, 32, 32).
    """
    record = label_bytes + PIXELS
    pixels, labels = [], []
    for path in paths:
        content = np.frombuffer(read_bytes(path), np.uint8)
        if len(content) == 0 or len(content) % record:
            raise DataError(
                f"{path} holds {len(content):,} bytes, expected a multiple of {record:,}: {label_bytes} label "
                f"byte{'s' * (label_bytes > 1)} and 3 x {SIDE} x {SIDE} pixels to an image. It was cut off, or is another "
                f"version. {FETCH_AGAIN}"
            )
        rows = content.reshape(-1, record)
        pixels.append(rows[:, label_bytes:])
        labels.append(rows[:, label_bytes - 1])
    planes = torch.from_numpy(np.concatenate(pixels)).view(-1, 3, SIDE, SIDE)
    return Images(planes, torch.from_numpy(np.concatenate(labels)).long())


def read_cifar_python(paths: Sequence[Path], label_key: str) -> Images:
    """Images of some files of the Python version, one after the other; no code in them is run.

    Args:
        paths: the files.
        label_key: "labels" for CIFAR-10, "fine_labels" for CIFAR-100.

    Returns:
        Images (n, 3, 32, 32).
    """
    pixels, labels = [], []
    for path in paths:
        batch = read_plain_pickle(path)
        data, targets = (batch.get("data"), batch.get(label_key)) if isinstance(batch, dict) else (None, None)
        if (
            not isinstance(data, np.ndarray)
            or data.dtype != np.uint8
            or data.ndim != 2
            or data.shape[1] != PIXELS
            or not isinstance(targets, list)
            or len(targets) != len(data)
            or not all(type(label) is int and 0 <= label < 256 for label in targets)
        ):
            raise DataError(
                f"{path} is no batch of this set: expected 'data' of shape (n, {PIXELS}) in bytes and n whole numbers in "
                f"{label_key!r}. {FETCH_AGAIN}"
            )
        pixels.append(data)
        labels += targets
    return Images(torch.from_numpy(np.concatenate(pixels)).view(-1, 3, SIDE, SIDE), torch.tensor(labels))


BROKEN = (zlib.error, zipfile.BadZipFile)


def read_svhn(path: Path) -> Images:
    """The images of a .mat or .npz file.

    Args:
        path: the file.

    Returns:
        Images (n, 3, 32, 32), labelled by their digit.
    """
    arrays = _npz if path.name.removesuffix(".gz").endswith(".npz") else _mat()
    content = BytesIO(read_bytes(path))
    try:
        pixels, labels = arrays(content)
    # What SciPy and NumPy raise for broken files is not documented: these are what cutting and overwriting files gave.
    except (OSError, EOFError, LookupError, ValueError, TypeError, NotImplementedError, *BROKEN) as error:
        raise DataError(
            f"{path} ({path.stat().st_size:,} bytes) is not a whole file of SVHN's cropped digits: "
            f"{type(error).__name__}: {error}. {FETCH_AGAIN}"
        ) from error
    labels = labels.reshape(-1).astype(np.int64)
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), 3, SIDE, SIDE):
        raise DataError(
            f"{path} holds {pixels.dtype} of shape {pixels.shape} (as images, channels, height, width) and {len(labels)} "
            f"labels; expected as many images of bytes, 3 x {SIDE} x {SIDE}. {FETCH_AGAIN}"
        )
    labels[labels == 10] = 0
    return Images(torch.from_numpy(np.ascontiguousarray(pixels)), torch.from_numpy(labels))


def read_colour_arrays(path: Path) -> Images:
    """The images of a .npz file that has them in `images`, all labelled 0: outliers belong to no class.

    Args:
        path: the file.

    Returns:
        Images (n, 3, 32, 32).
    """
    try:
        with np.load(BytesIO(read_bytes(path)), allow_pickle=False) as arrays:
            pixels = arrays["images"]
    except (OSError, EOFError, LookupError, ValueError, TypeError, NotImplementedError, *BROKEN) as error:
        raise DataError(
            f"{path} ({path.stat().st_size:,} bytes) is not a whole .npz file with an array `images`: "
            f"{type(error).__name__}: {error}. {FETCH_AGAIN}"
        ) from error
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[1:] != (SIDE, SIDE, 3):
        raise DataError(
            f"{path}: expected `images` of shape (n, {SIDE}, {SIDE}, 3) in bytes, got {pixels.shape} of {pixels.dtype}."
        )
    planes = torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))
    return Images(planes, torch.zeros(len(planes), dtype=torch.int64))


def _mat() -> Callable[[BytesIO], tuple[np.ndarray, np.ndarray]]:
    try:
        from scipy import io
    except ImportError as error:
        raise MissingExtraError(feature="reading SVHN's .mat files", package="scipy", extra="bench") from error

    def read(content: BytesIO) -> tuple[np.ndarray, np.ndarray]:
        try:
            arrays = io.loadmat(content, variable_names=["X", "y"])
        except io.matlab.MatReadError as error:  # derives from nothing but Exception
            raise ValueError(error) from error
        return arrays["X"].transpose(3, 2, 0, 1), arrays["y"]

    return read


def _npz(content: BytesIO) -> tuple[np.ndarray, np.ndarray]:
    with np.load(content, allow_pickle=False) as arrays:
        return arrays["images"].transpose(0, 3, 1, 2), arrays["labels"]
