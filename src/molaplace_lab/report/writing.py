"""Write the report of suites: the page, the figures and the tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import molaplace as mola
from molaplace.report.tables import as_latex, as_markdown
from molaplace.report.writing import Progress, draw_figures, no_progress, write_texts, writing_to
from molaplace_lab.report import words
from molaplace_lab.report.figures import suite_figures
from molaplace_lab.report.page import SuiteReport, suites_page
from molaplace_lab.report.reading import SuiteResults
from molaplace_lab.report.runs import LEADS
from molaplace_lab.report.tables import suite_tables


def write_report(suites: Sequence[SuiteResults], directory: Path, progress: Progress = no_progress) -> Path:
    """Write `index.html`, `tables.md`, `tables.tex`, and `figures/<suite>-<name>.svg` and `.png`; return the path of the page."""
    figures = {(suite.name, name): figure for suite in suites for name, figure in suite_figures(suite).items()}
    files = {key: "".join(letter if letter.isalnum() else "-" for letter in "-".join(key)) for key in figures}
    with writing_to(directory):
        drawn = draw_figures({files[key]: figure for key, figure in figures.items()}, directory, progress)
        reports = [
            SuiteReport(
                suite, suite_tables(suite), {key[1]: drawn[files[key]] for key in figures if key[0] == suite.name}
            )
            for suite in suites
        ]
        made_by = f"Made by `python -m molaplace_lab report {' '.join(suite.name for suite in suites)}` with molaplace {mola.__version__}."
        texts = {
            "tables.md": "\n".join([LEADS, "", *(line for report in reports for line in _markdown(report))]),
            "tables.tex": "\n".join(as_latex(table) for report in reports for table in report.tables.values()),
            "index.html": suites_page(reports, made_by),
        }
        return write_texts(texts, directory)


def _markdown(report: SuiteReport) -> list[str]:
    suite = report.suite
    lines = [f"## {suite.title}", ""]
    lines += [f"> **Compare with care:** {warning}\n" for warning in suite.warnings]
    lines += [f"* **{finding.title}.** {finding.text}" for finding in words.suite_findings(suite)]
    lines += ["", *[as_markdown(table) for table in report.tables.values()]]
    for figure in report.figures.values():
        lines += [f"![{figure.title}](figures/{figure.name}.svg)", ""]
    return [*lines, *[f"* {note}" for note in suite.notes], ""]
