"""Figures that consist of panels with lines and bands, drawn from plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from molaplace.report.numbers import Formatted
from molaplace.report.style import INK, LONG_DASHES, WIDTH, Figure, Line2D, Strokes, canvas, quiet_axes, shared_legend
from molaplace.report.tables import SHIFT_METRICS

GUIDE: dict[str, Any] = {"color": INK, "linestyle": LONG_DASHES, "linewidth": 0.9}
"""Line style of the diagonal on which calibrated predictions lie."""

MIN_COUNT, MIN_SHARE = 3, 0.001
"""A bin is drawn only if it contains at least this many predictions and at least this fraction of all predictions. The accuracy
of smaller bins is mostly noise. The calibration error includes all bins."""


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
    title: str, estimates: Mapping[float, Estimates], styles: Strokes, settings: Mapping[str, Any]
) -> Panel:
    """Return a panel with a line for each label through the estimates at each position; bands show one standard error."""
    lines = []
    for label, stroke in styles.items():
        known = {x: value for x, by_label in estimates.items() if (value := by_label.get(label)) is not None}
        errors = np.nan_to_num([estimate.error for estimate in known.values()])
        style = {"marker": "o", "markersize": 2.6, **stroke}
        lines.append(Line(list(known), [estimate.value for estimate in known.values()], label, style, errors))
    return Panel(title, [line for line in lines if line.x], {"xticks": list(estimates), **settings})


def draw_against_level(
    levels: Sequence[float],
    metrics: Sequence[str],
    axis: str,
    styles: Strokes,
    estimates: Callable[[float, str], Estimates],
) -> Figure:
    """Plot metrics against the level of shift; `estimates(level, metric)` returns the estimate of each method."""
    ticks = levels if len(levels) <= 10 else levels[::3]
    panels = []
    for metric in metrics:
        by_level = {level: estimates(level, metric) for level in levels}
        settings = {"xlabel": axis, "xticks": ticks} | ({"ylim": (0, None)} if metric in ("brier", "ece") else {})
        panels.append(estimates_panel(SHIFT_METRICS[metric].name, by_level, styles, settings))
    return draw_panels(panels, 2.4)


def draw_reliability(bins: Mapping[str, Mapping[str, ArrayLike]], styles: Strokes) -> Figure:
    """Plot accuracy against confidence in one panel for each method; all panels have the same axes, which fit the data.

    `bins` maps each method to the bins of each set: for each bin, the number of predictions, the sum of confidences and the number of
    correct predictions. The last set has the strongest colour.
    """
    columns = min(4, len(bins))
    figure, axes = canvas(-(-len(bins) // columns), columns, 0.9 + 0.8 * WIDTH / columns, sharey=True)
    points = {method: {name: _bin_points(of_set) for name, of_set in by_set.items()} for method, by_set in bins.items()}
    values = [row[:2].min() for by_set in points.values() for row in by_set.values() if row.size]
    lowest = min(0.9, np.floor(10 * min(values, default=0)) / 10)
    sets = dict.fromkeys(name for by_set in bins.values() for name in by_set)
    shades = dict(zip(sets, np.linspace(1, 1 / len(sets), len(sets))[::-1], strict=True))
    for index, (axis, (method, by_set)) in enumerate(zip(axes, points.items(), strict=False)):
        quiet_axes(axis)
        axis.plot([0, 1], [0, 1], **GUIDE)
        for name, (x, y, low, high) in by_set.items():
            style = {"color": styles[method]["color"], "alpha": shades[name]}
            axis.plot(x, y, linewidth=1.3, marker="o", markersize=3.2, **style)
            axis.vlines(x, low, high, linewidth=0.8, **style)
        axis.set(xlim=(lowest, 1.02), ylim=(lowest, 1.02), aspect="equal")
        axis.set_title(method, fontsize=8.5, color=styles[method]["color"])
        if index + columns < len(bins):
            axis.tick_params(labelbottom=False)
        else:
            axis.set_xlabel("confidence")
    for axis in axes[::columns]:
        axis.set_ylabel("accuracy")
    legend = [
        Line2D([], [], color=INK, alpha=shade, marker="o", markersize=3.2, label=name) for name, shade in shades.items()
    ]
    shared_legend(figure, axes, len(bins), legend if len(sets) > 1 else [])
    return figure


def _bin_points(bins: ArrayLike) -> NDArray[np.float64]:
    # Return the mean confidence, the accuracy and both ends of its 95 % interval (Wilson's) of each bin, as rows.
    rows = np.asarray(bins, dtype=np.float64).reshape(-1, 3)
    count, confidence, correct = rows[rows[:, 0] >= max(MIN_COUNT, MIN_SHARE * rows[:, 0].sum())].T
    squared = 1.96**2
    middle = (correct + squared / 2) / (count + squared)
    half = np.sqrt(squared * (correct * (1 - correct / count) + squared / 4)) / (count + squared)
    return np.stack([confidence / count, correct / count, middle - half, middle + half])
