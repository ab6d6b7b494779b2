"""Curves with bands of one standard error: against a shift, the number of components, and the distance from the data."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from mola.compare.demo_result import METHODS, DemoResult
from mola.compare.record import Comparison, Record
from mola.compare.report.estimate import (
    Estimate,
    On,
    Quantity,
    at_level,
    estimate,
    levels_of,
    mean_over,
    shared_outliers,
    shifted,
)
from mola.compare.report.reading import SuiteResults
from mola.compare.report.style import (
    COLOURS,
    INK,
    Axes,
    Figure,
    Shape,
    canvas,
    colours,
    crossed_strokes,
    quiet_axes,
    strokes,
)
from mola.compare.report.suite_tables import METRIC_NAMES

Points = Sequence[tuple[float, Estimate | None]]
Stroke = Mapping[str, Any]

DOTTED = (0, (1, 1.6))
DASHED = (0, (5, 2.5))


def _curves(
    panels: Mapping[str, Mapping[str, tuple[Points, Stroke]]],
    shape: Shape,
    *,
    axis: str,
    ticks: Sequence[float],
    columns: int = 3,
    from_zero: Collection[str] = (),
) -> Figure:
    # Panels by title and label: points, and how to draw the line.
    columns = min(columns, len(panels)) if shape.wide else 1
    figure, axes = canvas(shape, -(-len(panels) // columns), columns, 2.75 if shape.wide else 2.5)
    shown = ticks if len(ticks) <= 10 else ticks[::3]
    for panel, (title, curves) in zip(axes, panels.items(), strict=False):
        quiet_axes(panel)
        for label, (points, stroke) in curves.items():
            _curve(panel, points, label, stroke)
        panel.set_title(title, fontsize=10 if columns < 4 else 9)
        panel.set_xlabel(axis)
        panel.set_xticks(shown, [f"{tick:g}" for tick in shown])
        if title in from_zero:
            panel.set_ylim(bottom=0)
    _shared_legend(figure, axes, len(panels), shape)
    return figure


def _curve(panel: Axes, points: Points, label: str, stroke: Stroke) -> None:
    known = [(x, y) for x, y in points if y is not None]
    if not known:
        return
    x, mean = [place for place, _ in known], [value.mean for _, value in known]
    panel.plot(x, mean, label=label, linewidth=1.5, marker="o", markersize=2.6, **stroke)
    errors = [value.error or 0.0 for _, value in known]
    if any(errors):
        low, high = zip(*[(m - e, m + e) for m, e in zip(mean, errors, strict=True)], strict=True)
        panel.fill_between(x, low, high, color=stroke["color"], alpha=0.18, linewidth=0)


def _shared_legend(figure: Figure, panels: Sequence[Axes], used: int, shape: Shape) -> None:
    # In the place of an unused panel, if there is one; below otherwise.
    for panel in panels[used:]:
        panel.set_axis_off()
    handles, labels = panels[0].get_legend_handles_labels()
    style = {"fontsize": 8.5, "handlelength": 2.6, "labelspacing": 0.5}
    if len(panels) > used and len(labels) <= 14:
        panels[used].legend(handles, labels, loc="center left", **style)
    else:
        longest = max((len(label) for label in labels), default=1)
        columns = max(1, min(len(labels), int(shape.width * 11 / (longest + 6))))
        # The legend adds to the height instead of taking it from the panels.
        figure.set_figheight(figure.get_figheight() + 0.19 * -(-len(labels) // columns))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, columnspacing=1.4, **style)


# --- against the share of answers ---------------------------------------------------------------------------------------


def evaluation_decisions(comparison: Comparison, shape: Shape) -> Figure:
    """Risk against coverage of every method, and the points that were chosen on validation data."""
    found = comparison.decisions
    assert found is not None  # asked for only where there are some
    figure, (panel,) = canvas(shape, 1, 1, 3.4)
    quiet_axes(panel)
    drawn = strokes(comparison.runs)
    for method, points in found.curves.items():
        panel.plot(
            [100 * x for x, _ in points], [100 * y for _, y in points], label=method, linewidth=1.5, **drawn[method]
        )
    for one in found.answers:
        if one.answered is not None and one.realised is not None:
            panel.axhline(100 * one.promised, color=INK, linestyle=DOTTED, linewidth=0.8)
            panel.plot(100 * one.answered, 100 * one.realised, marker="x", markersize=8, color=INK, markeredgewidth=1.8)
    panel.set_xlabel("answered, %")
    panel.set_ylabel("of these wrong, %")
    panel.set_xlim(0, 101)
    panel.set_ylim(bottom=0)
    panel.legend(loc="upper left", fontsize=8.5)
    return figure


# --- against a shift ----------------------------------------------------------------------------------------------------


def suite_shift(suite: SuiteResults, shape: Shape) -> Figure:
    """Every metric of every method compared, against the level of shift."""
    return _against_level(suite, suite.runs, tuple(METRIC_NAMES), shape)


def suite_ablation(suite: SuiteResults, group: str, shape: Shape) -> Figure:
    """Log-likelihood and calibration of the variants in a group, against the level of shift."""
    return _against_level(suite, suite.groups[group], ("log_likelihood", "ece", "confidence"), shape)


def _against_level(
    suite: SuiteResults, methods: Mapping[str, Sequence[Record]], metrics: Sequence[str], shape: Shape
) -> Figure:
    levels, drawn = levels_of(suite), _strokes(methods)
    panels = {
        METRIC_NAMES[metric]: {
            method: ([(level, estimate(records, at_level(level, metric))) for level in levels], drawn[method])
            for method, records in methods.items()
        }
        for metric in metrics
    }
    from_zero = [METRIC_NAMES[metric] for metric in ("brier", "ece")]
    return _curves(panels, shape, axis=suite.axis, ticks=levels, from_zero=from_zero)


def _strokes(methods: Mapping[str, Sequence[Record]]) -> dict[str, dict[str, Any]]:
    for other in ("link", "rule"):
        kinds = {
            method: (str(records[0].settings.get("structure")), str(records[0].settings.get(other)))
            for method, records in methods.items()
        }
        if len(set(kinds.values())) == len(kinds) and all(
            len(set(kind)) > 1 for kind in zip(*kinds.values(), strict=True)
        ):
            return crossed_strokes(kinds)
    return strokes(methods)


def demo_rotation(result: DemoResult, shape: Shape) -> Figure:
    """Confidence with accuracy, log loss and calibration error against the angle."""
    runs, angles = result.comparison.runs, levels_of(result.comparison)

    def points(metric: str, method: str) -> Points:
        found = [(angle, estimate(runs[method], at_level(angle, metric))) for angle in angles]
        return [(angle, None if one is None else Estimate(one.mean, None, 1)) for angle, one in found]

    titles = {"confidence": "mean confidence", "nll": "log loss (NLL)", "ece": "calibration error (ECE)"}
    panels: dict[str, dict[str, tuple[Points, Stroke]]] = {
        title: {method: (points(metric, method), stroke) for method, stroke in strokes(runs).items()}
        for metric, title in titles.items()
    }
    dashed = {"color": INK, "linestyle": (0, (2, 1.5))}
    panels["mean confidence"]["accuracy of MoLA"] = (points("accuracy", "MoLA"), dashed)
    axis = "rotation (degrees)"
    return _curves(panels, shape, axis=axis, ticks=range(0, 181, 45), from_zero=list(titles.values()))


# --- against the number of components -----------------------------------------------------------------------------------


def component_sweep(suite: SuiteResults) -> dict[str, dict[int, tuple[Record, ...]]]:
    """Records by family ("DE", "MoLA") and number of components."""
    families: dict[str, dict[int, tuple[Record, ...]]] = {}
    for method, records in suite.groups.get("components", {}).items():
        count = records[0].settings.get("components", len(records[0].networks))
        if isinstance(count, int) and not isinstance(count, bool):
            family = re.sub(r"\s*\bK\s*=\s*\d+", "", method).strip() or method
            families.setdefault(family, {})[count] = records
    return {family: dict(sorted(counts.items())) for family, counts in families.items()}


def suite_components(suite: SuiteResults, shape: Shape) -> Figure:
    """Scores of each family against the number of components: as the test data are, shifted, and of outliers."""
    quantities: dict[str, Quantity] = {}
    for kind, of_metric in (("test", partial(On, "test")), ("shifted", shifted)):
        if kind == "test" or len(levels_of(suite)) > 1:
            for metric in ("log_likelihood", "ece", "confidence", "accuracy"):
                quantities[f"{'ECE' if metric == 'ece' else METRIC_NAMES[metric]}, {kind}"] = of_metric(metric)
    if outliers := [one.name for one in shared_outliers(suite, suite.groups.get("components", {}))]:
        quantities["mean confidence, outliers"] = mean_over(outliers, "confidence")
        quantities["AUROC, outliers"] = mean_over(outliers, "auroc")
    sweep = component_sweep(suite)
    drawn = strokes(sweep)
    panels = {
        title: {
            family: ([(float(count), estimate(records, quantity)) for count, records in counts.items()], drawn[family])
            for family, counts in sweep.items()
        }
        for title, quantity in quantities.items()
    }
    counts = sorted({count for found in sweep.values() for count in found})
    return _curves(panels, shape, axis="components", ticks=counts, columns=4)


# --- against the distance from the data ---------------------------------------------------------------------------------


def demo_distance(result: DemoResult, shape: Shape) -> Figure:
    """Confidence against distance with limit and bound, and both against the prior precision."""
    kinds = list(result.distance.curves)
    count = len(kinds) + 1
    figure, panels = canvas(shape, *((1, count) if shape.wide else (count, 1)), 3.5 if shape.wide else 3.0)
    for panel, kind in zip(panels, kinds, strict=False):
        _by_distance(panel, result, kind)
    _by_precision(panels[-1], result)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=5 if shape.wide else 2,
        fontsize=8,
        columnspacing=1.4,
        handlelength=2.4,
    )
    return figure


def _by_distance(panel: Axes, result: DemoResult, kind: str) -> None:
    distance = result.distance
    quiet_axes(panel)
    drawn = colours(METHODS)
    for method in METHODS:
        panel.plot(distance.scales, distance.curves[kind][method], color=drawn[method], label=method)
    for method, limit in distance.limits[kind].items():
        panel.axhline(limit, color=drawn[method], linestyle=DOTTED, linewidth=1.4, label=f"limit, {method}")
    for offset, (method, bound) in enumerate(distance.bounds[kind].items()):
        # Two bounds that both round to 1 would hide each other: their dashes take turns.
        dashes = (5 * offset, (4, 6))
        panel.axhline(bound, color=drawn[method], linestyle=dashes, linewidth=1.6, label=f"bound, {method}")
    panel.set_xscale("log")
    panel.minorticks_off()
    panel.set_xlim(distance.scales[0], distance.scales[-1])
    panel.set_ylim(0, 1.04)
    panel.set_title(f"{kind}, scaled away")
    panel.set_xlabel("scale δ of the input")
    panel.set_ylabel("mean confidence")


def _by_precision(panel: Axes, result: DemoResult) -> None:
    distance, colour = result.distance, COLOURS["MoLA"]
    quiet_axes(panel)
    panel.plot(distance.precisions, distance.bound, color=colour, linestyle=DASHED, label="bound")
    panel.plot(distance.precisions, distance.limit, color=colour, linestyle=DOTTED, label="limit, noise")
    panel.plot(distance.precisions, distance.test_confidence, color=INK, linewidth=1.2, label="test digits")
    chosen = result.comparison.methods["MoLA"].chosen["prior_precision"][0]
    panel.axvline(chosen, color=INK, linewidth=0.8, alpha=0.6)
    panel.annotate(
        f"tuned: λ = {chosen:.2g}", (chosen, 0.03), xytext=(-4, 0), textcoords="offset points", ha="right", fontsize=8
    )
    panel.set_xscale("log")
    panel.minorticks_off()
    panel.set_xlim(distance.precisions[0], distance.precisions[-1])
    panel.set_ylim(0, 1.04)
    panel.set_title("MoLA at other prior precisions")
    panel.set_xlabel("prior precision λ")
    panel.set_ylabel("mean confidence")
    # Between the bound's rise and the test digits', the one place that no curve crosses.
    panel.legend(fontsize=8, loc="center", bbox_to_anchor=(0.49, 0.72), labelspacing=0.4, handlelength=2.0)
