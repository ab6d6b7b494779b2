"""The tables of the methods compared: in and out of distribution, and under shift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mola.compare.record import Record
from mola.compare.report import paper_numbers
from mola.compare.report.estimate import Estimate
from mola.compare.report.suites.quantities import at_level, estimate, labelled, mmc, outlier_score
from mola.compare.report.suites.reading import SuiteResults
from mola.compare.report.tables import Column, Number, Table, make_table

__all__ = [
    "METRIC_NAMES",
    "difference_table",
    "in_distribution_table",
    "level_table",
    "outlier_table",
    "paper_name",
    "paper_network",
    "runs_counted",
]

METRIC_NAMES = {
    "log_likelihood": "log-likelihood",
    "brier": "Brier score",
    "ece": "calibration error (ECE)",
    "accuracy": "accuracy",
    "confidence": "mean confidence",
}
"""Metrics that are followed along a shift."""

PERCENT = ("accuracy", "ece", "confidence")

BETTER = {"log_likelihood": "high", "brier": "low", "ece": "low", "accuracy": "high", "confidence": None}


def paper_name(method: str) -> str:
    """How a row of the paper's numbers is named."""
    return f"paper: {method}"


def runs_counted(methods: Mapping[str, Sequence[Record]]) -> str:
    """How many runs these methods have: "4 runs", or "2 to 4 runs"."""
    counts = [len(records) for records in methods.values()]
    low, high = min(counts, default=0), max(counts, default=0)
    if high == 1:
        return "one run"
    return f"{high} runs" if low == high else f"{low} to {high} runs"


def runs_words(methods: Mapping[str, Sequence[Record]]) -> str:
    """Over what the means of these methods are taken."""
    counted = runs_counted(methods)
    if counted == "one run":
        return "One run, so no spread is known and nothing is bold."
    return (
        f"Mean \N{PLUS-MINUS SIGN} standard error over {counted}. Bold: leads every other, run by run, by more than chance "
        f"(Student's t, 95 %)."
    )


def outlier_table(suite: SuiteResults) -> Table | None:
    """Mean confidence in every set, and how well outliers are told apart by confidence; the paper's rows below."""
    sets = suite.of_role("outlier")
    if not sets or not suite.main:
        return None
    columns = [Column("MMC", group="test"), *_outlier_columns([one.title for one in sets])]
    values = {method: _outlier_row(records, [one.name for one in sets]) for method, records in suite.main.items()}
    paper = paper_numbers.OUTLIERS.get(suite.name, {})
    titles = ["test MMC", *(f"{one.title} {kind}" for one in sets for kind in ("MMC", "AUROC"))]
    aside = {paper_name(method): [row.get(title) for title in titles] for method, row in paper.items()}
    caption = (
        f"In %. {runs_words(suite.main)} MMC: mean confidence. AUROC: how well outliers are told from test data by low "
        f"confidence; 50 is guessing."
    )
    return make_table(
        f"{suite.title} against outliers", caption + _paper_words(suite, bool(aside)), columns, values, aside
    )


def _outlier_columns(titles: Sequence[str]) -> list[Column]:
    return [
        column
        for title in titles
        for column in (Column("MMC", group=title, better="low"), Column("AUROC", group=title, better="high"))
    ]


def _outlier_row(records: Sequence[Record], names: Sequence[str]) -> list[Number]:
    row: list[Number] = [estimate(records, labelled("test", "confidence"), 100)]
    for name in names:
        row += [estimate(records, mmc(name), 100), estimate(records, outlier_score(name), 100)]
    return row


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


def difference_table(suite: SuiteResults) -> Table | None:
    """Ours minus the paper's, where both are known."""
    paper = paper_numbers.OUTLIERS.get(suite.name, {})
    table_sets = [one for one in suite.of_role("outlier") if any(f"{one.title} MMC" in row for row in paper.values())]
    methods = [method for method in suite.main if method in paper]
    if not table_sets or not methods:
        return None
    titles = ["test MMC", *(f"{one.title} {kind}" for one in table_sets for kind in ("MMC", "AUROC"))]
    columns = [Column("MMC", group="test")]
    columns += [Column(kind, group=one.title) for one in table_sets for kind in ("MMC", "AUROC")]
    values: dict[str, list[Number]] = {}
    for method in methods:
        ours = _outlier_row(suite.main[method], [one.name for one in table_sets])
        values[method] = [_difference(mine, paper[method].get(title)) for mine, title in zip(ours, titles, strict=True)]
    return make_table(
        f"{suite.title}: ours minus the paper's",
        "In points of %; errors are of the difference. Positive: higher here.",
        columns,
        values,
    )


def _difference(mine: Number, theirs: Estimate | None) -> Estimate | None:
    if not isinstance(mine, Estimate) or theirs is None:
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


def in_distribution_table(suite: SuiteResults) -> Table | None:
    """What the methods cost or gain where nothing is wrong."""
    if "test" not in suite.sets or not suite.main:
        return None
    values = {
        method: [estimate(records, labelled("test", metric), factor) for metric, _, factor in IN_DISTRIBUTION]
        for method, records in suite.main.items()
    }
    known = [index for index in range(len(IN_DISTRIBUTION)) if any(row[index] is not None for row in values.values())]
    caption = (
        f"{suite.sets['test'].count} test data. {runs_words(suite.main)} NLL: log loss. ECE, MCE: expected and largest "
        f"calibration error. Legacy: the error as published scripts compute it, without all predictions of confidence 0.99 "
        f"and more; only to compare with published figures. AURC: area under the risk-coverage curve."
    )
    return make_table(
        f"{suite.title}: in distribution",
        caption,
        [IN_DISTRIBUTION[index][1] for index in known],
        {method: [row[index] for index in known] for method, row in values.items()},
    )


def level_table(suite: SuiteResults, metric: str) -> Table | None:
    """A metric of every method at every level of shift."""
    levels = suite.levels()
    if len(levels) < 2 or not suite.main:
        return None
    paper = {
        method: list(curve)
        for method, curve in paper_numbers.CURVES.get(suite.name, {}).get(metric, {}).items()
        if len(curve) == len(levels)
    }
    return curves_table(
        f"{suite.shift_title}: {METRIC_NAMES[metric]}",
        suite,
        suite.main,
        metric,
        paper,
        _paper_words(suite, bool(paper)),
    )


def curves_table(
    title: str,
    suite: SuiteResults,
    methods: Mapping[str, Sequence[Record]],
    metric: str,
    paper: Mapping[str, Sequence[float]],
    more: str = "",
) -> Table:
    """A metric of these methods at every level, with the paper's below.

    Args:
        title: of the table.
        suite: whose levels are used.
        methods: records by method.
        metric: its name.
        paper: the paper's values at every level, by method.
        more: words that end the caption.

    Returns:
        The table.
    """
    levels = suite.levels()
    factor, digits = (100, 1) if metric in PERCENT else (1, 3)
    better = BETTER[metric]
    columns = [Column(f"{level:g}", group=suite.axis, better=better, digits=digits) for level in levels]  # type: ignore[arg-type]
    values = {
        method: [estimate(records, at_level(level, metric), factor) for level in levels]
        for method, records in methods.items()
    }
    aside = {paper_name(method): [factor * value for value in curve] for method, curve in paper.items()}
    name = METRIC_NAMES[metric]
    unit = ", in %" if factor == 100 else ""
    what = f"{name[0].upper()}{name[1:]}{unit}"
    return make_table(title, f"{what}. {runs_words(methods)} 0 is the test set as it is.{more}", columns, values, aside)
