"""Curves: against a shift, the number of components, the distance from the data and the coverage; regressions."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from mola.compare.demo_result import METHODS, DemoResult
from mola.compare.record import Comparison, Record, RegressionDetail
from mola.compare.report.estimate import Estimate
from mola.compare.report.numbers import BY_CONFIDENCE, Numbers, On, levels_of, shared_outliers
from mola.compare.report.reading import SuiteResults
from mola.compare.report.style import (
    COLOURS,
    INK,
    Axes,
    Figure,
    canvas,
    colours,
    quiet_axes,
    shared_legend,
    strokes,
)
from mola.compare.report.suite_tables import SHIFT_METRICS

Points = Sequence[tuple[float, Estimate | None]]
Stroke = Mapping[str, Any]

DOTTED = (0, (1, 1.6))
DASHED = (0, (5, 2.5))
BELOW = "#d55e00"
"""Intervals that miss."""


def _curves(
    panels: Mapping[str, Mapping[str, tuple[Points, Stroke]]],
    *,
    axis: str,
    ticks: Sequence[float],
    columns: int = 2,
    from_zero: Collection[str] = (),
) -> Figure:
    # Panels by title and label: points, and how to draw the line.
    columns = min(columns, len(panels))
    figure, axes = canvas(-(-len(panels) // columns), columns, 2.4)
    shown = ticks if len(ticks) <= 10 else ticks[::3]
    for panel, (title, curves) in zip(axes, panels.items(), strict=False):
        quiet_axes(panel)
        for label, (points, stroke) in curves.items():
            _curve(panel, points, label, stroke)
        panel.set_title(title, fontsize=9)
        panel.set_xlabel(axis)
        panel.set_xticks(shown, [f"{tick:g}" for tick in shown])
        if title in from_zero:
            panel.set_ylim(bottom=0)
    shared_legend(figure, axes, len(panels))
    return figure


def _curve(panel: Axes, points: Points, label: str, stroke: Stroke) -> None:
    known = [(x, y) for x, y in points if y is not None]
    if not known:
        return
    x, mean = (np.array(values) for values in ([place for place, _ in known], [value.mean for _, value in known]))
    panel.plot(x, mean, label=label, linewidth=1.5, marker="o", markersize=2.6, **stroke)
    errors = np.array([value.error or 0.0 for _, value in known])
    if errors.any():
        panel.fill_between(x, mean - errors, mean + errors, color=stroke["color"], alpha=0.18, linewidth=0)


# --- suites ----------------------------------------------------------------------------------------------------------


def draw_against_level(
    comparison: Comparison, methods: Mapping[str, Sequence[Record]], metrics: Sequence[str], axis: str
) -> Figure:
    """Draw metrics of some methods against the level of shift."""
    levels, drawn, numbers = levels_of(comparison), strokes(methods), Numbers(methods)
    panels: dict[str, dict[str, tuple[Points, Stroke]]] = {}
    for metric in metrics:
        found = {level: numbers(numbers.at_level(level, metric)) for level in levels}
        panels[SHIFT_METRICS[metric].name] = {
            method: ([(level, found[level][method]) for level in levels], drawn[method]) for method in methods
        }
    from_zero = [SHIFT_METRICS[metric].name for metric in ("brier", "ece")]
    return _curves(panels, axis=axis, ticks=levels, from_zero=from_zero)


def component_sweep(suite: SuiteResults) -> dict[str, dict[int, str]]:
    """Return methods by family ("DE", "MoLA") and number of components."""
    families: dict[str, dict[int, str]] = {}
    for method, records in suite.groups.get("components", {}).items():
        count = records[0].settings.get("components", len(records[0].networks))
        if isinstance(count, int) and not isinstance(count, bool):
            family = re.sub(r"\s*\bK\s*=\s*\d+", "", method).strip() or method
            families.setdefault(family, {})[count] = method
    return {family: dict(sorted(counts.items())) for family, counts in families.items()}


def suite_components(suite: SuiteResults) -> Figure:
    """Draw metrics of each family against the number of components: on test data, shifted data and outliers."""
    methods = suite.groups["components"]
    numbers, sweep = Numbers(methods), component_sweep(suite)
    quantities: dict[str, On] = {}
    for metric in ("log_likelihood", "ece", "confidence", "accuracy"):
        name = "ECE" if metric == "ece" else SHIFT_METRICS[metric].name
        quantities[f"{name}, test"] = On("test", metric)
        if len(levels_of(suite)) > 1:
            quantities[f"{name}, shifted"] = numbers.shifted(metric)
    if outliers := tuple(one.name for one in shared_outliers(suite, methods)):
        quantities["mean confidence, outliers"] = On(outliers, "confidence")
        quantities["AUROC, outliers"] = On(outliers, "auroc", BY_CONFIDENCE)
    drawn = strokes(sweep)
    panels: dict[str, dict[str, tuple[Points, Stroke]]] = {}
    for title, quantity in quantities.items():
        found = numbers(quantity)
        panels[title] = {
            family: ([(float(count), found[method]) for count, method in counts.items()], drawn[family])
            for family, counts in sweep.items()
        }
    return _curves(panels, axis="components", ticks=sorted({count for found in sweep.values() for count in found}))


# --- mola evaluate ---------------------------------------------------------------------------------------------------


def evaluation_decisions(comparison: Comparison) -> Figure:
    """Draw risk against coverage for every method, and the points chosen on validation data."""
    found = comparison.decisions
    assert found is not None  # drawn only if there are decisions
    figure, (panel,) = canvas(1, 1, 3.4)
    quiet_axes(panel)
    drawn = strokes(comparison.runs)
    for method, points in found.curves.items():
        coverage, risk = 100 * np.array(points).T
        panel.plot(coverage, risk, label=method, linewidth=1.5, **drawn[method])
    for one in found.answers:
        if one.answered is not None and one.realised is not None:
            panel.axhline(100 * one.promised, color=INK, linestyle=DOTTED, linewidth=0.8)
            panel.plot(100 * one.answered, 100 * one.realised, marker="x", markersize=8, color=INK, markeredgewidth=1.8)
    panel.set(xlabel="answered, %", ylabel="error rate of answers, %", xlim=(0, 101))
    panel.set_ylim(bottom=0)
    panel.legend(loc="upper left", fontsize=8.5)
    return figure


MOST_PANELS = 2
"""Outputs of a regression in a figure."""


def _details(comparison: Comparison) -> dict[str, RegressionDetail]:
    test = comparison.test.name
    found = {name: record.labelled[test].regression for name, record in comparison.methods.items()}
    return {name: one for name, one in found.items() if one is not None}


def _diagonal(panel: Axes, low: float, high: float) -> None:
    quiet_axes(panel)
    panel.plot([low, high], [low, high], color=INK, linestyle=DASHED, linewidth=0.9)


def draw_coverage(comparison: Comparison, panels: Mapping[str, Sequence[str]]) -> Figure:
    """Draw observed against nominal coverage of central intervals; a panel for each title, with its methods."""
    figure, axes = canvas(1, len(panels), 3.4)
    details, drawn = _details(comparison), strokes(comparison.methods)
    for panel, (title, methods) in zip(axes, panels.items(), strict=True):
        _diagonal(panel, 0, 1)
        for method in methods:
            level, held, error = np.array([[one or 0.0 for one in row] for row in details[method].coverage]).T
            panel.fill_between(level, held - error, held + error, color=drawn[method]["color"], alpha=0.15, linewidth=0)
            panel.plot(level, held, label=method, **drawn[method])
        panel.set(xlim=(0, 1), ylim=(0, 1), xlabel="probability of the interval", ylabel="targets in it", title=title)
    shared_legend(figure, axes, len(axes))
    return figure


def draw_spread(comparison: Comparison) -> Figure:
    """Draw root mean squared error against predicted standard deviation, for the first outputs."""
    details, drawn = _details(comparison), strokes(comparison.methods)
    outputs = list(next(iter(details.values())).spread)[:MOST_PANELS]
    figure, axes = canvas(1, len(outputs), 3.4)
    for panel, output in zip(axes, outputs, strict=True):
        values = np.array([row[1:] for one in details.values() for row in one.spread[output]])
        room = np.maximum(0.1 * np.ptp(values, axis=0), 0.05 * values.max(0))
        low, high = np.maximum(0, values.min(0) - room), values.max(0) + room
        _diagonal(panel, float(low.min()), float(high.max()))
        for method, one in details.items():
            points = np.array(one.spread[output])
            cross: dict[str, Any] = (
                {"marker": "x", "markersize": 8} if len(points) == 1 else {"marker": "o", "markersize": 3.5}
            )
            panel.plot(points[:, 1], points[:, 2], label=method, **cross, **drawn[method])
        panel.set(xlabel="predicted standard deviation", ylabel="root mean squared error")
        panel.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]))
        panel.set_title(f"output {output}" if len(comparison.classes) > 1 else "")
    shared_legend(figure, axes, len(axes))
    return figure


def draw_predicted(comparison: Comparison) -> Figure:
    """Draw predictions of the posterior with their 90 % intervals, against the targets."""
    own = comparison.own
    examples, colour = _details(comparison)[own].examples, colours(comparison.methods)[own]
    outputs = list(examples)[:MOST_PANELS]
    figure, axes = canvas(1, len(outputs), 3.6)
    for panel, output in zip(axes, outputs, strict=True):
        target, mean, lower, upper = np.array(examples[output], dtype=float).T
        _diagonal(panel, min(target.min(), mean.min()), max(target.max(), mean.max()))
        held = (target >= lower) & (target <= upper)
        panel.vlines(target[held], lower[held], upper[held], color=colour, alpha=0.3, linewidth=0.9)
        panel.vlines(target[~held], lower[~held], upper[~held], color=BELOW, alpha=0.6, linewidth=0.9)
        panel.plot(target, mean, ".", color=colour, markersize=3.5)
        panel.set(xlabel="true", ylabel="predicted")
        name = f"output {output}: " if len(comparison.classes) > 1 else ""
        panel.set_title(f"{name}{own}, {100 * held.mean():.0f} % of {len(held)} covered", fontsize=9)
    return figure


# --- the demo --------------------------------------------------------------------------------------------------------


def demo_distance(result: DemoResult) -> Figure:
    """Draw confidence against distance with limit and bound, and both against the prior precision."""
    kinds = list(result.distance.curves)
    figure, panels = canvas(-(-(len(kinds) + 1) // 2), 2, 3.0)
    for panel, kind in zip(panels, kinds, strict=False):
        _by_distance(panel, result, kind)
    _by_precision(panels[len(kinds)], result)
    shared_legend(figure, [*panels[: len(kinds)], *panels[len(kinds) + 1 :]], len(kinds))
    return figure


def _by_distance(panel: Axes, result: DemoResult, kind: str) -> None:
    distance, drawn = result.distance, colours(METHODS)
    for method in METHODS:
        panel.plot(distance.scales, distance.curves[kind][method], color=drawn[method], label=method)
    for method, limit in distance.limits[kind].items():
        panel.axhline(limit, color=drawn[method], linestyle=DOTTED, linewidth=1.4, label=f"limit, {method}")
    for offset, (method, bound) in enumerate(distance.bounds[kind].items()):
        # Two bounds that both round to 1 would hide each other: their dashes alternate.
        dashes = (5 * offset, (4, 6))
        panel.axhline(bound, color=drawn[method], linestyle=dashes, linewidth=1.6, label=f"bound, {method}")
    _log_confidence(panel, distance.scales, f"{kind}, scaled away", "scale δ of the input")


def _by_precision(panel: Axes, result: DemoResult) -> None:
    distance, colour = result.distance, COLOURS["MoLA"]
    panel.plot(distance.precisions, distance.bound, color=colour, linestyle=DASHED, label="bound")
    panel.plot(distance.precisions, distance.limit, color=colour, linestyle=DOTTED, label="limit, noise")
    panel.plot(distance.precisions, distance.test_confidence, color=INK, linewidth=1.2, label="test digits")
    chosen = result.comparison.methods["MoLA"].chosen["prior_precision"][0]
    panel.axvline(chosen, color=INK, linewidth=0.8, alpha=0.6)
    offset: dict[str, Any] = {"xytext": (-4, 0), "textcoords": "offset points", "ha": "right", "fontsize": 8}
    panel.annotate(f"tuned: λ = {chosen:.2g}", (chosen, 0.03), **offset)
    _log_confidence(panel, distance.precisions, "MoLA at other prior precisions", "prior precision λ")
    # Between the rise of the bound and that of the test digits, where no curve passes.
    panel.legend(fontsize=8, loc="center", bbox_to_anchor=(0.49, 0.72), labelspacing=0.4, handlelength=2.0)


def _log_confidence(panel: Axes, places: Any, title: str, axis: str) -> None:
    quiet_axes(panel)
    panel.set_xscale("log")
    panel.minorticks_off()
    panel.set(xlim=(places[0], places[-1]), ylim=(0, 1.04), xlabel=axis, ylabel="mean confidence")
    panel.set_title(title, fontsize=9)
