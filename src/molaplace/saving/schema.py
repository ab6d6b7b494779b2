"""Parse JSON documents, protect their content with checksums, and validate them against schemas.

A schema is built from the types `str`, `bool`, `int` (from 0 to 2**63 - 1) and `float` (any finite number). `[kind]` stands for a
list, `{"key": kind}` for an object with at least these keys, `{str: kind}` for an object with any keys, and `Optional(kind)` for a
value that may be null.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from molaplace.errors import StorageError, printable

SEAL = "sha256"  # name of the entry that holds the checksum of all other entries


@dataclass(frozen=True)
class Optional:
    """A schema for a value that may be null."""

    kind: Any


def parse(content: bytes | str, name: object) -> Any:
    """Parse JSON text, in which control characters are replaced.

    Raises a `StorageError` that names the file if the text is invalid or too deeply nested.
    """
    try:
        return _printable(json.loads(content))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise StorageError(f"{name} is not readable JSON ({reason}). The file is truncated or damaged.") from error


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_printable(inner) for inner in value]
    if isinstance(value, dict):
        return {printable(name): _printable(inner) for name, inner in value.items()}
    return value


def _checksum(document: Mapping[str, Any]) -> str:
    content = {name: value for name, value in document.items() if name != SEAL}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with a checksum of its content; the checksum does not depend on the file's formatting."""
    plain = parse(
        json.dumps(document), "the document"
    )  # as read back from a file, with tuples as lists and keys as strings
    return {**plain, SEAL: _checksum(plain)}


def check_seal(document: Mapping[str, Any], name: object) -> None:
    """Raise `StorageError` unless the content of a document matches its checksum."""
    if document.get(SEAL) != _checksum(document):
        raise StorageError(
            f"{name} was changed after it was written: its content does not match its checksum. Copy the file again, or write it "
            f"again with other settings."
        )


def check(value: Any, schema: Any, path: str) -> None:
    """Raise `StorageError` if a value does not match its schema; the message states the path, the expected kind and the value."""
    if isinstance(schema, Optional):
        if value is not None:
            check(value, schema.kind, path)
    elif isinstance(schema, list):
        _require(isinstance(value, list), path, "a list", value)
        for index, inner in enumerate(value):
            check(inner, schema[0], f"{path}[{index}]")
    elif isinstance(schema, dict):
        _require(isinstance(value, dict), path, "an object", value)
        for key, kind in schema.items():
            _require(key is str or key in value, path, f"an entry {key!r}", value)
            for name in value if key is str else (key,):
                check(value[name], kind, f"{path}.{name}" if path else name)
    else:
        name, valid = KINDS[schema]
        _require(valid(value), path, name, value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


KINDS: dict[type, tuple[str, Any]] = {
    str: ("text", lambda value: isinstance(value, str)),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("a whole number from 0 to 2**63 - 1", lambda value: _is_int(value) and 0 <= value < 2**63),
    float: (
        "a finite number",
        lambda value: (abs(value) < 2**1023) if _is_int(value) else isinstance(value, float) and math.isfinite(value),
    ),
}


def _require(valid: bool, path: str, expected: str, value: Any) -> None:
    if not valid:
        summary = text if len(text := repr(value)) < 60 else type(value).__name__
        raise StorageError(
            f"the document is damaged at {path or 'its top level'!r}: expected {expected}, got {summary}."
        )
