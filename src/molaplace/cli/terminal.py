"""What every command shows: its progress, inputs that were left out, and the summary as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from molaplace.data.dataset import SkippedInputs
from molaplace.distributed import Team
from molaplace.progress import Progress, no_progress

LEFT_OUT = 3
"""Exit code of a command that succeeded but left some inputs out."""


@contextmanager
def showing_progress(*, quiet: bool) -> Iterator[Progress]:
    """Yield a function that shows the current step and the fraction of the work completed, from 0 to 1, on stderr.

    In a terminal, the progress is a bar, otherwise one line per step. For steps that differ only in their numbers, such as epochs, at
    most one line is printed per tenth of the work.
    """
    console = Console(stderr=True)
    if quiet:
        yield no_progress
    elif console.is_terminal:
        columns = (TextColumn("{task.description:<32}"), BarColumn(bar_width=32), TimeElapsedColumn())
        with ProgressBar(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=1.0)
            yield lambda doing, done: bar.update(task, description=doing, completed=done)
    else:
        printed = ""
        tenth = 0

        def show(doing: str, done: float) -> None:
            nonlocal printed, tenth
            repeated = re.sub(r"\d+", "", doing) == re.sub(r"\d+", "", printed)
            if doing != printed and not (repeated and int(10 * done) == tenth):
                console.print(f"{round(100 * done):3d} % {doing}", highlight=False)
                printed = doing
                tenth = int(10 * done)

        yield show


def finish(skipped: SkippedInputs, summary: dict[str, Any], team: Team, *, as_json: bool, quiet: bool) -> None:
    """Report inputs that were left out, or print the summary as JSON. Exit with code 3 if inputs were left out.

    With several processes, the exit code is 0 even then, because torchrun treats any other exit code as a failure.
    """
    if as_json:
        click.echo(json.dumps(summary, indent=2, ensure_ascii=False))
    elif not quiet:
        console = Console(stderr=True, highlight=False)
        for line in skipped.lines():
            console.print(escape(line), style="yellow" if not line.startswith(" ") else "dim", soft_wrap=True)
    if len(skipped) and team.size == 1:
        raise click.exceptions.Exit(LEFT_OUT)
