"""Write the report of suites: the page, the figures and the tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import molaplace as mola
from molaplace.report.tables import as_markdown
from molaplace.report.writing import Progress, draw_figures, no_progress, write_texts, writing_to
from molaplace_lab.report import words
from molaplace_lab.report.figures import suite_figures
from molaplace_lab.report.page import SuiteReport, suites_page
from molaplace_lab.report.reading import SuiteResults
from molaplace_lab.report.runs import LEADS
from molaplace_lab.report.tables import suite_tables


def write_report(suites: Sequence[SuiteResults], directory: Path, progress: Progress = no_progress) -> Path:
    """Write `index.html`, `tables.md`, and `figures/<suite>-<name>.svg` and `.png`; return the path of the page."""
    planned = {suite.name: suite_figures(suite) for suite in suites}
    files = {(suite, name): _file_name(suite, name) for suite, figures in planned.items() for name in figures}
    made_by = f"Made by `python -m molaplace_lab report {' '.join(planned)}` with molaplace {mola.__version__}."
    with writing_to(directory):
        drawn = draw_figures({file: planned[suite][name] for (suite, name), file in files.items()}, directory, progress)
        reports = [
            SuiteReport(
                suite, suite_tables(suite), {name: drawn[files[suite.name, name]] for name in planned[suite.name]}
            )
            for suite in suites
        ]
        texts = {
            "tables.md": "\n".join([LEADS, "", *(line for report in reports for line in _markdown(report))]),
            "index.html": suites_page(reports, made_by),
        }
        return write_texts(texts, directory)


def _file_name(suite: str, name: str) -> str:
    return re.sub(r"[^\w]|_", "-", f"{suite}-{name}")


def _markdown(report: SuiteReport) -> list[str]:
    suite = report.suite
    lines = [f"## {suite.title}", ""]
    lines += [f"> **Compare with care:** {warning}\n" for warning in suite.warnings]
    lines += [f"* **{finding.title}.** {finding.text}" for finding in words.suite_findings(suite)]
    lines += ["", *[as_markdown(table) for table in report.tables.values()]]
    for figure in report.figures.values():
        lines += [f"![{figure.title}](figures/{figure.name}.svg)", ""]
    return [*lines, *[f"* {note}" for note in suite.notes], ""]
