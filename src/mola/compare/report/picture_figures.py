"""Pictures: example images with confidences, confidence over the plane, and histograms of confidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.patches import Patch

from mola.compare.demo_result import METHODS, DemoResult
from mola.compare.record import Comparison, Examples, Pictures, SetInfo
from mola.compare.report.numbers import BY_CONFIDENCE, Numbers, On
from mola.compare.report.style import INK, WIDTH, Axes, Figure, canvas, colours, quiet_axes, shared_legend, strokes

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


MOST_SETS = 4
"""Sets of outliers in a figure."""


def draw_histograms(comparison: Comparison, sets: Sequence[SetInfo]) -> Figure:
    """For every method: confidence in each set of outliers, over confidence in the test set; all runs together."""
    test, numbers, painted = comparison.of_role("test"), Numbers(comparison.runs), colours(comparison.runs)
    shown = list(sets or test)
    figure, panels = canvas(len(comparison.runs), len(shown), 1.35, sharex=True, sharey=True)
    cells = [(method, one) for method in comparison.runs for one in shown]
    for place, (panel, (method, one)) in enumerate(zip(panels, cells, strict=True)):
        if place < len(shown):
            panel.set_title(one.title if sets else "", pad=15, fontsize=9)
        if place % len(shown) == 0:
            panel.set_ylabel(method, fontweight="bold", fontsize=8)
        if place >= len(panels) - len(shown):
            panel.set_xlabel("confidence")
        panel.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        # Most of the test data are in the last bin; a square-root scale shows the others, too.
        panel.set_yscale("function", functions=(np.sqrt, np.square))
        panel.set_ylim(0, 1)
        panel.set_yticks([0, 0.1, 0.5, 1], ["0", "0.1", "0.5", "1"])
        quiet_axes(panel)
        records = comparison.runs[method]
        outside = [record.outliers[one.name].histogram for record in records if one.name in record.outliers]
        inside = [
            record.labelled[two.name].histogram for record in records for two in test if two.name in record.labelled
        ]
        _stairs(panel, outside, color=painted[method], fill=True, alpha=0.75)
        _stairs(panel, inside, color=INK, linewidth=1.0)
        confidence, auroc = (
            numbers(on)[method] for on in (On(one.name, "confidence"), On(one.name, "auroc", BY_CONFIDENCE))
        )
        if confidence is not None and outside:
            panel.axvline(confidence.mean, color=painted[method], linestyle=(0, (2, 1.5)), linewidth=1.3)
        words = [] if confidence is None else [f"mean {confidence.mean:.2f}"]
        words += [] if auroc is None else [f"AUROC {auroc.mean:.3f}"]
        # Above the panel: inside, the words would hide bars.
        panel.text(0.0, 1.04, ", ".join(words), transform=panel.transAxes, va="bottom", fontsize=7)
        panel.set_xlim(0, 1)
    explained = "filled: outliers \N{MIDDLE DOT} dashed: their mean confidence \N{MIDDLE DOT} outline: test data"
    figure.supxlabel(explained if sets else "share of the test data", fontsize=8)
    return figure


def _stairs(panel: Axes, histograms: Sequence[Sequence[int]], **style: Any) -> None:
    total = np.sum(np.asarray(histograms, dtype=np.float64), axis=0) if histograms else np.zeros(0)
    if total.sum() > 0:
        panel.stairs(total / total.sum(), np.linspace(0.0, 1.0, len(total) + 1), **style)
