"""The tables of a suite: methods in and out of distribution and under shift, what was varied, what it cost; beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from mola.compare.record import Record, SetInfo
from mola.compare.report import paper_numbers
from mola.compare.report.estimate import (
    EXCESS,
    Estimate,
    On,
    Quantity,
    at_level,
    estimate,
    levels_of,
    mean_over,
    of_type,
    runs_words,
    shared_outliers,
    shifted,
)
from mola.compare.report.measure_tables import people_table, rejection_table
from mola.compare.report.openood import openood_table
from mola.compare.report.reading import MAIN, SuiteResults, known_scores
from mola.compare.report.tables import Cell, Column, Number, Row, Shown, Table, make_table, records_table

TERMINAL = ("outliers", "in-distribution", "cost")
"""Tables that are shown in the terminal; all of them are in the files."""


def suite_tables(suite: SuiteResults) -> dict[str, Table]:
    """All tables, in order."""
    tables: dict[str, Table | None] = {
        "outliers": _outliers(suite),
        "difference": _differences(suite),
        "scores": _score_digest(suite),
        **{f"scores {one.name}": _scores(suite, one.name) for one in suite.of_role("outlier")},
        "openood": openood_table(suite),
        "rejection": rejection_table(suite),
        "in-distribution": _in_distribution(suite),
        "risk": _risk(suite),
        "people": people_table(suite),
        **{f"shift {metric}": _along_shift(suite, metric) for metric in METRIC_NAMES},
        **{f"types {metric}": _by_type(suite, metric) for metric in BY_TYPE},
        "variants": _variants(suite),
        **{f"ablation {group}": _ablation(suite, group) for group in ablation_groups(suite)},
        "cost": _cost(suite),
        "settings": _settings(suite),
    }
    return {name: table for name, table in tables.items() if table is not None}


METRIC_NAMES = {
    "log_likelihood": "log-likelihood",
    "brier": "Brier score",
    "ece": "calibration error (ECE)",
    "accuracy": "accuracy",
    "confidence": "mean confidence",
}
"""Metrics that are followed along a shift."""

PERCENT = ("accuracy", "ece", "confidence")

BETTER: dict[str, Literal["low", "high"] | None] = {
    "log_likelihood": "high",
    "brier": "low",
    "ece": "low",
    "accuracy": "high",
    "confidence": None,
}


def _paper_name(method: str) -> str:
    return f"paper: {method}"


def _outliers(suite: SuiteResults) -> Table | None:
    # Mean confidence in every set, and how well outliers are told apart by confidence; the paper's rows below.
    sets = suite.of_role("outlier")
    if not sets or not suite.runs:
        return None
    paper = paper_numbers.OUTLIERS.get(suite.name, {})
    titles = ["test MMC", *(f"{one.title} {kind}" for one in sets for kind in ("MMC", "AUROC"))]
    aside = {_paper_name(method): [row.get(title) for title in titles] for method, row in paper.items()}
    caption = (
        f"In %. {runs_words(suite.runs)} MMC: mean confidence. AUROC: how well outliers are told from test data by low "
        f"confidence; 50 is guessing."
    )
    caption += _paper_words(suite, bool(aside))
    return records_table(f"{suite.title} against outliers", caption, suite.runs, _outlier_columns(sets), aside)


def _outlier_columns(sets: Sequence[SetInfo]) -> list[Shown]:
    shown = [Shown(Column("MMC", "test"), On("test", "confidence"), 100)]
    for one in sets:
        shown.append(Shown(Column("MMC", one.title, "low"), On(one.name, "confidence"), 100))
        shown.append(Shown(Column("AUROC", one.title, "high"), On(one.name, "auroc"), 100))
    return shown


def _paper_words(suite: SuiteResults, given: bool) -> str:
    if not given:
        return ""
    return f" Rows that begin with 'paper' are the paper's own numbers, {paper_network(suite)}."


def paper_network(suite: SuiteResults) -> str:
    """Whether the paper's numbers are of the same network, such as "also with LeNet"."""
    there, here = paper_numbers.NETWORKS[suite.name], suite.network
    if there.lower().replace("-", "") == here.lower().replace("-", ""):
        return f"also with {there}"
    return f"with another network: {there} there, {here} here"


def _differences(suite: SuiteResults) -> Table | None:
    paper = paper_numbers.OUTLIERS.get(suite.name, {})
    table_sets = [one for one in suite.of_role("outlier") if any(f"{one.title} MMC" in row for row in paper.values())]
    methods = [method for method in suite.runs if method in paper]
    if not table_sets or not methods:
        return None
    shown = _outlier_columns(table_sets)
    values: dict[str, list[Number]] = {
        method: [
            _difference(
                estimate(suite.runs[method], one.quantity, 100), paper[method].get(f"{column.group} {column.name}")
            )
            for one in shown
            for column in [one.column]
        ]
        for method in methods
    }
    columns = [replace(one.column, better=None) for one in shown]
    return make_table(
        f"{suite.title}: ours minus the paper's",
        "In points of %; errors are of the difference. Positive: higher here.",
        columns,
        values,
    )


def _difference(mine: Estimate | None, theirs: Estimate | None) -> Estimate | None:
    if mine is None or theirs is None:
        return None
    error = None if mine.error is None or theirs.error is None else (mine.error**2 + theirs.error**2) ** 0.5
    return Estimate(mine.mean - theirs.mean, error, mine.runs)


IN_DISTRIBUTION = (
    ("accuracy", Column("accuracy %", better="high", digits=2), 100),
    ("nll", Column("NLL", better="low", digits=4), 1),
    ("brier", Column("Brier", better="low", digits=4), 1),
    ("ece", Column("ECE % (15 bins)", better="low", digits=2), 100),
    ("ece100", Column("ECE % (100)", better="low", digits=2), 100),
    ("ece_legacy", Column("ECE % (legacy)", digits=2), 100),
    ("mce", Column("MCE %", digits=1), 100),
    ("aurc", Column("AURC %", better="low", digits=3), 100),
    ("confidence", Column("mean conf. %", digits=2), 100),
)


def _in_distribution(suite: SuiteResults) -> Table | None:
    if "test" not in suite.sets or not suite.runs:
        return None
    caption = (
        f"{suite.sets['test'].count} test data. {runs_words(suite.runs)} NLL: log loss. ECE, MCE: expected and largest "
        f"calibration error. Legacy: the error as published scripts compute it, without all predictions of confidence 0.99 "
        f"and more; only to compare with published figures. AURC: area under the risk-coverage curve."
    )
    shown = [Shown(column, On("test", metric), factor) for metric, column, factor in IN_DISTRIBUTION]
    return records_table(f"{suite.title}: in distribution", caption, suite.runs, shown)


def _risk(suite: SuiteResults) -> Table | None:
    levels = levels_of(suite)
    if not levels or not suite.runs:
        return None
    shown = [
        Shown(Column(f"{level:g}", f"AURC %, {suite.axis}", "low", 2), at_level(level, "aurc"), 100) for level in levels
    ]
    shown.append(Shown(Column("test", "excess %", "low", 3), On("test", EXCESS), 100))
    if len(levels) > 1:
        shown.append(Shown(Column("shifted", "excess %", "low", 2), shifted(EXCESS), 100))
    caption = (
        f"{runs_words(suite.runs)} AURC: error rate among the predictions that a method is surest of, mean over all shares of "
        f"them (Geifman et al., 2019); lower is better, refusing at random gives the error rate. Excess: less the AURC of refusing "
        f"all errors first, so that of two methods with other accuracies only the order of predictions counts"
        f"{'; shifted: mean over levels' if len(levels) > 1 else ''}."
    )
    return records_table(f"{suite.title}: risk and coverage", caption, suite.runs, shown)


def _along_shift(suite: SuiteResults, metric: str) -> Table | None:
    levels = levels_of(suite)
    if len(levels) < 2 or not suite.runs:
        return None
    paper = {
        method: list(curve)
        for method, curve in paper_numbers.CURVES.get(suite.name, {}).get(metric, {}).items()
        if len(curve) == len(levels)
    }
    return _curves(
        f"{suite.shift_title}: {METRIC_NAMES[metric]}",
        suite,
        suite.runs,
        metric,
        paper,
        _paper_words(suite, bool(paper)),
    )


def _curves(
    title: str,
    suite: SuiteResults,
    methods: Mapping[str, Sequence[Record]],
    metric: str,
    paper: Mapping[str, Sequence[float]],
    more: str = "",
) -> Table:
    levels = levels_of(suite)
    factor, digits = (100, 1) if metric in PERCENT else (1, 3)
    shown = [
        Shown(Column(f"{level:g}", suite.axis, BETTER[metric], digits), at_level(level, metric), factor)
        for level in levels
    ]
    aside = {_paper_name(method): [factor * value for value in curve] for method, curve in paper.items()}
    name = METRIC_NAMES[metric]
    unit = ", in %" if factor == 100 else ""
    what = f"{name[0].upper()}{name[1:]}{unit}"
    caption = f"{what}. {runs_words(methods)} 0 is the test set as it is.{more}"
    return records_table(title, caption, methods, shown, aside)


def _score_digest(suite: SuiteResults) -> Table | None:
    sets, scores = shared_outliers(suite, suite.runs), known_scores(suite)
    if not sets or not scores:
        return None
    names = [one.name for one in sets]
    values: dict[str, list[Number]] = {
        score: [estimate(records, mean_over(names, "auroc", score), 100) for records in suite.runs.values()]
        for score in scores
    }
    caption = (
        f"AUROC in %, mean over {', '.join(one.title for one in sets)}. {runs_words(suite.runs)} The scores of "
        f"a method compete with each other. Higher scores mean more outlying; the sign of confidence and of logits is turned."
    )
    columns = [Column(method, better="high") for method in suite.runs]
    return make_table(f"{suite.title}: outliers by every score", caption + _own_scores(suite), columns, values)


def _own_scores(suite: SuiteResults) -> str:
    found: dict[str, list[str]] = {}
    for method, records in suite.runs.items():
        for name in dict.fromkeys(
            str(record.chosen["ood_score"]) for record in records if "ood_score" in record.chosen
        ):
            found.setdefault(name, []).append(method)
    told = "; ".join(f"{name} of {', '.join(methods)}" for name, methods in found.items())
    return f" The ood score is: {told}." if told else ""


def _scores(suite: SuiteResults, name: str) -> Table | None:
    # One set of outliers: every method by every score that it has.
    columns = {
        "auroc": Column("AUROC", better="high"),
        "aupr_in": Column("AUPR in", better="high"),
        "aupr_out": Column("AUPR out", better="high"),
        "fpr95": Column("FPR95", better="low"),
        "fpr95_out": Column("FPR95 out", better="low"),
    }
    found: dict[str, dict[str, Estimate | None]] = {
        f"{method}, {score}": {metric: estimate(records, On(name, metric, score), 100) for metric in columns}
        for method, records in suite.runs.items()
        for score in known_scores(suite)
    }
    known = [metric for metric in columns if any(row[metric] is not None for row in found.values())]
    if not known:
        return None
    values: dict[str, list[Number]] = {
        named: [row[metric] for metric in known]
        for named, row in found.items()
        if any(number is not None for number in row.values())
    }
    caption = (
        f"In %. {runs_words(suite.runs)} AUPR in, out: area under precision and recall with test data, or outliers, as the "
        f"positive class. FPR95: share of outliers taken for test data where 95% of the test data are."
    )
    if "fpr95_out" in known:
        caption += " FPR95 out: share of test data taken for outliers where 95% of the outliers are."
    return make_table(
        f"{suite.sets[name].title}: every method by every score", caption, [columns[one] for one in known], values
    )


BY_TYPE = {"nll": ("log loss (NLL)", 3, 1), "ece": ("calibration error (ECE) in %", 1, 100)}
"""Metrics that are shown by type of shift: what they are, digits, and the factor to their unit."""

PAPERS_RULE = "MoLA"
NOT_THE_PAPERS = ("MoLA (distance)", "MoLA (NLL)", "DE-T", "DE")
"""What is compared with the paper's rule, type by type: the first of these that records know."""


def compared_by_type(suite: SuiteResults) -> str | None:
    """The method that is compared with the paper's rule type by type, if both have results by type."""

    def typed(method: str) -> bool:
        return any(one.types for record in suite.runs.get(method, ()) for one in record.labelled.values())

    return next((method for method in NOT_THE_PAPERS if typed(method)), None) if typed(PAPERS_RULE) else None


def _types(suite: SuiteResults) -> tuple[list[str], list[float]]:
    found = [one for record in suite.runs.get(PAPERS_RULE, ()) for one in record.labelled.values() if one.types]
    return list(dict.fromkeys(kind for one in found for kind in one.types)), sorted({one.level for one in found})


def type_differences(suite: SuiteResults, metric: str) -> dict[str, dict[float, Estimate | None]]:
    """By type of shift and level: a metric of the method compared minus that of the paper's rule, in its unit."""
    other, (kinds, levels) = compared_by_type(suite), _types(suite)
    if other is None:
        return {}
    factor = BY_TYPE[metric][2]

    def gap(quantity: Quantity) -> Estimate | None:
        mine, theirs = (estimate(suite.runs[method], quantity, factor) for method in (other, PAPERS_RULE))
        return None if mine is None or theirs is None else mine.minus(theirs)

    return {kind: {level: gap(of_type(kind, level, metric)) for level in levels} for kind in kinds}


def _by_type(suite: SuiteResults, metric: str) -> Table | None:
    found, other = type_differences(suite, metric), compared_by_type(suite)
    if not found or other is None:
        return None
    title, digits, _ = BY_TYPE[metric]
    levels = list(next(iter(found.values())))
    columns = [Column(f"{level:g}", suite.axis, digits=digits) for level in levels]
    values: dict[str, list[Number]] = {
        kind.replace("_", " "): [row[level] for level in levels] for kind, row in found.items()
    }
    counted = {method: suite.runs[method] for method in (other, PAPERS_RULE)}
    noise = " With few data in each cell, chance alone lifts every calibration error; much of that cancels here."
    caption = (
        f"{title[0].upper()}{title[1:]} of {other} minus that of {PAPERS_RULE}: below 0, {other} is better. {runs_words(counted)} "
        f"Types were dealt over the test data, so that each row is of other images.{noise if metric == 'ece' else ''}"
    )
    return make_table(f"{suite.shift_title} by type: {title}, {other} minus {PAPERS_RULE}", caption, columns, values)


GROUP_TITLES = {
    "variants": "LLLA: structure and link",
    "structures": "MoLA: structure and rule",
    "components": "Number of components",
    "rules": "Rules for the prior precision",
    "weights": "Weights of the mixture",
    "tempered": "A temperature first, then Laplace",
    "many-classes": "Very many classes: structure and link",
}


def ablation_groups(suite: SuiteResults) -> list[str]:
    """What is varied in this suite: the known ablations in their order, others after them."""
    found = [group for group in suite.groups if group != MAIN]
    return [group for group in GROUP_TITLES if group in found] + [group for group in found if group not in GROUP_TITLES]


def _ablation(suite: SuiteResults, group: str) -> Table:
    sets = shared_outliers(suite, suite.groups[group])
    outliers, every = [one.name for one in sets], len(sets) == len(suite.of_role("outlier"))
    shown = [
        Shown(Column("NLL", "test", "low", 4), On("test", "nll")),
        Shown(Column("ECE %", "test", "low", 2), On("test", "ece"), 100),
        Shown(Column("acc. %", "test", "high", 2), On("test", "accuracy"), 100),
        Shown(Column("log-lik.", "shifted", "high", 3), shifted("log_likelihood")),
        Shown(Column("ECE %", "shifted", "low", 2), shifted("ece"), 100),
        Shown(Column("MMC %", "shifted", None, 1), shifted("confidence"), 100),
        Shown(Column("acc. %", "shifted", "high", 2), shifted("accuracy"), 100),
        Shown(Column("MMC %", "outliers", "low", 1), mean_over(outliers, "confidence"), 100),
        Shown(Column("AUROC", "outliers", "high", 2), mean_over(outliers, "auroc"), 100),
    ]
    along = f" Shifted: mean over all levels of {suite.shift_title}." if suite.of_role("shift") else ""
    caption = (
        f"{runs_words(suite.groups[group])}{along} Outliers: mean over "
        f"{'all sets' if every else ', '.join(one.title for one in sets)}, told apart by confidence."
    )
    return records_table(f"{suite.title}: {GROUP_TITLES.get(group, group)}", caption, suite.groups[group], shown)


def _variants(suite: SuiteResults) -> Table | None:
    methods = suite.groups.get("variants", {})
    if not methods or len(levels_of(suite)) < 2:
        return None
    given = paper_numbers.VARIANTS.get(suite.name, {})
    settings = [(records[0].settings.get("structure"), records[0].settings.get("link")) for records in methods.values()]
    paper = {
        f"LLLA {structure} {link}": curve
        for (structure, link), curve in given.items()
        if len(curve) == len(levels_of(suite)) and (structure, link) in settings
    }
    more = (
        f" Rows that begin with 'paper' are from its figure of LLLA variants, {paper_network(suite)}." if paper else ""
    )
    return _curves(f"{suite.title}: log-likelihood of LLLA variants", suite, methods, "log_likelihood", paper, more)


SETTINGS = ("components", "structure", "link", "rule", "weights")


def _settings(suite: SuiteResults) -> Table:
    rows = []
    for group in [MAIN, *ablation_groups(suite)]:
        for method, records in suite.groups.get(group, {}).items():
            cells = [_plain(records[0].settings.get(key)) for key in SETTINGS]
            others = {key: value for key, value in records[0].settings.items() if key not in SETTINGS}
            cells.append(", ".join(f"{key} {_plain(value)}" for key, value in others.items()))
            cells += [_chosen(records, key) for key in ("prior_precision", "temperature", "distance_exponent")]
            rows.append(Row(method, tuple(Cell(cell) for cell in cells)))
    columns = [*SETTINGS, "other", "prior precision", "temperature", "distance exponent"]
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


BASE, FIT_BASE = "MAP", "LLLA"
"""What prediction and memory, and what fitting are compared with: MAP fits nothing."""

MEGABYTE = 1e6


def _cost(suite: SuiteResults) -> Table | None:
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
