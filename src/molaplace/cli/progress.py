"""Show progress on stderr: as a bar in a terminal, otherwise as one line per step.

For steps that differ only in their numbers, such as epochs, at most one line is printed per tenth of the work.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from molaplace.progress import Progress, no_progress


@contextmanager
def showing_progress(*, quiet: bool) -> Iterator[Progress]:
    """Yield a function that shows the current step and the fraction of the work completed, from 0 to 1."""
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
