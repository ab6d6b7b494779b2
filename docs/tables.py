"""Fill the tables of a page from stored results: `python docs/tables.py docs/results.md results`.

A page holds places such as

    <!-- table: mnist outliers -->
    <!-- end -->

and what stands between the two lines is replaced by that table of that suite. The tests do the same and compare, so that
every number on the page is one of a record.
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path

from mola.compare.report.reading import read_suites
from mola.compare.report.suite_tables import suite_tables
from mola.compare.report.tables import Table, as_markdown
from mola.lab.uci import METHODS, read_records
from mola.lab.uci_tables import as_good, estimates, gap_findings, gap_table, published_table, score_table

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
        if suite == "uci":
            return f"{start}\n{uci_table(name, results)}\n\n{end}"
        if suite == "drawn":
            return f"{start}\n{drawn_table(name)}\n\n{end}"
        if suite == "links":
            return f"{start}\n{links_table(name)}\n\n{end}"
        known = tables(suite)
        if name not in known:
            message = f"{suite} has no table {name!r}; it has {', '.join(known)}."
            raise KeyError(message)
        return f"{start}\n{as_markdown(known[name]).strip()}\n\n{end}"

    return PLACE.sub(place, page)


def uci_table(name: str, results: Path) -> str:
    """A table of the regression sets, or what it says in words.

    Raises:
        KeyError: if there is no such table.
    """
    records = read_records(results)
    if name == "gaps":
        return gap_table(records)
    if name == "gap findings":
        return gap_findings(records)
    if name == "published":
        return published_table(list(estimates(records, "rmse")))
    if name in ("rmse", "nll"):
        return score_table(records, name)
    if name != "findings":
        message = f"uci has no table {name!r}; it has rmse, nll, findings, published, gaps, gap findings."
        raise KeyError(message)
    lines = []
    for score, words in (("rmse", "root mean squared error"), ("nll", "negative log-likelihood")):
        found = estimates(records, score)
        counts = [f"{method} in {len(as_good(found, method))}" for method in METHODS]
        lines.append(
            f"The best {words}, or within one standard error of it, in so many of {len(found)} sets: {', '.join(counts)}."
        )
    return "\n".join(lines)


def drawn_table(likelihood: str) -> str:
    """Closed forms against Monte Carlo: the worst over structures, inputs and outputs.

    Raises:
        KeyError: if there is no such likelihood.
    """
    path = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "closed_forms.json"
    rows = [row for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if row["likelihood"] == likelihood]
    if not rows:
        message = f"closed_forms.json knows no likelihood {likelihood!r}."
        raise KeyError(message)
    lines = [
        "| closed form | largest error | Monte Carlo's standard error there | largest error in standard errors |",
        "|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["quantity"] for row in rows):
        same = [row for row in rows if row["quantity"] == name]
        worst, most = max(same, key=lambda row: row["error"]), max(row["standard_errors"] for row in same)
        shown = f"{most:.1f}" if worst["exact"] else f"{most:.1f} (an approximation)"
        lines.append(f"| {name} | {worst['error']:.1e} | {worst['standard_error']:.1e} | {shown} |")
    return "\n".join(lines)


def links_table(name: str) -> str:
    """Links against the integral: errors by the rule that chose the prior precision, "scores", or "variances".

    Raises:
        KeyError: if there is no such table.
    """
    path = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "links_against_monte_carlo.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    if name == "scores":
        lines = ["| structure | link | λ | test NLL | ECE % | SVHN AUROC % |", "|---|---|---|---|---|---|"]
        for row in document["tuned"]:
            precision = "" if row["prior_precision"] is None else f"{row['prior_precision']:.2g}"
            lines.append(
                f"| {row['structure']} | {row['link']} | {precision} | {row['nll']:.4f} | {100 * row['ece']:.2f} "
                f"| {100 * row['svhn_auroc']:.2f} |"
            )
        return "\n".join(lines)
    if name == "variances":
        lines = ["| structure | λ | common mode: test | SVHN | contrasts: test | SVHN |", "|---|---|---|---|---|---|"]
        for row in document["variances"]:
            cells = [
                row[one] for one in ("prior_precision", "common_test", "common_svhn", "contrast_test", "contrast_svhn")
            ]
            lines.append(f"| `{row['structure']}` | {' | '.join(f'{value:.2g}' for value in cells)} |")
        return "\n".join(lines)
    rows = {(one["data"], one["structure"], one["link"]): one for one in document["rows"] if one["rule"] == name}
    if not rows:
        raise KeyError(f"links_against_monte_carlo.json has no rule {name!r}.")
    lines = [
        "| structure | link | test: TV mean | max | confidence | NLL | SVHN: TV mean | max | confidence |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    previous = None
    for (data, structure, link), test in rows.items():
        if data != "test":
            continue
        svhn = rows["svhn", structure, link]
        shown = "" if structure == previous else f"`{structure}`, λ = {test['prior_precision']:.2g}"
        previous = structure
        lines.append(
            f"| {shown} | {link} | {100 * test['mean_tv']:.2f} | {100 * test['max_tv']:.1f} "
            f"| {100 * test['confidence_error']:+.2f} | {test['nll_difference']:+.4f} "
            f"| {100 * svhn['mean_tv']:.2f} | {100 * svhn['max_tv']:.1f} | {100 * svhn['confidence_error']:+.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Fill a page in place."""
    page, results = Path(sys.argv[1]), Path(sys.argv[2])
    page.write_text(fill(page.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
