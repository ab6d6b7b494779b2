"""The demo's figures, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mola.bench.demo_result import DemoResult
from mola.report.confidence_figures import draw_histograms, draw_reliability, draw_rotation
from mola.report.distance_figures import draw_distance
from mola.report.picture_figures import draw_examples, draw_moons
from mola.report.style import NARROW, WIDE, Figure, Shape, as_png, as_svg, drawing, settle

__all__ = ["FIGURES", "Drawn", "draw"]

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
    with drawing():
        wide, narrow = FIGURES[name](result, WIDE), FIGURES[name](result, NARROW)
        settle(wide)  # drawn twice
        return Drawn(name, as_svg(wide, f"{name}-wide"), as_svg(narrow, f"{name}-narrow"), as_png(wide))
