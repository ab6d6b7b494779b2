"""Pickled data read as data: a reader of the format that can build numbers, texts, lists, dictionaries and arrays of bytes.

CIFAR's Python files are pickles. The standard unpickler runs whatever functions a file names; this reader runs none. It
knows the few instructions that such files consist of, and of the names in them only NumPy's own for rebuilding an array,
which it follows itself. Everything else is refused.

The idx format of MNIST and its relatives.

A file is two zero bytes, the type of the numbers (8: unsigned bytes), the number of dimensions, each dimension in four bytes
(most significant first), then the numbers with the last dimension running fastest. It is often compressed by gzip.

CIFAR-10 and CIFAR-100: the binary files, and the Python ones without unpickling them.

A record of the binary version is one label byte (CIFAR-100: two, the coarse and the fine one), then the red, the green and
the blue plane of 32 x 32 pixels. The Python version holds the same planes and labels in a pickled dictionary.

SVHN's cropped digits: the published MATLAB files, or the same arrays in NumPy's .npz.

The MATLAB file has X (32, 32, 3, n) and y (n, 1), in which 10 stands for the digit 0. The .npz has `images` (n, 32, 32, 3)
and `labels` (n,), digit 0 as either 0 or 10.
"""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mola.errors import DataError, MissingExtraError
from mola.lab.data.files import FETCH_AGAIN, read_bytes
from mola.lab.data.images import Images

__all__ = ["read_cifar_binary", "read_cifar_python", "read_idx", "read_idx_pair", "read_plain_pickle", "read_svhn"]

RECONSTRUCT = frozenset(
    {("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")}  # before and after NumPy 2
)
ARRAY, DTYPE = ("numpy", "ndarray"), ("numpy", "dtype")
BYTES = ("u1", "uint8", "|u1")


class _Refused(Exception):  # noqa: N818 - never leaves this file
    """Why the file is not plain."""


@dataclass
class _Name:
    """A function or class named in the file; never looked up."""

    path: tuple[str, str]


@dataclass
class _Dtype:
    code: Any


@dataclass
class _Array:
    """An array before its state is set; `value` after."""

    value: np.ndarray | None = None


@dataclass
class _Machine:
    """The stack machine that a pickle is a program for."""

    content: bytes
    place: int = 0
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def take(self, count: int) -> bytes:
        if self.place + count > len(self.content):
            message = f"it ends after {len(self.content):,} bytes, in the middle"
            raise _Refused(message)
        self.place += count
        return self.content[self.place - count : self.place]

    def number(self, form: str) -> int:
        return int(struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0])

    def line(self) -> str:
        end = self.content.find(b"\n", self.place)
        return self.take((len(self.content) if end < 0 else end + 1) - self.place)[:-1].decode("latin-1")

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def pop(self, count: int) -> list[Any]:
        if count > len(self.stack):
            raise IndexError
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return items

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def remember(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def refuse(self, _: _Machine) -> None:
        message = f"it has the instruction {self.content[self.place - 1 : self.place]!r}, which plain data do not need"
        raise _Refused(message)

    def append(self, items: list[Any]) -> None:
        self.stack[-1].extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if len(items) % 2:
            message = "a dictionary in it has a key without a value"
            raise _Refused(message)
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[key] = value

    def name(self, module: str, name: str) -> None:
        path = (module, name)
        if path not in RECONSTRUCT and path not in (ARRAY, DTYPE):
            message = f"it names {module}.{name}, which data have no use for and which will not be run"
            raise _Refused(message)
        self.push(_Name(path))

    def call(self) -> None:
        function, arguments = self.pop(2)
        if isinstance(function, _Name) and isinstance(arguments, tuple):
            if function.path == DTYPE and arguments:
                return self.push(_Dtype(arguments[0]))
            if function.path in RECONSTRUCT and arguments and arguments[0] == _Name(ARRAY):
                return self.push(_Array())
        message = "it calls something other than NumPy's rebuilding of an array"
        raise _Refused(message)

    def build(self) -> None:
        (state,) = self.pop(1)
        target = self.stack[-1]
        if isinstance(target, _Dtype):
            return  # its state is the byte order, which single bytes do not have
        if not isinstance(target, _Array) or not isinstance(state, tuple) or len(state) != 5:
            message = "it sets the state of something other than an array"
            raise _Refused(message)
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype) or _text(dtype.code) not in BYTES:
            message = "it holds an array of something other than unsigned bytes"
            raise _Refused(message)
        data = data.encode("latin-1") if isinstance(data, str) else data
        if not isinstance(data, bytes) or math.prod(shape) != len(data):
            message = f"it holds an array of shape {shape} in another number of bytes"
            raise _Refused(message)
        # bytearray: a tensor over immutable bytes could be written to by mistake.
        values = np.frombuffer(bytearray(data), np.uint8)
        target.value = values.reshape(shape, order="F" if fortran else "C")


def _text(value: Any) -> Any:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _text_of(form: str, encoding: str) -> Callable[[_Machine], None]:
    """Python 2 wrote texts and bytes alike: those are Latin-1, which keeps every byte."""
    return lambda machine: machine.push(machine.take(machine.number(form)).decode(encoding))


INSTRUCTIONS: dict[bytes, Callable[[_Machine], Any]] = {
    b"\x80": lambda m: m.take(1),  # version of the format
    b"\x95": lambda m: m.take(8),  # length of what follows
    b"(": lambda m: m.marks.append(len(m.stack)),
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"}": lambda m: m.push({}),
    b"]": lambda m: m.push([]),
    b")": lambda m: m.push(()),
    b"\x85": lambda m: m.push(tuple(m.pop(1))),
    b"\x86": lambda m: m.push(tuple(m.pop(2))),
    b"\x87": lambda m: m.push(tuple(m.pop(3))),
    b"t": lambda m: m.push(tuple(m.since_mark())),
    b"K": lambda m: m.push(m.number("B")),
    b"M": lambda m: m.push(m.number("H")),
    b"J": lambda m: m.push(m.number("i")),
    b"\x8a": lambda m: m.push(int.from_bytes(m.take(m.number("B")), "little", signed=True)),
    b"U": _text_of("B", "latin-1"),
    b"T": _text_of("I", "latin-1"),
    b"C": lambda m: m.push(m.take(m.number("B"))),
    b"B": lambda m: m.push(m.take(m.number("I"))),
    b"\x8e": lambda m: m.push(m.take(m.number("Q"))),
    b"X": _text_of("I", "utf-8"),
    b"\x8c": _text_of("B", "utf-8"),
    b"a": lambda m: m.append(m.pop(1)),
    b"e": lambda m: m.append(m.since_mark()),
    b"s": lambda m: m.set_items(m.pop(2)),
    b"u": lambda m: m.set_items(m.since_mark()),
    b"q": lambda m: m.remember(m.number("B")),
    b"r": lambda m: m.remember(m.number("I")),
    b"\x94": lambda m: m.remember(len(m.memo)),
    b"h": lambda m: m.push(m.memo[m.number("B")]),
    b"j": lambda m: m.push(m.memo[m.number("I")]),
    b"c": lambda m: m.name(m.line(), m.line()),
    b"\x93": lambda m: m.name(*m.pop(2)),
    b"R": _Machine.call,
    b"b": _Machine.build,
}


def read_plain_pickle(path: Path) -> Any:
    """The value in a pickle of plain data, without running anything that it names.

    Args:
        path: the file.

    Returns:
        The value; byte strings that are keys are texts in it, and arrays are of unsigned bytes.

    Raises:
        DataError: if the file is cut off, or holds anything else.
    """
    machine = _Machine(read_bytes(path))
    try:
        while (code := machine.take(1)) != b".":
            INSTRUCTIONS.get(code, machine.refuse)(machine)
        (value,) = machine.stack
        return _finished(value)
    except (_Refused, IndexError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        reason = str(error) if isinstance(error, _Refused) else "its instructions do not fit together"
        message = (
            f"{path} is not plain pickled data: {reason}. {FETCH_AGAIN} The binary version of the set needs no pickle."
        )
        raise DataError(message) from error


def _finished(value: Any) -> Any:
    """Arrays for their placeholders, and texts for keys."""
    if isinstance(value, _Array):
        return value.value
    if isinstance(value, dict):
        return {_text(key): _finished(item) for key, item in value.items()}
    return value


UNSIGNED_BYTES = 8


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read a file of unsigned bytes.

    Args:
        path: ends in .gz if it is compressed.
        dimensions: how many it must have: 3 for images, 1 for labels.

    Returns:
        The numbers in uint8.

    Raises:
        DataError: if the file is no such idx file, or not as long as it says.
    """
    content = read_bytes(path)
    start = 4 + 4 * dimensions
    expected = bytes([0, 0, UNSIGNED_BYTES, dimensions])
    if content[:4] != expected:
        message = (
            f"{path} is no idx file of unsigned bytes with {dimensions} dimension{'s' * (dimensions > 1)}: expected it to "
            f"begin with {expected.hex(' ')}, got {content[:4].hex(' ') or 'nothing'}. {FETCH_AGAIN}"
        )
        raise DataError(message)
    shape = struct.unpack(f">{dimensions}I", content[4:start]) if len(content) >= start else None
    if shape is None or len(content) != start + math.prod(shape):
        size = f"{start + math.prod(shape):,} bytes for {shape}" if shape else f"at least {start} bytes"
        message = f"{path} holds {len(content):,} bytes where its header says {size}: it was cut off or changed. {FETCH_AGAIN}"
        raise DataError(message)
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

    Raises:
        DataError: if the files do not belong together.
    """
    pixels, targets = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(targets):
        message = (
            f"{images} holds {len(pixels)} images but {labels} {len(targets)} labels: they do not belong together."
        )
        raise DataError(message)
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

    Raises:
        DataError: if a file is not a whole number of records.
    """
    record = label_bytes + PIXELS
    pixels, labels = [], []
    for path in paths:
        content = np.frombuffer(read_bytes(path), np.uint8)
        if len(content) == 0 or len(content) % record:
            message = (
                f"{path} holds {len(content):,} bytes, expected a multiple of {record:,}: {label_bytes} label "
                f"byte{'s' * (label_bytes > 1)} and 3 x {SIDE} x {SIDE} pixels to an image. It was cut off, or is another "
                f"version. {FETCH_AGAIN}"
            )
            raise DataError(message)
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

    Raises:
        DataError: if a file does not hold what it should.
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
            or not all(type(label) is int for label in targets)
        ):
            message = (
                f"{path} is no batch of this set: expected 'data' of shape (n, {PIXELS}) in bytes and n whole numbers in "
                f"{label_key!r}. {FETCH_AGAIN}"
            )
            raise DataError(message)
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

    Raises:
        DataError: if the file is not whole, or holds something else.
    """
    arrays = _npz if path.name.removesuffix(".gz").endswith(".npz") else _mat()
    content = BytesIO(read_bytes(path))
    try:
        pixels, labels = arrays(content)
    # What SciPy and NumPy raise for broken files is not documented: these are what cutting and overwriting files gave.
    except (OSError, EOFError, LookupError, ValueError, TypeError, NotImplementedError, *BROKEN) as error:
        message = (
            f"{path} ({path.stat().st_size:,} bytes) is not a whole file of SVHN's cropped digits: "
            f"{type(error).__name__}: {error}. {FETCH_AGAIN}"
        )
        raise DataError(message) from error
    labels = labels.reshape(-1).astype(np.int64)
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), 3, SIDE, SIDE):
        message = (
            f"{path} holds {pixels.dtype} of shape {pixels.shape} (as images, channels, height, width) and {len(labels)} "
            f"labels; expected as many images of bytes, 3 x {SIDE} x {SIDE}. {FETCH_AGAIN}"
        )
        raise DataError(message)
    labels[labels == 10] = 0
    return Images(torch.from_numpy(np.ascontiguousarray(pixels)), torch.from_numpy(labels))


def _mat() -> Callable[[BytesIO], tuple[np.ndarray, np.ndarray]]:
    """A reader of .mat files.

    Raises:
        MissingExtraError: if SciPy is not installed.
    """
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
