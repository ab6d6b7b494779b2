"""Pieces of HTML pages that need nothing else: styles and figures inside, no script, no request."""

from __future__ import annotations

import re
from html import escape
from importlib.resources import files
from itertools import groupby

from mola.compare.report.figures import Drawn
from mola.compare.report.style import INK
from mola.compare.report.tables import Table

__all__ = ["document", "figure_markup", "inline_svg", "table_markup"]

SCREENS = (700, 900, 1100, 1300)
"""Widths in pixels up to which a hint can be shown; page.css has a rule for each."""

PHONE = 44
"""Characters of a table's row that fit on a phone, where letters are smaller and names wrap."""

LETTER, PADDING, MARGINS, PAGE = 8.1, 22.4, 40, 1100
"""Pixels: of a letter in a table, around a cell, around the page, and of a folded part of the page at its widest."""


def document(title: str, styles: str, body: str) -> str:
    """A complete HTML document.

    Args:
        title: for the window.
        styles: names of style sheets in this package, space between them.
        body: what the page shows.

    Returns:
        HTML with the styles inside.
    """
    style = "".join(files("mola.compare.report").joinpath(name).read_text(encoding="utf-8") for name in styles.split())
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


def table_markup(table: Table, *, tall: bool = False) -> str:
    """The table in a box that scrolls sideways, with a hint on the screens on which it has to, and its caption below.

    Args:
        table: what to show.
        tall: whether the box scrolls up and down too, for tables of many rows.

    Returns:
        HTML.
    """
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
    kind = _hint_kind(table)
    hint = f'<p class="hint {kind}" aria-hidden="true">scroll sideways &rarr;</p>' if kind else ""
    box = f'{hint}<div class="scroll{" tall" * tall}" tabindex="0" role="region" aria-label="{escape(table.title, quote=True)}">'
    return (
        f"{box}<table><thead>{head}<tr><th></th>{names}</tr></thead>"
        f'<tbody>{"".join(rows)}</tbody></table></div><p class="caption">{escape(table.caption)}</p>'
    )


def _hint_kind(table: Table) -> str:
    """The narrowest screen on which the table still fits, by an estimate that rather hints too often."""
    names = max((len(row.name) for row in table.rows), default=0)
    widths = [
        max([len(column.name), *[len(row.cells[index].text) for row in table.rows]])
        for index, column in enumerate(table.columns)
    ]
    starts = sum(1 for _ in groupby(column.group for column in table.columns))
    pixels = LETTER * (names + sum(widths)) + PADDING * (1 + len(widths)) + 10 * starts
    if pixels > PAGE:
        return "always"
    if names + sum(widths) + 3 * len(widths) <= PHONE:
        return ""
    return f"below-{min(screen for screen in SCREENS if screen >= min(pixels + MARGINS, SCREENS[-1]))}"


def inline_svg(svg: str, label: str) -> str:
    """An SVG element as part of the page: sized by it, in its text colour, and named for those who cannot see it."""
    opening, rest = svg.split(">", 1)
    opening = re.sub(r'\s(?:width|height|xmlns(?::\w+)?|version)="[^"]*"', "", opening)
    return f'{opening} role="img" aria-label="{escape(label, quote=True)}">{rest}'.replace(INK, "currentColor")
