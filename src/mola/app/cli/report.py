"""`mola report`: tables, figures and a page from stored results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from mola.app.cli.progress import showing_progress
from mola.compare.report.tables import for_terminal


def report(
    suites: Annotated[
        list[str] | None, typer.Argument(help="Suites to show, by name; without any, all that have results.")
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder that `mola bench` wrote.")] = Path("results"),
    output: Annotated[Path, typer.Option(help="Folder for the page, the figures and the tables.")] = Path("report"),
    quiet: Annotated[bool, typer.Option("--quiet", help="Write files, show nothing.")] = False,
) -> None:
    """Show benchmark results: tables, figures and a page, beside the paper's numbers.

    Reads what `mola bench` stored and no model: index.html holds everything in one file; tables.md, tables.tex and figures lie
    beside it. Takes seconds.
    """
    # Here and not above: drawing needs matplotlib, which other commands do not.
    from mola.compare.report.reading import read_suites
    from mola.compare.report.suite_tables import TERMINAL, suite_tables
    from mola.compare.report.words import suite_findings
    from mola.compare.report.writing import write_report

    found = read_suites(results, suites or [])
    with showing_progress(quiet=quiet) as progress:
        page = write_report(found, output, progress)
    if quiet:
        return
    console = Console(highlight=False)
    for suite in found:
        tables = suite_tables(suite)
        for name in TERMINAL:
            if name in tables:
                console.print(for_terminal(tables[name]))
        for finding in suite_findings(suite):
            console.print(f"[bold]{escape(finding.title)}[/bold]: {escape(finding.text)}")
        for warning in suite.warnings:
            console.print(f"[bold]Compare with care[/bold]: {escape(warning)}", style="yellow")
        console.print()
    console.print(f"Wrote [bold]{escape(str(page))}[/bold], with tables and figures beside it.", soft_wrap=True)
