"""Insert numbers and tables from stored records into all pages, or into the pages given as arguments.

Run `python docs/values.py` or `python docs/values.py PAGE ...`. The comment before a number names a table in `docs/tables.py`, a row
and a column; the number is the mean over runs. Alternatively, the comment names a JSON file, the keys that lead to the number, and a
format; the format `* 100 .1f` multiplies the number by 100. A key of the form `key=value & key=value` selects the list entry
that has these values, and the key `count` gives the length of a list:

    <!-- = cifar10 ablation rules; MoLA by nll; test NLL -->0.1781<!-- /= -->
    <!-- = benchmarks/results/modes.json; mean_far_confidence; MoLA; .0% -->90%<!-- /= -->

Everything between the two comments that enclose a table is replaced:

    <!-- table: cifar10 outliers -->
    <!-- end -->

Tests check that all pages are up to date, so every such number comes from a record.
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tables import ROOT, Cells, cells, suite_table, table

VALUE = re.compile(r"(<!-- = ([^>]+?) -->)(.*?)(<!-- /= -->)", re.DOTALL)
TABLE = re.compile(r"(<!-- table: ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


@cache
def _document(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def _step(value: Any, step: str) -> Any:
    if not isinstance(value, list):
        return value[step]
    if step == "count":
        return len(value)
    if step.isdigit():
        return value[int(step)]
    wanted = [part.strip().partition("=")[::2] for part in step.split("&")]
    entries = [entry for entry in value if all(str(entry[key]) == text for key, text in wanted)]
    if len(entries) != 1:
        raise KeyError(
            f"Expected exactly one entry with {step}, but {len(entries)} of {len(value)} have it. Check that the record is complete."
        )
    return entries[0]


def _value(text: str) -> str:
    source, *steps = [part.strip() for part in text.split(";")]
    if not source.endswith(".json"):
        row, column = steps
        return cells(suite_table(source), row, [column])[0].split(" ")[0]
    *path, form = steps
    value = _document(source)
    for step in path:
        value = _step(value, step)
    return Cells().format_field(value, form)


def fill(page: str) -> str:
    """Return the text of a page after all numbers and tables have been filled in from the records."""
    for pattern, opening in ((TABLE, "<!-- table: "), (VALUE, "<!-- = ")):
        if len(pattern.findall(page)) != page.count(opening):
            raise ValueError(f"A comment that begins with {opening!r} has no closing comment. Add it.")
    page = TABLE.sub(lambda match: f"{match.group(1)}\n{table(match.group(2))}\n\n{match.group(3)}", page)
    return VALUE.sub(lambda match: f"{match.group(1)}{_value(match.group(2))}{match.group(4)}", page)


def main() -> None:
    """Update the pages on disk."""
    for page in map(Path, sys.argv[1:] or sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        if (filled := fill(text)) != text:
            page.write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    main()
