"""What the options of several commands share: their types, the run file that repeats a command, and consent to run code it names.

A command is a function. Its arguments, and the fields of its dataclass of options, are the flags, the help and the keys of the run file.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, ArgumentCollection, CycloptsError, Group, Parameter, Token
from cyclopts.config import Dict
from cyclopts.validators import Number

from molaplace import __version__
from molaplace.errors import OptionError
from molaplace.imported import require_trust

OPTIONS = Group("Options", sort_key=0)
MORE = Group("More options", sort_key=1)
DECISIONS = Group("Decisions, calibrated on the validation data", sort_key=2)
RUN = Group("Run", sort_key=9)
"""Headings in the help text."""

DEFAULT = Parameter(negative_iterable="", negative_none="", allow_repeating=True)
"""Lists and values that may be None have no negated flags, and the last of several values counts."""

UNSTORED = ("quiet", "as_json", "config", "trust", "overwrite", "bundle", "checkpoint")
"""Options that a run file neither stores nor sets. Consent to run code is among them, because a file may come from a stranger."""


# --- types of values -------------------------------------------------------------------------------------------------


def about(text: str, group: Group = OPTIONS, **settings: Any) -> Parameter:
    """Return a description of an option: its help, its heading, and other settings of `cyclopts.Parameter`."""
    return Parameter(help=text, group=group, **settings)


def _whole(kind: Any, tokens: Sequence[Token]) -> int:
    if not re.fullmatch(r"-?[0-9]+", tokens[0].value):
        raise ValueError(f"expected a whole number; got {tokens[0].value!r}")
    return int(tokens[0].value)


def whole_number(least: int | None = None, most: int | None = None) -> Parameter:
    """Return the type of whole numbers between two bounds."""
    return Parameter(converter=_whole, validator=Number(gte=least, lte=most), allow_leading_hyphen=True)


def _numbers(kind: Any, tokens: Sequence[Token]) -> tuple[float, ...]:
    text = _joined(tokens, ",")
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError as error:
        raise ValueError(f"expected numbers separated by commas, such as 0.5,0.5,0.5; got {text!r}") from error


def _size(kind: Any, tokens: Sequence[Token]) -> int | tuple[int, int]:
    text = _joined(tokens, "x")
    sides = re.fullmatch(r"([1-9][0-9]*)(?:x([1-9][0-9]*))?", text.lower())
    if sides is None:
        raise ValueError(f"expected a length in pixels, or a height and width such as 224x160; got {text!r}")
    return int(sides[1]) if sides[2] is None else (int(sides[1]), int(sides[2]))


def _names(kind: Any, tokens: Sequence[Token]) -> tuple[str, ...]:
    return tuple(name.strip() for name in _joined(tokens, ",").split(","))


def _class_names(kind: Any, tokens: Sequence[Token]) -> int | tuple[str, ...]:
    texts = [token.value for token in tokens]
    if len(texts) == 1:
        if texts[0].isascii() and texts[0].isdigit():
            return int(texts[0])
        try:
            texts = Path(texts[0]).read_text(encoding="utf-8").splitlines()
        except OSError:  # the file does not exist, or the string is too long for a file name
            texts = texts[0].split(",")
    names = tuple(name.strip() for name in texts if name.strip())
    if len(set(names)) != len(names) or len(names) < 2:
        raise ValueError(
            "expected a number, two or more different names separated by commas, or a file with one name on each line; got "
            f"{','.join(texts)[:60]!r}"
        )
    return names


def _joined(tokens: Sequence[Token], separator: str) -> str:
    # Return a list of a run file as it is written on the command line.
    return separator.join(token.value for token in tokens)


def _parsed_by(converter: Callable[..., Any]) -> Parameter:
    return Parameter(converter=converter, n_tokens=1, accepts_keys=False, allow_leading_hyphen=True)


Numbers = Annotated[Any, _parsed_by(_numbers)]
Size = Annotated[Any, _parsed_by(_size)]
Names = Annotated[Any, _parsed_by(_names)]
ClassNames = Annotated[Any, _parsed_by(_class_names)]


# --- options of several commands -------------------------------------------------------------------------------------


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of commands that run long computations."""

    quiet: Annotated[bool, about("Print nothing", RUN, negative="")] = False
    as_json: Annotated[bool, about("Print only a summary as JSON", RUN, name="--json", negative="")] = False
    config: Annotated[Path | None, about("TOML file with the options of an earlier run; flags override it", RUN)] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class FolderOptions:
    """Options of commands that write a folder."""

    overwrite: Annotated[
        bool, about("Write to a folder with other files: keep yours, replace what molaplace wrote", RUN, negative="")
    ] = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PosteriorOptions:
    """Options of commands that open a posterior's folder."""

    device: Annotated[str, about("Device to compute on, such as cuda", RUN)] = "cpu"
    network: Annotated[
        tuple[str, ...],
        about("Networks, named as in `molaplace fit`", MORE, show_default=lambda _: "those named in the folder"),
    ] = ()
    trust: Annotated[bool, about("Trust the folder: import and run the functions that it names", MORE, negative="")] = (
        False
    )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DecisionOptions:
    """Options of commands that make calibrated decisions."""

    false_alarm_rate: Annotated[
        float | None,
        about(
            "Fraction of in-distribution inputs that may be flagged as OOD", DECISIONS, show_default=lambda _: "0.05"
        ),
    ] = None
    error_rate: Annotated[float | None, about("Selective prediction: maximum fraction of wrong answers", DECISIONS)] = (
        None
    )
    certainty: Annotated[
        float | None, about("Confidence level for --error-rate", DECISIONS, show_default=lambda _: "0.95")
    ] = None
    coverage: Annotated[
        float | None,
        about(
            "Conformal sets (for regression, intervals) that contain the true value for this fraction of inputs",
            DECISIONS,
        ),
    ] = None

    def rates(self) -> dict[str, Any]:
        """Return the arguments for `molaplace.cli.decisions.make_decisions`."""
        return {field.name: getattr(self, field.name) for field in fields(DecisionOptions)}


# --- run files -------------------------------------------------------------------------------------------------------


def stored_options(command: str, options: Any, **arguments: Any) -> dict[str, Any]:
    """Return the document of a run file: the command, and its options and arguments that are not None, as plain values."""
    values = {field.name: getattr(options, field.name) for field in fields(options)} | arguments
    kept = {name: _plain(value) for name, value in values.items() if name not in UNSTORED and value is not None}
    return {"command": command, "molaplace": __version__, "options": kept}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value


def to_toml(document: Mapping[str, Any]) -> str:
    """Format a document from `stored_options` as TOML."""
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


def read_run_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Give the options that the command line omits the values of the file that `--config` names, once all text was checked."""
    given = {argument.name: argument for argument in arguments}
    for argument in arguments:
        for token in argument.tokens:
            _check_text(argument.name, token.value)
    if "--config" in given and given["--config"].tokens:
        path = Path(given["--config"].tokens[0].value)
        path = path / "job.toml" if path.is_dir() else path
        set_options(app, commands, arguments, read_toml(path), path)
        trust = bool(given["--trust"].tokens)
        for argument in arguments:
            from_file = [token.value for token in argument.tokens if token.source == str(path)]
            require_trust(from_file, path, argument.name, trust=trust)


def set_options(
    app: App, commands: tuple[str, ...], arguments: ArgumentCollection, document: Mapping[str, Any], path: Path
) -> None:
    """Give the arguments that have no value those of a run file's document."""
    options = document.get("options")
    if document.get("command") != commands[-1] or not isinstance(options, dict):
        raise OptionError(
            f'{path} is not a run file for `molaplace {commands[-1]}`: expected command = "{commands[-1]}" and an [options] table.'
        )
    refused = [name for name in UNSTORED if name in options]
    if refused:
        raise OptionError(f"{path} sets {refused[0]}, which only the command line can. Remove it from the file.")
    Dict(options, use_commands_as_keys=False, source=str(path))(app, commands, arguments)


def parsed_options(function: Callable[..., Any], document: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the arguments with which a run file's document calls the function of its command."""

    def read(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        set_options(app, (function.__name__,), arguments, document, path)

    app = App(config=read, default_parameter=DEFAULT)
    app.default(function)
    try:
        return dict(app.parse_args([], exit_on_error=False, print_error=False)[1].arguments)
    except CycloptsError as error:
        raise OptionError(f"{path}: {error}") from error


def _check_text(flag: str, text: str) -> None:
    # Text that is not UTF-8, such as the name of a file in Latin-1, can be neither stored nor printed.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = os.fsencode(text).decode(errors="backslashreplace")
        raise OptionError(
            f"{flag} must be valid UTF-8, so that it can be stored and printed; got {shown!r}. Rename the file or folder."
        ) from error
