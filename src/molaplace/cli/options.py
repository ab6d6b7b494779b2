"""Options of commands. A field of a dataclass declares an option once: its flag, its help, its check and its key in the run file.

    @dataclass(frozen=True, kw_only=True)
    class Options:
        seed: int = option(0, "Random seed", minimum=0)

`parameters` turns the fields into parameters of click. A command writes its options to a TOML file, from which `--config` repeats
the run. Paths declared with `is_path=True` are stored relative to this file, so that it can be moved with the files it names.
"""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import click

from molaplace import __version__
from molaplace.errors import OptionError
from molaplace.imported import is_path
from molaplace.options import did_you_mean, one_of

RUN = "Run"
MORE = "More options"
DECISIONS = "Decisions, calibrated on the validation data"
"""Headings in the help text."""

NAMES = ("mlp",)
"""Names of networks that could be names of files."""


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    flags: tuple[str, ...] = (),
    argument: bool = False,
    panel: str = "",
    default_text: str = "",
    choices: Collection[str] = (),
    parse: Callable[[Any], Any] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    is_path: bool = False,
    stored: bool = True,
) -> Any:
    """Return a dataclass field that declares an option; without a default, the option is required.

    Args:
        default: default value.
        help: one or two short lines without a full stop.
        flags: flags for the option; by default, the name of the field, written with hyphens.
        argument: whether the value is given without a flag.
        panel: heading under which the help lists the option. Common options have no heading and come first.
        default_text: text that the help shows instead of the default value.
        choices: names that are allowed; all if empty.
        parse: function that converts the text from the command line, or a list from a run file. It returns converted values
            unchanged, and raises `click.BadParameter` for invalid values.
        minimum: least value.
        maximum: largest value.
        is_path: whether values may be paths.
        stored: whether the option is stored in the run file.
    """
    settings = {name: value for name, value in locals().items() if name != "default"}
    return field(default=default, metadata=settings)


def parameters(kind: type) -> list[click.Parameter]:
    """Return a parameter of click for each field of a dataclass of options."""
    hints = get_type_hints(kind)
    return [_parameter(declared, _plain_type(hints[declared.name])) for declared in fields(kind)]


def _plain_type(hint: Any) -> type:
    # Return str for "str | None" and tuple for "tuple[str, ...]".
    if get_origin(hint) is UnionType:
        hint = get_args(hint)[0]
    return get_origin(hint) or hint


def _parameter(declared: Field[Any], kind: type) -> click.Parameter:
    settings = declared.metadata
    required = declared.default is MISSING
    several = kind is tuple and settings["parse"] is None
    common: dict[str, Any] = {"type": _click_type(kind, settings), "metavar": "TEXT" if settings["parse"] else None}
    common |= {"required": True} if required else {"default": declared.default}
    if settings["argument"]:
        parameter: click.Parameter = click.Argument([declared.name], nargs=-1 if several else 1, **common)
        parameter.text = settings["help"]  # type: ignore[attr-defined]
    else:
        name = declared.name.replace("_", "-")
        negated = kind is bool and (declared.default is True or settings["stored"])  # overrides a run file
        flags = settings["flags"] or (f"--{name}/--no-{name}" if negated else f"--{name}",)
        common |= {"is_flag": True} if kind is bool else {"multiple": several}
        common |= {"help": settings["help"], "show_default": settings["default_text"] or True}
        parameter = click.Option([declared.name, *flags], **common)
    parameter.panel = settings["panel"]  # type: ignore[attr-defined]
    return parameter


class _Choice(click.Choice[Any]):
    # Add a hint to the message for an unknown name.
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            raise click.BadParameter(error.message + did_you_mean(value, list(self.choices)), ctx, param) from error


def _click_type(kind: type, settings: Mapping[str, Any]) -> Any:
    if settings["parse"] is not None:
        return settings["parse"]
    if settings["choices"]:
        return _Choice(list(settings["choices"]))
    if settings["minimum"] is not None:
        return click.IntRange(settings["minimum"], settings["maximum"])
    return click.STRING if kind is tuple else kind


def label(parameter: click.Parameter) -> str:
    """Return the name of a parameter on the command line, such as "--rule" or "WEIGHTS"."""
    return parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name


# --- options of several commands -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options for commands that run long computations, and write a summary and a run file."""

    quiet: bool = option(False, "Print nothing", panel=RUN, stored=False)
    as_json: bool = option(False, "Print only a summary as JSON", flags=("--json",), panel=RUN, stored=False)
    config: Path | None = option(
        None, "TOML file with the options of an earlier run; flags override it", panel=RUN, stored=False
    )

    def __post_init__(self) -> None:
        """Raise `OptionError` for text that cannot be written to the run file, such as the name of a file in Latin-1."""
        for declared in fields(self):
            value = getattr(self, declared.name)
            for text in value if isinstance(value, tuple) else (value,):
                try:
                    str(text).encode()
                except UnicodeEncodeError as error:
                    shown = os.fsencode(str(text)).decode(errors="backslashreplace")
                    raise OptionError(
                        f"must be valid UTF-8, so that it can be stored and printed; got {shown!r}. Rename the file or folder.",
                        argument=declared.name,
                    ) from error


@dataclass(frozen=True, kw_only=True)
class FolderOptions:
    """Options for commands that write a folder."""

    overwrite: bool = option(
        False,
        "Write to a folder with other files: keep yours, and replace what molaplace wrote",
        panel=RUN,
        stored=False,
    )


@dataclass(frozen=True, kw_only=True)
class PosteriorOptions:
    """Options for commands that open a posterior's folder."""

    device: str = option("cpu", "Device to compute on, such as cuda", panel=RUN)
    network: tuple[str, ...] = option(
        (), "Networks, named as in `molaplace fit`", panel=MORE, default_text="the networks named in the folder"
    )
    trust: bool = option(
        False, "Trust the folder: import and run the functions that it names", panel=MORE, stored=False
    )


@dataclass(frozen=True, kw_only=True)
class DecisionOptions:
    """Options for commands that make calibrated decisions."""

    false_alarm_rate: float | None = option(
        None, "Fraction of in-distribution inputs that may be flagged as OOD", default_text="0.05", panel=DECISIONS
    )
    error_rate: float | None = option(None, "Selective prediction: maximum fraction of wrong answers", panel=DECISIONS)
    certainty: float | None = option(None, "Confidence level for --error-rate", default_text="0.95", panel=DECISIONS)
    coverage: float | None = option(
        None,
        "Conformal sets (for regression, intervals) that contain the true value for this fraction of inputs",
        panel=DECISIONS,
    )

    def rates(self) -> dict[str, Any]:
        """Return the arguments for `molaplace.cli.decisions.make_decisions`."""
        names = ("false_alarm_rate", "error_rate", "certainty", "coverage")
        return {name: getattr(self, name) for name in names}


# --- run files ----------------------------------------------------------------------------------------------------------


def as_document(options: Any, command: str, folder: Path) -> dict[str, Any]:
    """Return the options as plain values, with paths relative to the folder of the run file. Options that are None are omitted."""
    values: dict[str, Any] = {}
    for declared in fields(options):
        value = getattr(options, declared.name)
        if declared.metadata["stored"] and value is not None:
            values[declared.name] = _plain(value, folder.resolve() if declared.metadata["is_path"] else None)
    return {"command": command, "molaplace": __version__, "options": values}


def _plain(value: Any, folder: Path | None) -> Any:
    if isinstance(value, tuple):
        return [_plain(part, folder) for part in value]
    if folder is not None and _may_be_path(str(value)):
        path = Path(value).expanduser().resolve()
        return Path(os.path.relpath(path, folder)).as_posix() if path.drive == folder.drive else str(path)
    return str(value) if isinstance(value, Path) else value


def _may_be_path(value: str) -> bool:
    # All names without a colon are paths, so that a missing file is never looked up in the current folder.
    return is_path(value) or (":" not in value and value not in NAMES)


def to_toml(document: Mapping[str, Any]) -> str:
    """Format a document from `as_document` as TOML."""
    lines = [f"{name} = {_toml(value)}" for name, value in document.items() if name != "options"]
    lines += ["", "[options]", *(f"{name} = {_toml(value)}" for name, value in document["options"].items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    # Strings, finite numbers, Booleans and lists have the same form in JSON and TOML, except that TOML strings must escape U+007F.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file; raise `OptionError` if the file does not exist or is invalid."""
    if not path.is_file():
        raise OptionError(f"{path} does not exist. Pass a TOML file, such as the job.toml that `molaplace fit` writes.")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(f"{path} is not a valid TOML file: {error}.") from error


def read_options(document: Mapping[str, Any], kind: type, command: str, path: Path) -> dict[str, Any]:
    """Return the checked options from a run file, with paths relative to the current folder."""
    options = document.get("options")
    if document.get("command") != command or not isinstance(options, dict):
        raise OptionError(
            f'{path} is not a run file for `molaplace {command}`: expected command = "{command}" and an [options] table.'
        )
    declared = {
        field.name: (parameter, field.metadata["is_path"])
        for field, parameter in zip(fields(kind), parameters(kind), strict=True)
        if field.metadata["stored"]
    }
    context = click.Context(click.Command(command))
    values = {}
    for key, value in options.items():
        name = one_of(key.replace("-", "_"), declared, f"{path}: an option")
        parameter, may_be_path = declared[name]
        text: Any = [str(part) for part in value] if isinstance(value, list) else str(value)
        if parameter.multiple or parameter.nargs == -1:
            text = text if isinstance(text, list) else [text]
        try:
            converted = parameter.type_cast_value(context, text)
        except click.UsageError as error:
            raise OptionError(f"{path}: {name}: {error.message}") from error
        values[name] = _relocated(converted, path.parent) if may_be_path else converted
    return values


def _relocated(value: Any, folder: Path) -> Any:
    if isinstance(value, tuple):
        return tuple(_relocated(part, folder) for part in value)
    return os.path.normpath(folder / Path(value).expanduser()) if _may_be_path(value) else value


# --- output paths -------------------------------------------------------------------------------------------------------


def check_writable(path: Path) -> None:
    """Raise `OptionError` before any work begins if a file or folder cannot be created."""
    parents = (path, *path.absolute().parents)
    above = next(parent for parent in parents if parent.is_dir() or (parent != path and parent.exists()))
    try:
        # os.access is not reliable: for root, it reports that /proc is writable.
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise OptionError(
            f"{path} cannot be written: {above} is not a writable folder. Choose another folder for the output."
        ) from error
