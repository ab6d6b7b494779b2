"""Figures of confidence, drawn from plain values: histograms, and maps over the plane."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from molaplace.evaluation import SetInfo
from molaplace.report.curves import Estimates
from molaplace.report.numbers import BY_CONFIDENCE, Quantity
from molaplace.report.style import INK, Axes, Figure, Strokes, canvas, quiet_axes

MOST_SETS = 4
"""Maximum number of outlier sets in one figure."""


def draw_histograms(
    numbers: Callable[[Quantity], Estimates],
    test: SetInfo,
    outliers: Sequence[SetInfo],
    histograms: Mapping[str, Mapping[str, ArrayLike]],
    styles: Strokes,
) -> Figure:
    """Draw histograms of each method's confidence on sets of outliers and on test data.

    `numbers` returns the mean confidences and AUROCs shown above each histogram. `histograms` contains the number of inputs in each
    confidence bin, by method and by name of the set.
    """
    confidence = [numbers(Quantity(info.name, "confidence")) for info in outliers]
    auroc = [numbers(Quantity(info.name, "auroc", BY_CONFIDENCE)) for info in outliers]
    figure, panels = canvas(len(histograms), len(outliers), 1.35, sharex=True, sharey=True)
    for index, panel in enumerate(panels):
        row, column = divmod(index, len(outliers))
        method = list(histograms)[row]
        by_set = histograms[method]
        if row == 0:
            panel.set_title(outliers[column].title, pad=15, fontsize=9)
        if column == 0:
            # Few predictions have a low confidence, so this corner is free.
            panel.text(0.03, 0.93, method, transform=panel.transAxes, va="top", fontsize=8, fontweight="bold")
        if row == len(histograms) - 1:
            panel.set_xlabel("confidence")
        # Most of the test data are in the last bin; a square-root scale makes the other bins visible.
        panel.set_yscale("function", functions=(np.sqrt, np.square))
        panel.set(xlim=(0, 1), ylim=(0, 1), xticks=[0, 0.5, 1], yticks=[0, 0.1, 0.5, 1])
        quiet_axes(panel)
        if outliers[column].name in by_set:
            _draw_shares(
                panel, by_set[outliers[column].name], {"color": styles[method]["color"], "fill": True, "alpha": 0.75}
            )
        _draw_shares(panel, by_set[test.name], {"color": INK})
        means = {"mean": confidence[column].get(method), "AUROC": auroc[column].get(method)}
        words = [f"{name} {mean.value:.3f}" for name, mean in means.items() if mean is not None]
        # Inside the panel, the text would hide bars, so it is placed above the panel.
        panel.text(0.0, 1.04, ", ".join(words), transform=panel.transAxes, va="bottom", fontsize=7)
    figure.supxlabel("filled: outliers, outline: test data", fontsize=8)
    return figure


def _draw_shares(panel: Axes, counts: ArrayLike, style: Mapping[str, Any]) -> None:
    totals = np.asarray(counts, dtype=float)
    if totals.sum() > 0:
        panel.stairs(totals / totals.sum(), np.linspace(0.0, 1.0, len(totals) + 1), **style)


def draw_maps(
    maps: Mapping[str, ArrayLike],
    points: ArrayLike,
    labels: ArrayLike,
    reach: float,
    title_colours: Mapping[str, str],
    *,
    columns: int = 4,
    size: float = 2.6,
) -> Figure:
    """Draw maps of the confidence over the plane around the points (n, 2) of two classes, on a common colour scale.

    Both axes of each map run from `-reach` to `reach`. `maps` and `title_colours` are keyed by title; `size` is the side length of a map
    in inches.
    """
    rows = -(-len(maps) // columns)
    figure, panels = canvas(rows, columns, size + (0.2 if rows == 1 else 0.5), size * columns)
    figure.set_layout_engine("compressed")  # makes the colour bar as tall as the square panels
    x, y = np.asarray(points).T
    for panel, (title, values) in zip(panels, maps.items(), strict=True):
        extent = (-reach, reach, -reach, reach)
        scale: dict[str, Any] = {"cmap": "cividis", "vmin": 0.5, "vmax": 1.0, "interpolation": "bilinear"}
        image = panel.imshow(np.asarray(values), extent=extent, origin="lower", **scale)
        for label, colour in enumerate(("#ffffff", "#d55e00")):
            of_class = np.asarray(labels) == label
            panel.scatter(x[of_class], y[of_class], s=2.5, color=colour, linewidths=0)
        panel.set(xticks=[], yticks=[])
        for spine in panel.spines.values():
            spine.set(visible=True, alpha=0.4, linewidth=0.6)
        panel.set_title(title, color=title_colours[title], fontsize=9)
    side, fraction = ("right", 0.04) if rows == 1 else ("bottom", 0.03)
    bar = figure.colorbar(image, ax=panels, location=side, fraction=fraction, pad=0.015, aspect=22, label="confidence")
    bar.outline.set_visible(False)
    return figure
