"""Fill measured numbers into pages from stored results: `python docs/values.py docs/choosing.md docs/method.md`.

Two kinds of places. A number in a sentence or in a table's cell,

    <!-- = cifar10 ablation rules; MoLA by nll; test NLL -->0.1781<!-- /= -->
    <!-- = benchmarks/results/modes.json; mean_far_confidence; MoLA; .0% -->90%<!-- /= -->

names a suite's table, a row and a column (what stands there is the mean over runs), or a JSON file, the steps down into it and
how to write what is there (`* 100 .1f` writes a hundred times the number); a step `key=value & key=value` picks from a list,
`count` is its length. And a part of a suite's table, rows and columns perhaps under other names,

    <!-- cut: cifar10 ablation rules; MoLA by nll = log loss | MoLA by threshold; test NLL | outliers AUROC -->
    <!-- end -->

The tests do the same and compare, so that every such number is one of a record.
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from mola.compare.report.reading import read_suites
from mola.compare.report.suite_tables import suite_tables
from mola.compare.report.tables import ARROWS, Column, Table, markdown_rows

ROOT = Path(__file__).resolve().parent.parent
VALUE = re.compile(r"(<!-- = ([^>]+?) -->)(.*?)(<!-- /= -->)", re.DOTALL)
CUT = re.compile(r"(<!-- cut: ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


@cache
def _tables(suite: str) -> dict[str, Table]:
    (found,) = read_suites(ROOT / "results", [suite])
    return suite_tables(found)


@cache
def _document(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def _table(name: str) -> Table:
    suite, _, table = name.partition(" ")
    if table not in (known := _tables(suite)):
        message = f"{suite} has no table {table!r}; it has {', '.join(known)}."
        raise KeyError(message)
    return known[table]


def _column_name(column: Column) -> str:
    return f"{column.group} {column.name}".strip()


def _cells(table: Table, row: str, columns: list[str]) -> list[str]:
    rows = {one.name: one for one in table.rows}
    places = {_column_name(column): index for index, column in enumerate(table.columns)}
    missing = [name for name in (row,) if name not in rows] + [name for name in columns if name not in places]
    if missing:
        message = f"{table.title}: no {missing}. Rows: {', '.join(rows)}. Columns: {', '.join(places)}."
        raise KeyError(message)
    return [rows[row].cells[places[name]].text for name in columns]


def _step(value: Any, step: str) -> Any:
    if not isinstance(value, list):
        return value[step]
    if step == "count":
        return len(value)
    if step.isdigit():
        return value[int(step)]
    wanted = [part.strip().partition("=")[::2] for part in step.split("&")]
    found = [one for one in value if all(str(one[key]) == text for key, text in wanted)]
    if len(found) != 1:
        message = f"{len(found)} of {len(value)} entries have {step}, expected one: was the record made by a whole run?"
        raise KeyError(message)
    return found[0]


def _value(place: str) -> str:
    source, *steps = [part.strip() for part in place.split(";")]
    if not source.endswith(".json"):
        row, column = steps
        return _cells(_table(source), row, [column])[0].split(" ")[0]
    *path, form = steps
    value = _document(source)
    for step in path:
        value = _step(value, step)
    if form.startswith("* "):
        factor, form = form.removeprefix("* ").split(" ")
        value *= float(factor)
    return f"{value:{form}}"


def _names(listed: str) -> dict[str, str]:
    pairs = [part.partition(" = ") for part in listed.split("|")]
    return {name.strip(): (other or name).strip() for name, _, other in pairs}


def _cut(place: str) -> str:
    source, rows, columns = [part.strip() for part in place.split(";")]
    table, shown, heads = _table(source), _names(rows), _names(columns)
    better = {_column_name(column): column.better for column in table.columns}
    header = ["", *[f"{other} {ARROWS.get(better.get(name) or '', '')}".strip() for name, other in heads.items()]]
    return markdown_rows(header, [[other, *_cells(table, name, list(heads))] for name, other in shown.items()])


def fill(page: str) -> str:
    """The page with its numbers as the records have them.

    Args:
        page: Markdown.

    Returns:
        The page.

    Raises:
        ValueError: if a place is not closed.
    """
    for pattern, opening in ((CUT, "<!-- cut: "), (VALUE, "<!-- = ")):
        if len(pattern.findall(page)) != page.count(opening):
            message = f"a place that begins with {opening!r} is not closed, and would take the text up to the next one with it."
            raise ValueError(message)
    page = CUT.sub(lambda match: f"{match.group(1)}\n{_cut(match.group(2))}\n\n{match.group(3)}", page)
    return VALUE.sub(lambda match: f"{match.group(1)}{_value(match.group(2))}{match.group(4)}", page)


def main() -> None:
    """Fill pages in place."""
    for name in sys.argv[1:]:
        page = Path(name)
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
