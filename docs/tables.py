"""Fill the tables of a page from stored results: `python docs/tables.py docs/results.md results`.

A page holds places such as

    <!-- table: mnist outliers -->
    <!-- end -->

and what stands between the two lines is replaced by that table of that suite. The tests do the same and compare, so that
every number on the page is one of a record.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

from mola.compare.report.reading import read_suites
from mola.compare.report.suite_tables import suite_tables
from mola.compare.report.tables import Table, as_markdown

PLACE = re.compile(r"(<!-- table: (\w+) ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(page: str, results: Path) -> str:
    """The page with its tables as the records have them.

    Args:
        page: Markdown.
        results: the folder that `mola bench` wrote.

    Returns:
        The page.
    """

    @cache
    def tables(suite: str) -> dict[str, Table]:
        (found,) = read_suites(results, [suite])
        return suite_tables(found)

    def place(match: re.Match[str]) -> str:
        start, suite, name, end = match.groups()
        known = tables(suite)
        if name not in known:
            message = f"{suite} has no table {name!r}; it has {', '.join(known)}."
            raise KeyError(message)
        return f"{start}\n{as_markdown(known[name]).strip()}\n\n{end}"

    return PLACE.sub(place, page)


def main() -> None:
    """Fill a page in place."""
    page, results = Path(sys.argv[1]), Path(sys.argv[2])
    page.write_text(fill(page.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
