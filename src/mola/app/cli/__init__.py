"""The `mola` command line: one file per command. Parse, call one function, print."""

from __future__ import annotations

import os

from mola.errors import MissingExtraError, OptionError

try:
    import rich  # noqa: F401  (tables and progress; asked for here, so that its lack is told before any work)
    import typer
except ImportError as error:
    raise MissingExtraError(feature="the mola command", package=error.name or "typer", extra="cli") from error

import mola
from mola.app.cli import bench, demo, evaluate, explore, export, fit, info, predict, report, train

__all__ = ["app"]

app = typer.Typer(
    name="mola",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # lines of a paragraph are joined and wrapped anew
)
YOURS, PAPER = "Your own networks", "The paper's experiments"
app.command(rich_help_panel=YOURS)(fit.fit)
app.command(rich_help_panel=YOURS)(predict.predict)
app.command(rich_help_panel=YOURS)(evaluate.evaluate)
app.command(rich_help_panel=YOURS)(export.export)
app.command(rich_help_panel=YOURS)(explore.explore)
app.command(rich_help_panel=YOURS)(info.info)
app.command(rich_help_panel=PAPER)(demo.demo)
app.command(rich_help_panel=PAPER)(train.train)
app.command(rich_help_panel=PAPER)(bench.bench)
app.command(rich_help_panel=PAPER)(report.report)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mola {mola.__version__}")
        raise typer.Exit


SHARED = ("fit", "evaluate", "predict", "demo", "train", "bench")
"""Commands that several processes do together."""


def _refuse_team(command: str | None) -> None:
    # Let several processes start only what they can do together: otherwise each would do all of it, and write the same
    # files.
    size = os.environ.get("WORLD_SIZE", "1")
    if size != "1" and command not in SHARED:
        raise OptionError(
            f"mola {command} works in one process, and torchrun started {size}: start it without torchrun. "
            f"{', '.join(SHARED[:-1])} and {SHARED[-1]} can be shared."
        )


@app.callback()
def _options(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Honest confidence for trained PyTorch classifiers, after the fact.

    Start with `mola demo`, or with checkpoints of your own:

        mola fit checkpoints/*.safetensors --network lenet --train mnist:train --val mnist:val --data DIR

        mola evaluate posterior --test mnist:report --ood fashion-mnist:test --output report

    Several processes share the work of fit, evaluate, predict, demo, train and bench: torchrun --nproc-per-node=4 -m mola fit ...

    Exit codes: 0 success; 1 an error, explained in one line on stderr; 2 wrong usage; 3 success, but inputs were left out; 130
    stopped.
    """
    _refuse_team(context.invoked_subcommand)
