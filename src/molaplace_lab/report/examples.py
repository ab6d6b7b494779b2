"""Figures of example images with bars of each method's confidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.patches import Patch

from molaplace.evaluation import SetInfo
from molaplace.report.style import INK, WIDTH, Axes, Figure, Strokes, canvas, shared_legend
from molaplace_lab.examples import Examples, Pictures

IMAGES = 6
"""Number of images per row."""

SIZE, BAR, STEP = 0.86, 0.115, 0.145
"""Side length of an image, height of a bar and distance between bars, relative to the distance between adjacent images."""

MOST_SHIFTED = 2
"""Number of shifted sets from which images are shown (those at the middle and the highest level)."""


def example_sets(
    sets: Mapping[str, SetInfo], pictures: Mapping[str, Pictures], examples: Mapping[str, Mapping[str, Examples]]
) -> list[SetInfo]:
    """Return the sets for which images and the confidences of at least one method are available."""
    with_confidence = {name for by_set in examples.values() for name in by_set}
    known = [info for info in sets.values() if info.name in pictures and info.name in with_confidence]
    shifted = [info for info in known if info.role == "shift"]
    indices = [(index + 1) * len(shifted) // MOST_SHIFTED - 1 for index in range(MOST_SHIFTED)] if shifted else []
    return [info for info in known if info not in shifted or shifted.index(info) in indices]


def draw_examples(
    sets: Sequence[SetInfo],
    pictures: Mapping[str, Pictures],
    examples: Mapping[str, Mapping[str, Examples]],
    styles: Strokes,
) -> Figure:
    """Draw the first few images of each set, with a bar for each method's confidence.

    `examples` maps each method to its predictions for each set.
    """
    height = 1.12 + len(styles) * STEP
    figure, panels = canvas(len(sets), 1, WIDTH / IMAGES * height * 0.98 + 0.28)
    for panel, info in zip(panels, sets, strict=True):
        images = pictures[info.name]
        for column, image in enumerate(images.pixels[:IMAGES]):
            grey: dict[str, Any] = {"cmap": "gray_r", "vmin": 0, "vmax": 255} if image.shape[-1] == 1 else {}
            extent = (column, column + SIZE, 1 - SIZE, 1)
            panel.imshow(image.squeeze(-1) if grey else image, extent=extent, interpolation="nearest", **grey)
        for row, (method, by_set) in enumerate(examples.items()):
            if info.name in by_set:
                middle = 1 - SIZE - 0.05 - (row + 1) * STEP + BAR / 2
                _draw_bars(panel, middle, by_set[info.name], images, _paint(styles[method]))
        panel.set(xlim=(0, IMAGES), ylim=(1 - height, 1.04), aspect="equal")
        panel.set_axis_off()
        panel.set_title(info.title, fontsize=9)
    handles = [Patch(facecolor=_paint(stroke), label=name) for name, stroke in styles.items()]
    if any(pictures[info.name].labels is not None for info in sets):
        handles.append(Patch(facecolor="none", edgecolor=INK, label="hollow bar: wrong class"))
    shared_legend(figure, panels, len(panels), handles)
    return figure


def _draw_bars(panel: Axes, middle: float, examples: Examples, images: Pictures, colour: Any) -> None:
    full = SIZE - 0.24  # the remaining width is left for the number
    confidences = examples.confidence[: min(IMAGES, len(images.pixels))]
    for left, (confidence, label) in enumerate(zip(confidences, examples.label, strict=False)):
        wrong = images.labels is not None and label != images.labels[left]
        panel.barh(middle, full, BAR, left, facecolor=INK, alpha=0.08, linewidth=0)
        face = "none" if wrong else colour
        panel.barh(middle, confidence * full, BAR, left, facecolor=face, edgecolor=colour, linewidth=0.8)
        panel.text(left + SIZE, middle, f"{confidence:.2f}", ha="right", va="center_baseline", fontsize=6.5)


def _paint(stroke: Mapping[str, Any]) -> tuple[str, float]:
    return stroke["color"], 1.0 if stroke["linestyle"] == "-" else 0.5
