"""Tables of what is varied: LLLA's structure and link, the number of components, the prior's rule, the weights."""

from __future__ import annotations

from functools import partial
from typing import Any

from mola.compare.record import Record
from mola.compare.report import paper_numbers
from mola.compare.report.suites.quantities import estimate, labelled, mmc, outlier_mean, outlier_score, shifted
from mola.compare.report.suites.reading import MAIN, SuiteResults
from mola.compare.report.suites.tables import curves_table, paper_network, runs_words
from mola.compare.report.tables import Cell, Column, Number, Row, Table, make_table

__all__ = ["GROUP_TITLES", "ablation_groups", "ablation_table", "settings_table", "variants_table"]

GROUP_TITLES = {
    "variants": "LLLA: structure and link",
    "structures": "MoLA: structure and rule",
    "components": "Number of components",
    "rules": "Rules for the prior precision",
    "weights": "Weights of the mixture",
}


def ablation_groups(suite: SuiteResults) -> list[str]:
    """What is varied in this suite: the known ablations in their order, others after them."""
    found = [group for group in suite.groups if group != MAIN]
    return [group for group in GROUP_TITLES if group in found] + [group for group in found if group not in GROUP_TITLES]


def ablation_table(suite: SuiteResults, group: str) -> Table:
    """In distribution, under shift and against outliers, for every variant."""
    outliers = [one.name for one in suite.of_role("outlier")]
    quantities = [
        (Column("NLL", "test", "low", 4), labelled("test", "nll"), 1),
        (Column("ECE %", "test", "low", 2), labelled("test", "ece"), 100),
        (Column("acc. %", "test", "high", 2), labelled("test", "accuracy"), 100),
        (Column("log-lik.", "shifted", "high", 3), shifted("log_likelihood"), 1),
        (Column("ECE %", "shifted", "low", 2), shifted("ece"), 100),
        (Column("MMC %", "shifted", None, 1), shifted("confidence"), 100),
        (Column("acc. %", "shifted", "high", 2), shifted("accuracy"), 100),
        (Column("MMC %", "outliers", "low", 1), outlier_mean(mmc, outliers), 100),
        (Column("AUROC", "outliers", "high", 2), outlier_mean(partial(outlier_score), outliers), 100),
    ]
    values: dict[str, list[Number]] = {
        method: [estimate(records, quantity, factor) for _, quantity, factor in quantities]
        for method, records in suite.groups[group].items()
    }
    known = [index for index in range(len(quantities)) if any(row[index] is not None for row in values.values())]
    caption = (
        f"{runs_words(suite.groups[group])} Shifted: mean over all levels of {suite.shift_title}. Outliers: mean over all "
        f"sets, told apart by confidence."
    )
    return make_table(
        f"{suite.title}: {GROUP_TITLES.get(group, group)}",
        caption,
        [quantities[index][0] for index in known],
        {method: [row[index] for index in known] for method, row in values.items()},
    )


def variants_table(suite: SuiteResults) -> Table | None:
    """Log-likelihood of the LLLA variants against the shift, beside the paper's."""
    methods = suite.groups.get("variants", {})
    if not methods or len(suite.levels()) < 2:
        return None
    given = paper_numbers.VARIANTS.get(suite.name, {})
    settings = [(records[0].settings.get("structure"), records[0].settings.get("link")) for records in methods.values()]
    paper = {
        f"LLLA {structure} {link}": curve
        for (structure, link), curve in given.items()
        if len(curve) == len(suite.levels()) and (structure, link) in settings
    }
    more = (
        f" Rows that begin with 'paper' are from its figure of LLLA variants, {paper_network(suite)}." if paper else ""
    )
    return curves_table(
        f"{suite.title}: log-likelihood of LLLA variants", suite, methods, "log_likelihood", paper, more
    )


SETTINGS = ("components", "structure", "link", "rule", "weights")


def settings_table(suite: SuiteResults) -> Table:
    """What makes each method, and what tuning chose."""
    rows = []
    for group in [MAIN, *ablation_groups(suite)]:
        for method, records in suite.groups.get(group, {}).items():
            cells = [_plain(records[0].settings.get(key)) for key in SETTINGS]
            others = {key: value for key, value in records[0].settings.items() if key not in SETTINGS}
            cells.append(", ".join(f"{key} {_plain(value)}" for key, value in others.items()))
            cells += [_chosen(records, "prior_precision"), _chosen(records, "temperature")]
            rows.append(Row(method, tuple(Cell(cell) for cell in cells)))
    columns = [*SETTINGS, "other", "prior precision", "temperature"]
    # A column that says nothing of any method is left out.
    known = [index for index in range(len(columns)) if any(row.cells[index].text for row in rows)]
    return Table(
        f"{suite.title}: settings, and what was tuned",
        "Ranges are over components and runs.",
        tuple(Column(columns[index]) for index in known),
        tuple(Row(row.name, tuple(row.cells[index] for index in known)) for row in rows),
    )


def _plain(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain(one) for one in value)
    return str(value)


def _chosen(records: tuple[Record, ...], key: str) -> str:
    numbers: list[float] = []
    for record in records:
        value = record.chosen.get(key)
        values = value if isinstance(value, list) else [value]
        numbers += [one for one in values if isinstance(one, (int, float)) and not isinstance(one, bool)]
    if not numbers:
        return ""
    low, high = f"{min(numbers):.3g}", f"{max(numbers):.3g}"
    return low if low == high else f"{low} to {high}"
