"""Style and file formats of figures: colours and line styles of methods, SVG for web pages and PNG for documents."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from molaplace.errors import importing

with importing("drawing figures", "matplotlib", "cli"):
    import matplotlib as mpl
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
    from matplotlib.lines import Line2D as Line2D

COLOURS = {"MAP": "#8c8c8c", "DE": "#2b83c6", "LLLA": "#e69f00", "paper": "#9467bd", "MoLA": "#009e73"}
"""Colours of the main methods, most of them from Okabe and Ito's palette for colour-blind readers: the plain network is grey, MoLA with
the paper's rule ("paper") purple, and MoLA with the default rule green, like the library's pages."""

DASHED = (0, (3.2, 1.6))
DOTTED = (0, (1, 1.4))
DASH_DOTTED = (0, (5, 1.5, 1, 1.5))
LONG_DASHES = (0, (5, 2.5))

KNOWN: dict[str, tuple[str, Any]] = {
    "MAP": (COLOURS["MAP"], "-"),
    "MAP-T": (COLOURS["MAP"], DASHED),
    "MAP-N": (COLOURS["MAP"], DASHED),
    "DE": (COLOURS["DE"], "-"),
    "DE-T": (COLOURS["DE"], DASHED),
    "DE-N": (COLOURS["DE"], DASHED),
    "DE-L": ("#56b4e9", "-"),
    "DE-SVS": ("#56b4e9", DASHED),
    "DE-SMS": ("#56b4e9", DOTTED),
    "JUCAL": ("#b8a900", "-"),
    "ensemble": (COLOURS["DE"], "-"),
    "LLLA": (COLOURS["LLLA"], "-"),
    "LLLA (calibrated)": (COLOURS["MoLA"], DASHED),
    "LLLA (distance)": ("#d55e00", DASHED),
    "MoLA": (COLOURS["MoLA"], "-"),
    "MoLA (calibrated)": (COLOURS["MoLA"], "-"),
    "LLLA (paper)": (COLOURS["paper"], DASHED),
    "MoLA (paper)": (COLOURS["paper"], "-"),
    "MoLA (NLL)": (COLOURS["paper"], DASHED),
    "MoLA (all layers)": (COLOURS["paper"], DOTTED),
    "MoLA (subnetwork)": (COLOURS["paper"], DASH_DOTTED),
    "MoLA (distance)": ("#d55e00", "-"),
    "SWAG": ("#cc79a7", DASHED),
    "MultiSWAG": ("#cc79a7", "-"),
    "MIMO": ("#a6761d", DASHED),
    "MIMO-MoLA": ("#a6761d", "-"),
    "MC dropout": ("#17becf", "-"),
    "MC dropout-T": ("#17becf", DASHED),
}
"""Colour and line style of each known method, the same in all figures and pages. Related methods share a colour; the less important ones
have dashed lines."""

OTHERS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#9467bd", "#8c8c8c", "#a6761d", "#b8a900")

PATTERNS: tuple[Any, ...] = ("-", DASHED, DOTTED, DASH_DOTTED, (0, (4, 1.2, 1, 1.2, 1, 1.2)))

INK = "#25303b"
"""Colour of text and axes. Pages replace this colour with their own text colour, so that figures match the light or dark theme."""

PAPER = "#ffffff"

WIDTH = 7.2
"""Width of a figure in inches; at this width, two panels side by side are still readable on a phone."""

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
    "font.sans-serif": ["DejaVu Sans"],  # this font comes with matplotlib, so figures look the same everywhere
    "font.size": 9,
    "grid.alpha": 0.15,
    "grid.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",  # text stays selectable and searchable, and files stay small
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


Strokes = Mapping[str, Mapping[str, Any]]
"""Colour and line style by method."""


def strokes(methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the colour and line style of each method."""
    free = cycle((colour, pattern) for pattern in PATTERNS for colour in OTHERS)
    pairs = {method: KNOWN[method] if method in KNOWN else next(free) for method in methods}
    return {method: {"color": colour, "linestyle": pattern} for method, (colour, pattern) in pairs.items()}


def colours(methods: Iterable[str]) -> dict[str, str]:
    """Return the colour of each method."""
    return {method: stroke["color"] for method, stroke in strokes(methods).items()}


def drawing() -> AbstractContextManager[None]:
    """Apply the matplotlib settings in `SETTINGS` for the duration of the context."""
    return mpl.rc_context(SETTINGS)


def canvas(
    rows: int, columns: int, row_height: float, width: float = WIDTH, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure and the panels of its grid, row by row. The figure has no window, so it need not be closed."""
    figure = Figure(figsize=(width, rows * row_height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, list(panels.flat)


def quiet_axes(panel: Axes) -> None:
    """Draw faint grid lines."""
    panel.grid(True)
    panel.tick_params(length=3)


def shared_legend(figure: Figure, panels: list[Axes], num_panels: int, handles: list[Any] | None = None) -> None:
    """Draw one legend for all panels: in the first unused panel if it fits there, otherwise below the figure.

    By default, the legend has the labels of all panels; without handles, it is omitted.
    """
    for panel in panels[num_panels:]:
        panel.set_axis_off()
    if handles is None:
        all_handles = [handle for panel in panels[:num_panels] for handle in panel.get_legend_handles_labels()[0]]
        handles = list({handle.get_label(): handle for handle in all_handles}.values())
    if not handles:
        return
    style = {"fontsize": 8, "handlelength": 2.4, "labelspacing": 0.45, "columnspacing": 1.3}
    if len(panels) > num_panels and len(handles) <= 16:
        panels[num_panels].legend(handles=handles, loc="center left", **style)
        return
    longest = max(len(handle.get_label()) for handle in handles)
    columns = max(1, min(len(handles), int(figure.get_figwidth() * 12 / (longest + 7))))
    # The figure grows by the height of the legend so that the panels keep their size.
    figure.set_figheight(figure.get_figheight() + 0.19 * -(-len(handles) // columns))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, **style)


# --- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A figure that has not been drawn yet."""

    title: str
    caption: str
    make: Callable[[], Figure]


@dataclass(frozen=True)
class Drawn:
    """A drawn figure, as SVG without a background and as PNG on a white background."""

    name: str
    title: str
    caption: str
    svg: str
    png: bytes

    def write(self, folder: Path) -> None:
        """Write `<name>.svg` and `<name>.png`, both on a white background."""
        on_white = self.svg.replace("<svg", f'<svg style="background:{PAPER}"', 1)
        (folder / f"{self.name}.svg").write_text(on_white, encoding="utf-8")
        (folder / f"{self.name}.png").write_bytes(self.png)


def render(name: str, planned: Planned) -> Drawn:
    """Draw the figure; `name` becomes part of every id in the SVG."""
    with drawing():
        figure = planned.make()
        figure.draw_without_rendering()
        figure.set_layout_engine(None)  # compute the layout once, not once per format
        return Drawn(name, planned.title, planned.caption, as_svg(figure, name), as_png(figure))


def as_png(figure: Figure) -> bytes:
    """Return the figure as a PNG image on a white background, for documents."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, facecolor=PAPER, metadata={"Software": None})
    return buffer.getvalue()


def as_svg(figure: Figure, name: str) -> str:
    """Return the bare `<svg>` element with a transparent background; every id begins with `name`."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
