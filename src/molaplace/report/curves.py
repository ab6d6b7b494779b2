"""Figures that consist of panels with lines and bands, drawn from plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from molaplace.report.numbers import Formatted
from molaplace.report.style import INK, Axes, Figure, canvas, quiet_axes, shared_legend, strokes
from molaplace.report.tables import SHIFT_METRICS

DOTTED = (0, (1, 1.6))
LONG_DASHES = (0, (5, 2.5))

GUIDE: dict[str, Any] = {"color": INK, "linestyle": LONG_DASHES, "linewidth": 0.9}
"""Line style of the diagonal on which calibrated predictions lie."""

MIN_COUNT, MIN_SHARE = 5, 0.001
"""A bin is drawn only if it contains at least this many predictions and at least this fraction of all predictions. The accuracy
in smaller bins is mostly noise. The calibration error includes all bins."""


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
            x = np.asarray(line.x, dtype=float)
            y = np.asarray(line.y, dtype=float)
            axis.plot(x, y, label=line.label, **{"linewidth": 1.5, **line.style})
            if line.error is not None and np.any(line.error):
                band = np.asarray(line.error)
                axis.fill_between(x, y - band, y + band, color=line.style["color"], alpha=0.18, linewidth=0)
        axis.set(**panel.settings)
        axis.set_title(panel.title, fontsize=9)
    shared_legend(figure, axes, len(panels))
    return figure


Estimates = Mapping[str, Formatted | None]
"""Estimates by label; None if the estimate is unknown."""


def estimates_panel(
    title: str, estimates: Mapping[float, Estimates], labels: Sequence[str], settings: Mapping[str, Any]
) -> Panel:
    """Return a panel with a line for each label through the estimates at each position; bands show one standard error."""
    lines = []
    for label, stroke in strokes(labels).items():
        known = {x: value for x, by_label in estimates.items() if (value := by_label.get(label)) is not None}
        errors = np.nan_to_num([estimate.error for estimate in known.values()])
        style = {"marker": "o", "markersize": 2.6, **stroke}
        lines.append(Line(list(known), [estimate.value for estimate in known.values()], label, style, errors))
    return Panel(title, [line for line in lines if line.x], {"xticks": list(estimates), **settings})


def draw_against_level(
    levels: Sequence[float],
    metrics: Sequence[str],
    axis: str,
    methods: Sequence[str],
    estimates: Callable[[float, str], Estimates],
) -> Figure:
    """Plot metrics against the level of shift; `estimates(level, metric)` returns the estimate of each method."""
    ticks = levels if len(levels) <= 10 else levels[::3]
    panels = []
    for metric in metrics:
        by_level = {level: estimates(level, metric) for level in levels}
        settings = {"xlabel": axis, "xticks": ticks} | ({"ylim": (0, None)} if metric in ("brier", "ece") else {})
        panels.append(estimates_panel(SHIFT_METRICS[metric].name, by_level, methods, settings))
    return draw_panels(panels, 2.4)


def draw_reliability(panels: Mapping[str, Mapping[str, ArrayLike]]) -> Figure:
    """Plot accuracy against confidence; the area of each dot shows the share of predictions in its bin.

    `panels` maps the title of each panel to the bins of each method: for each bin, the number of predictions, the sum of confidences
    and the number of correct predictions.
    """
    figure, axes = canvas(-(-len(panels) // 2), 2, 3.4)
    drawn = strokes(dict.fromkeys(method for bins in panels.values() for method in bins))
    for axis, (title, bins_by_method) in zip(axes, panels.items(), strict=False):
        quiet_axes(axis)
        axis.plot([0, 1], [0, 1], color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        for method, bins in bins_by_method.items():
            _draw_bins(axis, np.asarray(bins, dtype=np.float64).reshape(-1, 3), method, drawn[method])
        axis.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1.03), ylim=(0, 1.03))
        axis.set_aspect("equal", anchor="N")  # anchored at the top, to leave space for a legend below
        axis.set_title(title, fontsize=9)
    shared_legend(figure, axes, len(panels))
    return figure


def _draw_bins(axis: Axes, bins: Any, label: str, stroke: Mapping[str, Any]) -> None:
    count, confidence, correct = bins[bins[:, 0] >= max(MIN_COUNT, MIN_SHARE * bins[:, 0].sum())].T
    if not len(count):
        return
    x = confidence / count
    y = correct / count
    axis.plot(x, y, linewidth=1.2, label=label, **stroke)
    area = 6 + 160 * count / count.sum()
    axis.scatter(x, y, s=area, color=stroke["color"], alpha=0.75, linewidths=0, zorder=3)
