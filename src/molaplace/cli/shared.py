"""Helpers shared by several commands, for example to check the output folder and to report inputs that were left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from molaplace.cli.data.dataset import SkippedInputs
from molaplace.cli.options import contents
from molaplace.distributed import Team
from molaplace.errors import OptionError
from molaplace.options import listed

LEFT_OUT = 3
"""Exit code of a command that succeeded but left some inputs out."""


def check_report_folder(output: Path) -> None:
    """Raise `OptionError` before any work begins if a report's folder is not writable or contains files but no report."""
    names = contents(output, "report")
    if set(names) - {"figures"} and "index.html" not in names:
        raise OptionError(f"{output} contains other files ({listed(names, 3)}) but no report. Choose another --output.")


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
