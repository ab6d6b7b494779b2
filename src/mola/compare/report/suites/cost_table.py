"""What the methods cost, and relative to what."""

from __future__ import annotations

from collections.abc import Mapping

from mola.compare.report import paper_numbers
from mola.compare.report.suites.reading import SuiteResults
from mola.compare.report.tables import Column, Number, Table, make_table

__all__ = ["cost_table"]

BASE, FIT_BASE = "MAP", "LLLA"
"""What prediction and memory, and what fitting are compared with: MAP fits nothing."""

MEGABYTE = 1e6


def cost_table(suite: SuiteResults) -> Table | None:
    """Seconds and megabytes, and their ratios beside the paper's ratios."""
    if not suite.cost:
        return None
    here = {row.method: (row.fit_seconds, row.predict_seconds, row.bytes / MEGABYTE) for row in suite.cost}
    columns = []
    for name, unit, base in (("fit", "s", FIT_BASE), ("predict", "s", BASE), ("memory", "MB", BASE)):
        columns += [
            Column(unit, group=name, digits=2),
            Column(f"\N{MULTIPLICATION SIGN} {base}", group=name, digits=2),
            Column(f"paper \N{MULTIPLICATION SIGN} {base}", group=name, digits=2),
        ]
    values: dict[str, list[Number]] = {}
    for method, costs in here.items():
        row: list[Number] = []
        for index, base in enumerate((FIT_BASE, BASE, BASE)):
            row += [
                costs[index],
                _ratio(here, method, base, index),
                _ratio(paper_numbers.COST, method, base, index),
            ]
        values[method] = row
    told = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in suite.cost_document["settings"].items())
    caption = (
        f"Measured in one run{f' ({told})' if told else ''}. Columns with a \N{MULTIPLICATION SIGN}: times that of {BASE} "
        f"(fitting: of {FIT_BASE}, since {BASE} fits nothing). Columns that begin with 'paper': the same ratios in the paper's "
        f"table ({paper_numbers.COST_SETTING}). Memory: what must be kept to predict."
    )
    return make_table(f"{suite.title}: cost", caption, columns, values)


def _ratio(costs: Mapping[str, tuple[float | None, float, float]], method: str, base: str, index: int) -> float | None:
    if method not in costs or base not in costs:
        return None
    mine, other = costs[method][index], costs[base][index]
    return mine / other if mine is not None and other else None
