"""Everything that a report leaves on disk: the page, the figures, the tables and the numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mola
from mola.compare.demo_result import DemoResult
from mola.compare.evaluation import Evaluation
from mola.compare.report import confidence_figures, curve_figures, picture_figures, words
from mola.compare.report.page import SuiteReport, demo_page, evaluation_page, suites_page
from mola.compare.report.reading import SuiteResults
from mola.compare.report.rendering import Drawn, Maker, drawing_key, kept_or_drawn, render, write_figure
from mola.compare.report.single_run_tables import FEW, class_table, evaluation_tables
from mola.compare.report.suite_tables import ablation_groups, suite_tables
from mola.compare.report.tables import as_markdown, latex_document
from mola.errors import OptionError

__all__ = [
    "demo_figures",
    "evaluation_figures",
    "prepare_folder",
    "suite_figures",
    "write_demo",
    "write_evaluation",
    "write_report",
]

Progress = Callable[[str, float], None]
"""Told what is being drawn, and which share is done."""


def prepare_folder(directory: Path) -> Path:
    """Make the folder, and the one for figures inside it.

    Args:
        directory: may exist already.

    Returns:
        The folder for figures.

    Raises:
        OptionError: if it cannot be made.
    """
    pictures = directory / "figures"
    try:
        pictures.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot make the folder {pictures} ({error.strerror}): choose another output folder."
        raise OptionError(message) from error
    return pictures


def _write(
    directory: Path,
    makers: Mapping[str, Maker],
    texts: Callable[[dict[str, Drawn]], Mapping[str, str]],
    progress: Progress,
    keys: Mapping[str, str] | None = None,
) -> Path:
    """Draw figures and write files; those of an earlier report are replaced.

    Args:
        directory: where to.
        makers: what draws each figure, by the name of its files.
        texts: from the figures drawn to texts by file name; `index.html` is the page.
        progress: told what is being drawn.
        keys: of figures that are kept while they do not change, see `mola.compare.report.rendering.drawing_key`.

    Returns:
        The page.

    Raises:
        OptionError: if a file cannot be written.
    """
    pictures, drawn = prepare_folder(directory), {}
    try:
        for index, (name, make) in enumerate(makers.items()):
            progress(f"drawing {name}", index / len(makers))
            if keys is None:
                drawn[name] = render(name, make)
                write_figure(drawn[name], pictures)
            else:
                drawn[name] = kept_or_drawn(name, make, keys[name], pictures)
        for name, text in texts(drawn).items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        message = (
            f"cannot write the report to {directory} ({error.strerror}): make room, or choose another output folder."
        )
        raise OptionError(message) from error
    progress("done", 1.0)
    return directory / "index.html"


def _as_json(numbers: dict[str, Any]) -> str:
    return json.dumps(numbers, indent=2, ensure_ascii=False) + "\n"


def _quiet(doing: str, done: float) -> None:
    """Tell nobody."""


# --- the demo -----------------------------------------------------------------------------------------------------------


def demo_figures(result: DemoResult) -> dict[str, Maker]:
    """What draws each figure, by name, in the order of the page."""
    return {
        "examples": partial(picture_figures.demo_examples, result),
        "histograms": partial(confidence_figures.demo_histograms, result),
        "reliability": partial(confidence_figures.demo_reliability, result),
        "rotation": partial(curve_figures.demo_rotation, result),
        "distance": partial(curve_figures.demo_distance, result),
        "moons": partial(picture_figures.demo_moons, result),
    }


def write_demo(result: DemoResult, directory: Path, progress: Progress = _quiet) -> Path:
    """Write `index.html`, `numbers.json`, and each figure as `figures/<name>.svg` and `.png`; see `_write`."""

    def texts(figures: dict[str, Drawn]) -> dict[str, str]:
        return {"numbers.json": _as_json(result.numbers()), "index.html": demo_page(result, figures)}

    return _write(directory, demo_figures(result), texts, progress)


# --- mola evaluate ------------------------------------------------------------------------------------------------------


def evaluation_figures(result: Evaluation) -> dict[str, Maker]:
    """What draws each figure, by name, in the order of the page."""
    drawn = result.outside[: confidence_figures.MOST_SETS]
    return {
        "reliability": partial(confidence_figures.evaluation_reliability, result),
        "confidence": partial(confidence_figures.evaluation_histograms, result),
        **{
            f"scores-{index}": partial(confidence_figures.evaluation_scores, result, name)
            for index, name in enumerate(drawn)
        },
    }


def write_evaluation(result: Evaluation, directory: Path, progress: Progress = _quiet) -> Path:
    """Write `index.html`, `numbers.json`, `tables.md`, and each figure as `figures/<name>.svg` and `.png`; see `_write`."""

    def texts(figures: dict[str, Drawn]) -> dict[str, str]:
        lines = [f"* **{finding.title}.** {finding.text}" for finding in words.evaluation_findings(result)]
        lines += ["", *[as_markdown(table) for table in [*evaluation_tables(result), class_table(result, FEW)]]]
        lines += [*[f"* {one}" for one in words.evaluation_remarks(result)], ""]
        return {
            "numbers.json": _as_json(result.plain()),
            "tables.md": "\n".join(lines),
            "index.html": evaluation_page(result, figures),
        }

    return _write(directory, evaluation_figures(result), texts, progress)


# --- suites -------------------------------------------------------------------------------------------------------------


def suite_figures(suite: SuiteResults) -> dict[str, Maker]:
    """What draws each figure, by name, in the order of the page: only those that the records can fill."""
    figures: dict[str, Maker] = {}
    levels = len(suite.levels())
    if suite.main and suite.of_role("outlier"):
        figures["histograms"] = partial(confidence_figures.suite_histograms, suite)
    if suite.main and levels > 1:
        figures["shift"] = partial(curve_figures.suite_shift, suite)
    if suite.main and levels:
        figures["reliability"] = partial(confidence_figures.suite_reliability, suite)
    if picture_figures.example_sets(suite):
        figures["examples"] = partial(picture_figures.suite_examples, suite)
    for group in ablation_groups(suite):
        if group == "components" and curve_figures.component_sweep(suite):
            figures["components"] = partial(curve_figures.suite_components, suite)
        elif levels > 1:
            figures[group] = partial(curve_figures.suite_ablation, suite, group)
    return figures


def write_report(suites: Sequence[SuiteResults], directory: Path, progress: Progress = _quiet) -> Path:
    """Write `index.html`, `tables.md`, `tables.tex`, and each figure as `figures/<suite>-<name>.svg` and `.png`.

    A figure whose numbers have not changed since it was drawn there is not drawn again.

    Args:
        suites: what was read.
        directory: where to; files of an earlier report are replaced.
        progress: told what is being drawn, and which share is done.

    Returns:
        The page.
    """
    makers: dict[str, Maker] = {}
    keys: dict[str, str] = {}
    for suite in suites:
        figures = {_file_name(suite, name): make for name, make in suite_figures(suite).items()}
        makers |= figures
        keys |= dict.fromkeys(figures, drawing_key(suite.fingerprint))

    def texts(drawn: dict[str, Drawn]) -> dict[str, str]:
        reports = [
            SuiteReport(
                suite, suite_tables(suite), {name: drawn[_file_name(suite, name)] for name in suite_figures(suite)}
            )
            for suite in suites
        ]
        names = " ".join(suite.name for suite in suites)
        made_by = f"Made by `mola report {names}` with mola {mola.__version__}, from stored results alone."
        sections = [(report.suite.title, list(report.tables.values())) for report in reports]
        return {
            "tables.md": "\n".join(line for report in reports for line in _markdown(report)),
            "tables.tex": latex_document(sections),
            "index.html": suites_page(reports, made_by),
        }

    return _write(directory, makers, texts, progress, keys)


def _file_name(suite: SuiteResults, name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in f"{suite.name}-{name}")


def _markdown(report: SuiteReport) -> list[str]:
    suite = report.suite
    lines = [f"## {suite.title}", ""]
    lines += [f"> **Compare with care:** {warning}\n" for warning in suite.warnings]
    lines += [f"* **{finding.title}.** {finding.text}" for finding in words.suite_findings(suite)]
    lines += ["", *[as_markdown(table) for table in report.tables.values()]]
    for name, figure in report.figures.items():
        lines += [f"![{words.SUITE_FIGURES.get(name, (name, ''))[0]}](figures/{figure.name}.svg)", ""]
    return [*lines, *[f"* {note}" for note in suite.notes], ""]
