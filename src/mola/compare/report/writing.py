"""Reports on disk: the page, the figures, the tables and the numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mola
from mola.compare.demo_result import DemoResult
from mola.compare.record import Comparison
from mola.compare.report import words
from mola.compare.report.confidence_figures import (
    MOST_SETS,
    draw_histograms,
    draw_reliability_panels,
    draw_score_histograms,
)
from mola.compare.report.curve_figures import (
    component_sweep,
    demo_distance,
    demo_rotation,
    draw_coverage,
    draw_predicted,
    draw_spread,
    evaluation_decisions,
    suite_ablation,
    suite_components,
    suite_shift,
)
from mola.compare.report.numbers import levels_of
from mola.compare.report.page import SuiteReport, demo_page, evaluation_page, suites_page
from mola.compare.report.picture_figures import demo_moons, draw_examples, example_sets, suite_types
from mola.compare.report.reading import SuiteResults
from mola.compare.report.single_run_tables import FEW, detail_table, evaluation_tables
from mola.compare.report.style import Drawn, Figure, render
from mola.compare.report.suite_tables import ablation_groups, compared_by_type, suite_tables
from mola.compare.report.tables import as_markdown, latex_document
from mola.errors import OptionError

Maker = Callable[[], Figure]
"""Draws a figure."""

Progress = Callable[[str, float], None]
"""Called with the current step and the share of the work that is done."""


def prepare_folder(directory: Path) -> Path:
    """Make the folder and its folder for figures, and return the latter."""
    pictures = directory / "figures"
    try:
        pictures.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"cannot make the folder {pictures} ({error.strerror}): choose another output folder."
        ) from error
    return pictures


def _write(
    directory: Path,
    makers: Mapping[str, Maker],
    texts: Callable[[dict[str, Drawn]], Mapping[str, str]],
    progress: Progress,
) -> Path:
    # `texts` makes the texts by file name from the figures.
    pictures, drawn = prepare_folder(directory), {}
    try:
        for index, (name, make) in enumerate(makers.items()):
            progress(f"drawing {name}", index / len(makers))
            drawn[name] = render(name, make)
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


def _quiet(doing: str, done: float) -> None: ...


# --- the demo --------------------------------------------------------------------------------------------------------


def demo_figures(result: DemoResult) -> dict[str, Maker]:
    """What draws each figure, by name, in the order of the page."""
    comparison = result.comparison
    shown = {0: "test digits", 15: "rotated by 15°", 30: "rotated by 30°"}
    panels = {title: (float(angle), list(comparison.methods)) for angle, title in shown.items()}
    return {
        "examples": partial(draw_examples, comparison),
        "histograms": partial(draw_histograms, comparison, comparison.of_role("outlier")[:3]),
        "reliability": partial(draw_reliability_panels, comparison, panels),
        "rotation": partial(demo_rotation, result),
        "distance": partial(demo_distance, result),
        "moons": partial(demo_moons, result),
    }


def write_demo(result: DemoResult, directory: Path, progress: Progress = _quiet) -> Path:
    """Write `index.html`, `numbers.json`, and each figure as `figures/<name>.svg` and `.png`; return the page."""

    def texts(figures: dict[str, Drawn]) -> dict[str, str]:
        return {"numbers.json": _as_json(result.numbers()), "index.html": demo_page(result, figures)}

    return _write(directory, demo_figures(result), texts, progress)


# --- mola evaluate ---------------------------------------------------------------------------------------------------


def evaluation_figures(comparison: Comparison) -> dict[str, Maker]:
    """What draws each figure, by name, in the order of the page."""
    outliers = comparison.of_role("outlier")[:MOST_SETS]
    scores: dict[str, Maker] = {
        f"scores-{index}": partial(draw_score_histograms, comparison, one.name) for index, one in enumerate(outliers)
    }
    alone = [one for one in comparison.methods if one.startswith(("MAP", "DE"))]
    beside = [one for one in comparison.methods if one in ("MAP", "LLLA", "MoLA")]
    if comparison.regression:
        return {
            "coverage": partial(draw_coverage, comparison, {"networks alone": alone, "with Laplace": beside}),
            "spread": partial(draw_spread, comparison),
            "predicted": partial(draw_predicted, comparison),
            **scores,
        }
    panels = {"networks, and temperatures": (0.0, alone), "with Laplace": (0.0, beside)}
    decided: dict[str, Maker] = {}
    if comparison.decisions is not None:
        decided["decisions"] = partial(evaluation_decisions, comparison)
    return {
        "reliability": partial(draw_reliability_panels, comparison, panels),
        "confidence": partial(draw_histograms, comparison, outliers),
        **decided,
        **scores,
    }


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
            "index.html": evaluation_page(comparison, figures),
        }

    return _write(directory, evaluation_figures(comparison), texts, progress)


# --- suites ----------------------------------------------------------------------------------------------------------


def suite_figures(suite: SuiteResults) -> dict[str, Maker]:
    """What draws each figure that the records can fill, by name, in the order of the page."""
    figures: dict[str, Maker] = {}
    levels, outliers = levels_of(suite), suite.of_role("outlier")
    if suite.runs and outliers:
        figures["histograms"] = partial(draw_histograms, suite, outliers[:MOST_SETS])
    if suite.runs and len(levels) > 1:
        figures["shift"] = partial(suite_shift, suite)
    if compared_by_type(suite) is not None:
        figures["types"] = partial(suite_types, suite)
    if suite.runs and levels:
        # The test set, the middle of the shift and its end.
        shown = sorted({levels[0], levels[len(levels) // 2], levels[-1]})
        titles = ["test", *(f"{suite.shift_title}, {level:g}" for level in shown[1:])]
        panels = {title: (level, list(suite.runs)) for title, level in zip(titles, shown, strict=True)}
        figures["reliability"] = partial(draw_reliability_panels, suite, panels)
    if example_sets(suite):
        figures["examples"] = partial(draw_examples, suite)
    for group in ablation_groups(suite):
        if group == "components" and component_sweep(suite):
            figures["components"] = partial(suite_components, suite)
        elif len(levels) > 1:
            figures[group] = partial(suite_ablation, suite, group)
    return figures


def write_report(suites: Sequence[SuiteResults], directory: Path, progress: Progress = _quiet) -> Path:
    """Write `index.html`, `tables.md`, `tables.tex`, and each figure as `figures/<suite>-<name>.svg` and `.png`.

    Args:
        suites: to show.
        directory: of the report; files of an earlier report are replaced.
        progress: called with the current step and the share of the work that is done.

    Returns:
        Path of the page.
    """
    makers = {_file_name(suite, name): make for suite in suites for name, make in suite_figures(suite).items()}

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

    return _write(directory, makers, texts, progress)


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
