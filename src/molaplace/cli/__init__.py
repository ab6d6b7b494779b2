"""The `molaplace` command line, with one module per command. A command is imported when it is run.

A module `molaplace.cli.NAME` has a function `NAME` that takes a dataclass of options (`molaplace.cli.options`), does the work and prints
the result. The function's docstring is the command's help.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import Any, get_type_hints

from molaplace import __version__
from molaplace.errors import MolaError, OptionError, importing
from molaplace.options import did_you_mean

with importing("the molaplace command", "click and rich", "cli"):
    import click
    import rich  # noqa: F401  (a missing package is reported before any work)
    from click.core import ParameterSource

from molaplace.cli.options import label, parameters, read_options, read_toml
from molaplace.cli.processors import limit_threads, processors
from molaplace.imported import require_trust

__all__ = ["app"]

INTERRUPTED = 130
"""Exit code of a command that the user interrupted."""

ARGUMENTS = {"confidence": "--threshold", "val_loader": "--val", "train_loader": "--train"}
"""Arguments of the library whose flags have other names."""

LAST_PANEL = "Run"
"""Heading of the help's last section."""


COMMANDS = {
    "fit": "Fit a posterior to calibrate the confidence of trained networks.",
    "predict": "Write predictions with calibrated confidence, one row per input.",
    "evaluate": "Compare MAP, temperature scaling, the deep ensemble, LLLA and MoLA on your own data.",
    "watch": "Watch new inputs: raise an alarm if they change, and estimate the accuracy without labels.",
    "export": "Export the networks and the Bayesian head as one model that outputs probabilities and uncertainty.",
    "info": "Show the tuning, contents and history of a posterior without loading its networks.",
    "demo": "Compare a single network, a scaled deep ensemble and MoLA (with the paper's and the default rule) on handwritten digits.",
}
"""First line of each command's help, for which no command has to be imported."""

SHARED = ("fit", "predict", "evaluate")
"""Commands whose work several processes can share. Any other command would repeat all of its work in each process."""


class Command(click.Command):
    """A command whose help lists the common options and the arguments first, then the other options by topic."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for each topic."""
        panels: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            row = row or (parameter.human_readable_name, getattr(parameter, "text", ""))
            panels.setdefault(getattr(parameter, "panel", "") or "Options", []).append(row)
        for panel in sorted(panels, key=lambda panel: panel == LAST_PANEL):
            with formatter.section(panel):
                formatter.write_dl(panels[panel])


class Commands(click.Group):
    """The group of all commands, which imports a command when it is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command."""
        if cmd_name not in COMMANDS:
            if ctx.resilient_parsing:
                return None
            ctx.fail(f"No such command {cmd_name!r}.{did_you_mean(cmd_name, COMMANDS)}")
        function = getattr(importlib.import_module(f"molaplace.cli.{cmd_name}"), cmd_name)
        kind = get_type_hints(function)["options"]
        declared = parameters(kind)

        def callback(**values: Any) -> None:
            _run(function, kind, declared, values)

        for parameter in declared:
            if parameter.name == "config":
                parameter.is_eager = True
                parameter.callback = _reader(kind, cmd_name)
        return Command(cmd_name, params=declared, callback=callback, help=inspect.getdoc(function))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands and their summaries."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _reader(kind: type, command: str) -> Any:
    # Return a callback for --config that makes the values in a run file the defaults of the command.
    def read(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
        if path is not None:
            path = path / "job.toml" if path.is_dir() else path
            context.default_map = read_options(read_toml(path), kind, command, path)
        return path

    return read


def _run(function: Any, kind: type, declared: list[click.Parameter], values: dict[str, Any]) -> None:
    context = click.get_current_context()
    for parameter in declared:
        value = values[str(parameter.name)]
        if context.get_parameter_source(str(parameter.name)) == ParameterSource.DEFAULT_MAP:
            names = [str(part) for part in value] if isinstance(value, tuple) else [str(value)]
            require_trust(names, values["config"], label(parameter), trust=values.get("trust", False))
    limit_threads(processors())
    try:
        function(kind(**values))
    except MolaError as error:
        flags = {parameter.name: label(parameter) for parameter in declared} | ARGUMENTS
        if error.argument in flags:
            error.argument = flags[error.argument]
        raise
    except KeyboardInterrupt:
        sys.stderr.write("molaplace: stopped. Complete files are unchanged. Run the command again.\n")
        context.exit(INTERRUPTED)


@click.group(cls=Commands, name="molaplace", no_args_is_help=True, context_settings={"max_content_width": 110})
@click.version_option(__version__, message="molaplace %(version)s", help="Show the version and exit.")
@click.pass_context
def app(context: click.Context) -> None:
    """Post-hoc uncertainty for trained PyTorch networks: calibration, OOD detection and selective prediction.

    Start with `molaplace demo`, which also trains networks, then fit and evaluate a posterior:

        molaplace fit demo-results/networks --network mlp --train digits:train --val digits:val

        molaplace evaluate posterior --test digits:test

    With torchrun, several processes can share the work of fit, evaluate and predict:
    torchrun --nproc-per-node=4 -m molaplace fit ...

    Commands use one thread for each processor that they may use; OMP_NUM_THREADS sets another number.

    Exit codes: 0 success; 1 error, with one line on stderr; 2 usage error; 3 success, but some inputs were left out or, for
    watch, an alarm; 130 interrupted.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if size != "1" and context.invoked_subcommand not in SHARED:
        raise OptionError(
            f"molaplace {context.invoked_subcommand} runs in one process, but torchrun started {size} processes. Run it without "
            f"torchrun. Only {', '.join(SHARED)} can run in several processes."
        )
