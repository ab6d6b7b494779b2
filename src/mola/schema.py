"""JSON documents: parsed, sealed with a checksum of their content, and compared with a schema.

A schema is written as an example of types. `str`, `bool`, `int` (from 0 to 2**63 - 1) and `float` (any finite number) stand
for themselves, `[kind]` for a list, `{"key": kind}` for an object with at least these keys, `{str: kind}` for one with any
keys, `Optional(kind)` for null or a kind.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mola.errors import StorageError

SEAL = "sha256"
"""Name of the entry that holds the checksum of all others."""

DEEPEST = 50
"""How deep lists and objects may be nested: deeper ones end in Python's own limit, somewhere."""


def parse(content: bytes | str) -> Any:
    """What a text of JSON says.

    Args:
        content: of a file.

    Returns:
        Its values.
    """
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Refuse what is nested too deeply for Python to handle.

    Args:
        value: lists, dictionaries and what is in them.
    """
    inside = [value]
    for _ in range(DEEPEST):
        inside = [
            below
            for one in inside
            if isinstance(one, (dict, list))
            for below in (one.values() if isinstance(one, dict) else one)
        ]
        if not inside:
            return
    raise ValueError("it is nested too deeply")


def _seal(document: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in document.items() if name != SEAL}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document with a checksum of what it says, however that is laid out in the file."""
    plain = parse(json.dumps(document))  # as it will be read: tuples as lists, keys as texts
    return {**document, SEAL: _seal(plain)}


def check_seal(document: Mapping[str, Any], path: object) -> None:
    """Refuse a document that does not say what it said when it was written.

    Args:
        document: as it was read; those of older versions have no seal.
        path: of the file, for the message.
    """
    if SEAL in document and document[SEAL] != _seal(document):
        raise StorageError(
            f"{path} was changed after it was written: its content does not have the checksum that it names. Copy the file again, or "
            f"make it again; to change a setting, use the Python interface or `mola fit --config`."
        )


@dataclass(frozen=True)
class Optional:
    """Null, or a kind."""

    kind: Any


def check(value: Any, schema: Any, path: str) -> None:
    """Compare a value with its schema; `StorageError` names the place, what was expected and what is there.

    Args:
        value: what JSON gave.
        schema: what it should be.
        path: where it stands, for the message.
    """
    if isinstance(schema, Optional):
        if value is not None:
            check(value, schema.kind, path)
    elif isinstance(schema, list):
        _require(isinstance(value, list), path, "a list", value)
        for index, one in enumerate(value):
            check(one, schema[0], f"{path}[{index}]")
    elif isinstance(schema, dict):
        _require(isinstance(value, dict), path, "an object", value)
        for key, kind in schema.items():
            if key is str:
                for name, one in value.items():
                    check(one, kind, f"{path}.{name}")
            else:
                _require(key in value, path, f"an entry {key!r}", value)
                check(value[key], kind, f"{path}.{key}" if path else key)
    else:
        name, holds = KINDS[schema]
        _require(holds(value), path, name, value)


def _is_number(value: Any) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**1023  # whole numbers beyond have no float
    return isinstance(value, float) and math.isfinite(value)


KINDS: dict[type, tuple[str, Any]] = {
    str: ("text", lambda value: isinstance(value, str)),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: (
        "a whole number",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63,
    ),
    float: ("a finite number", _is_number),
}


def shortened(value: Any) -> str:
    """A value for a message: as Python writes it, or only its type if that is long."""
    if isinstance(value, int) and abs(value) >= 2**1023:  # Python refuses to write thousands of digits
        return "a huge whole number"
    return shown if len(shown := repr(value)) < 60 else type(value).__name__


def _require(holds: bool, path: str, expected: str, value: Any) -> None:
    if not holds:
        found = shortened(value)
        raise StorageError(f"the saved document is garbled at {path or 'its top'!r}: expected {expected}, got {found}.")
