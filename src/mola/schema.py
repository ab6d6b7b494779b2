"""Whether a JSON document has the form it should have: a schema is written as an example of types.

`str`, `bool`, `int` (not negative) and `float` (any finite number) stand for themselves, `[kind]` for a list, `{"key":
kind}` for an object with at least these keys, `{str: kind}` for one with any keys, `Optional(kind)` for null or a kind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mola.errors import StorageError

__all__ = ["Optional", "check"]


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
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


KINDS: dict[type, tuple[str, Any]] = {
    str: ("text", lambda value: isinstance(value, str)),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0),
    float: ("a finite number", _is_number),
}


def _require(holds: bool, path: str, expected: str, value: Any) -> None:
    if not holds:
        found = repr(value) if len(repr(value)) < 60 else type(value).__name__
        message = f"the saved document is garbled at {path or 'its top'!r}: expected {expected}, got {found}."
        raise StorageError(message)
