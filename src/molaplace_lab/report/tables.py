"""Tables for a suite: test data, shifted data, outliers, ablations and cost, with the paper's numbers for comparison."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from molaplace.evaluation import SetInfo
from molaplace.evaluation.catalogue import CLASSIFICATION_METRICS, OUTLIER_METRICS, with_digits
from molaplace.report.numbers import BY_CONFIDENCE, Quantity
from molaplace.report.tables import SHIFT_METRICS, Column, Number, Table, columns_on
from molaplace.settings import Settings
from molaplace_lab.report import paper_numbers
from molaplace_lab.report.reading import MAIN, SuiteResults, known_scores
from molaplace_lab.report.runs import (
    EXCESS,
    Numbers,
    levels_of,
    marked_table,
    records_table,
    shared_outliers,
)

TERMINAL = ("outliers", "in-distribution", "cost")
"""Names of the tables printed to the terminal; the output files contain all tables."""

GROUP_TITLES = {
    "variants": "LLLA: structure and link",
    "structures": "MoLA: structure and rule",
    "components": "Number of components",
    "rules": "Rules for the prior precision",
    "weights": "Weights of the mixture",
    "tempered": "Temperature before Laplace",
    "many-classes": "Structure and link with many classes",
}


def suite_tables(suite: SuiteResults) -> dict[str, Table]:
    """Return all tables for a suite, keyed by name, in page order."""
    tables: dict[str, Table | None] = {}
    if suite.runs:
        numbers = suite.numbers()
        tables = {
            "outliers": _outliers(suite, numbers),
            "difference": _differences(suite, numbers),
            "scores": _score_digest(suite, numbers),
            **{f"scores {info.name}": _scores(suite, numbers, info) for info in suite.of_role("outlier")},
            "openood": _openood(suite, numbers),
            "rejection": _rejection(suite, numbers),
            "in-distribution": _in_distribution(suite, numbers),
            "risk": _risk(suite, numbers),
            "people": _people(suite),
            **{f"shift {metric}": _along_shift(suite, metric) for metric in SHIFT_METRICS},
            **{f"types {metric}": _by_type(suite, metric) for metric in BY_TYPE},
        }
    tables["variants"] = _along_shift(suite, "log_likelihood", "variants")
    tables |= {f"ablation {group}": _ablation(suite, group) for group in ablation_groups(suite)}
    tables |= {"cost": _cost(suite), "settings": _settings(suite)}
    return {name: table for name, table in tables.items() if table is not None and table.columns}


# --- beside the paper ------------------------------------------------------------------------------------------------


def _outlier_columns(sets: Sequence[SetInfo]) -> list[Column]:
    columns = [Column("MMC", "test", None, 1, Quantity("test", "confidence"), 100)]
    for info in sets:
        columns.append(Column("MMC", info.title, "low", 1, Quantity(info.name, "confidence"), 100))
        columns.append(Column("AUROC", info.title, "high", 1, Quantity(info.name, "auroc", BY_CONFIDENCE), 100))
    return columns


def _paper_rows(methods: Mapping[str, Any]) -> dict[str, Any]:
    return {f"paper: {method}": row for method, row in methods.items()}


def _paper_words(suite: SuiteResults, rows: Mapping[str, Any]) -> str:
    if not rows:
        return ""
    network = paper_numbers.NETWORKS[suite.name]
    same = network.lower().replace("-", "") == suite.network.lower().replace("-", "")
    other = "" if same else f" (other rows: {suite.network})"
    return f" Rows that begin with 'paper' contain the paper's numbers for {network}{other}."


def _outliers(suite: SuiteResults, numbers: Numbers) -> Table | None:
    columns = _outlier_columns(suite.of_role("outlier"))
    if len(columns) == 1:
        return None
    titles = [f"{column.group} {column.name}" for column in columns]
    paper = paper_numbers.OUTLIERS.get(suite.name, {})
    aside = _paper_rows({method: [row.get(title) for title in titles] for method, row in paper.items()})
    caption = (
        f"In %. {numbers.over_runs} MMC is the mean confidence; AUROC, how well low confidence separates outliers from test data."
        f"{_paper_words(suite, aside)}"
    )
    return records_table(f"{suite.title} against outliers", caption, numbers, columns, aside)


def _differences(suite: SuiteResults, numbers: Numbers) -> Table | None:
    paper = paper_numbers.OUTLIERS.get(suite.name, {})
    titles = {title for row in paper.values() for title in row}
    columns = _outlier_columns([info for info in suite.of_role("outlier") if f"{info.title} MMC" in titles])
    rows: dict[str, list[Number]] = {method: [] for method in suite.runs if method in paper}
    if len(columns) == 1 or not rows:
        return None
    for column in columns:
        means = numbers(column.quantity, 100)
        for method, row in rows.items():
            mean = means[method]
            published = paper[method].get(f"{column.group} {column.name}")
            if mean is None or published is None:
                row.append(None)
            else:
                gap = mean.minus(published)
                row.append(gap if mean.known else replace(gap, error=math.nan))
    caption = "In percentage points, with standard errors."
    columns = [replace(column, better=None) for column in columns]
    return marked_table(f"{suite.title}: our numbers minus the paper's", caption, columns, rows)


# --- in distribution and under shift ---------------------------------------------------------------------------------


def _in_distribution(suite: SuiteResults, numbers: Numbers) -> Table | None:
    if "test" not in suite.sets:
        return None
    caption = (
        f"{suite.sets['test'].count} test inputs. {numbers.over_runs} ECE and MCE use 15 bins. Legacy ECE follows published "
        f"scripts, which omit predictions with a confidence of 0.99 or more; use it only for comparison with published numbers. AURC "
        f"is the area under the risk-coverage curve."
    )
    repeated = (
        "log_likelihood",
        "mce_legacy",
    )  # the NLL with the opposite sign, and a variant that no publication uses
    metrics = {name: metric for name, metric in CLASSIFICATION_METRICS.items() if name not in repeated}
    return records_table(f"{suite.title}: in distribution", caption, numbers, columns_on("test", metrics))


def _risk(suite: SuiteResults, numbers: Numbers) -> Table | None:
    levels = levels_of(suite.sets)
    group = f"AURC %, {suite.axis}"
    columns = [Column(f"{level:g}", group, "low", 2, numbers.at_level(level, "aurc"), 100) for level in levels]
    columns.append(Column("test", "excess %", "low", 3, Quantity("test", EXCESS), 100))
    columns.append(Column("shifted", "excess %", "low", 2, numbers.shifted(EXCESS), 100))
    caption = (
        f"{numbers.over_runs} AURC is the error rate of the most confident predictions, averaged over all coverages (Geifman et "
        f"al., 2019); random rejection gives the error rate. Excess AURC is the AURC minus its minimum for the same number of errors."
        f"{' The column for shifted data shows the mean over all levels.' if len(levels) > 1 else ''}"
    )
    return records_table(f"{suite.title}: risk and coverage", caption, numbers, columns)


def _along_shift(suite: SuiteResults, metric: str, group: str = MAIN) -> Table | None:
    levels = levels_of(suite.sets)
    methods = suite.groups.get(group, {})
    if len(levels) < 2 or not methods:
        return None
    numbers = suite.numbers(group)
    like = SHIFT_METRICS[metric]
    columns = [
        Column(f"{level:g}", suite.axis, like.better, like.digits, numbers.at_level(level, metric), like.factor)
        for level in levels
    ]
    title = f"{suite.shift_title}: {like.name}"
    curves = paper_numbers.CURVES.get(suite.name, {}).get(metric, {})
    if group == "variants":
        title = f"{suite.title}: {like.name} of LLLA variants"
        variants = [
            tuple(records[0].settings.get(key) for key in ("structure", "link")) for records in methods.values()
        ]
        published = paper_numbers.VARIANTS.get(suite.name, {})
        curves = {f"LLLA {' '.join(variant)}": curve for variant, curve in published.items() if variant in variants}
    aside = _paper_rows(
        {name: [like.factor * value for value in curve] for name, curve in curves.items() if len(curve) == len(levels)}
    )
    caption = f"{'In %. ' if like.factor == 100 else ''}{numbers.over_runs} Level 0 is the test set.{_paper_words(suite, aside)}"
    return records_table(title, caption, numbers, columns, aside)


BY_TYPE = with_digits({"nll": 3, "ece": 1})
"""Metrics shown for each type of shift."""

BY_DISTANCE = "MoLA (distance)"
PAPERS_RULE = "MoLA"
"""The two methods whose difference is shown for each type of shift."""


def _by_type(suite: SuiteResults, metric: str) -> Table | None:
    methods = {method: suite.runs[method] for method in (BY_DISTANCE, PAPERS_RULE) if method in suite.runs}
    records = methods.get(PAPERS_RULE, ())
    typed = [result for record in records for result in record.labelled.values() if result.types]
    if len(methods) < 2 or not typed:
        return None
    numbers = Numbers(methods, suite.overlap)
    like = BY_TYPE[metric]
    levels = sorted({result.level for result in typed})
    rows: dict[str, list[Number]] = {}
    for kind in dict.fromkeys(kind for result in typed for kind in result.types):
        pairs = [numbers(numbers.at_level(level, metric, kind), like.factor).values() for level in levels]
        rows[kind.replace("_", " ")] = [
            by_distance.minus(paper) if by_distance and paper else None for by_distance, paper in pairs
        ]
    difference = f"{BY_DISTANCE} minus {PAPERS_RULE}"
    caption = (
        f"{numbers.over_runs} {BY_DISTANCE} is better if the difference is negative. Rows are based on different test images because "
        f"each image received only one type of shift."
    )
    columns = [Column(f"{level:g}", suite.axis, digits=like.digits) for level in levels]
    title = f"{like.name} in %" if like.factor == 100 else like.name
    return marked_table(f"{suite.shift_title} by type: {title}, {difference}", caption, columns, rows)


# --- outlier scores --------------------------------------------------------------------------------------------------

POSITIVES = "AUPR treats test data (in) or outliers (out) as the positive class."


def _every_score(title: str, caption: str, suite: SuiteResults, numbers: Numbers, columns: Sequence[Column]) -> Table:
    # Each row shows one combination of method and score; in a metric name such as "recall, {}", the name of the score replaces {}.
    scores = known_scores(suite)
    rows: dict[str, list[Number]] = {f"{method}, {score}": [] for method in suite.runs for score in scores}
    nonempty = []
    for column in columns:
        metric = column.quantity.metric
        means: dict[str, Number] = {}
        for score in scores:
            quantity = Quantity(column.quantity.sets, metric.format(score), "" if "{}" in metric else score)
            means |= {f"{method}, {score}": mean for method, mean in numbers(quantity, 100).items()}
        if any(means.values()):
            nonempty.append(column)
            for name, row in rows.items():
                row.append(means[name])
    return marked_table(title, caption, nonempty, {name: row for name, row in rows.items() if any(row)})


def _score_digest(suite: SuiteResults, numbers: Numbers) -> Table | None:
    sets = shared_outliers(suite.sets, suite.runs)
    scores = known_scores(suite)
    if not sets or not scores:
        return None
    names = tuple(info.name for info in sets)
    rows = {score: list(numbers(Quantity(names, "auroc", score), 100).values()) for score in scores}
    methods_of_score: dict[str, dict[str, None]] = {}
    for method, records in suite.runs.items():
        for record in records:
            if "ood_score" in record.chosen:
                methods_of_score.setdefault(str(record.chosen["ood_score"]), {})[method] = None
    definitions = "; ".join(f"{score} for {', '.join(methods)}" for score, methods in methods_of_score.items())
    caption = (
        f"AUROC in %, averaged over the following outlier sets: {', '.join(info.title for info in sets)}. {numbers.over_runs} "
        f"Bold marks a score that is clearly best for a method.{f' The ood score is {definitions}.' if definitions else ''}"
    )
    columns = [Column(method, better="high") for method in suite.runs]
    return marked_table(f"{suite.title}: outliers by every score", caption, columns, rows)


def _scores(suite: SuiteResults, numbers: Numbers, info: SetInfo) -> Table:
    caption = (
        f"In %. {POSITIVES} FPR95 is the share of outliers accepted at the threshold that accepts 95 % of the test data; FPR95 out, the "
        f"share of test data rejected at the threshold that rejects 95 % of the outliers."
    )
    title = f"{info.title}: every method by every score"
    return _every_score(title, caption, suite, numbers, columns_on(info.name, OUTLIER_METRICS))


NEAR_AND_FAR = {"cifar10": {"near": ("cifar100", "tinyimagenet"), "far": ("mnist", "svhn")}}
"""Near and far outlier sets of the OpenOOD benchmark, by suite."""

OPENOOD_METRICS = {
    "auroc": OUTLIER_METRICS["auroc"],
    "fpr95_out": replace(OUTLIER_METRICS["fpr95_out"], heading="FPR95"),
    "aupr_in": OUTLIER_METRICS["aupr_in"],
    "aupr_out": OUTLIER_METRICS["aupr_out"],
}
"""Metrics of the OpenOOD benchmark, which calls FPR95 what `molaplace` calls FPR95 out."""


def _openood(suite: SuiteResults, numbers: Numbers) -> Table:
    columns: list[Column] = []
    counts: list[str] = []
    for kind, names in NEAR_AND_FAR.get(suite.name, {}).items():
        sets = [suite.sets[name] for name in names if name in suite.sets]
        group = f"{kind}: {', '.join(info.title for info in sets)}"
        columns += columns_on(tuple(info.name for info in sets), OPENOOD_METRICS, group)
        counts += [f"{info.count:,} from {info.title}" for info in sets]
    caption = (
        f"In %. {numbers.over_runs} Means over outlier sets, as in OpenOOD (Zhang et al., 2023). FPR95 is the share of test data "
        f"rejected at the threshold that rejects 95 % of the outliers. {POSITIVES} The rows for MAP and DE include the scores computed "
        f"from features and logits. These numbers should not be ranked alongside published ones: the architecture is {suite.network}, "
        f"not ResNet-18; DE and MoLA use {suite.components} networks; the {suite.test.count:,} test images and the outliers "
        f"({', '.join(counts)}) differ, with none from Textures or Places365 and without TinyImageNet classes that also occur in "
        f"CIFAR-10 (according to our own list); and no score was tuned on outliers."
    )
    return _every_score(f"{suite.title}: near and far outliers, as in OpenOOD", caption, suite, numbers, columns)


# --- additional measures ---------------------------------------------------------------------------------------------


def _rejection(suite: SuiteResults, numbers: Numbers) -> Table:
    names = ("in-scope accuracy", "out-of-scope recall")
    columns = [Column(name, better="high", quantity=Quantity("rejection", f"{name}, {{}}")) for name in names]
    caption = (
        f"In %. {numbers.over_runs} A request is rejected if its score exceeds a threshold chosen to maximise the number of "
        f"correctly handled validation requests (3000 in scope and 100 out of scope). The in-scope accuracy treats rejected requests "
        f"as errors. Larson et al. (EMNLP 2019, arXiv 1909.02027) report the same two metrics for different features and networks."
    )
    return _every_score(f"{suite.title}: rejection of out-of-scope requests", caption, suite, numbers, columns)


def _people(suite: SuiteResults) -> Table | None:
    methods = {
        method: records
        for method, records in suite.runs.items()
        if any("people" in record.measures for record in records)
    }
    if not methods:
        return None
    columns = [
        *columns_on("test", with_digits({"nll": 4}), "test"),
        Column("cross-entropy", "people", "low", 4, Quantity("people", "cross-entropy")),
        Column("divergence", "people", "low", 4, Quantity("people", "divergence")),
    ]
    columns += [
        Column(score, "rank correlation %", "high", 1, Quantity("people", f"correlation, {score}"), 100)
        for score in known_scores(suite)
    ]
    caption = (
        "NLL uses the published labels. Cross-entropy and divergence use the labels that about 50 people gave each image (CIFAR-10H, "
        "Peterson et al., 2019). The last columns show Spearman's rank correlation between each score and the entropy of these labels."
    )
    return records_table(f"{suite.title}: human uncertainty", caption, Numbers(methods, suite.overlap), columns)


# --- ablations, settings and cost ------------------------------------------------------------------------------------


def ablation_groups(suite: SuiteResults) -> list[str]:
    """Return the names of a suite's ablations: first the known ablations in page order, then all others."""
    groups = [group for group in suite.groups if group != MAIN]
    known = [group for group in GROUP_TITLES if group in groups]
    return [*known, *(group for group in groups if group not in GROUP_TITLES)]


def _ablation(suite: SuiteResults, group: str) -> Table:
    numbers = suite.numbers(group)
    sets = shared_outliers(suite.sets, suite.groups[group])
    outliers = tuple(info.name for info in sets)
    shifted = with_digits({"log_likelihood": 3, "ece": 2, "confidence": 1, "accuracy": 2})
    columns = [
        *columns_on("test", with_digits({"nll": 4, "ece": 2, "accuracy": 2}), "test"),
        *columns_on(numbers.shifted_sets, shifted, "shifted"),
        Column("mean conf. %", "outliers", "low", 1, Quantity(outliers, "confidence"), 100),
        Column("AUROC", "outliers", "high", 2, Quantity(outliers, "auroc", BY_CONFIDENCE), 100),
    ]
    averaged = "all outlier sets"
    if len(sets) < len(suite.of_role("outlier")):
        averaged = ", ".join(info.title for info in sets)
    if suite.of_role("shift"):
        averaged = f"all levels of {suite.shift_title}, and over {averaged}"
    caption = f"{numbers.over_runs} Columns beside the test data show means over {averaged}. AUROC is computed from the confidence."
    return records_table(f"{suite.title}: {GROUP_TITLES.get(group, group)}", caption, numbers, columns)


SETTINGS = ("components", "structure", "link", "rule", "weights")
TUNED = tuple(setting.name for setting in fields(Settings))


def _settings(suite: SuiteResults) -> Table:
    headings = [*SETTINGS, "other", *(name.replace("_", " ") for name in TUNED)]
    rows = {}
    for group in [MAIN, *ablation_groups(suite)]:
        for method, records in suite.groups.get(group, {}).items():
            settings = records[0].settings
            others = [f"{name} {_plain(value)}" for name, value in settings.items() if name not in SETTINGS]
            tuned = [_range(record.chosen.get(name) for record in records) for name in TUNED]
            rows[method] = [*(_plain(settings.get(name)) for name in SETTINGS), ", ".join(others), *tuned]
    filled = [index for index in range(len(headings)) if any(row[index] for row in rows.values())]
    columns = [Column(headings[index]) for index in filled]
    values = {method: [row[index] for index in filled] for method, row in rows.items()}
    caption = "Ranges extend from the smallest to the largest value over components and runs."
    return marked_table(f"{suite.title}: settings and tuned values", caption, columns, values)


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _range(values: Iterable[Any]) -> str:
    # Return the range of all numbers; each value is a number, a list of numbers, or None.
    lists = [value if isinstance(value, list) else [value] for value in values]
    numbers = [number for listed in lists for number in listed if number is not None]
    ends = [f"{end(numbers):.3g}" for end in (min, max)] if numbers else []
    return " to ".join(dict.fromkeys(ends))


COSTS = (
    ("fit", "s", "fit_seconds", 1.0, "LLLA"),
    ("predict", "s", "predict_seconds", 1.0, "MAP"),
    ("memory", "MB", "bytes", 1e-6, "MAP"),
)
"""Heading, unit, key in `cost.json`, unit factor and reference method for each cost. MAP is not fitted, so fitting times are relative
to LLLA."""


def _cost(suite: SuiteResults) -> Table | None:
    costs = {row["method"]: row for row in suite.cost["rows"]}
    if not costs:
        return None
    columns: list[Column] = []
    rows: dict[str, list[Number]] = {method: [] for method in costs}
    for index, (group, unit, key, factor, base) in enumerate(COSTS):
        ratio = f"\N{MULTIPLICATION SIGN} {base}"
        columns += [Column(name, group=group, digits=2) for name in (unit, ratio, f"paper {ratio}")]
        measured = {method: None if cost[key] is None else factor * cost[key] for method, cost in costs.items()}
        paper = {method: published[index] for method, published in paper_numbers.COST.items()}
        for method, row in rows.items():
            row += [measured[method], *(_ratio(values.get(method), values.get(base)) for values in (measured, paper))]
    settings = ", ".join(f"{key.replace('_', ' ')} = {value}" for key, value in suite.cost["settings"].items())
    caption = (
        f"Measured in one run{f' (settings: {settings})' if settings else ''}. The 'paper' columns give the ratios in the paper "
        f"({paper_numbers.COST_SETTING}). Memory is the amount needed for prediction."
    )
    return marked_table(f"{suite.title}: cost", caption, columns, rows)


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
