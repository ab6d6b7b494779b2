"""`molaplace report`: write tables, figures and a web page from stored results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from molaplace.cli.option_groups import Quiet
from molaplace.cli.options import option
from molaplace.cli.progress import showing_progress
from molaplace.cli.shared import check_report_folder
from molaplace.report.tables import print_table


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Quiet):
    """Options for `molaplace report`."""

    suites: tuple[str, ...] = option(
        (),
        "Suites to include; for uci, `molaplace bench uci` prints the tables",
        argument=True,
        metavar="SUITES",
        shown="all suites with results",
    )
    results: Path = option(Path("results"), "Folder written by `molaplace bench`", metavar="DIR")
    output: Path = option(
        Path("report"), "Folder for the page, the figures and the tables", flags=("--output", "-o"), metavar="DIR"
    )


def report(options: ReportOptions) -> None:
    """Present benchmark results as tables, figures and a web page, alongside the paper's numbers.

    Reads only the records written by `molaplace bench`, not the networks. Writes a self-contained index.html, tables.md, tables.tex
    and the figures. Takes a few seconds.
    """
    # Imported here so that the other commands start without loading matplotlib.
    from molaplace_lab.report.reading import read_suites
    from molaplace_lab.report.tables import TERMINAL, suite_tables
    from molaplace_lab.report.words import suite_findings
    from molaplace_lab.report.writing import write_report

    check_report_folder(options.output)
    found = read_suites(options.results, options.suites)
    with showing_progress(quiet=options.quiet) as progress:
        page = write_report(found, options.output, progress)
    if options.quiet:
        return
    console = Console(highlight=False)
    for suite in found:
        tables = suite_tables(suite)
        for name in TERMINAL:
            if name in tables:
                print_table(console, tables[name])
        for finding in suite_findings(suite):
            console.print(f"[bold]{escape(finding.title)}[/bold]: {escape(finding.text)}")
        for warning in suite.warnings:
            console.print(f"[bold]Compare with care[/bold]: {escape(warning)}", style="yellow")
        console.print()
    console.print(
        f"Wrote [bold]{escape(str(page))}[/bold], with tables and figures in the same folder.", soft_wrap=True
    )
