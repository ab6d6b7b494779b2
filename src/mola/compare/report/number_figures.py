"""Figures of numbers: whether intervals hold as many targets as they say, whether errors are as large as predicted, examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mola.compare.record import Comparison, RegressionDetail
from mola.compare.report.style import INK, Axes, Figure, Shape, canvas, colours, quiet_axes, strokes

LEGEND_ROW = 0.17
"""Inches that a row of the legend takes."""

MOST_PANELS = 3
"""Outputs that are drawn, each in its own panel."""

DASHED = (0, (3, 2))


def _details(comparison: Comparison) -> dict[str, RegressionDetail]:
    test = comparison.test.name
    found = {name: record.labelled[test].regression for name, record in comparison.methods.items()}
    return {name: one for name, one in found.items() if one is not None}


def _legend(panel: Axes) -> None:
    panel.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=7.5, handlelength=1.8, columnspacing=1.0
    )


def draw_coverage(comparison: Comparison, panels: Mapping[str, Sequence[str]], shape: Shape) -> Figure:
    """Observed against nominal coverage of central intervals.

    Args:
        comparison: of methods whose outputs are numbers.
        panels: methods by title.
        shape: of the figure.

    Returns:
        The figure.
    """
    rows = -(-max(len(methods) for methods in panels.values()) // 2)
    grid = (1, len(panels)) if shape.wide else (len(panels), 1)
    figure, axes = canvas(shape, *grid, 3.6 + LEGEND_ROW * rows)
    details, drawn = _details(comparison), strokes(comparison.methods)
    for panel, (title, methods) in zip(axes, panels.items(), strict=True):
        quiet_axes(panel)
        panel.plot([0, 1], [0, 1], color=INK, linestyle=DASHED, linewidth=0.9)
        for method in methods:
            curve = np.array(
                [[level, held, error or 0.0] for level, held, error in details[method].coverage], dtype=float
            )
            panel.fill_between(
                curve[:, 0],
                curve[:, 1] - curve[:, 2],
                curve[:, 1] + curve[:, 2],
                color=drawn[method]["color"],
                alpha=0.15,
                linewidth=0,
            )
            panel.plot(curve[:, 0], curve[:, 1], label=method, **drawn[method])
        panel.set(xlim=(0, 1), ylim=(0, 1), xlabel="probability of the interval", ylabel="targets that it holds")
        panel.set_title(title)
        _legend(panel)
    return figure


def _ends(values: Sequence[float]) -> tuple[float, float]:
    # Of an axis: with some room around the values, and never less than a tenth of them.
    room = max(0.1 * (max(values) - min(values)), 0.05 * max(values))
    return max(0.0, min(values) - room), max(values) + room


def draw_spread(comparison: Comparison, shape: Shape) -> Figure:
    """Root mean squared error against predicted standard deviation, a panel for each of the first outputs."""
    details, drawn = _details(comparison), strokes(comparison.methods)
    outputs = list(next(iter(details.values())).spread)[: MOST_PANELS if shape.wide else 1]
    rows = -(-len(details) // 2)
    figure, axes = canvas(shape, 1, len(outputs), 3.6 + LEGEND_ROW * rows)
    for panel, output in zip(axes, outputs, strict=True):
        quiet_axes(panel)
        ends = [_ends([row[place] for one in details.values() for row in one.spread[output]]) for place in (1, 2)]
        low, high = min(ends)[0], max(one[1] for one in ends)
        panel.plot([low, high], [low, high], color=INK, linestyle=DASHED, linewidth=0.9)
        for method, one in details.items():
            points = np.array(one.spread[output], dtype=float)
            if len(points) == 1:
                cross = "x" if drawn[method]["linestyle"] == "-" else "+"
                panel.plot(points[:, 1], points[:, 2], cross, color=drawn[method]["color"], label=method, markersize=8)
            else:
                panel.plot(points[:, 1], points[:, 2], marker="o", markersize=3.5, label=method, **drawn[method])
        panel.set(xlabel="predicted standard deviation", ylabel="root mean squared error", xlim=ends[0], ylim=ends[1])
        panel.set_title(f"output {output}" if len(outputs) > 1 or len(comparison.classes) > 1 else "")
        _legend(panel)
    return figure


def draw_predicted(comparison: Comparison, shape: Shape) -> Figure:
    """Predictions of the posterior with their 90 % intervals, against the targets."""
    own = comparison.own
    examples, colour = _details(comparison)[own].examples, colours(comparison.methods)[own]
    outputs = list(examples)[: MOST_PANELS if shape.wide else 1]
    figure, axes = canvas(shape, 1, len(outputs), 3.8)
    for panel, output in zip(axes, outputs, strict=True):
        quiet_axes(panel)
        target, mean, lower, upper = np.array(examples[output], dtype=float).T
        ends = [min(target.min(), mean.min()), max(target.max(), mean.max())]
        panel.plot(ends, ends, color=INK, linestyle=DASHED, linewidth=0.9)
        held = (target >= lower) & (target <= upper)
        panel.vlines(target[held], lower[held], upper[held], color=colour, alpha=0.3, linewidth=0.9)
        panel.vlines(target[~held], lower[~held], upper[~held], color="#d55e00", alpha=0.6, linewidth=0.9)
        panel.plot(target, mean, ".", color=colour, markersize=3.5)
        panel.set(xlabel="true", ylabel="predicted")
        name = f"output {output}: " if len(comparison.classes) > 1 else ""
        panel.set_title(f"{name}{own}, {held.mean():.0%} of {len(held)} held")
    return figure
