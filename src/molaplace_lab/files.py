"""Files that are replaced atomically, and JSON documents that are checked when they are read.

A schema is built from the types `str`, `int` and `float` (any finite number). `[kind]` stands for a list, `{"key": kind}` for an object
with at least these keys, `{str: kind}` for an object with any keys, and `Nullable(kind)` for a value that may be null.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from molaplace.errors import StorageError


@contextmanager
def partial_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`. On success, a file written there replaces `path` atomically; on error, it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        yield partial
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
    """Write tensors and a document of JSON values to one safetensors file."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with partial_file(path) as partial:
        save_file(contiguous, partial, {"document": json.dumps(document)})


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors and the document from a file written by `write_tensors`."""
    try:
        with safe_open(path, framework="pt") as file:
            document = json.loads(file.metadata()["document"])
            return {name: file.get_tensor(name) for name in file.keys()}, document  # noqa: SIM118  (not a mapping)
    except (OSError, SafetensorError, TypeError, KeyError, ValueError) as error:
        raise StorageError(
            f"{path} is damaged or incomplete ({error}). Delete it, and run the command again."
        ) from error


SEAL = "sha256"
"""Name of the entry that holds the checksum of all other entries."""


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document with a checksum of its content. One line per entry keeps files small and diffs readable."""
    entries = json.loads(json.dumps(document))  # as read back from a file, with tuples as lists and keys as strings
    sealed = {**entries, SEAL: _seal(entries)}
    lines = [f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in sealed.items()]
    with partial_file(path) as partial:
        partial.write_bytes(("{\n" + ",\n".join(lines) + "\n}\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """Read a document written by `write_json`; raise `StorageError` if it is damaged or was changed."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError(f"{path} is not readable JSON ({error}).") from error
    if not isinstance(document, dict):
        raise StorageError(f"{path} is not a JSON object.")
    if SEAL in document and document[SEAL] != _seal(document):  # documents written by hand have no seal
        raise StorageError(f"{path} was changed after it was written: its content does not match its checksum.")
    return document


def _seal(document: Mapping[str, Any]) -> str:
    entries = {name: value for name, value in document.items() if name != SEAL}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Nullable:
    """A schema for a value that may be null."""

    kind: Any


def check(value: Any, schema: Any, place: str) -> None:
    """Raise `StorageError` if a value does not match its schema; the message names the place in the document."""
    if isinstance(schema, Nullable):
        if value is not None:
            check(value, schema.kind, place)
    elif isinstance(schema, list):
        _require(isinstance(value, list), place, "a list", value)
        for index, entry in enumerate(value):
            check(entry, schema[0], f"{place}[{index}]")
    elif isinstance(schema, dict):
        _require(isinstance(value, dict), place, "an object", value)
        for key, kind in schema.items():
            _require(key is str or key in value, place, f"an entry {key!r}", value)
            for name in value if key is str else (key,):
                check(value[name], kind, f"{place}.{name}" if place else name)
    elif schema is str:
        _require(isinstance(value, str), place, "text", value)
    else:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        valid = number and abs(value) < 2**63 if schema is int else number and math.isfinite(value)
        whole = schema is not int or (number and value >= 0 and value == int(value))
        _require(valid and whole, place, "a number" if schema is float else "a whole number of at least 0", value)


def _require(valid: bool, place: str, expected: str, value: Any) -> None:
    if not valid:
        text = repr(value)
        raise StorageError(
            f"the document is damaged at {place or 'its top level'!r}: expected {expected}, got "
            f"{text if len(text) < 60 else type(value).__name__}."
        )
