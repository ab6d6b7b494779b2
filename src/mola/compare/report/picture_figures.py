"""Pictures: examples of what the networks were shown, and how sure they are over the plane."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.patches import Patch

from mola.compare.demo_result import METHODS, DemoResult
from mola.compare.record import Comparison, Examples, Pictures, SetInfo
from mola.compare.report.style import INK, Axes, Figure, Shape, canvas, colours, strokes

BAR, GAP = 0.115, 0.03
"""Height of a bar, and space between them, where an image is 1 wide."""

SIZE = 0.86
"""Of an image, where the next one begins 1 farther on."""

MOST_SHIFTED = 2
"""Shifted sets to show, of those that have images."""


def example_sets(comparison: Comparison) -> list[SetInfo]:
    """The sets with images and with at least one method's confidence in them."""
    told = {name for records in comparison.runs.values() for record in records[:1] for name in record.examples}
    known = [one for one in comparison.sets.values() if one.name in comparison.pictures and one.name in told]
    shifted = [one for one in known if one.role == "shift"]
    # Evenly spaced: with two, the middle of the shift and its end.
    kept = [shifted[(index + 1) * len(shifted) // MOST_SHIFTED - 1] for index in range(MOST_SHIFTED)] if shifted else []
    return [one for one in known if one not in shifted or one in kept]


def draw_examples(comparison: Comparison, shape: Shape) -> Figure:
    """The first images of each set in the first run, with a bar for each method's confidence below."""
    sets, drawn = example_sets(comparison), strokes(comparison.runs)
    columns = 8 if shape.wide else 4
    height = 1.12 + len(drawn) * (BAR + GAP)
    figure, panels = canvas(shape, len(sets), 1, shape.width / columns * height * 0.98 + 0.28)
    for panel, one in zip(panels, sets, strict=True):
        pictures = comparison.pictures[one.name]
        told = {method: records[0].examples.get(one.name) for method, records in comparison.runs.items()}
        for column, image in enumerate(pictures.pixels[:columns]):
            extent = (column, column + SIZE, 1 - SIZE, 1)
            # The colours of grey images; those of others are their own.
            scale: dict[str, Any] = {"cmap": "gray_r", "vmin": 0, "vmax": 255} if image.shape[-1] == 1 else {}
            panel.imshow(image.squeeze(-1) if scale else image, extent=extent, interpolation="nearest", **scale)
            _bars(panel, pictures, told, drawn, column)
        panel.set_xlim(0, columns)
        panel.set_ylim(-(height - 1.0), 1.04)
        panel.set_aspect("equal")
        panel.set_axis_off()
        panel.set_title(one.title, fontsize=9)
    handles = [Patch(facecolor=(stroke["color"], _strength(stroke)), label=name) for name, stroke in drawn.items()]
    if any(comparison.pictures[one.name].labels is not None for one in sets):
        handles.append(Patch(facecolor="none", edgecolor=INK, label="hollow: wrong class"))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles) if shape.wide else 3,
        fontsize=8,
        handlelength=1.2,
    )
    return figure


def _bars(
    panel: Axes,
    pictures: Pictures,
    told: Mapping[str, Examples | None],
    drawn: Mapping[str, Mapping[str, Any]],
    column: int,
) -> None:
    full = SIZE - 0.24  # leaves room for the number
    for place, (method, stroke) in enumerate(drawn.items()):
        examples = told[method]
        if examples is None or column >= min(len(examples.confidence), len(examples.label)):
            continue
        confidence = examples.confidence[column]
        middle = 1 - SIZE - 0.05 - (place + 1) * (BAR + GAP) + BAR / 2
        colour = (stroke["color"], _strength(stroke))
        hollow = pictures.labels is not None and examples.label[column] != pictures.labels[column]
        panel.barh(middle, full, height=BAR, left=column, facecolor=INK, alpha=0.08, linewidth=0)
        panel.barh(
            middle,
            confidence * full,
            height=BAR,
            left=column,
            facecolor="none" if hollow else colour,
            edgecolor=colour,
            linewidth=0.8,
        )
        text = f"{confidence:.2f}"
        text = text.removeprefix("0") if confidence < 1 else text
        panel.text(column + SIZE, middle, text, ha="right", va="center_baseline", fontsize=6.5)


def _strength(stroke: Mapping[str, Any]) -> float:
    # Opacity of a bar: relatives of a method, whose lines are dashed, are paler.
    return 1.0 if stroke["linestyle"] == "-" else 0.5


def demo_moons(result: DemoResult, shape: Shape) -> Figure:
    """Confidence maps of the methods around two moons, on one colour scale."""
    moons = result.moons
    rows, columns = (1, len(METHODS)) if shape.wide else (-(-len(METHODS) // 2), 2)
    figure, panels = canvas(shape, rows, columns, 2.3 if shape.wide else 2.4)
    figure.set_layout_engine("compressed")  # keeps the colour bar as tall as square panels
    extent = (-moons.reach, moons.reach, -moons.reach, moons.reach)
    drawn = colours(METHODS)
    for panel in panels[len(METHODS) :]:
        panel.set_visible(False)
    for panel, method in zip(panels, METHODS, strict=False):
        image = panel.imshow(
            moons.maps[method],
            extent=extent,
            origin="lower",
            cmap="viridis",
            vmin=0.5,
            vmax=1.0,
            interpolation="bilinear",
        )
        for label, colour in ((0, "#111111"), (1, "#ffffff")):
            points = moons.points[moons.labels == label]
            panel.scatter(points[:, 0], points[:, 1], s=3, color=colour, linewidths=0)
        panel.set(xticks=[], yticks=[])
        for spine in panel.spines.values():
            spine.set(visible=True, edgecolor=INK, alpha=0.4, linewidth=0.6)
        panel.set_title(f"{method}\n{moons.maps[method].mean():.2f} on average", color=drawn[method], fontsize=8.5)
    bar = figure.colorbar(
        image,
        ax=panels,
        orientation="horizontal" if not shape.wide else "vertical",
        fraction=0.04 if shape.wide else 0.03,
        pad=0.015,
        aspect=22,
        label="confidence",
    )
    bar.outline.set_visible(False)
    return figure
