"""The `mola` command line: one file per command. Parse, call one function, print."""

from __future__ import annotations

from mola.errors import MissingExtraError

try:
    import rich  # noqa: F401  (tables and progress; asked for here, so that its lack is told before any work)
    import typer
except ImportError as error:
    raise MissingExtraError(feature="the mola command", package=error.name or "typer", extra="cli") from error

import mola
from mola.cli import bench, demo, report, train

__all__ = ["app"]

app = typer.Typer(
    name="mola",
    help="Honest confidence for trained PyTorch classifiers, after the fact.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # lines of a paragraph are joined and wrapped anew
)
app.command()(demo.demo)
app.command()(train.train)
app.command()(bench.bench)
app.command()(report.report)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mola {mola.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Honest confidence for trained PyTorch classifiers, after the fact."""
