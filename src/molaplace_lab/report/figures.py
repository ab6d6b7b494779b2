"""Names, titles and captions of the figures of a suite, and the functions that draw them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from molaplace.report.curves import draw_against_level, draw_panels, draw_reliability, estimates_panel
from molaplace.report.figures import RELIABILITY, SHARES
from molaplace.report.numbers import BY_CONFIDENCE, Quantity
from molaplace.report.pictures import MOST_SETS, draw_histograms
from molaplace.report.style import Figure, Planned, Strokes, strokes
from molaplace.report.tables import SHIFT_METRICS
from molaplace_lab.report.examples import draw_examples, example_sets
from molaplace_lab.report.reading import MAIN, SuiteResults
from molaplace_lab.report.runs import levels_of, shared_outliers
from molaplace_lab.report.tables import GROUP_TITLES, ablation_groups

BANDS = "Lines show means over runs; bands show one standard error."

ABLATED = ("log_likelihood", "ece", "confidence")
"""Metrics plotted against the level of shift in ablations."""


def suite_strokes(methods: Iterable[str]) -> Strokes:
    """Return the colour and line style of each method; in suites, MoLA is tuned by the paper's rule."""
    names = {method: "MoLA, paper's rule" if method == "MoLA" else method for method in methods}
    styles = strokes(names.values())
    return {method: styles[name] for method, name in names.items()}


def suite_figures(suite: SuiteResults) -> dict[str, Planned]:
    """Return the figures for a suite, keyed by name, in page order; figures whose records are missing are omitted."""
    figures: dict[str, Planned] = {}
    levels = levels_of(suite.sets)
    if suite.runs and suite.of_role("outlier"):
        histograms = partial(draw_suite_histograms, suite)
        figures["histograms"] = Planned("Confidence in outliers", f"{SHARES} All runs are pooled.", histograms)
    if suite.runs and len(levels) > 1:
        shift = partial(draw_shift, suite, MAIN, tuple(SHIFT_METRICS))
        figures["shift"] = Planned("Under shift", BANDS, shift)
    if suite.runs and levels:
        figures["reliability"] = Planned(
            *RELIABILITY, partial(draw_reliability, _pooled_bins(suite, levels), suite_strokes(suite.runs))
        )
    examples = {method: records[0].examples for method, records in suite.runs.items()}
    if sets := example_sets(suite.sets, suite.pictures, examples):
        caption = "The first images of each set, with each method's confidence in the first run."
        styles = suite_strokes(examples)
        figures["examples"] = Planned(
            "Example images", caption, partial(draw_examples, sets, suite.pictures, examples, styles)
        )
    for group in ablation_groups(suite):
        title = GROUP_TITLES.get(group, group)
        if group == "components":
            figures[group] = Planned(title, BANDS, partial(draw_components, suite))
        elif len(levels) > 1:
            figures[group] = Planned(title, BANDS, partial(draw_shift, suite, group, ABLATED))
    return figures


def draw_shift(suite: SuiteResults, group: str, metrics: Sequence[str]) -> Figure:
    """Plot the metrics of a group's methods against the level of shift."""
    numbers = suite.numbers(group)
    return draw_against_level(
        levels_of(suite.sets),
        metrics,
        suite.axis,
        suite_strokes(suite.groups[group]),
        lambda level, metric: numbers(numbers.at_level(level, metric)),
    )


def _pooled_bins(suite: SuiteResults, levels: Sequence[float]) -> dict[str, dict[str, Any]]:
    # The panels show the test set (level 0) and the middle and highest levels of shift.
    pooled: dict[str, dict[str, Any]] = {}
    for method, records in suite.runs.items():
        results = [result for record in records for result in record.labelled.values()]
        for level in sorted({levels[0], levels[len(levels) // 2], levels[-1]}):
            bins = [result.reliability for result in results if result.level == level and result.reliability]
            if bins:
                title = "test" if level == levels[0] else f"{suite.shift_title}, {level:g}"
                pooled.setdefault(method, {})[title] = np.sum(bins, axis=0)
    return pooled


def draw_suite_histograms(suite: SuiteResults) -> Figure:
    """Draw histograms of each method's confidence on the test set and on the first few outlier sets, with all runs pooled."""
    pooled: dict[str, dict[str, Any]] = {}
    for method, records in suite.runs.items():
        histograms = pooled.setdefault(method, {})
        for record in records:
            for name, on_set in (record.labelled | record.outliers).items():
                histograms[name] = np.array(on_set.histogram) + histograms.get(name, 0)
    return draw_histograms(
        suite.numbers(), suite.test, suite.of_role("outlier")[:MOST_SETS], pooled, suite_strokes(pooled)
    )


def draw_components(suite: SuiteResults) -> Figure:
    """Plot metrics on test data, shifted data and outliers against the number of components, with one line per family."""
    methods = suite.groups["components"]
    numbers = suite.numbers("components")
    # Each number of components has one method per family; "DE K=2" belongs to the family "DE".
    sweep: dict[float, dict[str, str]] = {}
    for method, records in methods.items():
        sweep.setdefault(int(records[0].settings.get("components", 1)), {})[method.split(" K=")[0]] = method
    sweep = dict(sorted(sweep.items()))
    families = list(dict.fromkeys(family for members in sweep.values() for family in members))
    quantities: dict[str, Quantity] = {}
    for metric in ("log_likelihood", "ece", "confidence", "accuracy"):
        name = "ECE" if metric == "ece" else SHIFT_METRICS[metric].name
        quantities |= {f"{name}, test": Quantity("test", metric), f"{name}, shifted": numbers.shifted(metric)}
    outliers = tuple(info.name for info in shared_outliers(suite.sets, methods))
    quantities["mean confidence, outliers"] = Quantity(outliers, "confidence")
    quantities["AUROC, outliers"] = Quantity(outliers, "auroc", BY_CONFIDENCE)
    panels = []
    for title, quantity in quantities.items():
        means = numbers(quantity)
        by_count = {
            count: {family: means[method] for family, method in members.items()} for count, members in sweep.items()
        }
        panels.append(estimates_panel(title, by_count, suite_strokes(families), {"xlabel": "components"}))
    return draw_panels([panel for panel in panels if panel.lines], 2.4)
