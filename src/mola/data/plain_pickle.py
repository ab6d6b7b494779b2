"""Pickled data read as data: a reader of the format that can build numbers, texts, lists, dictionaries and arrays of bytes.

CIFAR's Python files are pickles. The standard unpickler runs whatever functions a file names; this reader runs none. It
knows the few instructions that such files consist of, and of the names in them only NumPy's own for rebuilding an array,
which it follows itself. Everything else is refused.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mola.data.files import FETCH_AGAIN, read_bytes
from mola.errors import DataError

__all__ = ["read_plain_pickle"]

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
