"""The `molaplace` command line, with one module per command. Each command parses its options, calls one function and prints the result."""

from __future__ import annotations

import os

from molaplace.errors import OptionError, importing

with importing("the molaplace command", "typer and rich", "cli"):
    import rich  # noqa: F401  (imported here so that a missing package is reported before any work)
    import typer

import molaplace as mola
from molaplace.cli import demo, evaluate, explore, export, fit, info, predict
from molaplace.cli.command import Commands, add_command

__all__ = ["app"]

app = typer.Typer(
    name="molaplace",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
YOURS, DEMO = "Your own networks", "A demonstration"
UNTOUCHED = "Nothing was written. Any existing output is unchanged."

add_command(
    app,
    fit.fit,
    panel=YOURS,
    stopped="No posterior was written. Any existing posterior is unchanged. "
    "If you passed --checkpoint, run the same command again to resume. Progress is saved every 100 batches.",
)
add_command(app, predict.predict, panel=YOURS, stopped=UNTOUCHED)
add_command(app, evaluate.evaluate, panel=YOURS, stopped="The report is missing or incomplete. Run the command again.")
add_command(app, export.export, panel=YOURS, stopped="Unfinished files were removed.")
add_command(app, explore.explore, panel=YOURS, stopped="The page is closed. Nothing was written.")
add_command(app, info.info, panel=YOURS, stopped="Nothing was written.")
add_command(app, demo.demo, panel=DEMO, stopped="The page is missing or incomplete. Run the command again.")

SHARED = ("fit", "evaluate", "predict")
"""Commands whose work can be split between several processes. Any other command would repeat all of its work in each process."""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"molaplace {mola.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Post-hoc uncertainty for trained PyTorch networks: calibration, OOD detection and selective prediction.

    Start with `molaplace demo`, or fit and evaluate a posterior:

        molaplace fit networks/*.safetensors --network models:build --train train.npz --val val.npz

        molaplace evaluate posterior --test test.npz

    With torchrun, several processes can share the work of fit, evaluate and predict:
    torchrun --nproc-per-node=4 -m molaplace fit ...

    Exit codes: 0 success; 1 error, with one line on stderr; 2 usage error; 3 success, but some inputs were left out; 130
    interrupted.
    """
    size, command = os.environ.get("WORLD_SIZE", "1"), context.invoked_subcommand
    if size != "1" and command not in SHARED:
        raise OptionError(
            f"molaplace {command} runs in one process, but torchrun started {size} processes. Run it without torchrun. Only "
            f"{', '.join(SHARED[:-1])} and {SHARED[-1]} can run in several processes."
        )
