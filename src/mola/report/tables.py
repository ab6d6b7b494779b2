"""Tables: scores in, rows of text with the best ones marked out; and how a terminal shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mola.bench.demo_result import METHODS, DemoResult
from mola.errors import MissingExtraError
from mola.report.estimate import Estimate

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["MISSING", "Cell", "Column", "Number", "Row", "Table", "demo_tables", "for_terminal", "make_table"]

Number = float | Estimate | None

TABLE_ANGLES = (15, 30, 45)
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


def make_table(
    title: str,
    caption: str,
    columns: Sequence[Column],
    values: Mapping[str, Sequence[Number]],
    aside: Mapping[str, Sequence[Number]] | None = None,
) -> Table:
    """Format numbers and mark the best of each column; those that look the same as the best are best too.

    Args:
        title: of the table.
        caption: what to know when reading it.
        columns: what the numbers are.
        values: one number, estimate or None for each column, by row. Estimates compete by their means.
        aside: further rows that do not compete.

    Returns:
        The table.
    """
    best: list[str | None] = []
    for index, column in enumerate(columns):
        numbers = [_mean(number) for row in values.values() if (number := row[index]) is not None]
        choose = {"low": min, "high": max}.get(column.better or "")
        best.append(None if choose is None or not numbers else _text(choose(numbers), column.digits))

    def cells(row: Sequence[Number], *, competes: bool) -> tuple[Cell, ...]:
        shown = []
        for number, column, top in zip(row, columns, best, strict=True):
            if number is None:
                shown.append(Cell(MISSING))
            else:
                leads = competes and _text(_mean(number), column.digits) == top
                shown.append(Cell(_text(number, column.digits), leads))
        return tuple(shown)

    rows = [Row(name, cells(row, competes=True)) for name, row in values.items()]
    rows += [Row(name, cells(row, competes=False), aside=True) for name, row in (aside or {}).items()]
    return Table(title, caption, tuple(columns), tuple(rows))


def _mean(number: float | Estimate) -> float:
    return number.mean if isinstance(number, Estimate) else number


def _text(number: float | Estimate, digits: int) -> str:
    return number.text(digits) if isinstance(number, Estimate) else f"{number:z.{digits}f}"


def demo_tables(result: DemoResult) -> list[Table]:
    """In distribution, under rotation, and against outliers."""
    return [_in_distribution(result), _rotated(result), _outliers(result)]


def _in_distribution(result: DemoResult) -> Table:
    digits = result.digits
    count = digits.sizes["test"]
    accuracy = digits.clean["MAP"].accuracy
    noise = 100 * (accuracy * (1 - accuracy) / count) ** 0.5
    columns = [
        Column("accuracy %"),
        Column("NLL", better="low", digits=3),
        Column("Brier", better="low", digits=3),
        Column("ECE %", better="low"),
        Column("mean conf. %"),
    ]
    values = {
        name: (100 * scores.accuracy, scores.nll, scores.brier, 100 * scores.ece, 100 * scores.confidence)
        for name, scores in digits.clean.items()
    }
    caption = (
        f"{count} test digits: chance alone moves an accuracy by {noise:.1f} points. NLL: log loss. ECE: expected "
        f"calibration error, 15 bins. What the methods cost or gain where nothing is wrong."
    )
    return make_table("In distribution", caption, columns, values)


def _rotated(result: DemoResult) -> Table:
    columns = [
        column
        for angle in TABLE_ANGLES
        for column in (
            Column("acc. %", group=f"{angle}°"),
            Column("NLL", group=f"{angle}°", better="low", digits=2),
            Column("ECE %", group=f"{angle}°", better="low"),
        )
    ]
    values = {
        name: [
            number
            for angle in TABLE_ANGLES
            for scores in [result.digits.rotated[angle][name]]
            for number in (100 * scores.accuracy, scores.nll, 100 * scores.ece)
        ]
        for name in METHODS
    }
    return make_table(
        "Under rotation",
        "The test digits, turned counter-clockwise. MAP and LLLA are the first network alone.",
        columns,
        values,
    )


def _outliers(result: DemoResult) -> Table:
    sets = list(result.digits.detection)
    columns = [
        column
        for kind in sets
        for column in (
            Column("MMC", group=kind, better="low"),
            Column("AUROC", group=kind, better="high"),
        )
    ]
    values = {
        name: [
            number
            for kind in sets
            for found in [result.digits.detection[kind][name]]
            for number in (100 * found.confidence, 100 * found.auroc)
        ]
        for name in METHODS
    }
    scored: list[Number] = []
    for kind in sets:
        scored += [None, 100 * result.digits.ood_score_auroc[kind]["MoLA"]]
    caption = (
        "In %. MMC: mean confidence. AUROC: how well outliers are told from test digits by low confidence; 50 is guessing. "
        "Last row: told apart by MoLA's ood_score instead, which reads the direction of the features and not their length."
    )
    return make_table("Out of distribution", caption, columns, values, aside={"MoLA, ood_score": scored})


def for_terminal(table: Table) -> Group:
    """The table as `rich` draws it.

    Args:
        table: what to show.

    Returns:
        Something a rich console prints: title, table, caption.

    Raises:
        MissingExtraError: if rich is not installed.
    """
    try:
        from rich import box
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError as error:
        raise MissingExtraError(feature="tables in the terminal", package="rich", extra="cli") from error
    shown = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    shown.add_column("", no_wrap=True)
    previous = ""
    for column in table.columns:
        # A group stands over its first column alone, a word to a line, so that numbers and not names set the width.
        over = column.group.split() if column.group != previous else []
        previous = column.group
        shown.add_column("\n".join([*over, column.name]), justify="right", vertical="bottom", no_wrap=True)
    for position, row in enumerate(table.rows):
        if row.aside and position and not table.rows[position - 1].aside:
            shown.rows[position - 1].end_section = True
        cells = [Text(cell.text, style="bold" if cell.best else "") for cell in row.cells]
        shown.add_row(row.name, *cells, style="italic" if row.aside else None)
    below = [Text(table.caption, style="dim")] if table.caption else []
    return Group(Text(table.title, style="bold"), shown, *below, Text(""))
