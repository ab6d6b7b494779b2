"""How figures look: one colour and stroke for each method everywhere, and two shapes, for wide screens and for phones."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mola.errors import MissingExtraError

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
except ImportError as error:
    raise MissingExtraError(feature="drawing figures", package="matplotlib", extra="bench") from error

COLOURS = {"MAP": "#8c8c8c", "DE": "#2b83c6", "LLLA": "#e69f00", "MoLA": "#009e73"}
"""Okabe and Ito's palette, which the colour-blind can tell apart; grey for the plain network."""

DASHED = (0, (3.2, 1.6))

KNOWN: dict[str, tuple[str, Any]] = {
    **{method: (colour, "-") for method, colour in COLOURS.items()},
    "MAP-T": (COLOURS["MAP"], DASHED),
    "DE-T": (COLOURS["DE"], DASHED),
    "MAP-N": (COLOURS["MAP"], DASHED),
    "DE-N": (COLOURS["DE"], DASHED),
    "MoLA (NLL)": (COLOURS["MoLA"], DASHED),
    "MoLA (distance)": ("#d55e00", "-"),
    "LLLA (distance)": ("#d55e00", DASHED),
    "SWAG": ("#cc79a7", DASHED),
    "MultiSWAG": ("#cc79a7", "-"),
    "MIMO": ("#9467bd", DASHED),
    "MIMO-MoLA": ("#9467bd", "-"),
}
"""Relatives share a colour: the one that the paper does not stress is dashed."""

OTHERS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#9467bd", "#8c8c8c", "#a6761d", "#b8a900")

PATTERNS: tuple[Any, ...] = ("-", DASHED, (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)), (0, (4, 1.2, 1, 1.2, 1, 1.2)))

INK = "#25303b"
"""Text and axes. A page replaces it by its own text colour, so that figures follow light and dark."""

PAPER = "#ffffff"

SETTINGS: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.facecolor": "none",
    "figure.constrained_layout.h_pad": 0.07,
    "figure.constrained_layout.w_pad": 0.07,
    "figure.facecolor": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the same figure everywhere
    "font.size": 9,
    "grid.alpha": 0.15,
    "grid.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",  # text stays text: selectable, searchable, small
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def strokes(methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What a line of each method is drawn with, by method."""
    methods = list(methods)
    taken = [KNOWN[method] for method in methods if method in KNOWN]
    free = (pair for pattern in PATTERNS for colour in OTHERS if (pair := (colour, pattern)) not in taken)
    # With more methods than pairs, the last ones cannot be told apart by their lines.
    pairs = {method: KNOWN[method] if method in KNOWN else next(free, (OTHERS[0], PATTERNS[-1])) for method in methods}
    return {method: {"color": colour, "linestyle": pattern} for method, (colour, pattern) in pairs.items()}


def crossed_strokes(kinds: Mapping[str, tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """Lines of methods that vary in two ways: one colour for each of the first, one pattern for each of the second."""
    first = list(dict.fromkeys(one for one, _ in kinds.values()))
    second = list(dict.fromkeys(two for _, two in kinds.values()))
    return {
        method: {
            "color": OTHERS[first.index(one) % len(OTHERS)],
            "linestyle": PATTERNS[second.index(two) % len(PATTERNS)],
        }
        for method, (one, two) in kinds.items()
    }


def colours(methods: Iterable[str]) -> dict[str, str]:
    """The colour of each method."""
    return {method: stroke["color"] for method, stroke in strokes(methods).items()}


@dataclass(frozen=True)
class Shape:
    """How wide a figure is, in inches, and whether its panels stand side by side or below each other."""

    name: str
    width: float

    @property
    def wide(self) -> bool:
        """Whether panels stand side by side."""
        return self.name == "wide"


WIDE = Shape("wide", 10.4)
NARROW = Shape("narrow", 4.4)


@contextmanager
def drawing() -> Iterator[None]:
    """Matplotlib's settings are these inside, and what they were before afterwards."""
    with mpl.rc_context(SETTINGS):
        yield


def canvas(shape: Shape, rows: int, columns: int, row_height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure with a grid of panels, row by row. It belongs to no window, so nothing need be closed."""
    figure = Figure(figsize=(shape.width, rows * row_height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, list(panels.flat)


def quiet_axes(panel: Axes) -> None:
    """Faint grid lines."""
    panel.grid(True)
    panel.tick_params(length=3)


def explain(figure: Figure, shape: Shape, *parts: str) -> None:
    """A line below a figure that says how to read it: on one line where there is room."""
    figure.supxlabel((" \N{MIDDLE DOT} " if shape.wide else "\n").join(parts), fontsize=8)


def settle(figure: Figure) -> None:
    """Arrange the panels now and for good: arranging takes longer than drawing, and would be done for each format."""
    figure.draw_without_rendering()
    # Not "none": that leaves an engine that arranges nothing, for which each format is drawn twice.
    figure.set_layout_engine(None)


def as_png(figure: Figure) -> bytes:
    """On white, for documents."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, facecolor=PAPER, metadata={"Software": None})
    return buffer.getvalue()


def as_svg(figure: Figure, name: str) -> str:
    """The bare `<svg>` element on a transparent ground; the same figure gives the same text.

    Args:
        figure: what to draw.
        name: prefix of every id inside, so that several fit on one page.

    Returns:
        SVG without prolog and metadata.
    """
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = text.replace("url(#", f"url(#{name}-")
    return re.sub(r'href="#', f'href="#{name}-', text)
