"""Turn a dataclass of options into a command with flags, help and a run file."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from molaplace.cli.job import RUN
from molaplace.cli.options import Option, as_document, in_flags, options_of, parsed, read_options, read_toml, to_toml
from molaplace.errors import MolaError
from molaplace.saving.files import write_atomically

INTERRUPTED = 130
"""Exit code of a command that the user interrupted."""

METAVARS = {int: "N", float: "X", Path: "PATH", str: "TEXT", tuple: "TEXT"}


def add_command(app: typer.Typer, function: Callable[[Any], None], *, panel: str, stopped: str) -> None:
    """Register as a command a function that takes a dataclass of options (`mola.cli.options`).

    The function's docstring becomes the help text. `stopped` is the message shown after Ctrl-C; it says what an interrupted run
    leaves behind.
    """
    kind = get_type_hints(function)["options"]
    declared = options_of(kind)

    def called(context: typer.Context, **flags: Any) -> None:
        given = _given(declared, flags)
        kept = _from_file(function.__name__, kind, declared, given)
        for one in declared:
            if one.required and one.name not in given | kept:
                context.fail(f"Missing {'argument' if one.argument else 'option'} '{one.label}'.")
        options = kind(**kept | given)
        if getattr(options, "threads", None) is not None:
            import torch

            torch.set_num_threads(options.threads)
        try:
            function(options)
        except MolaError as error:
            error.message = in_flags(str(error), declared)
            error.argument = None
            error.place = None
            raise
        except KeyboardInterrupt:
            sys.stderr.write(f"molaplace: stopped. {stopped}\n")
            raise typer.Exit(INTERRUPTED) from None

    parameters = {"context": typer.Context} | {name: kind for one in declared for name, kind in _parameters(one)}
    called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if name == "context" else None,
                annotation=annotation,
            )
            for name, annotation in parameters.items()
        ]
    )
    called.__annotations__ = parameters
    called.__doc__, called.__name__ = function.__doc__, function.__name__
    app.command(rich_help_panel=panel, cls=Command)(called)


def _parameters(one: Option) -> list[tuple[str, Any]]:
    # Return the name and annotation of each typer parameter. Every default is None, so that omitted flags can be
    # distinguished from given ones.
    settings: dict[str, Any] = {
        "help": _help(one),
        "metavar": one.metavar or METAVARS.get(one.kind),
        "show_default": False,
        "rich_help_panel": one.panel or None,
        "min": one.minimum,
        "max": one.maximum,
    }
    kind: Any = list[str] if one.kind is tuple and one.parse is None else one.kind
    if one.parse is not None:
        kind = str
    elif one.kind not in (int, float):
        del settings["min"], settings["max"]
    if one.kind is bool:
        del settings["metavar"]
    found = []
    if one.flags:
        option = typer.Option(*one.flags, envvar=one.envvar, show_envvar=False, hidden=one.argument, **settings)
        found.append((one.name, Annotated[kind | None, option]))
    if one.argument:
        found.append((f"{one.name}_argument", Annotated[kind | None, typer.Argument(**settings)]))
    return found


def _help(one: Option) -> str:
    shown = one.shown
    if shown is None and one.default and not isinstance(one.default, bool) and not one.required:
        shown = str(one.default)
    return one.help + (f" [default: {shown}]" if shown else "") + (" [required]" if one.required else "")


def _given(declared: list[Option], flags: dict[str, Any]) -> dict[str, Any]:
    # Return the options given on the command line or in the environment, converted to the fields' types.
    given: dict[str, Any] = {}
    for one in declared:
        named: list[Any] = [flags.get(name) for name in (one.name, f"{one.name}_argument")]
        values = [value for value in named if value not in (None, [])]
        if one.kind is tuple and one.parse is None and values:
            given[one.name] = tuple(part for value in values for part in value)
        elif values:
            given[one.name] = values[0] if one.parse is None else parsed(one.parse, values[0], one.label)
    return given


def _from_file(command: str, kind: type, declared: list[Option], given: dict[str, Any]) -> dict[str, Any]:
    # Return the options in a run file. The file may come from a stranger, so code named only in the file runs only with the
    # user's consent.
    path: Path | None = given.get("config")
    if path is None:
        return {}
    from molaplace.cli.consent import require_trust

    path = path / "job.toml" if path.is_dir() else path
    kept = read_options(read_toml(path), kind, command, path)
    for option in declared:
        value = kept.get(option.name)
        if option.name not in given and isinstance(value, (str, tuple)):
            names = [value] if isinstance(value, str) else value
            require_trust(map(str, names), path, option.label, trust=given.get("trust", False))
    return kept


def write_run(options: Any, command: str, path: Path) -> Path:
    """Write a run file that can be passed to `--config` to repeat the run."""
    write_atomically(path, to_toml(as_document(options, command, path.parent)).encode())
    return path


class Command(TyperCommand):
    """A command with compact help that lists the common options first, then the others by topic."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line, with brackets around optional arguments only."""
        shown: list[Any] = self.get_params(ctx)
        needed = {f"[{one.metavar}]": one.metavar for one in shown if (one.help or "").endswith("[required]")}
        return [needed.get(piece, piece) for piece in super().collect_usage_pieces(ctx)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the usage line, the description and the options."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        self.format_options(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, with one section per topic. Arguments are listed with the common options."""
        panels: dict[str, list[tuple[str, str]]] = {"Options": []}
        shown: list[Any] = [one for one in self.get_params(ctx) if not getattr(one, "hidden", False)]
        for one in shown:
            rows, text = panels.setdefault(one.rich_help_panel or "Options", []), one.help or ""
            if one.param_type_name == "argument":
                rows.append((one.metavar, text))
            elif not text:  # an option without help shares the previous option's line
                before, text = rows.pop()
                flag, _, value = before.partition(" ")
                rows.append((f"{flag}, {one.opts[0]} {value}".rstrip(), text))
            else:
                flag = (
                    one.secondary_opts[0] if one.secondary_opts else one.opts[0]
                )  # show the flag that changes the default
                short = "".join(f"{name}, " for name in one.opts if not name.startswith("--"))
                rows.append((f"{short}{flag}{'' if one.is_flag else f' {one.metavar}'}", text))
        width = max(len(name) for rows in panels.values() for name, _ in rows)
        for title in sorted(panels, key=lambda title: title == RUN):  # the "Run" options come last
            rows = panels[title]
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in rows])


class Commands(TyperGroup):
    """The top-level command group; its help lists the commands by topic."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, with one section per topic."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            one: Any = self.get_command(ctx, name)
            panels.setdefault(one.rich_help_panel or "Commands", []).append((name, one.get_short_help_str(66)))
        for title, rows in panels.items():
            with formatter.section(title):
                formatter.write_dl(rows)
