"""A table as a value, and its forms: for the terminal, as Markdown and as LaTeX.

`make_table` formats numbers and marks the best of each column; every form shows the same cells. HTML is made by the templates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from mola.compare.measured import Lead
from mola.compare.record import Record
from mola.compare.report.estimate import Estimate, On, Quantity, estimate, leaders
from mola.errors import MissingExtraError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

Number = float | Estimate | None

MISSING = "\N{EN DASH}"


@dataclass(frozen=True)
class Column:
    """A score."""

    name: str
    group: str = ""
    """What several columns side by side have in common."""
    better: Literal["low", "high"] | None = None
    """Which end is best; None where that is not for a table to say."""
    digits: int = 1


@dataclass(frozen=True)
class Cell:
    """A number as it is shown, and whether it is the best of its column."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Row:
    """The scores of one method."""

    name: str
    cells: tuple[Cell, ...]
    aside: bool = False
    """Stands apart from the others and does not compete with them."""


@dataclass(frozen=True)
class Table:
    """Rows of text under columns."""

    title: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    @property
    def groups(self) -> list[tuple[str, list[int]]]:
        """Names of the groups of columns, each with the places of its columns."""
        named = groupby(range(len(self.columns)), key=lambda place: self.columns[place].group)
        return [(name, list(places)) for name, places in named]

    @property
    def widths(self) -> list[int]:
        """Of each column, the number of characters in its longest cell, its name included."""
        return [
            max([len(column.name), *[len(row.cells[place].text) for row in self.rows]])
            for place, column in enumerate(self.columns)
        ]

    @property
    def name_width(self) -> int:
        """Number of characters in the longest name of a row."""
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
    """Format numbers and mark the best of each column, where it leads by more than chance.

    Args:
        title: of the table.
        caption: what to know when reading it.
        columns: what the numbers are.
        values: one number, estimate or None for each column, by row.
        aside: further rows that do not compete.
        best: row and column of each cell to mark, where that was decided before. None compares the estimates over runs: the best
            mean is marked if it leads every other clearly, see `mola.compare.report.estimate.leaders`.
        digits: decimals of each column, by row, where rows have units of their own. None takes those of the columns.

    Returns:
        The table.
    """
    if best is None:
        best = {
            (name, index)
            for index, column in enumerate(columns)
            if column.better is not None
            for name in leaders({name: row[index] for name, row in values.items()}, column.better)
        }

    usual = [column.digits for column in columns]

    def cells(row: Sequence[Number], name: str | None = None) -> tuple[Cell, ...]:
        decimals = usual if digits is None or name is None else digits[name]
        return tuple(
            Cell(MISSING) if number is None else Cell(_text(number, places), (name, index) in best)
            for index, (number, places) in enumerate(zip(row, decimals, strict=True))
        )

    rows = [Row(name, cells(row, name)) for name, row in values.items()]
    rows += [Row(name, cells(row), aside=True) for name, row in (aside or {}).items()]
    return Table(title, caption, tuple(columns), tuple(rows))


def _text(number: float | Estimate, digits: int) -> str:
    return number.text(digits) if isinstance(number, Estimate) else f"{number:z.{digits}f}"


@dataclass(frozen=True)
class Shown:
    """A column, what it shows of a record, and the factor to its unit."""

    column: Column
    quantity: Quantity
    factor: float = 1.0


def records_table(
    title: str,
    caption: str,
    methods: Mapping[str, Sequence[Record]],
    shown: Sequence[Shown],
    aside: Mapping[str, Sequence[Number]] | None = None,
    leads: Mapping[str, Mapping[str, Lead]] | None = None,
) -> Table:
    """Methods by numbers of their records.

    Args:
        title: of the table.
        caption: what to know when reading it.
        methods: records by method.
        shown: its columns. One that no method knows is left out, unless there are rows aside.
        aside: further rows that do not compete.
        leads: by set and metric, who leads, where that was decided on the data of one run, see `mola.compare.record.Comparison`.

    Returns:
        The table.
    """
    values = {
        method: [estimate(records, one.quantity, one.factor) for one in shown] for method, records in methods.items()
    }
    known = [place for place in range(len(shown)) if aside or any(row[place] is not None for row in values.values())]
    best = {
        (method, index)
        for index, place in enumerate(known)
        for method in methods
        if leads and isinstance(on := shown[place].quantity, On) and on.metric in leads.get(on.name, {})
        if {(method,), (method, on.score)} & set(leads[on.name][on.metric].clear)
    }
    return make_table(
        title,
        caption,
        [shown[place].column for place in known],
        {method: [row[place] for place in known] for method, row in values.items()},
        aside,
        best if leads else None,
    )


# --- the terminal ----------------------------------------------------------------------------------------------------

BETWEEN = 2
"""Characters between columns, and at both ends together."""


def fitting(table: Table, width: int) -> list[Table]:
    """The table in parts of whole groups of columns that fit, or of columns where a group is too wide; only the last has the caption.

    Args:
        table: what to show.
        width: in characters.

    Returns:
        At least one table.
    """
    widths = [
        BETWEEN + max([wide, *[len(word) for word in column.group.split()]])
        for wide, column in zip(table.widths, table.columns, strict=True)
    ]

    def too_wide(places: list[int]) -> bool:
        return BETWEEN + table.name_width + sum(widths[place] for place in places) > width

    # Columns without a group can be parted anywhere, and those of a group that fits nowhere have to be: numbers would be cut off.
    groups = [
        group
        for name, places in table.groups
        for group in ([places] if name and not too_wide(places) else [[one] for one in places])
    ]
    parts: list[list[int]] = [[]]
    for group in groups:
        if parts[-1] and too_wide(parts[-1] + group):
            parts.append([])
        parts[-1] += group
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
    # The rows with these columns only; rows aside that say nothing in them are left out.
    for row in rows:
        cells = tuple(row.cells[index] for index in part)
        if not row.aside or any(cell.text != MISSING for cell in cells):
            yield Row(row.name, cells, row.aside)


@dataclass(frozen=True)
class TerminalTable:
    """A table that `rich` prints: title, table and caption, in as many parts as the width of the terminal asks for."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        for part in fitting(self.table, options.max_width):
            yield Text(part.title, style="bold")
            yield _rich_table(part)
            if part.caption:
                yield Text(part.caption, style="dim")
            yield Text("")


def for_terminal(table: Table) -> TerminalTable:
    """The table for a console of `rich`.

    Args:
        table: what to show.

    Returns:
        Something to print.
    """
    if find_spec("rich") is None:
        raise MissingExtraError(feature="tables in the terminal", package="rich", extra="cli")
    return TerminalTable(table)


def _rich_table(table: Table) -> RenderableType:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    shown.add_column("", no_wrap=True)
    for group, places in table.groups:
        for place in places:
            # A group stands over its first column alone, a word to a line, so that numbers and not names set the width.
            over = group.split() if place == places[0] else []
            name = "\n".join([*over, table.columns[place].name])
            shown.add_column(name, justify="right", vertical="bottom", no_wrap=True)
    for position, row in enumerate(table.rows):
        if row.aside and position and not table.rows[position - 1].aside:
            shown.rows[position - 1].end_section = True
        cells = [Text(cell.text, style="bold" if cell.best else "") for cell in row.cells]
        shown.add_row(row.name, *cells, style="italic" if row.aside else None)
    return shown


# --- Markdown and LaTeX ----------------------------------------------------------------------------------------------

ARROWS = {"low": "\N{DOWNWARDS ARROW}", "high": "\N{UPWARDS ARROW}"}

LONG, BROAD = 40, 80
"""Rows from which a table may break over pages; characters in a row from which it is shrunk to the line."""

SPECIAL = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "\N{PLUS-MINUS SIGN}": r"$\pm$",
    "\N{MULTIPLICATION SIGN}": r"$\times$",
    "\N{DOWNWARDS ARROW}": r"$\downarrow$",
    "\N{UPWARDS ARROW}": r"$\uparrow$",
    "\N{RIGHTWARDS ARROW}": r"$\rightarrow$",
    "\N{DEGREE SIGN}": r"$^\circ$",
    "\N{GREEK SMALL LETTER LAMDA}": r"$\lambda$",
    "\N{MIDDLE DOT}": r"$\cdot$",
    "\N{EN DASH}": "--",
    "\N{LEFT DOUBLE QUOTATION MARK}": "``",
    "\N{RIGHT DOUBLE QUOTATION MARK}": "''",
}


def escape_latex(text: str) -> str:
    """The text with everything that LaTeX reads as a command made harmless."""
    return "".join(SPECIAL.get(letter, letter) for letter in text)


def as_markdown(table: Table) -> str:
    """Title, table and caption; groups of columns are named in each of their columns, one that all share in the corner."""
    shared = {(column.group, column.better) for column in table.columns}
    corner = ""
    if len(shared) == 1 and table.columns[0].group:
        corner = _with_arrow(replace(table.columns[0], name=table.columns[0].group))
        names = [column.name for column in table.columns]
    else:
        names = [" ".join(part for part in (column.group, _with_arrow(column)) if part) for column in table.columns]
    rows = []
    for row in table.rows:
        name, *cells = (text.replace("|", "\\|") for text in (row.name, *(cell.text for cell in row.cells)))
        marked = [f"**{text}**" if cell.best else text for text, cell in zip(cells, row.cells, strict=True)]
        rows.append([f"*{name}*" if row.aside else name, *marked])
    return "\n".join([f"### {table.title}", "", markdown_rows([corner, *names], rows), "", table.caption, ""])


def markdown_rows(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Rows of text as a Markdown table, the first columns flush left and the others flush right."""
    aligned = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, aligned, *rows])


def _with_arrow(column: Column) -> str:
    return f"{column.name} {ARROWS[column.better]}" if column.better else column.name


def as_latex(table: Table) -> str:
    """A booktabs table with its caption: one float, or a table that breaks over pages if it is long."""
    layout = "l" + "r" * len(table.columns)
    head = _head(table)
    body = []
    for position, row in enumerate(table.rows):
        if row.aside and position and not table.rows[position - 1].aside:
            body.append(r"\midrule")
        body.append(_row(row))
    caption = rf"\caption{{{escape_latex(table.title)}. {escape_latex(table.caption)}}}"
    if len(table.rows) > LONG:
        heading = [r"\toprule", *head, r"\midrule"]
        lines = [r"{\footnotesize", rf"\begin{{longtable}}{{{layout}}}", caption + r" \\", *heading, r"\endfirsthead"]
        lines += [*heading, r"\endhead", *body, r"\bottomrule", r"\end{longtable}", "}", ""]
        return "\n".join(lines)
    inner = [
        rf"\begin{{tabular}}{{{layout}}}",
        r"\toprule",
        *head,
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    if table.name_width + sum(table.widths) + 2 * len(table.columns) > BROAD:
        inner = [r"\resizebox{\linewidth}{!}{%", *inner, "}"]
    return "\n".join([r"\begin{table}[htbp]", r"\centering", caption, r"\footnotesize", *inner, r"\end{table}", ""])


def _head(table: Table) -> list[str]:
    names = " & ".join(["", *[escape_latex(_with_arrow(column)) for column in table.columns]]) + r" \\"
    if not any(column.group for column in table.columns):
        return [names]
    groups = [rf"\multicolumn{{{len(places)}}}{{c}}{{{escape_latex(name)}}}" for name, places in table.groups]
    rules = [rf"\cmidrule(lr){{{places[0] + 2}-{places[-1] + 2}}}" for name, places in table.groups if name]
    return [" & ".join(["", *groups]) + r" \\", " ".join(rules), names]


def _row(row: Row) -> str:
    name = rf"\textit{{{escape_latex(row.name)}}}" if row.aside else escape_latex(row.name)
    return " & ".join([name, *[_cell(cell) for cell in row.cells]]) + r" \\"


def _cell(cell: Cell) -> str:
    text = escape_latex(cell.text)
    if text.startswith("-") and text[1:2].isdigit():
        text = f"$-${text[1:]}"  # a minus, not a hyphen
    return rf"\textbf{{{text}}}" if cell.best else text


def latex_document(sections: Sequence[tuple[str, Sequence[Table]]]) -> str:
    """A document that compiles as it is; tables can be taken from it one by one.

    Args:
        sections: title and tables of each.

    Returns:
        LaTeX.
    """
    lines = [
        r"% Needs booktabs, longtable and graphicx, which every LaTeX has.",
        r"\documentclass{article}",
        r"\usepackage[T1]{fontenc}",
        r"\usepackage[utf8]{inputenc}",
        r"\usepackage[margin=2cm]{geometry}",
        r"\usepackage{booktabs,graphicx,longtable}",
        r"\begin{document}",
        "",
    ]
    for title, tables in sections:
        lines += [rf"\section*{{{escape_latex(title)}}}", ""]
        # Each on its own page at the latest: LaTeX keeps only so many floats waiting.
        lines += [part for table in tables for part in (as_latex(table), r"\clearpage", "")]
    return "\n".join([*lines, r"\end{document}", ""])
