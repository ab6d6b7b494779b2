"""A job: all the options of `mola fit` as one value, and as the TOML file that repeats it.

Paths in a file are relative to the folder that holds the file, so a folder can be moved together with its weights. What fitting
found is written below the options, under `result`, and is not read as an option. Trust in files that can run code is never
saved: a file may come from a stranger, so the user has to say it each time.

Python reads TOML but does not write it: `to_toml` writes tables of texts, numbers, booleans and lists of these.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from mola.errors import OptionError
from mola.lab.models import MODELS
from mola.likelihoods import Gaussian, Likelihood, as_likelihood
from mola.network import IGNORE_INDEX
from mola.options import one_of
from mola.saving.schema import check_depth

Progress = Callable[[str, float], None]
"""Told what is being done, and which share of the work is done."""

FORMAT = "mola-job"
VERSION = 1
NAME = "job.toml"
"""Of the file beside a posterior."""

OPTIONS: Mapping[str, Mapping[str, str]] = {
    "networks": {"network": "texts", "weights": "texts", "classes": "classes", "head": "text"},
    "data": {
        "train": "text",
        "val": "text",
        "outliers": "text",
        "directory": "text",
        "download": "flag",
        "strict": "flag",
    },
    "preparation": {
        "resize": "sides",
        "crop": "whole",
        "mode": "text",
        "normalise": "text",
        "mean": "numbers",
        "std": "numbers",
        "batch_size": "whole",
        "workers": "whole",
    },
    "method": {
        "likelihood": "text",
        "noise": "numbers",
        "location": "numbers",
        "scale": "numbers",
        "heteroscedastic": "flag",
        "structure": "text",
        "link": "text",
        "mixing": "text",
        "prior_precision": "number",
        "rule": "text",
        "threshold": "number",
        "price": "price",
        "distances": "flag",
        "positions": "text",
        "ignore_index": "integer",
    },
    "run": {"seed": "whole", "device": "text", "threads": "whole"},
}
"""Sections of the file, and what kind of value each option has."""

PATHS = ("network", "weights", "train", "val", "outliers", "directory")
"""Options that name files and folders, or something else where there is no such file."""


@dataclass(frozen=True)
class Job:
    """What `mola fit` is told; see its help for each."""

    network: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    classes: int | tuple[str, ...] | None = None
    head: str | None = None
    trust: bool = False
    train: str | None = None
    val: str | None = None
    outliers: str | None = None
    directory: str | None = None
    download: bool = False
    strict: bool = False
    resize: int | tuple[int, int] | None = None
    crop: int | None = None
    mode: str | None = None
    normalise: str | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    batch_size: int = 256
    workers: int = 2
    likelihood: str = "categorical"
    noise: tuple[float, ...] | None = None
    location: tuple[float, ...] | None = None
    scale: tuple[float, ...] | None = None
    heteroscedastic: bool = False
    structure: str = "kron"
    link: str = "probit"
    mixing: str = "uniform"
    prior_precision: float = 1.0
    rule: str = "calibrated"
    threshold: float | None = None
    price: float | Literal["loss"] | None = None
    distances: bool = True
    positions: str = "all"
    ignore_index: int = IGNORE_INDEX
    seed: int = 0
    device: str = "cpu"
    threads: int | None = None

    def with_options(self, given: Mapping[str, Any]) -> Job:
        """The same job with the options that are not None in place of its own."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    def meaning(self) -> Likelihood:
        """What the networks' outputs mean."""
        likelihood = as_likelihood(self.likelihood)
        given = {name: getattr(self, name) for name in ("noise", "location", "scale")}
        given = {name: value for name, value in given.items() if value is not None}
        given |= {"heteroscedastic": True} if self.heteroscedastic else {}
        if not given:
            return likelihood
        if not isinstance(likelihood, Gaussian):
            raise OptionError(
                f"--{next(iter(given))} is for --likelihood gaussian, got the likelihood {self.likelihood!r}."
            )
        return replace(likelihood, **given)

    def document(self, folder: Path) -> dict[str, Any]:
        """The options by section, with paths as seen from a folder.

        Args:
            folder: where the file will lie.

        Returns:
            Plain values.
        """

        def seen(name: str, value: Any) -> Any:
            if name in PATHS and isinstance(value, str) and not _is_no_path(name, value):
                return relative(value, folder)
            if isinstance(value, tuple):
                return [seen(name, one) for one in value]
            return value

        return {
            "format": FORMAT,
            "version": VERSION,
            **{
                section: {name: seen(name, getattr(self, name)) for name in names} for section, names in OPTIONS.items()
            },
        }


def _is_no_path(name: str, value: str) -> bool:
    return name == "network" and (value in MODELS or ":" in value)


def relative(value: str, folder: Path) -> str:
    """A path as seen from a folder; what is no path stays as it is."""
    path = Path(value).expanduser()
    if not path.exists():
        return value
    try:
        return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
    except ValueError:  # another drive
        return str(path.resolve())


def _located(value: str, folder: Path) -> str:
    # A path as seen from here; what is no path there stays as it is.
    path = folder / Path(value).expanduser()
    # Files that are gone must still be named by their full path, and never be looked for in the current folder.
    is_path = "/" in value or value.startswith(".") or (Path(value).suffix != "" and ":" not in value)
    return os.path.normpath(path) if is_path or path.exists() else value


def read_job(path: Path) -> tuple[Job, dict[str, Any]]:
    """A job from its file, checked.

    Args:
        path: a TOML file, or the folder that `mola fit` wrote it to.

    Returns:
        The job, its paths as seen from here, and the whole document. `OptionError` if the file is not a job, or holds something
        unknown or of the wrong kind.
    """
    path = path / NAME if path.is_dir() else path
    document = read_toml(path)
    return job_of(document, path), document


def job_of(document: Mapping[str, Any], path: Path) -> Job:
    """The job of a document, checked.

    Args:
        document: tables of options.
        path: of the file that they come from: paths are relative to its folder.

    Returns:
        The job, its paths as seen from here.
    """
    version = document.get("version", VERSION)
    if document.get("format", FORMAT) != FORMAT or version != VERSION:
        raise OptionError(
            f"{path} has the format {_shortened(document.get('format'))}, version {_shortened(version)}; "
            f"this mola reads {FORMAT!r}, version {VERSION}."
        )
    values: dict[str, Any] = {}
    for section, table in document.items():
        if section in ("format", "version", "result"):
            continue
        one_of(section, OPTIONS, f"{path}: a section")
        if not isinstance(table, dict):
            raise OptionError(f"{path}: {section} must be a table, [{section}]; got {_shortened(table)}.")
        for name, value in table.items():
            one_of(name, OPTIONS[section], f"{path}: an option in [{section}]")
            values[name] = _checked(value, OPTIONS[section][name], f"{path}: {name} in [{section}]")
    for name in PATHS:
        value = values.get(name)
        if isinstance(value, str):
            values[name] = _located(value, path.parent)
        elif value is not None:
            values[name] = tuple(one if _is_no_path(name, one) else _located(one, path.parent) for one in value)
    known = {field.name for field in fields(Job)}
    return Job(**{name: value for name, value in values.items() if name in known})


def _shortened(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 2**1023:  # Python refuses to write thousands of digits
        return "a huge whole number"
    return shown if len(shown := repr(value)) < 60 else type(value).__name__


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    # Whole numbers beyond have no float.
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1023)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "text": ("a text", lambda value: isinstance(value, str)),
    "texts": ("a list of texts", lambda value: isinstance(value, str) or _are_texts(value)),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "whole": ("a whole number", _is_whole),
    "integer": (
        "a whole number, perhaps below 0",
        lambda value: _is_whole(value) or (type(value) is int and value < 0),
    ),
    "number": ("a number", _is_number),
    "price": ("a number, or 'loss'", lambda value: value == "loss" or _is_number(value)),
    "numbers": ("a list of numbers", lambda value: isinstance(value, list) and all(map(_is_number, value))),
    "sides": (
        "a whole number, or [height, width]",
        lambda value: _is_whole(value) or (isinstance(value, list) and len(value) == 2 and all(map(_is_whole, value))),
    ),
    "classes": ("a whole number, or a list of names", lambda value: _is_whole(value) or _are_texts(value)),
}


def _checked(value: Any, kind: str, where: str) -> Any:
    expected, holds = KINDS[kind]
    if not holds(value):
        raise OptionError(f"{where} must be {expected}, got {_shortened(value)}.")
    if kind == "texts" and isinstance(value, str):
        return (value,)
    if kind == "number" or (kind == "price" and value != "loss"):
        return float(value)
    if kind == "numbers":
        return tuple(float(one) for one in value)
    return tuple(value) if isinstance(value, list) else value


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
    raise OptionError(f"cannot write a {type(value).__name__} as TOML: {value!r}.")


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file.

    Args:
        path: the file.

    Returns:
        Its tables.
    """
    if not path.is_file():
        raise OptionError(f"{path} does not exist: expected a TOML file such as the job.toml that `mola fit` writes.")
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        check_depth(document)
    except (OSError, ValueError) as error:
        raise OptionError(f"{path} is not TOML: {error}.") from error
    except RecursionError as error:
        raise OptionError(f"{path} is not TOML that can be read: it is nested too deeply.") from error
    return document
