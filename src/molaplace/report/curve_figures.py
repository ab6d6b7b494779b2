"""Figures that consist of panels with lines and bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from molaplace.evaluation.demo_result import METHODS, PAPER, DemoResult
from molaplace.evaluation.record import Comparison, Record, RegressionDetail
from molaplace.reliability import Curve, draw_reliability
from molaplace.report.estimate import Estimate
from molaplace.report.numbers import Numbers, levels_of
from molaplace.report.style import COLOURS, INK, Figure, canvas, colours, quiet_axes, shared_legend, strokes
from molaplace.report.tables import SHIFT_METRICS

DOTTED, DASHED = (0, (1, 1.6)), (0, (5, 2.5))
GUIDE: dict[str, Any] = {"color": INK, "linestyle": DASHED, "linewidth": 0.9}
"""Line style of the diagonal on which calibrated predictions lie."""


@dataclass(frozen=True)
class Line:
    """A line through points, with its label and style."""

    x: ArrayLike
    y: ArrayLike
    label: str
    style: Mapping[str, Any]
    error: ArrayLike | None = None
    """Half the height of the band at each point of the line."""


@dataclass(frozen=True)
class Panel:
    """A panel of a figure, showing several lines."""

    title: str
    lines: Sequence[Line]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for `Axes.set`."""


def draw_panels(panels: Sequence[Panel], height: float = 3.4) -> Figure:
    """Draw panels in rows of two, with one legend for all panels."""
    columns = min(2, len(panels))
    figure, axes = canvas(-(-len(panels) // columns), columns, height)
    for axis, panel in zip(axes, panels, strict=False):
        quiet_axes(axis)
        for line in panel.lines:
            x, y = np.asarray(line.x, dtype=float), np.asarray(line.y, dtype=float)
            axis.plot(x, y, label=line.label, **{"linewidth": 1.5, **line.style})
            if line.error is not None and np.any(line.error):
                band = np.asarray(line.error)
                axis.fill_between(x, y - band, y + band, color=line.style["color"], alpha=0.18, linewidth=0)
        axis.set(**panel.settings)
        axis.set_title(panel.title, fontsize=9)
    shared_legend(figure, axes, len(panels))
    return figure


Estimates = Mapping[float, Mapping[str, Estimate | None]]
"""Estimates, keyed by position on the x-axis and then by label."""


def estimates_panel(title: str, found: Estimates, labels: Sequence[str], settings: Mapping[str, Any]) -> Panel:
    """Return a panel whose lines show means over runs; bands extend one standard error to each side."""
    lines = []
    for label, stroke in strokes(labels).items():
        known = {x: one for x, values in found.items() if (one := values.get(label)) is not None}
        means, errors = [one.mean for one in known.values()], [one.error or 0.0 for one in known.values()]
        lines.append(Line(list(known), means, label, {"marker": "o", "markersize": 2.6, **stroke}, errors))
    return Panel(title, [line for line in lines if line.x], {"xticks": list(found), **settings})


def draw_against_level(
    comparison: Comparison, methods: Mapping[str, Sequence[Record]], metrics: Sequence[str], axis: str
) -> Figure:
    """Plot the metrics of the given methods against the level of shift."""
    levels, numbers = levels_of(comparison), Numbers(methods)
    ticks = levels if len(levels) <= 10 else levels[::3]
    panels = []
    for metric in metrics:
        found = {level: numbers(numbers.at_level(level, metric)) for level in levels}
        settings = {"xlabel": axis, "xticks": ticks} | ({"ylim": (0, None)} if metric in ("brier", "ece") else {})
        panels.append(estimates_panel(SHIFT_METRICS[metric].name, found, list(methods), settings))
    return draw_panels(panels, 2.4)


# --- calibration and decisions ---------------------------------------------------------------------------------------


def draw_reliability_panels(comparison: Comparison, panels: Mapping[str, tuple[float, Sequence[str]]]) -> Figure:
    """Plot accuracy against confidence, with all runs pooled; `panels` maps each title to a level of shift and the methods to plot."""
    figure, axes = canvas(-(-len(panels) // 2), 2, 3.4)
    drawn = strokes(comparison.runs)
    for axis, (title, (level, methods)) in zip(axes, panels.items(), strict=False):
        curves: dict[str, Curve] = {}
        for method in methods:
            found = [one for record in comparison.runs[method] for one in record.labelled.values()]
            bins = [one.reliability for one in found if one.level == level and one.reliability]
            curves |= {method: (np.sum(bins, axis=0), drawn[method])} if bins else {}
        quiet_axes(axis)
        draw_reliability(axis, curves, INK)
        axis.set_title(title, fontsize=9)
    shared_legend(figure, axes, len(panels))
    return figure


def evaluation_decisions(comparison: Comparison) -> Figure:
    """Plot risk against coverage for every method, and mark the thresholds chosen on the validation data."""
    found, drawn = comparison.decisions, strokes(comparison.runs)
    assert found is not None  # this figure is drawn only if there are decisions
    lines = []
    for method, points in found.curves.items():
        coverage, risk = 100 * np.array(points).T
        lines.append(Line(coverage, risk, method, drawn[method]))
    for one in found.answers:
        if one.answered is not None and one.realised is not None:
            cross = {"marker": "x", "markersize": 8, "markeredgewidth": 1.8, "color": INK}
            lines.append(Line([0, 101], [100 * one.promised] * 2, "", {**GUIDE, "linestyle": DOTTED}))
            lines.append(Line([100 * one.answered], [100 * one.realised], "", cross))
    settings = {
        "xlabel": "answered inputs, %",
        "ylabel": "error rate of the answers, %",
        "xlim": (0, 101),
        "ylim": (0, None),
    }
    return draw_panels([Panel("", lines, settings)])


MOST_PANELS = 2
"""Maximum number of regression outputs in one figure."""


def _details(comparison: Comparison) -> dict[str, RegressionDetail]:
    test = comparison.test.name
    found = {name: record.labelled[test].regression for name, record in comparison.methods.items()}
    return {name: one for name, one in found.items() if one is not None}


def _output_title(comparison: Comparison, output: str) -> str:
    return f"output {output}" if len(comparison.classes) > 1 else ""


def draw_coverage(comparison: Comparison, panels: Mapping[str, Sequence[str]]) -> Figure:
    """Plot the observed against the nominal coverage of central intervals; `panels` maps panel titles to the methods to plot."""
    details, drawn = _details(comparison), strokes(comparison.methods)
    settings = {"xlim": (0, 1), "ylim": (0, 1), "xlabel": "nominal coverage", "ylabel": "share of targets inside"}
    made = []
    for title, methods in panels.items():
        lines = [Line([0, 1], [0, 1], "", GUIDE)]
        for method in methods:
            level, held, error = np.array([[one or 0.0 for one in row] for row in details[method].coverage]).T
            lines.append(Line(level, held, method, drawn[method], error))
        made.append(Panel(title, lines, settings))
    return draw_panels(made)


def draw_spread(comparison: Comparison) -> Figure:
    """Plot the root mean squared error against the predicted standard deviation for the first few outputs."""
    details, drawn = _details(comparison), strokes(comparison.methods)
    settings = {"xlabel": "predicted standard deviation", "ylabel": "root mean squared error"}
    panels = []
    for output in list(next(iter(details.values())).spread)[:MOST_PANELS]:
        lines = []
        for method, one in details.items():
            _, predicted, error = np.array(one.spread[output]).T
            marker = {"marker": "x", "markersize": 8} if len(error) == 1 else {"marker": "o", "markersize": 3.5}
            lines.append(Line(predicted, error, method, {**marker, **drawn[method]}))
        ends = [min(np.min(line.x) for line in lines), max(np.max(line.x) for line in lines)]
        panels.append(Panel(_output_title(comparison, output), [Line(ends, ends, "", GUIDE), *lines], settings))
    return draw_panels(panels)


def draw_predicted(comparison: Comparison) -> Figure:
    """Plot the posterior's predictions and 90 % intervals against the targets."""
    examples, colour = _details(comparison)[comparison.own].examples, colours(comparison.methods)[comparison.own]
    panels = []
    for output in list(examples)[:MOST_PANELS]:
        target, mean, lower, upper = np.array(examples[output], dtype=float).T
        ends = [min(target.min(), mean.min()), max(target.max(), mean.max())]
        # The intervals are drawn as vertical segments of one line, separated by NaN.
        broken = np.stack([lower, upper, np.full_like(lower, np.nan)], axis=1).ravel()
        lines = [
            Line(ends, ends, "", GUIDE),
            Line(np.repeat(target, 3), broken, "90 % interval", {"color": colour, "alpha": 0.35, "linewidth": 0.9}),
            Line(target, mean, comparison.own, {"color": colour, "linestyle": "", "marker": ".", "markersize": 3.5}),
        ]
        panels.append(Panel(_output_title(comparison, output), lines, {"xlabel": "true", "ylabel": "predicted"}))
    return draw_panels(panels)


# --- the demo --------------------------------------------------------------------------------------------------------


def demo_distance(result: DemoResult) -> Figure:
    """Plot the confidence, its limit and its bound against the scale of the input and against the prior precision."""
    distance, drawn, green = result.distance, strokes(METHODS), COLOURS["MoLA"]
    common = {"xscale": "log", "ylim": (0, 1.04), "ylabel": "mean confidence"}
    panels = []
    for kind, curves in distance.curves.items():
        lines = [Line(distance.scales, curves[method], method, drawn[method]) for method in METHODS]
        ends = distance.scales[[0, -1]]
        for words, values, dashes in (("limit", distance.limits, DOTTED), ("bound", distance.bounds, DASHED)):
            for method, value in values[kind].items():
                style = {**drawn[method], "linestyle": dashes}
                lines.append(Line(ends, [value] * 2, f"{words}, {method}", style))
        panels.append(Panel(f"{kind}, scaled away", lines, {**common, "xlabel": "scale δ of the input"}))
    chosen = result.comparison.methods[PAPER].chosen["prior_precision"][0]
    lines = [
        Line(distance.precisions, distance.limit, f"limit, {PAPER}", {"color": green, "linestyle": DOTTED}),
        Line(distance.precisions, distance.bound, f"bound, {PAPER}", {"color": green, "linestyle": DASHED}),
        Line(distance.precisions, distance.test_confidence, f"{PAPER}, test digits", {"color": INK}),
        Line([chosen] * 2, [0, 1], "λ as tuned", {"color": INK, "linewidth": 0.8, "alpha": 0.6}),
    ]
    title = "other prior precisions: noise"
    panels.append(Panel(title, lines, {**common, "xlabel": "prior precision λ"}))
    return draw_panels(panels, 3.0)
