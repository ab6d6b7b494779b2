"""Plain values as TOML, and back: what a job's file needs and no more.

Python reads TOML but does not write it. Written here are tables of texts, numbers, truth values and lists of these; lists of
tables are written inline.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mola.errors import OptionError
from mola.schema import check_depth

__all__ = ["read_toml", "to_toml"]

BARE = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(document: Mapping[str, Any]) -> str:
    """A document of nested tables as text; entries that are None are left out.

    Args:
        document: texts, numbers, truth values, lists of these, and tables of all of them.

    Returns:
        TOML that `tomllib` reads back to the same values.
    """
    return "\n".join(_table(document, ())).lstrip("\n") + "\n"


def _table(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    plain = {key: value for key, value in table.items() if value is not None and not isinstance(value, Mapping)}
    lines = []
    if path and (plain or not table):
        lines += ["", "[" + ".".join(_key(part) for part in path) + "]"]
    lines += [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += _table(value, (*path, key))
    return lines


def _key(key: str) -> str:
    return key if BARE.fullmatch(key) else _text(key)


def _text(text: str) -> str:
    # JSON's escapes are TOML's, but for the one character that JSON leaves as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else ("nan" if math.isnan(value) else f"{'-' * (value < 0)}inf")
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items() if one is not None)
        return f"{{ {inside} }}"
    if isinstance(value, Sequence):
        short = "[" + ", ".join(_value(one) for one in value) + "]"
        if len(short) <= 100:
            return short
        return "[\n" + "".join(f"  {_value(one)},\n" for one in value) + "]"
    message = f"cannot write a {type(value).__name__} as TOML: {value!r}."
    raise OptionError(message)


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file.

    Args:
        path: the file.

    Returns:
        Its tables.

    Raises:
        OptionError: if there is none, or it is not TOML.
    """
    if not path.is_file():
        message = f"{path} does not exist: expected a TOML file such as the job.toml that `mola fit` writes."
        raise OptionError(message)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        check_depth(document)
    except (OSError, ValueError) as error:
        message = f"{path} is not TOML: {error}."
        raise OptionError(message) from error
    except RecursionError as error:
        message = f"{path} is not TOML that can be read: it is nested too deeply."
        raise OptionError(message) from error
    return document
