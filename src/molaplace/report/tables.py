"""Tables of formatted text for the terminal, Markdown and HTML.

Each `Column` defines a heading, the quantity to read from the records, and a number format. All output formats show the same text.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pandas as pd

from molaplace.evaluation import Estimate
from molaplace.evaluation.catalogue import Better, Metric, with_digits
from molaplace.report.numbers import Formatted, Quantity

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable


Number = float | Formatted | str | None

MISSING = "\N{EN DASH}"
NOWHERE = Quantity("", "")
ARROWS = {"low": "\N{DOWNWARDS ARROW}", "high": "\N{UPWARDS ARROW}"}


@dataclass(frozen=True)
class Column:
    """The heading and number format of a column and, in tables made from records, the quantity that it shows."""

    name: str
    group: str = ""
    """Heading above several adjacent columns."""
    better: Better | None = None
    """Direction of improvement; None if neither direction is better."""
    digits: int | None = 1
    """Number of decimals; None shows two significant digits of the standard error."""
    quantity: Quantity = NOWHERE
    factor: float = 1.0
    """Factor that converts numbers in the records to the unit of the column."""

    @property
    def heading(self) -> str:
        """Name of the column, with an arrow in the direction of improvement."""
        return f"{self.name} {ARROWS[self.better]}" if self.better else self.name


@dataclass(frozen=True, eq=False)
class Table:
    """A table of formatted text with a title and a caption."""

    title: str
    caption: str
    columns: tuple[Column, ...]
    texts: pd.DataFrame
    """Formatted text of each cell, with one row per method. Headings have one level, or two if the columns are grouped."""
    best: Collection[tuple[str, int]]
    """Row name and column index of each bold cell."""
    aside: Collection[str]
    """Rows excluded from the comparison, such as published numbers."""

    def marked(self, escape: Callable[[str], str], bold: str, italic: str) -> pd.DataFrame:
        """Return the escaped text of all cells; templates such as "**{}**" mark the best cells and the names of excluded rows."""
        cells = [
            [
                bold.format(escape(text)) if (row, index) in self.best else escape(text)
                for index, text in enumerate(texts)
            ]
            for row, texts in zip(self.texts.index, self.texts.to_numpy(), strict=True)
        ]
        rows = [italic.format(escape(row)) if row in self.aside else escape(row) for row in self.texts.index]
        return pd.DataFrame(cells, rows, self.texts.rename(columns=escape).columns)


def make_table(
    title: str,
    caption: str,
    columns: Sequence[Column],
    values: Mapping[str, Sequence[Number]],
    aside: Mapping[str, Sequence[Number]] | None = None,
    best: Collection[tuple[str, int]] = (),
) -> Table:
    """Format the numbers in each row; `best` contains the row name and the column index of each cell to mark.

    The rows in `aside` follow the others and are never marked.
    """
    rows = {**values, **(aside or {})}
    heads: list[tuple[str, str]] = [(column.group, column.heading) for column in columns]
    grouped = any(group for group, _ in heads)
    return Table(
        title,
        caption,
        tuple(columns),
        pd.DataFrame(
            [[_text(number, column) for number, column in zip(row, columns, strict=True)] for row in rows.values()],
            list(rows),
            pd.MultiIndex.from_tuples(heads) if grouped else [heading for _, heading in heads],
        ),
        best,
        tuple(aside or ()),
    )


def _text(number: Number, column: Column) -> str:
    if number is None or isinstance(number, str):
        return MISSING if number is None else number
    formatted = Estimate(number) if isinstance(number, (int, float)) else number
    return str(formatted) if column.digits is None else formatted.text(column.digits)


SHIFT_METRICS = with_digits({"log_likelihood": 3, "brier": 3, "ece": 1, "accuracy": 1, "confidence": 1})
"""Metrics shown as a function of the level of shift."""


def columns_on(sets: str | tuple[str, ...], metrics: Mapping[str, Metric], group: str = "") -> list[Column]:
    """Return columns that show metrics on one set, or their means over several sets."""
    return [
        Column(metric.heading, group, metric.better, metric.digits, Quantity(sets, name), metric.factor)
        for name, metric in metrics.items()
    ]


def quantity_table(
    title: str,
    caption: str,
    numbers: Callable[[Quantity, float], Mapping[str, Number]],
    columns: Sequence[Column],
    aside: Mapping[str, Sequence[Number]] | None = None,
    best: Callable[[Column, Mapping[str, Number]], Collection[str]] = lambda column, values: (),
) -> Table:
    """Return a table with the numbers of each method; columns without numbers are omitted unless `aside` has rows.

    `numbers` returns the numbers of each method for a quantity and a unit factor, and `best` the methods to mark in a column.
    """
    by_column = [(column, numbers(column.quantity, column.factor)) for column in columns]
    pairs = [
        (column, values)
        for column, values in by_column
        if aside or any(number is not None for number in values.values())
    ]
    best_cells = [(name, index) for index, (column, values) in enumerate(pairs) for name in best(column, values)]
    methods = dict.fromkeys(name for _, values in pairs for name in values)
    rows = {method: [values[method] for _, values in pairs] for method in methods}
    return make_table(title, caption, [column for column, _ in pairs], rows, aside, best_cells)


# --- the terminal ----------------------------------------------------------------------------------------------------


def print_table(console: Console, table: Table) -> None:
    """Print the title, the table and the caption; omit standard errors if the table is too wide for the terminal."""
    from rich.measure import Measurement
    from rich.text import Text

    rich_table = _rich_table(table)
    caption = table.caption
    unlimited = console.options.update(max_width=10_000)
    if Measurement.get(console, unlimited, rich_table).maximum > console.width:
        rich_table = _rich_table(table, errors=False)
        rich_table.width = Measurement.get(console, unlimited, rich_table).maximum
        caption += (
            " The terminal is too narrow to show standard errors; the output files contain them." if caption else ""
        )
    console.print(Text(table.title, style="bold"))
    console.print(rich_table, crop=False)
    if caption:
        console.print(Text(f"{caption}\n", style="dim"))


def _rich_table(table: Table, *, errors: bool = True) -> RichTable:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    rich_table = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    rich_table.add_column("", no_wrap=True)
    for index, column in enumerate(table.columns):
        # The heading of a group is placed above its first column, with one word per line, so that the numbers determine the column
        # width.
        first = index == 0 or table.columns[index - 1].group != column.group
        name = "\n".join(
            [*(column.group.split() if first else []), *([column.name] if errors else column.name.split())]
        )
        rich_table.add_column(name, justify="right", vertical="bottom", no_wrap=True)
    for row, texts in zip(table.texts.index, table.texts.to_numpy(), strict=True):
        cells = [
            Text(
                text if errors else text.split(" \N{PLUS-MINUS SIGN}")[0], "bold" if (row, index) in table.best else ""
            )
            for index, text in enumerate(texts)
        ]
        rich_table.add_row(Text(row), *cells, style="italic" if row in table.aside else None)
    return rich_table


# --- files -----------------------------------------------------------------------------------------------------------


def as_markdown(table: Table) -> str:
    """Return the title, table and caption as Markdown; if all columns belong to one group, the top-left cell names the group."""
    shared = {(column.group, column.better) for column in table.columns}
    if len(shared) == 1 and table.columns[0].group:
        corner = replace(table.columns[0], name=table.columns[0].group).heading
        names = [column.name for column in table.columns]
    else:
        corner = ""
        names = [f"{column.group} {column.heading}".strip() for column in table.columns]
    cells = table.marked(lambda text: text.replace("|", "\\|"), "**{}**", "*{}*")
    rows = [[name, *row] for name, row in zip(cells.index, cells.to_numpy(), strict=True)]
    return "\n".join([f"### {table.title}", "", markdown_rows([corner, *names], rows), "", table.caption, ""])


def markdown_rows(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return rows of text as a Markdown table; the first `left` columns are left-aligned, and all others are right-aligned."""
    aligned = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, aligned, *rows])


def as_html(table: Table) -> str:
    """Return the table as a `<table>` element."""
    with pd.option_context("display.max_colwidth", None):
        text: str = table.marked(html.escape, "<b>{}</b>", "<i>{}</i>").to_html(escape=False, border=0)
    return text
