"""Pieces of HTML pages that need nothing else: styles and figures inside, no script, no request."""

from __future__ import annotations

import re
from html import escape
from importlib.resources import files
from itertools import groupby

from mola.report.figures import Drawn
from mola.report.style import INK
from mola.report.tables import Table

__all__ = ["document", "figure_markup", "inline_svg", "table_markup"]


def document(title: str, styles: str, body: str) -> str:
    """A complete HTML document.

    Args:
        title: for the window.
        styles: names of style sheets in this package, space between them.
        body: what the page shows.

    Returns:
        HTML with the styles inside.
    """
    style = "".join(files("mola.report").joinpath(name).read_text(encoding="utf-8") for name in styles.split())
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def figure_markup(figure: Drawn, title: str, caption: str, heading: str = "h2") -> str:
    """A figure under its title, in the shape that fits the screen, and its caption below."""
    shapes = "".join(
        f'<div class="{kind}">{inline_svg(svg, title)}</div>'
        for kind, svg in (("wide", figure.wide), ("narrow", figure.narrow))
    )
    return (
        f'<{heading}>{escape(title)}</{heading}><figure id="{escape(figure.name)}">{shapes}'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def table_markup(table: Table) -> str:
    """The table in a box that scrolls sideways, and its caption below."""
    groups = [(name, len(list(columns))) for name, columns in groupby(column.group for column in table.columns)]
    grouped = any(name for name, _ in groups)
    starts = {sum(size for _, size in groups[:index]) for index in range(len(groups))} if grouped else set()

    def mark(index: int, *classes: str) -> str:
        names = [*classes, *(["first"] if index in starts else [])]
        return f' class="{" ".join(names)}"' if names else ""

    head = ""
    if grouped:
        cells = "".join(f'<th colspan="{size}" scope="colgroup">{escape(name)}</th>' for name, size in groups)
        head = f'<tr class="groups"><th></th>{cells}</tr>'
    names = "".join(
        f'<th scope="col"{mark(index)}>{escape(column.name)}</th>' for index, column in enumerate(table.columns)
    )
    rows = []
    for row in table.rows:
        cells = "".join(
            f"<td{mark(index, *(['best'] if cell.best else []))}>{escape(cell.text)}</td>"
            for index, cell in enumerate(row.cells)
        )
        aside = ' class="aside"' if row.aside else ""
        rows.append(f'<tr{aside}><th scope="row">{escape(row.name)}</th>{cells}</tr>')
    return (
        f'<div class="scroll"><table><thead>{head}<tr><th></th>{names}</tr></thead>'
        f'<tbody>{"".join(rows)}</tbody></table></div><p class="caption">{escape(table.caption)}</p>'
    )


def inline_svg(svg: str, label: str) -> str:
    """An SVG element as part of the page: sized by it, in its text colour, and named for those who cannot see it."""
    opening, rest = svg.split(">", 1)
    opening = re.sub(r'\s(?:width|height|xmlns(?::\w+)?|version)="[^"]*"', "", opening)
    return f'{opening} role="img" aria-label="{escape(label, quote=True)}">{rest}'.replace(INK, "currentColor")
