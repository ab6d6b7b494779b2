"""Tables as values, and their forms: terminal, Markdown, data frame and LaTeX. The templates make HTML.

`make_table` formats numbers and marks the best of each column; every form shows the same cells.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from mola.compare.report.estimate import Estimate, leaders

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

Number = float | Estimate | None
Better = Literal["low", "high"]

MISSING = "\N{EN DASH}"
ARROWS = {"low": "\N{DOWNWARDS ARROW}", "high": "\N{UPWARDS ARROW}"}


@dataclass(frozen=True)
class Column:
    """A metric."""

    name: str
    group: str = ""
    """Heading of several columns side by side."""
    better: Better | None = None
    """Direction of improvement; None if neither."""
    digits: int = 1

    @property
    def heading(self) -> str:
        """Name and arrow."""
        return f"{self.name} {ARROWS[self.better]}" if self.better else self.name


@dataclass(frozen=True)
class Cell:
    """A number as text, and whether it is the best of its column."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Row:
    """The numbers of one method."""

    name: str
    cells: tuple[Cell, ...]
    aside: bool = False
    """Not part of the comparison, such as published numbers."""


@dataclass(frozen=True)
class Table:
    """Rows of text under columns."""

    title: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    @property
    def groups(self) -> list[tuple[str, list[int]]]:
        """Groups of columns, each with the places of its columns."""
        named = groupby(range(len(self.columns)), key=lambda place: self.columns[place].group)
        return [(name, list(places)) for name, places in named]

    @property
    def widths(self) -> list[int]:
        """Characters in the longest cell of each column, its name included."""
        return [
            max([len(column.name), *[len(row.cells[place].text) for row in self.rows]])
            for place, column in enumerate(self.columns)
        ]

    @property
    def name_width(self) -> int:
        """Characters in the longest name of a row."""
        return max((len(row.name) for row in self.rows), default=0)


def make_table(
    title: str,
    caption: str,
    columns: Sequence[Column],
    values: Mapping[str, Sequence[Number]],
    aside: Mapping[str, Sequence[Number]] | None = None,
    best: Collection[tuple[str, int]] | None = None,
    digits: Mapping[str, Sequence[int]] | None = None,
) -> Table:
    """Format numbers and mark the best of each column.

    Args:
        title: title of the table.
        caption: how to read it.
        columns: its metrics.
        values: a number, an estimate or None for each column, by row.
        aside: further rows, which do not compete.
        best: row and column of each cell to mark. None marks estimates over runs that lead by more than chance, see `leaders`.
        digits: decimals of each column, by row, where rows have different units. None takes those of the columns.
    """
    if best is None:
        best = {
            (name, index)
            for index, column in enumerate(columns)
            if column.better is not None
            for name in leaders({name: _estimate(row[index]) for name, row in values.items()}, column.better)
        }
    usual = [column.digits for column in columns]

    def cells(row: Sequence[Number], decimals: Sequence[int], name: str | None = None) -> tuple[Cell, ...]:
        pairs = enumerate(zip(map(_estimate, row), decimals, strict=True))
        return tuple(
            Cell(MISSING) if number is None else Cell(number.text(places), (name, index) in best)
            for index, (number, places) in pairs
        )

    rows = [Row(name, cells(row, usual if digits is None else digits[name], name)) for name, row in values.items()]
    rows += [Row(name, cells(row, usual), aside=True) for name, row in (aside or {}).items()]
    return Table(title, caption, tuple(columns), tuple(rows))


def _estimate(number: Number) -> Estimate | None:
    return number if number is None or isinstance(number, Estimate) else Estimate(number, None, 1)


# --- the terminal ----------------------------------------------------------------------------------------------------

BETWEEN = 2
"""Characters between columns, and at both ends together."""


def fitting(table: Table, width: int) -> list[Table]:
    """Return the table in parts that fit the width in characters; the last part has the caption."""
    parts: list[list[int]] = [[]]
    room = width - BETWEEN - table.name_width
    left = room
    for place, (wide, column) in enumerate(zip(table.widths, table.columns, strict=True)):
        needed = BETWEEN + max([wide, *[len(word) for word in column.group.split()]])
        if parts[-1] and needed > left:
            parts.append([])
            left = room
        parts[-1].append(place)
        left -= needed
    if len(parts) == 1:
        return [table]
    return [
        replace(
            table,
            title=f"{table.title} ({number} of {len(parts)})",
            caption=table.caption if number == len(parts) else "",
            columns=tuple(table.columns[index] for index in part),
            rows=tuple(_cut(table.rows, part)),
        )
        for number, part in enumerate(parts, 1)
    ]


def _cut(rows: Sequence[Row], part: Sequence[int]) -> Iterator[Row]:
    for row in rows:
        cells = tuple(row.cells[index] for index in part)
        if not row.aside or any(cell.text != MISSING for cell in cells):
            yield replace(row, cells=cells)


@dataclass(frozen=True)
class TerminalTable:
    """Title, table and caption for `rich`, in as many parts as the terminal's width needs."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        for part in fitting(self.table, options.max_width):
            yield Text(part.title, style="bold")
            yield _rich_table(part)
            if part.caption:
                yield Text(part.caption, style="dim")
            yield Text("")


def _rich_table(table: Table) -> RenderableType:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    shown.add_column("", no_wrap=True)
    for group, places in table.groups:
        for place in places:
            # A group's heading is above its first column, a word to a line, so that numbers set the width.
            above = group.split() if place == places[0] else []
            name = "\n".join([*above, table.columns[place].name])
            shown.add_column(name, justify="right", vertical="bottom", no_wrap=True)
    for position, row in enumerate(table.rows):
        if row.aside and position and not table.rows[position - 1].aside:
            shown.rows[position - 1].end_section = True
        cells = [Text(cell.text, style="bold" if cell.best else "") for cell in row.cells]
        shown.add_row(Text(row.name), *cells, style="italic" if row.aside else None)
    return shown


# --- Markdown --------------------------------------------------------------------------------------------------------


def as_markdown(table: Table) -> str:
    """Return title, table and caption. Headings of groups precede the names of columns; a heading shared by all is in the corner."""
    shared = {(column.group, column.better) for column in table.columns}
    if len(shared) == 1 and table.columns[0].group:
        corner = replace(table.columns[0], name=table.columns[0].group).heading
        names = [column.name for column in table.columns]
    else:
        corner = ""
        names = [f"{column.group} {column.heading}".strip() for column in table.columns]
    rows = []
    for row in table.rows:
        name, *cells = (text.replace("|", "\\|") for text in (row.name, *(cell.text for cell in row.cells)))
        marked = [f"**{text}**" if cell.best else text for text, cell in zip(cells, row.cells, strict=True)]
        rows.append([f"*{name}*" if row.aside else name, *marked])
    return "\n".join([f"### {table.title}", "", markdown_rows([corner, *names], rows), "", table.caption, ""])


def markdown_rows(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return rows of text as a Markdown table: the first columns are left-aligned, the others right-aligned."""
    aligned = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, aligned, *rows])


# --- data frames and LaTeX -------------------------------------------------------------------------------------------

LONG, BROAD = 40, 80
"""Rows from which a table may break over pages; characters in a row from which it is shrunk to the line."""

SPECIAL = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        **{letter: f"\\{letter}" for letter in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\N{GREEK SMALL LETTER LAMDA}": r"$\lambda$",
    }
)
"""Characters that LaTeX reads as commands, or that its text fonts lack."""


def escape_latex(text: str) -> str:
    """Return the text with everything that LaTeX reads as a command made harmless; the sign of a negative number becomes a minus."""
    return re.sub(r"^-(?=\d)", "$-$", text.translate(SPECIAL))


def to_frame(table: Table) -> pd.DataFrame:
    """Return the cells as a data frame of texts, its columns by group and name."""
    pairs = [(column.group, column.heading) for column in table.columns]
    columns = pd.MultiIndex.from_tuples(pairs) if any(group for group, _ in pairs) else [name for _, name in pairs]
    return pd.DataFrame(
        [[cell.text for cell in row.cells] for row in table.rows], [row.name for row in table.rows], columns
    )


def as_latex(table: Table) -> str:
    """Return a booktabs table with its caption: a float, or a longtable that breaks over pages."""
    long = len(table.rows) > LONG
    bold = [["textbf:--rwrap;" if cell.best else "" for cell in row.cells] for row in table.rows]
    style = to_frame(table).style.format(escape_latex).apply(lambda _: np.array(bold), axis=None)
    for axis in (0, 1):
        style = style.format_index(escape_latex, axis=axis)
    style = style.apply_index(lambda _: ["textit:--rwrap;" if row.aside else "" for row in table.rows])
    text: str = style.to_latex(
        column_format="l" + "r" * len(table.columns),
        position=None if long else "htbp",
        position_float=None if long else "centering",
        hrules=True,
        multicol_align="c",
        caption=f"{escape_latex(table.title)}. {escape_latex(table.caption)}",
        environment="longtable" if long else None,
    )
    if long:
        return f"{{\\footnotesize\n{text}}}\n"
    text = text.replace(r"\centering", "\\centering\n\\footnotesize", 1)
    if table.name_width + sum(table.widths) + 2 * len(table.columns) > BROAD:
        text = text.replace(r"\begin{tabular}", "\\resizebox{\\linewidth}{!}{%\n\\begin{tabular}", 1)
        text = text.replace(r"\end{tabular}", "\\end{tabular}\n}", 1)
    return text


def latex_document(sections: Sequence[tuple[str, Sequence[Table]]], words: str = "") -> str:
    """Return a complete document that compiles, from words at its beginning and the title and tables of each section."""
    lines = [
        r"% Needs booktabs, longtable and graphicx, which every LaTeX has.",
        r"\documentclass{article}",
        r"\usepackage[T1]{fontenc}",
        r"\usepackage[utf8]{inputenc}",
        r"\usepackage{textcomp}",
        r"\usepackage[margin=2cm]{geometry}",
        r"\usepackage{booktabs,graphicx,longtable}",
        r"\begin{document}",
        escape_latex(words),
        "",
    ]
    for title, tables in sections:
        lines += [rf"\section*{{{escape_latex(title)}}}", ""]
        # Each on its own page at the latest: LaTeX keeps only a few floats waiting.
        lines += [part for table in tables for part in (as_latex(table), r"\clearpage", "")]
    return "\n".join([*lines, r"\end{document}", ""])
