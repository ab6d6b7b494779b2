"""Functions that write reports to disk: the page, the figures, the tables and the numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import molaplace as mola
from molaplace.errors import OptionError
from molaplace.evaluation.demo_result import DemoResult
from molaplace.evaluation.record import Comparison
from molaplace.report import words
from molaplace.report.figures import demo_figures, evaluation_figures, suite_figures
from molaplace.report.numbers import LEADS
from molaplace.report.page import SuiteReport, demo_page, evaluation_page, suites_page
from molaplace.report.reading import SuiteResults
from molaplace.report.single_run_tables import FEW, detail_table, evaluation_tables
from molaplace.report.style import Drawn, Planned, render
from molaplace.report.suite_tables import suite_tables
from molaplace.report.tables import as_latex, as_markdown

Progress = Callable[[str, float], None]
"""Callback that receives a description of the current step and the fraction of the work completed."""


def _quiet(doing: str, done: float) -> None: ...


def write_demo(result: DemoResult, directory: Path, progress: Progress = _quiet) -> Path:
    """Write `index.html`, `numbers.json`, and the figures as `figures/<name>.svg` and `.png`; return the path of the page."""
    with _named(directory):
        figures = _draw(demo_figures(result), directory, progress)
        texts = {"numbers.json": _as_json(result.numbers()), "index.html": demo_page(result, list(figures.values()))}
        return _write(texts, directory)


def write_evaluation(
    comparison: Comparison, numbers: dict[str, Any], directory: Path, progress: Progress = _quiet
) -> Path:
    """Write `index.html`, `numbers.json`, `tables.md`, and `figures/<name>.svg` and `.png`; return the path of the page."""
    tables = [*evaluation_tables(comparison), detail_table(comparison, FEW)]
    lines = [f"* **{finding.title}.** {finding.text}" for finding in words.evaluation_findings(comparison)]
    lines += ["", *[as_markdown(table) for table in tables if table is not None]]
    lines += [*[f"* {one}" for one in words.evaluation_remarks(comparison)], ""]
    with _named(directory):
        figures = _draw(evaluation_figures(comparison), directory, progress)
        page = evaluation_page(comparison, list(figures.values()))
        return _write({"numbers.json": _as_json(numbers), "tables.md": "\n".join(lines), "index.html": page}, directory)


def write_report(suites: Sequence[SuiteResults], directory: Path, progress: Progress = _quiet) -> Path:
    """Write `index.html`, `tables.md`, `tables.tex`, and `figures/<suite>-<name>.svg` and `.png`; return the path of the page."""
    named = {(suite.name, name): one for suite in suites for name, one in suite_figures(suite).items()}
    files = {key: "".join(letter if letter.isalnum() else "-" for letter in "-".join(key)) for key in named}
    with _named(directory):
        drawn = _draw({files[key]: one for key, one in named.items()}, directory, progress)
        reports = [
            SuiteReport(
                suite, suite_tables(suite), {key[1]: drawn[files[key]] for key in named if key[0] == suite.name}
            )
            for suite in suites
        ]
        made_by = (
            f"Made by `molaplace report {' '.join(suite.name for suite in suites)}` with molaplace {mola.__version__}."
        )
        texts = {
            "tables.md": "\n".join([LEADS, "", *(line for report in reports for line in _markdown(report))]),
            "tables.tex": "\n".join(as_latex(table) for report in reports for table in report.tables.values()),
            "index.html": suites_page(reports, made_by),
        }
        return _write(texts, directory)


def _markdown(report: SuiteReport) -> list[str]:
    suite = report.suite
    lines = [f"## {suite.title}", ""]
    lines += [f"> **Compare with care:** {warning}\n" for warning in suite.warnings]
    lines += [f"* **{finding.title}.** {finding.text}" for finding in words.suite_findings(suite)]
    lines += ["", *[as_markdown(table) for table in report.tables.values()]]
    for figure in report.figures.values():
        lines += [f"![{figure.title}](figures/{figure.name}.svg)", ""]
    return [*lines, *[f"* {note}" for note in suite.notes], ""]


def _draw(figures: Mapping[str, Planned], directory: Path, progress: Progress) -> dict[str, Drawn]:
    folder, drawn = directory / "figures", {}
    folder.mkdir(parents=True, exist_ok=True)
    for index, (name, planned) in enumerate(figures.items()):
        progress(f"drawing {name}", index / len(figures))
        drawn[name] = render(name, planned)
        drawn[name].write(folder)
    progress("done", 1.0)
    return drawn


def _write(texts: Mapping[str, str], directory: Path) -> Path:
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
    return directory / "index.html"


def _as_json(numbers: dict[str, Any]) -> str:
    return json.dumps(numbers, indent=2, ensure_ascii=False) + "\n"


@contextmanager
def _named(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OptionError(
            f"cannot write the report to {directory} ({error.strerror}): free some disk space or choose another output folder."
        ) from error
