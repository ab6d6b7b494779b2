"""A figure in every form: SVG for wide screens and for phones, PNG for documents; drawn again only if something has changed.

A figure that is kept begins with a key: a checksum of the numbers it shows, of this package's source and of matplotlib's version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import matplotlib as mpl

from mola.compare.report.style import NARROW, PAPER, WIDE, Figure, Shape, as_png, as_svg, drawing, settle

ON_WHITE = f' style="background:{PAPER}"'

Maker = Callable[[Shape], Figure]
"""Draws a figure in a shape."""


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


def render(name: str, make: Maker) -> Drawn:
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
    on_white = figure.wide.replace("<svg", f"<svg{ON_WHITE}", 1)
    (folder / f"{figure.name}.svg").write_text(on_white, encoding="utf-8")
    (folder / f"{figure.name}.png").write_bytes(figure.png)


def drawing_key(fingerprint: str) -> str:
    """The key of all figures of a suite with this fingerprint."""
    digest = hashlib.sha256(f"{fingerprint} {mpl.__version__}".encode())
    sources = [files("mola").joinpath("reliability.py"), *files("mola.compare.report").iterdir()]
    for source in sorted(sources, key=lambda source: source.name):
        if source.name.endswith(".py"):
            digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def kept_or_drawn(name: str, make: Maker, key: str, folder: Path) -> Drawn:
    """The figure as it lies in the folder if its key is the same; otherwise drawn, and written there.

    Args:
        name: of its files: `<name>.svg`, `<name>-narrow.svg` and `<name>.png`.
        make: draws it in a shape.
        key: of everything that it depends on.
        folder: where figures are.

    Returns:
        The figure.
    """
    mark = f"<!-- {key} -->\n"
    wide, narrow, picture = (folder / f"{name}{end}" for end in (".svg", "-narrow.svg", ".png"))
    if all(path.is_file() for path in (wide, narrow, picture)):
        texts = [path.read_text(encoding="utf-8") for path in (wide, narrow)]
        if all(text.startswith(mark) and text.endswith("</svg>\n") for text in texts):
            first, second = (text.removeprefix(mark).replace(ON_WHITE, "", 1) for text in texts)
            return Drawn(name, first, second, picture.read_bytes())
    drawn = render(name, make)
    narrow.write_text(mark + drawn.narrow.replace("<svg", f"<svg{ON_WHITE}", 1), encoding="utf-8")
    write_figure(drawn, folder)
    # The key comes last: a figure that was not written to its end has none.
    wide.write_text(mark + wide.read_text(encoding="utf-8"), encoding="utf-8")
    return drawn
