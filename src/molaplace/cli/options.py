"""Options for commands. A dataclass field declares an option once: its flag, its help, its key in the run file and its check.

    @dataclass(frozen=True, kw_only=True)
    class Options:
        seed: int = option(0, "Random seed", minimum=0)

`mola.cli.command` turns the fields into flags. `as_document` and `read_options` convert options to and from the TOML file
that is used to repeat a run. Paths declared with `is_path=True` are stored relative to this file, so that a run file can be moved
together with the files it names.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import molaplace as mola
from molaplace.errors import OptionError
from molaplace.imported import is_path
from molaplace.options import one_of
from molaplace.saving.schema import check_depth

KINDS: dict[type, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("a whole number", lambda value: type(value) is int and abs(value) < 2**63),
    float: ("a number", lambda value: isinstance(value, float) or (type(value) is int and abs(value) < 2**63)),
    str: ("a string", lambda value: isinstance(value, str)),
    Path: ("a path", lambda value: isinstance(value, str)),
    tuple: ("a list of strings", lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value)),
}
"""For each field type, a description of the value expected in a run file, and a function that checks it."""


@dataclass(frozen=True)
class Option:
    """Declaration of an option."""

    name: str
    default: Any
    """Default value, or `MISSING` if the option is required."""
    kind: type
    help: str
    """Help text: one or two short lines without a full stop. An option without help shares the previous option's line."""
    flags: tuple[str, ...] = ()
    """Flags for the option; by default, the name of the field, written with hyphens. Arguments have no default flag.

    A flag that can be switched on and off is written "--check/--no-check".
    """
    panel: str = ""
    """Heading under which the help lists the option. Common options have no heading and come first."""
    metavar: str = ""
    """Placeholder for the value in the help."""
    shown: str | None = None
    """Text that the help shows as the default value."""
    parse: Callable[[Any], Any] | None = None
    """Function that converts a string from the command line or a value from a run file.

    If the function raises `ValueError`, the message describes the expected value.
    """
    minimum: float | None = None
    maximum: float | None = None
    envvar: str | None = None
    """Environment variable that can supply the value."""
    argument: bool = False
    """True if the value can be given without a flag. An argument may also have flags."""
    is_path: bool = False
    """True if values that look like paths are treated as paths."""
    names: Collection[str] = ()
    """Values that are never treated as paths."""
    kept: bool = True
    """True if the option is stored in the run file."""

    @property
    def label(self) -> str:
        """Name of the option on the command line."""
        return self.flags[0].split("/")[0] if self.flags else self.metavar

    @property
    def required(self) -> bool:
        """True if the option has no default."""
        return self.default is MISSING

    def check(self, value: Any, where: str) -> Any:
        """Convert a value from a run file to the field's type; error messages begin with `where`."""
        if self.parse is not None:
            return parsed(self.parse, value, where)
        expected, holds = KINDS[self.kind]
        if self.kind is tuple and isinstance(value, str):
            value = [value]
        low, high = (
            one if one is not None else sign * math.inf for one, sign in ((self.minimum, -1), (self.maximum, 1))
        )
        if not holds(value) or (self.kind in (int, float) and not low <= value <= high):
            least = "" if self.minimum is None else f" of at least {self.minimum}"
            raise OptionError(f"{where} must be {expected}{least}, got {_shortened(value)}.")
        return self.kind(value)


def option(default: Any = MISSING, help: str = "", **settings: Any) -> Any:
    """Return a dataclass field for an option; `settings` are fields of `Option`."""
    return field(default=default, metadata={"help": help, **settings})


def options_of(kind: type) -> list[Option]:
    """Return the options that a dataclass declares."""
    hints, found = get_type_hints(kind), []
    for one in fields(kind):
        declared = Option(one.name, one.default, _plain_type(hints[one.name]), **one.metadata)
        if not declared.flags and not declared.argument:
            flag = one.name.replace("_", "-")
            declared = replace(declared, flags=(f"--{flag}/--no-{flag}" if one.default is True else f"--{flag}",))
        found.append(declared)
    return found


def _plain_type(hint: Any) -> type:
    # Return str for "str | None" and tuple for "tuple[str, ...]".
    if get_origin(hint) is UnionType:
        hint = get_args(hint)[0]
    return get_origin(hint) or hint


def parsed(parse: Callable[[Any], Any], value: Any, where: str) -> Any:
    """Convert a value with its option's `parse` function; error messages describe the expected value."""
    try:
        return parse(value)
    except (TypeError, ValueError) as error:
        raise OptionError(f"{where} must be {error}; got {_shortened(value)}.") from error


def parse_names(value: str | list[str]) -> tuple[str, ...]:
    """Return the names in a list or a comma-separated string."""
    return tuple(name.strip() for name in (value.split(",") if isinstance(value, str) else value))


def _shortened(value: Any) -> str:
    return shown if len(shown := repr(value)) < 60 else f"{shown[:50]}..."


def _flag(found: re.Match[str]) -> str:
    return f"--{found[1].replace('_', '-')} {found[2]}"


FLAGS: tuple[tuple[str, Any], ...] = (
    (r"\b(rule|likelihood|structure|link|head|ignore_index)='?([\w.-]+\w|\w)'?", _flag),
    (r"\bconfidence must lie", "--threshold must lie"),
    (r", or a Likelihood object| For predictions without covariance, use mola\.ensemble\.", ""),
    (r"download=True \(--download\)", "--download"),
    (r"mola\.likelihoods\.Gaussian\(heteroscedastic=True\)", "--heteroscedastic"),
    (r"mola\.likelihoods\.Gaussian\(location=\.\.\., scale=\.\.\.\)", "--location and --scale"),
    (r"\b(?:the )?(rule|likelihood|link) '([\w-]+)'", _flag),
    (r"\bPass val_loader\b", "Specify them with --val"),
    (r"\bval_loader\b", "--val"),
    (r"\b(training|validation|outlier|prediction|test) loader\b", r"\1 data"),
)
"""Patterns in messages from the Python interface, with their replacements for the command line."""


def in_flags(message: str, declared: Iterable[Option] = ()) -> str:
    """Rewrite a message from the library for the command line; for example, `rule='nll'` becomes `--rule nll`.

    The library's messages refer to options by their Python argument names, which match the names of the declared options.
    """
    for one in declared:
        message = re.sub(rf"(?:^|(?<=[.,:;] )){one.name}(?= must\b|: )", one.label, message)
    for python, command_line in FLAGS:
        message = re.sub(python, command_line, message)
    return message


# --- the run file -------------------------------------------------------------------------------------------------------


def as_document(options: Any, command: str, folder: Path) -> dict[str, Any]:
    """Return the options as plain values, with paths relative to the folder of the run file."""

    def plain(value: Any, one: Option) -> Any:
        if isinstance(value, tuple):
            return [plain(part, one) for part in value]
        if isinstance(value, (str, Path)) and one.is_path and _names_path(str(value), one.names, Path()):
            path = Path(value).expanduser().resolve()
            return (
                Path(os.path.relpath(path, folder.resolve())).as_posix()
                if path.drive == folder.resolve().drive
                else str(path)
            )
        return str(value) if isinstance(value, Path) else value

    kept = {one.name: plain(getattr(options, one.name), one) for one in options_of(type(options)) if one.kept}
    return {"command": command, "molaplace": mola.__version__, "options": kept}


def read_options(document: Mapping[str, Any], kind: type, command: str, path: Path) -> dict[str, Any]:
    """Return the checked options from a run file, with paths relative to the current folder."""
    options = document.get("options")
    if document.get("command") != command or not isinstance(options, dict):
        raise OptionError(
            f'{path} is not a run file for `molaplace {command}`: expected command = "{command}" and an [options] table.'
        )
    known = {one.name: one for one in options_of(kind) if one.kept}
    values = {}
    for name, value in ((key.replace("-", "_"), value) for key, value in options.items()):
        one = known[one_of(name, known, f"{path}: an option")]
        found = one.check(value, f"{path}: {name}")
        if one.is_path and isinstance(found, tuple):
            found = tuple(_located(part, one.names, path.parent) for part in found)
        elif one.is_path:
            found = one.kind(_located(str(found), one.names, path.parent))
        values[name] = found
    return values


def _names_path(value: str, names: Collection[str], folder: Path) -> bool:
    # Missing files must keep their full path, so that they are never looked up in the current folder.
    if value in names or (":" in value and not is_path(value)):
        return False
    return is_path(value) or value.startswith((".", "~")) or Path(value).suffix != "" or (folder / value).exists()


def _located(value: str, names: Collection[str], folder: Path) -> str:
    return os.path.normpath(folder / Path(value).expanduser()) if _names_path(value, names, folder) else value


def check_writable(path: Path) -> None:
    """Raise `OptionError` before any work begins if a file or folder cannot be created."""
    above = next(one for one in (path, *path.absolute().parents) if one.is_dir() or (one != path and one.exists()))
    try:
        with tempfile.TemporaryFile(
            dir=above
        ):  # os.access is not reliable: for root, it reports that /proc is writable
            pass
    except OSError as error:
        raise OptionError(
            f"{path} cannot be written: {above} is not a writable folder. Choose another folder for the output."
        ) from error


def check_folder(path: Path) -> None:
    """Raise `OptionError` before any work begins if the path is a file or the folder cannot be created."""
    if path.is_file():
        raise OptionError(f"{path} is a file; expected a folder.")
    check_writable(path)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file; raise `OptionError` if the file does not exist or is invalid."""
    if not path.is_file():
        raise OptionError(f"{path} does not exist. Pass a TOML file, such as the job.toml that `molaplace fit` writes.")
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        check_depth(document)
    except (OSError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise OptionError(f"{path} is not a valid TOML file: {reason}.") from error
    return document


def to_toml(document: Mapping[str, Any]) -> str:
    """Format nested tables as TOML that `tomllib` reads back as the same values. Entries that are None are omitted."""
    return "\n".join(_table(document, "")).lstrip("\n") + "\n"


def _table(table: Mapping[str, Any], name: str) -> list[str]:
    lines = ["", f"[{name}]"] if name else []
    tables = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    lines += [
        f"{_key(key)} = {_value(value)}" for key, value in table.items() if value is not None and key not in tables
    ]
    for key, value in tables.items():
        lines += _table(value, f"{name}.{_key(key)}" if name else _key(key))
    return lines


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        parts = [_value(one) for one in value]
        return f"[{', '.join(parts)}]" if sum(map(len, parts)) < 90 else "[\n  " + ",\n  ".join(parts) + ",\n]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # Strings, numbers and Booleans have the same form in JSON and TOML, except that TOML strings must escape U+007F.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
