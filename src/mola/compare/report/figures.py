"""The demo's figures, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mola.compare.demo_result import DemoResult
from mola.compare.report.confidence_figures import draw_histograms, draw_reliability, draw_rotation
from mola.compare.report.distance_figures import draw_distance
from mola.compare.report.picture_figures import draw_examples, draw_moons
from mola.compare.report.style import NARROW, PAPER, WIDE, Figure, Shape, as_png, as_svg, drawing, settle

__all__ = ["FIGURES", "Drawn", "draw", "render", "write_figure"]

FIGURES: dict[str, Callable[[DemoResult, Shape], Figure]] = {
    "examples": draw_examples,
    "histograms": draw_histograms,
    "reliability": draw_reliability,
    "rotation": draw_rotation,
    "distance": draw_distance,
    "moons": draw_moons,
}
"""In the order of the page."""


@dataclass(frozen=True)
class Drawn:
    """One figure, rendered."""

    name: str
    wide: str
    """SVG for wide screens."""
    narrow: str
    """SVG for phones."""
    png: bytes
    """The wide one on white."""


def draw(name: str, result: DemoResult) -> Drawn:
    """Render the figure of that name in every form."""
    return render(name, lambda shape: FIGURES[name](result, shape))


def render(name: str, make: Callable[[Shape], Figure]) -> Drawn:
    """Render any figure in every form.

    Args:
        name: for its files, and for the ids inside.
        make: draws it in a shape.

    Returns:
        The figure.
    """
    with drawing():
        wide, narrow = make(WIDE), make(NARROW)
        settle(wide)  # drawn twice
        return Drawn(name, as_svg(wide, f"{name}-wide"), as_svg(narrow, f"{name}-narrow"), as_png(wide))


def write_figure(figure: Drawn, folder: Path) -> None:
    """Write `<name>.svg` and `<name>.png`, both on white."""
    on_white = figure.wide.replace("<svg ", f'<svg style="background:{PAPER}" ', 1)
    (folder / f"{figure.name}.svg").write_text(on_white, encoding="utf-8")
    (folder / f"{figure.name}.png").write_bytes(figure.png)
