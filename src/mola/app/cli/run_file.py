"""A command's options in a TOML file: written beside what the command made, and read in place of its flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import mola
from mola.app.cli.shared_options import RUN
from mola.app.jobs.job import read_toml, to_toml
from mola.errors import OptionError
from mola.saving.files import write_atomically

NEVER_KEPT = ("config", "trust", "as_json", "quiet", "threads")
"""Options that are about one call and not about its result; trust is said each time."""


def _read(context: typer.Context, path: Path | None) -> Path | None:
    # Take the file's values as the command's defaults: flags win.
    if path is None:
        return None
    document, name = read_toml(path), context.info_name
    options = document.get("options")
    if document.get("command") != name or not isinstance(options, dict):
        raise OptionError(
            f'{path} is not a run of `mola {name}`: expected command = "{name}" and a table [options], as such a run writes.'
        )
    known = {str(one.name) for one in context.command.params} - set(NEVER_KEPT)
    unknown = sorted(set(options) - known)
    if unknown:
        raise OptionError(
            f"{path} names {unknown[0]!r}, which is not an option of `mola {name}`; known: {', '.join(sorted(known))}."
        )
    context.default_map = {**(context.default_map or {}), **options}
    return path


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        callback=_read,
        is_eager=True,
        help="TOML file that an earlier run wrote beside its result; flags take precedence.",
        rich_help_panel=RUN,
    ),
]


def check_run(context: typer.Context, config: Path | None, *, trust: bool) -> None:
    """Refuse code that the file of a run names and the command itself does not: the file may come from a stranger.

    Args:
        context: of the command.
        config: the file; None if there is none.
        trust: whether the user trusts it.
    """
    from mola.app.jobs.code import check_values

    if config is not None:
        by_file = {}
        for one in context.command.params:
            source = context.get_parameter_source(str(one.name))
            if source is not None and source.name == "DEFAULT_MAP":
                label = one.opts[0] if one.param_type_name == "option" else str(one.metavar or one.name)
                by_file[label] = context.params.get(str(one.name))
        check_values(by_file, config, trust=trust)


def write_run(context: typer.Context, path: Path) -> Path:
    """Write the file that makes the run again, with paths as they were given.

    Args:
        context: of the command.
        path: file to write.

    Returns:
        The file.
    """
    options = {name: _plain(value) for name, value in context.params.items() if name not in NEVER_KEPT}
    document = {"command": context.info_name, "mola": mola.__version__, "options": options}
    write_atomically(path, to_toml(document).encode())
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value
