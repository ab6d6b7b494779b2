"""Figures that show confidence maps, confidence histograms, and example images with each method's confidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.patches import Patch

from molaplace.evaluation.demo_result import METHODS, DemoResult
from molaplace.evaluation.record import Comparison, SetInfo
from molaplace.report.numbers import BY_CONFIDENCE, Numbers, On
from molaplace.report.style import INK, WIDTH, Axes, Figure, canvas, colours, quiet_axes, shared_legend, strokes

IMAGES = 6
"""Number of images per row."""

SIZE, BAR, STEP = 0.86, 0.115, 0.145
"""Side length of an image, height of a bar and distance between bars, relative to the distance between adjacent images."""

MOST_SHIFTED = 2
"""Number of shifted sets from which images are shown (those at the middle and the highest level)."""


def example_sets(comparison: Comparison) -> list[SetInfo]:
    """Return the sets for which images and the confidences of at least one method are available."""
    shown = {name for records in comparison.runs.values() for name in records[0].examples}
    known = [one for one in comparison.sets.values() if one.name in comparison.pictures and one.name in shown]
    shifted = [one for one in known if one.role == "shift"]
    kept = [shifted[(index + 1) * len(shifted) // MOST_SHIFTED - 1] for index in range(MOST_SHIFTED)] if shifted else []
    return [one for one in known if one not in shifted or one in kept]


def draw_examples(comparison: Comparison) -> Figure:
    """Draw the first few images of each set, with a bar for each method's confidence in the first run."""
    sets, drawn = example_sets(comparison), strokes(comparison.runs)
    height = 1.12 + len(drawn) * STEP
    figure, panels = canvas(len(sets), 1, WIDTH / IMAGES * height * 0.98 + 0.28)
    for panel, one in zip(panels, sets, strict=True):
        pictures = comparison.pictures[one.name]
        for column, image in enumerate(pictures.pixels[:IMAGES]):
            grey: dict[str, Any] = {"cmap": "gray_r", "vmin": 0, "vmax": 255} if image.shape[-1] == 1 else {}
            extent = (column, column + SIZE, 1 - SIZE, 1)
            panel.imshow(image.squeeze(-1) if grey else image, extent=extent, interpolation="nearest", **grey)
        for place, (method, records) in enumerate(comparison.runs.items()):
            if (examples := records[0].examples.get(one.name)) is None:
                continue
            middle, colour = 1 - SIZE - 0.05 - (place + 1) * STEP + BAR / 2, _paint(drawn[method])
            confidences = examples.confidence[: min(IMAGES, len(pictures.pixels))]
            for column, (confidence, label) in enumerate(zip(confidences, examples.label, strict=False)):
                wrong = pictures.labels is not None and label != pictures.labels[column]
                _bar(panel, (column, middle), confidence, colour, hollow=wrong)
        panel.set(xlim=(0, IMAGES), ylim=(1 - height, 1.04), aspect="equal")
        panel.set_axis_off()
        panel.set_title(one.title, fontsize=9)
    handles = [Patch(facecolor=_paint(stroke), label=name) for name, stroke in drawn.items()]
    if any(comparison.pictures[one.name].labels is not None for one in sets):
        handles.append(Patch(facecolor="none", edgecolor=INK, label="hollow bar: wrong class"))
    shared_legend(figure, panels, len(panels), handles)
    return figure


def _bar(panel: Axes, place: tuple[float, float], confidence: float, colour: Any, *, hollow: bool) -> None:
    left, middle = place
    full = SIZE - 0.24  # the remaining width is left for the number
    panel.barh(middle, full, BAR, left, facecolor=INK, alpha=0.08, linewidth=0)
    face = "none" if hollow else colour
    panel.barh(middle, confidence * full, BAR, left, facecolor=face, edgecolor=colour, linewidth=0.8)
    panel.text(left + SIZE, middle, f"{confidence:.2f}", ha="right", va="center_baseline", fontsize=6.5)


def _paint(stroke: Mapping[str, Any]) -> tuple[str, float]:
    return stroke["color"], 1.0 if stroke["linestyle"] == "-" else 0.5


def demo_moons(result: DemoResult) -> Figure:
    """Draw a map of each method's confidence around the two moons, with a common colour scale."""
    moons, drawn = result.moons, colours(METHODS)
    figure, panels = canvas(-(-len(METHODS) // 3), 3, 2.6)
    extent = (-moons.reach, moons.reach, -moons.reach, moons.reach)
    for panel in panels[len(METHODS) :]:
        panel.set_visible(False)
    for panel, method in zip(panels, METHODS, strict=False):
        scale: dict[str, Any] = {"cmap": "viridis", "vmin": 0.5, "vmax": 1.0, "interpolation": "bilinear"}
        image = panel.imshow(moons.maps[method], extent=extent, origin="lower", **scale)
        panel.scatter(moons.points[:, 0], moons.points[:, 1], s=3, c=moons.labels, cmap="gray", linewidths=0)
        panel.set(xticks=[], yticks=[])
        panel.set_title(f"{method}\n{moons.maps[method].mean():.2f} on average", color=drawn[method], fontsize=8.5)
    figure.colorbar(image, ax=panels, fraction=0.04, pad=0.015, aspect=22, label="confidence")
    return figure


MOST_SETS = 4
"""Maximum number of outlier sets in one figure."""


def draw_histograms(comparison: Comparison, sets: Sequence[SetInfo]) -> Figure:
    """Draw histograms of each method's confidence on each outlier set and on the test set, with all runs pooled."""
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
        # Most of the test data are in the last bin; a square-root scale makes the other bins visible.
        panel.set_yscale("function", functions=(np.sqrt, np.square))
        panel.set(xlim=(0, 1), ylim=(0, 1), xticks=[0, 0.5, 1], yticks=[0, 0.1, 0.5, 1])
        quiet_axes(panel)
        records = comparison.runs[method]
        outside = [record.outliers[one.name].histogram for record in records if one.name in record.outliers]
        inside = [record.labelled[two.name].histogram for record in records for two in test]
        for histograms, style in (
            (outside, {"color": painted[method], "fill": True, "alpha": 0.75}),
            (inside, {"color": INK}),
        ):
            if histograms and (total := np.sum(histograms, axis=0)).sum() > 0:
                panel.stairs(total / total.sum(), np.linspace(0.0, 1.0, len(total) + 1), **style)
        means = {"mean": numbers(On(one.name, "confidence")), "AUROC": numbers(On(one.name, "auroc", BY_CONFIDENCE))}
        words = [f"{name} {found.mean:.3f}" for name, by in means.items() if (found := by[method]) is not None]
        # Inside the panel, the text would hide bars, so it is placed above the panel.
        panel.text(0.0, 1.04, ", ".join(words), transform=panel.transAxes, va="bottom", fontsize=7)
    figure.supxlabel("filled: outliers, outline: test data" if sets else "share of the test data", fontsize=8)
    return figure
