"""Tables that are wider than the terminal, in parts that are not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from mola.compare.report.tables import MISSING, Row, Table

__all__ = ["fitting"]

BETWEEN = 3
"""Characters between columns, in the most generous of layouts."""


def fitting(table: Table, width: int) -> list[Table]:
    """The table in parts of whole groups of columns that fit; only the last has the caption.

    Args:
        table: what to show.
        width: in characters.

    Returns:
        At least one table.
    """
    groups = [[index for index, _ in members] for _, members in groupby(enumerate(table.columns), _group)]
    first = max((len(row.name) for row in table.rows), default=0)
    parts: list[list[int]] = [[]]
    for group in groups:
        if parts[-1] and first + _breadth(table, parts[-1] + group) > width:
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
    """The rows with these columns only; rows aside that say nothing in them are left out."""
    for row in rows:
        cells = tuple(row.cells[index] for index in part)
        if not row.aside or any(cell.text != MISSING for cell in cells):
            yield Row(row.name, cells, row.aside)


def _group(indexed: tuple[int, object]) -> object:
    index, column = indexed
    name = getattr(column, "group", "")
    return name or index  # columns without a group can be parted anywhere


def _breadth(table: Table, columns: Sequence[int]) -> int:
    return sum(
        BETWEEN
        + max(
            len(table.columns[index].name),
            max((len(word) for word in table.columns[index].group.split()), default=0),
            max((len(row.cells[index].text) for row in table.rows), default=0),
        )
        for index in columns
    )
