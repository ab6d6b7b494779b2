"""Curves with bands of one standard error: against the shift, and against the number of components."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mola.compare.record import Record
from mola.compare.report.estimate import Estimate
from mola.compare.report.style import Axes, Figure, Shape, canvas, quiet_axes
from mola.compare.report.suites.palette import crossed_strokes, strokes
from mola.compare.report.suites.quantities import (
    Quantity,
    at_level,
    estimate,
    labelled,
    mmc,
    outlier_mean,
    outlier_score,
    shifted,
)
from mola.compare.report.suites.reading import SuiteResults
from mola.compare.report.suites.tables import METRIC_NAMES

__all__ = ["component_sweep", "draw_ablation", "draw_components", "draw_shift"]

Sweep = dict[str, dict[int, tuple[Record, ...]]]


def draw_shift(suite: SuiteResults, shape: Shape) -> Figure:
    """Every metric of every method compared, against the level of shift."""
    return _against_level(suite, suite.main, tuple(METRIC_NAMES), shape)


def draw_ablation(suite: SuiteResults, group: str, shape: Shape) -> Figure:
    """Log-likelihood and calibration of the variants in a group, against the level of shift."""
    return _against_level(suite, suite.groups[group], ("log_likelihood", "ece", "confidence"), shape)


def _against_level(
    suite: SuiteResults, methods: Mapping[str, Sequence[Record]], metrics: Sequence[str], shape: Shape
) -> Figure:
    levels = suite.levels()
    columns = min(3, len(metrics)) if shape.wide else 1
    rows = -(-len(metrics) // columns)
    figure, panels = canvas(shape, rows, columns, 2.75 if shape.wide else 2.5)
    drawn = _strokes(methods)
    for panel, metric in zip(panels, metrics, strict=False):
        quiet_axes(panel)
        for method, records in methods.items():
            points = [(level, estimate(records, at_level(level, metric))) for level in levels]
            _curve(panel, points, method, drawn[method])
        panel.set_title(METRIC_NAMES[metric])
        panel.set_xlabel(suite.axis)
        _level_ticks(panel, levels)
        if metric in ("brier", "ece"):
            panel.set_ylim(bottom=0)
    _shared_legend(figure, panels, len(metrics), shape)
    return figure


def _strokes(methods: Mapping[str, Sequence[Record]]) -> dict[str, dict[str, Any]]:
    """Colours for structures and patterns for links or rules, where methods differ in both."""
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


def _curve(panel: Axes, points: Sequence[tuple[float, Estimate | None]], label: str, stroke: Mapping[str, Any]) -> None:
    known = [(x, y) for x, y in points if y is not None]
    if not known:
        return
    x, mean = [place for place, _ in known], [value.mean for _, value in known]
    panel.plot(x, mean, label=label, linewidth=1.5, marker="o", markersize=2.6, **stroke)
    errors = [value.error or 0.0 for _, value in known]
    if any(errors):
        low, high = zip(*[(m - e, m + e) for m, e in zip(mean, errors, strict=True)], strict=True)
        panel.fill_between(x, low, high, color=stroke["color"], alpha=0.18, linewidth=0)


def _level_ticks(panel: Axes, levels: Sequence[float]) -> None:
    every = 1 if len(levels) <= 7 else 3
    shown = list(levels[::every])
    panel.set_xticks(shown, [f"{level:g}" for level in shown])


def _shared_legend(figure: Figure, panels: Sequence[Axes], used: int, shape: Shape) -> None:
    """In the place of an unused panel, if there is one; below otherwise."""
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


def component_sweep(suite: SuiteResults) -> Sweep:
    """Records by family ("DE", "MoLA") and number of components."""
    families: Sweep = {}
    for method, records in suite.groups.get("components", {}).items():
        count = records[0].settings.get("components", len(records[0].networks))
        if isinstance(count, int) and not isinstance(count, bool):
            family = re.sub(r"\s*\bK\s*=\s*\d+", "", method).strip() or method
            families.setdefault(family, {})[count] = records
    return {family: dict(sorted(counts.items())) for family, counts in families.items()}


def draw_components(suite: SuiteResults, shape: Shape) -> Figure:
    """Scores of each family against the number of components: as the test data are, shifted, and of outliers."""
    outliers = [one.name for one in suite.of_role("outlier")]
    panels_of: list[tuple[str, Quantity]] = []
    kinds: tuple[tuple[str, Callable[[str], Quantity]], ...] = (("test", partial(labelled, "test")),)
    if len(suite.levels()) > 1:
        kinds = (*kinds, ("shifted", shifted))
    for kind, of_metric in kinds:
        panels_of += [
            (f"{METRIC_NAMES[metric]}, {kind}", of_metric(metric))
            for metric in ("log_likelihood", "ece", "confidence", "accuracy")
        ]
    if outliers:
        panels_of += [
            ("mean confidence, outliers", outlier_mean(mmc, outliers)),
            ("AUROC, outliers", outlier_mean(partial(outlier_score), outliers)),
        ]
    columns = 4 if shape.wide else 1
    rows = -(-len(panels_of) // columns)
    figure, panels = canvas(shape, rows, columns, 2.5 if shape.wide else 2.3)
    sweep = component_sweep(suite)
    drawn = strokes(sweep)
    for panel, (title, quantity) in zip(panels, panels_of, strict=False):
        quiet_axes(panel)
        for family, counts in sweep.items():
            points = [(float(count), estimate(records, quantity)) for count, records in counts.items()]
            _curve(panel, points, family, drawn[family])
        panel.set_title(title.replace("calibration error (ECE)", "ECE"), fontsize=9)
        panel.set_xlabel("components")
        panel.set_xticks(sorted({count for found in sweep.values() for count in found}))
    _shared_legend(figure, panels, len(panels_of), shape)
    return figure
