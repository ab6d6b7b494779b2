"""Pictures: example images with confidences, confidence over the plane, and differences by type of shift."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.patches import Patch

from mola.compare.demo_result import METHODS, DemoResult
from mola.compare.record import Comparison, Examples, Pictures, SetInfo
from mola.compare.report.estimate import Estimate
from mola.compare.report.reading import SuiteResults
from mola.compare.report.style import COLOURS, INK, WIDTH, Axes, Figure, canvas, colours, shared_legend, strokes
from mola.compare.report.suite_tables import BY_TYPE, PAPERS_RULE, compared_by_type, type_differences

IMAGES = 6
"""Images in a row."""

BAR, GAP = 0.115, 0.03
"""Height of a bar, and space between bars, in units of the distance between two images."""

SIZE = 0.86
"""Side of an image, in the same units."""

MOST_SHIFTED = 2
"""Shifted sets, of those with images: the middle and the end."""


def example_sets(comparison: Comparison) -> list[SetInfo]:
    """Return sets with images and with the confidence of at least one method."""
    shown = {name for records in comparison.runs.values() for record in records[:1] for name in record.examples}
    known = [one for one in comparison.sets.values() if one.name in comparison.pictures and one.name in shown]
    shifted = [one for one in known if one.role == "shift"]
    kept = [shifted[(index + 1) * len(shifted) // MOST_SHIFTED - 1] for index in range(MOST_SHIFTED)] if shifted else []
    return [one for one in known if one not in shifted or one in kept]


def draw_examples(comparison: Comparison) -> Figure:
    """Draw the first images of each set in the first run, with a bar for each method's confidence."""
    sets, drawn = example_sets(comparison), strokes(comparison.runs)
    height = 1.12 + len(drawn) * (BAR + GAP)
    figure, panels = canvas(len(sets), 1, WIDTH / IMAGES * height * 0.98 + 0.28)
    for panel, one in zip(panels, sets, strict=True):
        pictures = comparison.pictures[one.name]
        shown = {method: records[0].examples.get(one.name) for method, records in comparison.runs.items()}
        for column, image in enumerate(pictures.pixels[:IMAGES]):
            extent = (column, column + SIZE, 1 - SIZE, 1)
            grey: dict[str, Any] = {"cmap": "gray_r", "vmin": 0, "vmax": 255} if image.shape[-1] == 1 else {}
            panel.imshow(image.squeeze(-1) if grey else image, extent=extent, interpolation="nearest", **grey)
            _bars(panel, pictures, shown, drawn, column)
        panel.set(xlim=(0, IMAGES), ylim=(-(height - 1.0), 1.04), aspect="equal")
        panel.set_axis_off()
        panel.set_title(one.title, fontsize=9)
    handles = [Patch(facecolor=(stroke["color"], _opacity(stroke)), label=name) for name, stroke in drawn.items()]
    if any(comparison.pictures[one.name].labels is not None for one in sets):
        handles.append(Patch(facecolor="none", edgecolor=INK, label="hollow: wrong class"))
    shared_legend(figure, panels, len(panels), handles)
    return figure


def _bars(
    panel: Axes,
    pictures: Pictures,
    shown: Mapping[str, Examples | None],
    drawn: Mapping[str, Mapping[str, Any]],
    column: int,
) -> None:
    full = SIZE - 0.24  # leaves room for the number
    for place, (method, stroke) in enumerate(drawn.items()):
        examples = shown[method]
        if examples is None or column >= min(len(examples.confidence), len(examples.label)):
            continue
        confidence = examples.confidence[column]
        middle = 1 - SIZE - 0.05 - (place + 1) * (BAR + GAP) + BAR / 2
        colour = (stroke["color"], _opacity(stroke))
        hollow = pictures.labels is not None and examples.label[column] != pictures.labels[column]
        shape: dict[str, Any] = {"height": BAR, "left": column}
        panel.barh(middle, full, facecolor=INK, alpha=0.08, linewidth=0, **shape)
        filled = "none" if hollow else colour
        panel.barh(middle, confidence * full, facecolor=filled, edgecolor=colour, linewidth=0.8, **shape)
        text = f"{confidence:.2f}".removeprefix("0") if confidence < 0.995 else f"{confidence:.2f}"
        panel.text(column + SIZE, middle, text, ha="right", va="center_baseline", fontsize=6.5)


def _opacity(stroke: Mapping[str, Any]) -> float:
    return 1.0 if stroke["linestyle"] == "-" else 0.5


def demo_moons(result: DemoResult) -> Figure:
    """Draw confidence maps of the methods around two moons, on one colour scale."""
    moons, drawn = result.moons, colours(METHODS)
    figure, panels = canvas(-(-len(METHODS) // 3), 3, 2.6)
    extent = (-moons.reach, moons.reach, -moons.reach, moons.reach)
    for panel in panels[len(METHODS) :]:
        panel.set_visible(False)
    for panel, method in zip(panels, METHODS, strict=False):
        scale: dict[str, Any] = {"cmap": "viridis", "vmin": 0.5, "vmax": 1.0, "interpolation": "bilinear"}
        image = panel.imshow(moons.maps[method], extent=extent, origin="lower", **scale)
        for label, colour in ((0, "#111111"), (1, "#ffffff")):
            points = moons.points[moons.labels == label]
            panel.scatter(points[:, 0], points[:, 1], s=3, color=colour, linewidths=0)
        panel.set(xticks=[], yticks=[])
        panel.spines[:].set(visible=True, edgecolor=INK, alpha=0.4, linewidth=0.6)
        panel.set_title(f"{method}\n{moons.maps[method].mean():.2f} on average", color=drawn[method], fontsize=8.5)
    bar = figure.colorbar(image, ax=panels, fraction=0.04, pad=0.015, aspect=22, label="confidence")
    bar.outline.set_visible(False)
    return figure


# --- differences by type of shift ------------------------------------------------------------------------------------

ROW = 0.25
"""Height of a type's row, in inches."""


def suite_types(suite: SuiteResults) -> Figure:
    """Draw differences between the compared method and the paper's rule, by type of shift and level."""
    panels = {metric: type_differences(suite, metric) for metric in BY_TYPE}
    height = 1.1 + ROW * max(len(found) for found in panels.values())
    figure, axes = canvas(1, len(panels), height, sharey=True)
    for panel, (metric, found) in zip(axes, panels.items(), strict=True):
        title, digits, _ = BY_TYPE[metric]
        _heat_map(panel, found, digits)
        panel.set_title(f"{title}\n{compared_by_type(suite)} minus {PAPERS_RULE}", fontsize=8.5)
        panel.set_xlabel(suite.axis)
    return figure


def _heat_map(panel: Axes, found: Mapping[str, Mapping[float, Estimate | None]], digits: int) -> None:
    levels = list(next(iter(found.values())))
    gaps = np.array([[np.nan if one is None else one.mean for one in row.values()] for row in found.values()])
    widest = max([10.0**-digits, *np.abs(gaps[~np.isnan(gaps)])])
    for (row, column), gap in np.ndenumerate(gaps):
        if np.isnan(gap):
            continue
        # Small differences are pale; the largest stay light enough for the numbers on them.
        colour = COLOURS["DE"] if gap < 0 else COLOURS["LLLA"]
        share = (column / len(levels), (column + 1) / len(levels))
        panel.axhspan(row, row + 1, *share, color=colour, alpha=0.65 * abs(gap) / widest, lw=0)
        panel.text(column + 0.5, row + 0.5, f"{gap:+z.{digits}f}", ha="center", va="center", fontsize=7, color=INK)
    panel.set(xlim=(0, len(levels)), ylim=(len(gaps), 0))
    panel.set_xticks(np.arange(len(levels)) + 0.5, [f"{level:g}" for level in levels])
    panel.set_yticks(np.arange(len(gaps)) + 0.5, [kind.replace("_", " ") for kind in found], fontsize=8)
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
