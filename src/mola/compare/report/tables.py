"""Tables: scores in, rows of text with the best ones marked out; and how a terminal shows them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mola.compare.demo_result import METHODS, DemoResult
from mola.compare.measured import CLEAR
from mola.compare.report.estimate import Estimate, leaders
from mola.errors import MissingExtraError

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["BOLD", "MISSING", "Cell", "Column", "Number", "Row", "Table", "demo_tables", "for_terminal", "make_table"]

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
    best: Collection[tuple[str, int]] | None = None,
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

    def cells(row: Sequence[Number], name: str | None = None) -> tuple[Cell, ...]:
        return tuple(
            Cell(MISSING) if number is None else Cell(_text(number, column.digits), (name, index) in best)
            for index, (number, column) in enumerate(zip(row, columns, strict=True))
        )

    rows = [Row(name, cells(row, name)) for name, row in values.items()]
    rows += [Row(name, cells(row), aside=True) for name, row in (aside or {}).items()]
    return Table(title, caption, tuple(columns), tuple(rows))


def _text(number: float | Estimate, digits: int) -> str:
    return number.text(digits) if isinstance(number, Estimate) else f"{number:z.{digits}f}"


BOLD = (
    f"Bold: leads every other method{{}} by more than {CLEAR:g} standard errors of their difference, which is taken input by "
    f"input; where nothing is bold, no lead is clear."
)
"""What bold means where errors are those of the data, not of several runs."""


def demo_tables(result: DemoResult) -> list[Table]:
    """In distribution, under rotation, and against outliers: by confidence, and by every score."""
    return [_in_distribution(result), _rotated(result), _outliers(result), _scores(result)]


def _measured(value: float, error: float | None, factor: float = 1.0) -> Estimate:
    return Estimate(value, error, 1).scaled(factor)


def _in_distribution(result: DemoResult) -> Table:
    digits = result.digits
    columns = {
        "accuracy": (Column("accuracy %"), 100),
        "nll": (Column("NLL", better="low", digits=3), 1),
        "brier": (Column("Brier", better="low", digits=3), 1),
        "ece": (Column("ECE %", better="low"), 100),
        "confidence": (Column("mean conf. %"), 100),
    }
    values = {
        name: [
            _measured(getattr(scores, score), scores.errors[score], factor) for score, (_, factor) in columns.items()
        ]
        for name, scores in digits.clean.items()
    }
    places = list(columns)
    best = {(name, places.index(score)) for score, found in digits.leads[0].items() for (name,) in found.clear}
    caption = (
        f"{digits.sizes['test']} test digits, with standard errors. NLL: log loss. ECE: expected calibration error, 15 bins. "
        f"{BOLD.format('')}"
    )
    return make_table("In distribution", caption, [column for column, _ in columns.values()], values, best=best)


def _rotated(result: DemoResult) -> Table:
    shown = (("accuracy", "acc. %", 100, 1), ("nll", "NLL", 1, 2), ("ece", "ECE %", 100, 1))
    columns = [
        Column(title, group=f"{angle}°", better=None if score == "accuracy" else "low", digits=digits)
        for angle in TABLE_ANGLES
        for score, title, _, digits in shown
    ]
    values = {
        name: [
            _measured(getattr(scores, score), scores.errors[score], factor)
            for angle in TABLE_ANGLES
            for scores in [result.digits.rotated[angle][name]]
            for score, _, factor, _ in shown
        ]
        for name in METHODS
    }
    best = {
        (name, 3 * index + place)
        for index, angle in enumerate(TABLE_ANGLES)
        for place, score in ((1, "nll"), (2, "ece"))
        for (name,) in result.digits.leads[angle][score].clear
    }
    return make_table(
        "Under rotation",
        f"The test digits, turned counter-clockwise. MAP and LLLA are the first network alone. {BOLD.format('')}",
        columns,
        values,
        best=best,
    )


def _outliers(result: DemoResult) -> Table:
    detection, leads = result.digits.detection, result.digits.detection_leads
    columns = [
        column
        for kind in detection
        for column in (
            Column("MMC", group=kind, better="low"),
            Column("AUROC", group=kind, better="high"),
        )
    ]
    values = {
        name: [
            number
            for found in (by_method[name] for by_method in detection.values())
            for number in (
                _measured(found.confidence, found.confidence_error, 100),
                _measured(*found.scores["max probability"], 100),
            )
        ]
        for name in METHODS
    }
    best = {
        (name, 2 * index + place)
        for index, kind in enumerate(detection)
        for place, what in ((0, "confidence"), (1, "auroc"))
        for (name,) in leads[kind][what].clear
    }
    caption = (
        f"In %. MMC: mean confidence. AUROC: how well outliers are told from test digits by low confidence; 50 is guessing. "
        f"{BOLD.format('')}"
    )
    return make_table("Out of distribution, by confidence", caption, columns, values, best=best)


def _scores(result: DemoResult) -> Table:
    detection, leads = result.digits.detection, result.digits.detection_leads
    rows = [(name, score) for name, found in next(iter(detection.values())).items() for score in found.scores]
    values = {
        f"{name}, {score}": [_measured(*by_method[name].scores[score], 100) for by_method in detection.values()]
        for name, score in rows
    }
    best = {
        (f"{name}, {score}", index) for index, kind in enumerate(detection) for name, score in leads[kind]["any"].clear
    }
    caption = (
        f"AUROC in %, every method by every score that it has. Energy and maximum logit come from the logits alone, so LLLA has "
        f"MAP's and MoLA has DE's; the ood score reads the direction of the features and not their length. "
        f"{BOLD.format(', by whichever score,')}"
    )
    columns = [Column(kind, better="high") for kind in detection]
    return make_table("Out of distribution, by every score", caption, columns, values, best=best)


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
