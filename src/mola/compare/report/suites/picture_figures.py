"""Example images, and how sure each method is of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.patches import Patch

from mola.compare.record import Examples
from mola.compare.report.style import INK, Axes, Figure, Shape, canvas
from mola.compare.report.suites.palette import strokes
from mola.compare.report.suites.reading import Pictures, SuiteResults

__all__ = ["draw_examples", "example_sets"]

BAR, GAP = 0.115, 0.03
"""Height of a bar, and space between them, where an image is 1 wide."""

MOST_SHIFTED = 2
"""Shifted sets to show, of those that have images."""


def example_sets(suite: SuiteResults) -> list[str]:
    """The sets with images and with at least one method's confidence in them."""
    told = {name for records in suite.main.values() for record in records[:1] for name in record.examples}
    known = [name for name in suite.sets if name in suite.pictures and name in told]
    shifted = [name for name in known if suite.sets[name].role == "shift"]
    # Evenly spaced: with two, the middle of the shift and its end.
    kept = (
        {shifted[(index + 1) * len(shifted) // MOST_SHIFTED - 1] for index in range(MOST_SHIFTED)} if shifted else set()
    )
    return [name for name in known if name not in shifted or name in kept]


def draw_examples(suite: SuiteResults, shape: Shape) -> Figure:
    """The first inputs of each set, with a bar for each method's confidence below."""
    sets, methods = example_sets(suite), list(suite.main)
    columns = 8 if shape.wide else 4
    height = 1.12 + len(methods) * (BAR + GAP)
    figure, panels = canvas(shape, len(sets), 1, shape.width / columns * height * 0.98 + 0.28)
    drawn = strokes(methods)
    for panel, name in zip(panels, sets, strict=True):
        first = {method: suite.main[method][0].examples.get(name) for method in methods}
        _row(panel, suite.pictures[name], first, drawn, columns)
        panel.set_xlim(0, columns)
        panel.set_ylim(-(height - 1.0), 1.04)
        panel.set_aspect("equal")
        panel.set_axis_off()
        panel.set_title(suite.sets[name].title, fontsize=9)
    handles = [Patch(facecolor=(drawn[method]["color"], strength(drawn[method])), label=method) for method in methods]
    if any(suite.pictures[name].labels is not None for name in sets):
        handles.append(Patch(facecolor="none", edgecolor=INK, label="hollow: wrong class"))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles) if shape.wide else 3,
        fontsize=8,
        handlelength=1.2,
    )
    return figure


def _row(
    panel: Axes,
    pictures: Pictures,
    told: dict[str, Examples | None],
    drawn: Mapping[str, Mapping[str, Any]],
    columns: int,
) -> None:
    size = 0.86
    for column in range(min(columns, len(pictures.pixels))):
        image = pictures.pixels[column]
        extent = (column, column + size, 1 - size, 1)
        if image.shape[-1] == 1:
            panel.imshow(image[..., 0], extent=extent, cmap="gray_r", vmin=0, vmax=255, interpolation="nearest")
        else:
            panel.imshow(image, extent=extent, interpolation="nearest")
        _bars(panel, pictures, told, drawn, column, size)


def _bars(
    panel: Axes,
    pictures: Pictures,
    told: dict[str, Examples | None],
    drawn: Mapping[str, Mapping[str, Any]],
    column: int,
    size: float,
) -> None:
    for place, (method, examples) in enumerate(told.items()):
        if examples is None or column >= min(len(examples.confidence), len(examples.label)):
            continue
        confidence, colour = examples.confidence[column], drawn[method]["color"]
        wrong = pictures.labels is not None and examples.label[column] != pictures.labels[column]
        low = 1 - size - 0.05 - (place + 1) * (BAR + GAP)
        panel.barh(low + BAR / 2, size - 0.24, height=BAR, left=column, facecolor=INK, alpha=0.08, linewidth=0)
        # The full length of a bar leaves room for its number.
        panel.barh(
            low + BAR / 2,
            confidence * (size - 0.24),
            height=BAR,
            left=column,
            facecolor="none" if wrong else (colour, strength(drawn[method])),
            edgecolor=(colour, strength(drawn[method])),
            linewidth=0.8,
        )
        panel.text(column + size, low + BAR / 2, _short(confidence), ha="right", va="center_baseline", fontsize=6.5)


def strength(stroke: Mapping[str, Any]) -> float:
    """Opacity of a bar: relatives of a method, whose lines are dashed, are paler."""
    return 1.0 if stroke["linestyle"] == "-" else 0.5


def _short(confidence: float) -> str:
    text = f"{confidence:.2f}"
    return text.removeprefix("0") if confidence < 1 else text
