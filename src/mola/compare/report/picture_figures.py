"""Pictures: what the networks were shown, and how sure they are over the plane."""

from __future__ import annotations

from mola.compare.demo_result import METHODS, DemoResult
from mola.compare.report.style import COLOURS, INK, Axes, Figure, Shape, canvas, explain

__all__ = ["draw_examples", "draw_moons"]


def draw_examples(result: DemoResult, shape: Shape) -> Figure:
    """Inputs of each kind, with the confidence of MAP and of MoLA below each."""
    kinds = list(result.digits.examples)
    columns = 8 if shape.wide else 4
    figure, panels = canvas(shape, len(kinds), columns, 1.42 if shape.wide else 1.32)
    for row, kind in enumerate(kinds):
        examples = result.digits.examples[kind]
        for column in range(columns):
            panel = panels[row * columns + column]
            _bare(panel)
            if column >= len(examples.images):
                panel.set_visible(False)
                continue
            panel.imshow(examples.images[column], cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
            for method, place, side in (("MAP", 0.0, "left"), ("MoLA", 1.0, "right")):
                text = f"{examples.confidence[method][column]:.2f}"
                panel.text(
                    place,
                    -0.06,
                    text,
                    transform=panel.transAxes,
                    color=COLOURS[method],
                    ha=side,
                    va="top",
                    fontsize=8.5,
                    fontweight="bold",
                )
            if column == 0:
                panel.set_title(kind, fontsize=9)
    explain(figure, shape, "left, grey: confidence of MAP", "right, green: confidence of MoLA")
    return figure


def draw_moons(result: DemoResult, shape: Shape) -> Figure:
    """Confidence maps of the four methods around two moons, on one colour scale."""
    moons = result.moons
    rows, columns = (1, 4) if shape.wide else (2, 2)
    figure, panels = canvas(shape, rows, columns, 2.75 if shape.wide else 2.4)
    figure.set_layout_engine("compressed")  # keeps the colour bar as tall as square panels
    extent = (-moons.reach, moons.reach, -moons.reach, moons.reach)
    for panel, method in zip(panels, METHODS, strict=True):
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
        _bare(panel)
        panel.set_title(f"{method}: {moons.maps[method].mean():.2f} on average", color=COLOURS[method], fontsize=9)
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


def _bare(panel: Axes) -> None:
    panel.set_xticks([])
    panel.set_yticks([])
    for spine in panel.spines.values():
        spine.set_visible(True)
        spine.set_edgecolor(INK)
        spine.set_alpha(0.4)
        spine.set_linewidth(0.6)
