"""Parse JSON documents, and build values from them or validate them against schemas.

`from_json` builds a value of a type, which checks itself when it is made. Documents that are not read into values are checked against
a schema. A schema is built from the types `str`, `bool`, `int` (from 0 to 2**63 - 1) and `float` (any finite number). `[kind]` stands for a
list, `{"key": kind}` for an object with at least these keys, `{str: kind}` for an object with any keys, and `Optional(kind)` for a
value that may be null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from molaplace.errors import StorageError, printable


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


def from_json(kind: Any, value: Any, path: str = "") -> Any:
    """Build a value of a type from JSON.

    Args:
        kind: a dataclass, whose fields may have defaults, or any type that its fields may have: a number, text, `tuple[...]`,
            `dict[str, ...]`, a union or `Any`.
        value: what `json.loads` has returned. Entries of a dataclass without a field are ignored.
        path: where the value stands in its document, for messages.

    Returns:
        The value. Raises `StorageError` if the JSON has another form, or if the dataclass refuses the values.
    """
    origin = get_origin(kind)
    members = get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        return _member(members, value, path)
    if origin is dict:
        _require(isinstance(value, dict), path, "an object", value)
        return {name: from_json(members[1], inner, f"{path}.{name}") for name, inner in value.items()}
    if origin is tuple or hasattr(kind, "_fields"):
        _require(isinstance(value, list), path, "a list", value)
        kinds = tuple(get_type_hints(kind).values()) if origin is None else members
        kinds = (members[0],) * len(value) if members[1:] == (...,) else kinds
        _require(len(value) == len(kinds), path, f"{len(kinds)} entries", value)
        items = [
            from_json(inner, item, f"{path}[{index}]")
            for index, (inner, item) in enumerate(zip(kinds, value, strict=True))
        ]
        return tuple(items) if origin is tuple else kind(*items)
    if is_dataclass(kind):
        return _dataclass_from_json(kind, value, path)
    name, valid = KINDS[kind]
    _require(valid(value), path, name, value)
    return kind(value)


def _member(members: Sequence[Any], value: Any, path: str) -> Any:
    # Return the value as the first member of a union to which it belongs.
    if value is None and NoneType in members:
        return None
    members = [member for member in members if member is not NoneType]
    for member in members[:-1]:
        with suppress(StorageError):
            return from_json(member, value, path)
    return from_json(members[-1], value, path)


def _dataclass_from_json(kind: Any, value: Any, path: str) -> Any:
    _require(isinstance(value, dict), path, "an object", value)
    hints = get_type_hints(kind)
    values = {}
    for field in fields(kind):
        required = field.default is MISSING and field.default_factory is MISSING
        _require(field.name in value or not required, path, f"an entry {field.name!r}", value)
        if field.name in value:
            inner = f"{path}.{field.name}" if path else field.name
            values[field.name] = from_json(hints[field.name], value[field.name], inner)
    try:
        return kind(**values)
    except (TypeError, ValueError, OverflowError) as error:
        raise StorageError(f"the document is damaged at {path or 'its top level'!r}: {error}") from error


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


KINDS: dict[Any, tuple[str, Any]] = {
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
