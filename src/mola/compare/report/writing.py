"""Reports on disk: the page, the figures, the tables and the numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mola
from mola.compare.demo_result import DemoResult
from mola.compare.record import Comparison
from mola.compare.report import words
from mola.compare.report.figures import demo_figures, evaluation_figures, suite_figures
from mola.compare.report.numbers import LEADS
from mola.compare.report.page import SuiteReport, demo_page, evaluation_page, suites_page
from mola.compare.report.reading import SuiteResults
from mola.compare.report.single_run_tables import FEW, detail_table, evaluation_tables
from mola.compare.report.style import Drawn, Planned, render
from mola.compare.report.suite_tables import suite_tables
from mola.compare.report.tables import as_markdown, latex_document
from mola.errors import OptionError

Progress = Callable[[str, float], None]
"""Called with the current step and the share of the work that is done."""


def _quiet(doing: str, done: float) -> None: ...


def _write(
    directory: Path,
    figures: Mapping[str, Planned],
    texts: Callable[[dict[str, Drawn]], Mapping[str, str]],
    progress: Progress,
) -> Path:
    # `texts` makes the texts by file name from the figures.
    pictures, drawn = directory / "figures", {}
    try:
        pictures.mkdir(parents=True, exist_ok=True)
        for index, (name, planned) in enumerate(figures.items()):
            progress(f"drawing {name}", index / len(figures))
            drawn[name] = render(name, planned)
            drawn[name].write(pictures)
        for name, text in texts(drawn).items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(
            f"cannot write the report to {directory} ({error.strerror}): make room, or choose another output folder."
        ) from error
    progress("done", 1.0)
    return directory / "index.html"


def _as_json(numbers: dict[str, Any]) -> str:
    return json.dumps(numbers, indent=2, ensure_ascii=False) + "\n"


def write_demo(result: DemoResult, directory: Path, progress: Progress = _quiet) -> Path:
    """Write `index.html`, `numbers.json`, and each figure as `figures/<name>.svg` and `.png`; return the page."""

    def texts(figures: dict[str, Drawn]) -> dict[str, str]:
        return {"numbers.json": _as_json(result.numbers()), "index.html": demo_page(result, list(figures.values()))}

    return _write(directory, demo_figures(result), texts, progress)


def write_evaluation(
    comparison: Comparison, numbers: dict[str, Any], directory: Path, progress: Progress = _quiet
) -> Path:
    """Write `index.html`, `numbers.json`, `tables.md`, and each figure as `figures/<name>.svg` and `.png`; return the page."""

    def texts(figures: dict[str, Drawn]) -> dict[str, str]:
        lines = [f"* **{finding.title}.** {finding.text}" for finding in words.evaluation_findings(comparison)]
        tables = [*evaluation_tables(comparison), detail_table(comparison, FEW)]
        lines += ["", *[as_markdown(table) for table in tables if table is not None]]
        lines += [*[f"* {one}" for one in words.evaluation_remarks(comparison)], ""]
        return {
            "numbers.json": _as_json(numbers),
            "tables.md": "\n".join(lines),
            "index.html": evaluation_page(comparison, list(figures.values())),
        }

    return _write(directory, evaluation_figures(comparison), texts, progress)


def write_report(suites: Sequence[SuiteResults], directory: Path, progress: Progress = _quiet) -> Path:
    """Write `index.html`, `tables.md`, `tables.tex`, and each figure as `figures/<suite>-<name>.svg` and `.png`.

    Args:
        suites: to show.
        directory: folder of the report; files of an earlier report are replaced.
        progress: called with the current step and the share of the work that is done.

    Returns:
        Path of the page.
    """
    planned = {suite.name: suite_figures(suite) for suite in suites}

    def texts(drawn: dict[str, Drawn]) -> dict[str, str]:
        reports = [
            SuiteReport(
                suite, suite_tables(suite), {one: drawn[_file_name(suite.name, one)] for one in planned[suite.name]}
            )
            for suite in suites
        ]
        made_by = f"Made by `mola report {' '.join(planned)}` with mola {mola.__version__}, from stored results alone."
        sections = [(report.suite.title, list(report.tables.values())) for report in reports]
        return {
            "tables.md": "\n".join([LEADS, "", *(line for report in reports for line in _markdown(report))]),
            "tables.tex": latex_document(sections, LEADS),
            "index.html": suites_page(reports, made_by),
        }

    figures = {_file_name(suite, name): one for suite, found in planned.items() for name, one in found.items()}
    return _write(directory, figures, texts, progress)


def _file_name(suite: str, name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in f"{suite}-{name}")


def _markdown(report: SuiteReport) -> list[str]:
    suite = report.suite
    lines = [f"## {suite.title}", ""]
    lines += [f"> **Compare with care:** {warning}\n" for warning in suite.warnings]
    lines += [f"* **{finding.title}.** {finding.text}" for finding in words.suite_findings(suite)]
    lines += ["", *[as_markdown(table) for table in report.tables.values()]]
    for figure in report.figures.values():
        lines += [f"![{figure.title}](figures/{figure.name}.svg)", ""]
    return [*lines, *[f"* {note}" for note in suite.notes], ""]
