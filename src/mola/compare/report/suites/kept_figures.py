"""Figures are drawn again only if something they show, or the way they are drawn, has changed.

Each SVG begins with a key: a checksum of the records, of this package's source and of matplotlib's version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import matplotlib as mpl

from mola.compare.report.figures import Drawn, render, write_figure
from mola.compare.report.style import PAPER, Figure, Shape

__all__ = ["drawing_key", "kept_or_drawn"]

ON_WHITE = f' style="background:{PAPER}"'


def drawing_key(fingerprint: str) -> str:
    """The key of all figures of a suite with this fingerprint."""
    digest = hashlib.sha256(f"{fingerprint} {mpl.__version__}".encode())
    package = files("mola.compare.report")
    for folder in (package, package.joinpath("suites")):
        for source in sorted(folder.iterdir(), key=lambda source: source.name):
            if source.name.endswith(".py"):
                digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def kept_or_drawn(name: str, make: Callable[[Shape], Figure], key: str, folder: Path) -> Drawn:
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
