"""Tables for a suite: test data, shifted data, outliers, ablations and cost, with the paper's numbers for comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from molaplace.evaluation import SetInfo
from molaplace.report.numbers import Quantity
from molaplace.report.tables import SHIFT_METRICS, Column, Number, Table, columns_on
from molaplace_lab.report import paper_numbers
from molaplace_lab.report.reading import MAIN, SuiteResults, known_scores
from molaplace_lab.report.runs import (
    BY_CONFIDENCE,
    EXCESS,
    Numbers,
    levels_of,
    marked_table,
    records_table,
    runs_words,
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
        numbers = Numbers(suite.runs)
        tables = {
            "outliers": _outliers(suite, numbers),
            "difference": _differences(suite, numbers),
            "scores": _score_digest(suite, numbers),
            **{
                f"scores {outlier_set.name}": _scores(suite, numbers, outlier_set)
                for outlier_set in suite.of_role("outlier")
            },
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
    for one in sets:
        columns.append(Column("MMC", one.title, "low", 1, Quantity(one.name, "confidence"), 100))
        columns.append(Column("AUROC", one.title, "high", 1, Quantity(one.name, "auroc", BY_CONFIDENCE), 100))
    return columns


def _paper_rows(methods: Mapping[str, Any]) -> dict[str, Any]:
    return {f"paper: {method}": row for method, row in methods.items()}


def _paper_words(suite: SuiteResults, settings: Mapping[str, Any]) -> str:
    if not settings:
        return ""
    there, here = paper_numbers.NETWORKS[suite.name], suite.network
    same = there.lower().replace("-", "") == here.lower().replace("-", "")
    network = (
        f"which were also obtained with {there}" if same else f"which were obtained with {there} (other rows: {here})"
    )
    return f" Rows that begin with 'paper' contain the paper's numbers, {network}."


def _outliers(suite: SuiteResults, numbers: Numbers) -> Table | None:
    columns = _outlier_columns(suite.of_role("outlier"))
    if len(columns) == 1:
        return None
    paper = paper_numbers.OUTLIERS.get(suite.name, {})
    titles = [f"{one.group} {one.name}" for one in columns]
    aside = _paper_rows({method: [row.get(title) for title in titles] for method, row in paper.items()})
    caption = (
        f"In %. {runs_words(suite.runs)} MMC is the mean confidence. AUROC measures how well low confidence separates outliers from "
        f"test data; 50 corresponds to random guessing.{_paper_words(suite, aside)}"
    )
    return records_table(f"{suite.title} against outliers", caption, numbers, columns, aside)


def _differences(suite: SuiteResults, numbers: Numbers) -> Table | None:
    paper = paper_numbers.OUTLIERS.get(suite.name, {})
    known = {title for row in paper.values() for title in row}
    columns = _outlier_columns([one for one in suite.of_role("outlier") if f"{one.title} MMC" in known])
    values: dict[str, list[Number]] = {method: [] for method in suite.runs if method in paper}
    if len(columns) == 1 or not values:
        return None
    for one in columns:
        found = numbers(one.quantity, 100)
        for method, row in values.items():
            mine, theirs = found[method], paper[method].get(f"{one.group} {one.name}")
            gap = None if mine is None or theirs is None else mine.minus(theirs)
            row.append(gap if gap is None or mine is None or mine.error is not None else replace(gap, error=None))
    caption = (
        "Differences in percentage points, with standard errors. Positive differences mean that our numbers are higher."
    )
    columns = [replace(one, better=None) for one in columns]
    return marked_table(f"{suite.title}: our numbers minus the paper's", caption, columns, values)


# --- in distribution and under shift ---------------------------------------------------------------------------------

IN_DISTRIBUTION = {
    "accuracy": Column("accuracy %", better="high", digits=2, factor=100),
    "nll": Column("NLL", better="low", digits=4),
    "brier": Column("Brier", better="low", digits=4),
    "ece": Column("ECE % (15 bins)", better="low", digits=2, factor=100),
    "ece100": Column("ECE % (100)", better="low", digits=2, factor=100),
    "ece_legacy": Column("ECE % (legacy)", digits=2, factor=100),
    "mce": Column("MCE %", digits=1, factor=100),
    "aurc": Column("AURC %", better="low", digits=3, factor=100),
    "confidence": Column("mean conf. %", digits=2, factor=100),
}


def _in_distribution(suite: SuiteResults, numbers: Numbers) -> Table | None:
    if "test" not in suite.sets:
        return None
    caption = (
        f"{suite.sets['test'].count} test inputs. {runs_words(suite.runs)} NLL is the log loss; ECE and MCE are the expected and "
        f"maximum calibration errors. Legacy ECE follows published scripts, which omit predictions with a confidence of 0.99 or more; "
        f"use it only for comparison with published numbers. AURC is the area under the risk-coverage curve."
    )
    return records_table(f"{suite.title}: in distribution", caption, numbers, columns_on("test", IN_DISTRIBUTION))


def _risk(suite: SuiteResults, numbers: Numbers) -> Table | None:
    levels, group = levels_of(suite.sets), f"AURC %, {suite.axis}"
    columns = [Column(f"{one:g}", group, "low", 2, numbers.at_level(one, "aurc"), 100) for one in levels]
    columns.append(Column("test", "excess %", "low", 3, Quantity("test", EXCESS), 100))
    columns.append(Column("shifted", "excess %", "low", 2, numbers.shifted(EXCESS), 100))
    caption = (
        f"{runs_words(suite.runs)} AURC is the error rate of the most confident predictions, averaged over all coverages (Geifman et "
        f"al., 2019). Rejecting at random gives an AURC equal to the overall error rate. Excess AURC is the AURC minus the "
        f"lowest AURC possible with the same number of errors, so it measures only the ranking of the predictions."
        f"{' The column for shifted data shows the mean over all levels.' if len(levels) > 1 else ''}"
    )
    return records_table(f"{suite.title}: risk and coverage", caption, numbers, columns)


def _along_shift(suite: SuiteResults, metric: str, group: str = MAIN) -> Table | None:
    levels, methods, like = levels_of(suite.sets), suite.groups.get(group, {}), SHIFT_METRICS[metric]
    if len(levels) < 2 or not methods:
        return None
    numbers = Numbers(methods)
    columns = [
        replace(like, name=f"{level:g}", group=suite.axis, quantity=numbers.at_level(level, metric)) for level in levels
    ]
    title, paper = f"{suite.shift_title}: {like.name}", paper_numbers.CURVES.get(suite.name, {}).get(metric, {})
    if group == "variants":
        title = f"{suite.title}: {like.name} of LLLA variants"
        kinds = [[records[0].settings.get(key) for key in ("structure", "link")] for records in methods.values()]
        given = paper_numbers.VARIANTS.get(suite.name, {})
        paper = {f"LLLA {' '.join(kind)}": curve for kind, curve in given.items() if list(kind) in kinds}
    paper = {name: curve for name, curve in paper.items() if len(curve) == len(levels)}
    aside = _paper_rows({name: [like.factor * one for one in curve] for name, curve in paper.items()})
    caption = (
        f"{like.name[0].upper()}{like.name[1:]}{', in %' if like.factor == 100 else ''}. {runs_words(methods)} Level 0 is the "
        f"test set.{_paper_words(suite, aside)}"
    )
    return records_table(title, caption, numbers, columns, aside)


BY_TYPE = {"nll": ("log loss (NLL)", 3, 1), "ece": ("calibration error (ECE) in %", 1, 100)}
"""Metrics shown for each type of shift, with title, number of decimals and unit factor."""

BY_DISTANCE, PAPERS_RULE = "MoLA (distance)", "MoLA"
"""The two methods whose difference is shown for each type of shift."""


def _by_type(suite: SuiteResults, metric: str) -> Table | None:
    methods = {method: suite.runs[method] for method in (BY_DISTANCE, PAPERS_RULE) if method in suite.runs}
    typed = [one for record in methods.get(PAPERS_RULE, ()) for one in record.labelled.values() if one.types]
    if len(methods) < 2 or not typed:
        return None
    numbers, (title, digits, factor) = Numbers(methods), BY_TYPE[metric]
    levels = sorted({one.level for one in typed})
    values: dict[str, list[Number]] = {}
    for kind in dict.fromkeys(kind for one in typed for kind in one.types):
        pairs = [numbers(numbers.at_level(level, metric, kind), factor).values() for level in levels]
        values[kind.replace("_", " ")] = [mine.minus(theirs) if mine and theirs else None for mine, theirs in pairs]
    difference = f"{BY_DISTANCE} minus {PAPERS_RULE}"
    caption = (
        f"{title[0].upper()}{title[1:]}, {BY_DISTANCE} minus {PAPERS_RULE}. {BY_DISTANCE} is better if the difference is negative. "
        f"{runs_words(methods)} Rows are based on different test images because each image received only one type of shift."
    )
    columns = [Column(f"{level:g}", suite.axis, digits=digits) for level in levels]
    return marked_table(f"{suite.shift_title} by type: {title}, {difference}", caption, columns, values)


# --- outlier scores --------------------------------------------------------------------------------------------------

SCORED = {
    "auroc": Column("AUROC", better="high"),
    "aupr_in": Column("AUPR in", better="high"),
    "aupr_out": Column("AUPR out", better="high"),
    "fpr95": Column("FPR95", better="low"),
    "fpr95_out": Column("FPR95 out", better="low"),
}


def _every_score(title: str, caption: str, suite: SuiteResults, numbers: Numbers, columns: Sequence[Column]) -> Table:
    # Each row shows one combination of method and score; in a metric name such as "recall, {}", the name of the score replaces {}.
    scores, kept = known_scores(suite), []
    rows: dict[str, list[Number]] = {f"{one}, {score}": [] for one in suite.runs for score in scores}
    for column in columns:
        metric = column.quantity.metric
        found = {
            f"{method}, {score}": one
            for score in scores
            for method, one in numbers(
                Quantity(column.quantity.sets, metric.format(score), "" if "{}" in metric else score), 100
            ).items()
        }
        if any(found.values()):
            kept.append(column)
            for name, row in rows.items():
                row.append(found[name])
    return marked_table(title, caption, kept, {name: row for name, row in rows.items() if any(row)})


def _score_digest(suite: SuiteResults, numbers: Numbers) -> Table | None:
    sets, scores = shared_outliers(suite.sets, suite.runs), known_scores(suite)
    if not sets or not scores:
        return None
    names = tuple(one.name for one in sets)
    values = {score: list(numbers(Quantity(names, "auroc", score), 100).values()) for score in scores}
    own: dict[str, list[str]] = {}
    for method, records in suite.runs.items():
        for name in dict.fromkeys(str(one.chosen["ood_score"]) for one in records if "ood_score" in one.chosen):
            own.setdefault(name, []).append(method)
    listed = "; ".join(f"{name} for the following methods: {', '.join(methods)}" for name, methods in own.items())
    caption = (
        f"AUROC in %, averaged over the following outlier sets: {', '.join(one.title for one in sets)}. {runs_words(suite.runs)} "
        f"Bold marks a score that is clearly best for a method. Higher scores indicate outliers."
        f"{f' The ood score is {listed}.' if listed else ''}"
    )
    columns = [Column(method, better="high") for method in suite.runs]
    return marked_table(f"{suite.title}: outliers by every score", caption, columns, values)


def _scores(suite: SuiteResults, numbers: Numbers, outlier_set: SetInfo) -> Table:
    caption = (
        "In %. AUPR treats test data (in) or outliers (out) as the positive class. FPR95 is the share of outliers accepted at the "
        "threshold that accepts 95 % of the test data. FPR95 out is the share of test data rejected at the threshold that rejects "
        "95 % of the outliers."
    )
    return _every_score(
        f"{outlier_set.title}: every method by every score",
        caption,
        suite,
        numbers,
        columns_on(outlier_set.name, SCORED),
    )


NEAR_AND_FAR = {"cifar10": {"near": ("cifar100", "tinyimagenet"), "far": ("mnist", "svhn")}}
"""Near and far outlier sets of the OpenOOD benchmark, by suite."""

OPENOOD_METRICS = {"auroc": "AUROC", "fpr95_out": "FPR95", "aupr_in": "AUPR in", "aupr_out": "AUPR out"}


def _openood(suite: SuiteResults, numbers: Numbers) -> Table:
    columns: list[Column] = []
    shown: list[SetInfo] = []
    for kind, listed in NEAR_AND_FAR.get(suite.name, {}).items():
        sets = [suite.sets[name] for name in listed if name in suite.sets]
        group, names = f"{kind}: {', '.join(one.title for one in sets)}", tuple(one.name for one in sets)
        columns += [
            replace(SCORED[key], name=name, group=group, quantity=Quantity(names, key))
            for key, name in OPENOOD_METRICS.items()
        ]
        shown += sets
    counts = ", ".join(f"{one.count:,} from {one.title}" for one in shown)
    caption = (
        f"In %. {runs_words(suite.runs)} Numbers are means over outlier sets, as in OpenOOD (Zhang et al., 2023). FPR95 is the share "
        f"of test data rejected at the threshold that rejects 95 % of the outliers. AUPR treats test data (in) or outliers (out) as "
        f"the positive class and is computed as the average precision. The rows for MAP and DE include the scores computed from "
        f"features and logits. The set-up differs from that of OpenOOD in several ways. The architecture is {suite.network}, not "
        f"ResNet-18, and DE and MoLA use {suite.components} networks. The test set has {suite.test.count:,} images. The outlier "
        f"images ({counts}) include none from Textures or Places365. TinyImageNet classes that also occur in CIFAR-10 (according to "
        f"our own list) are excluded. No score was tuned on outliers. These numbers should therefore not be ranked alongside "
        f"published ones."
    )
    title = f"{suite.title}: near and far outliers, as in OpenOOD"
    return _every_score(title, caption, suite, numbers, columns)


# --- additional measures ---------------------------------------------------------------------------------------------


def _rejection(suite: SuiteResults, numbers: Numbers) -> Table:
    named = ("in-scope accuracy", "out-of-scope recall")
    columns = [Column(name, better="high", quantity=Quantity("rejection", f"{name}, {{}}")) for name in named]
    caption = (
        f"In %. {runs_words(suite.runs)} A request is rejected if its score exceeds a threshold chosen to maximise the number of "
        f"correctly handled validation requests (3000 in scope and 100 out of scope). The in-scope accuracy treats rejected requests "
        f"as errors. Larson et al. (EMNLP 2019, arXiv 1909.02027) report the same two metrics for different features and networks."
    )
    return _every_score(f"{suite.title}: rejection of out-of-scope requests", caption, suite, numbers, columns)


def _people(suite: SuiteResults) -> Table | None:
    methods = {name: found for name, found in suite.runs.items() if any("people" in one.measures for one in found)}
    if not methods:
        return None
    columns = [
        Column("NLL", "test", "low", 4, Quantity("test", "nll")),
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
    return records_table(f"{suite.title}: human uncertainty", caption, Numbers(methods), columns)


# --- ablations, settings and cost ------------------------------------------------------------------------------------


def ablation_groups(suite: SuiteResults) -> list[str]:
    """Return the names of a suite's ablations: first the known ablations in page order, then all others."""
    found = [group for group in suite.groups if group != MAIN]
    return [group for group in GROUP_TITLES if group in found] + [group for group in found if group not in GROUP_TITLES]


def _ablation(suite: SuiteResults, group: str) -> Table:
    methods = suite.groups[group]
    numbers, sets = Numbers(methods), shared_outliers(suite.sets, methods)
    outliers = tuple(one.name for one in sets)
    columns = [
        Column("NLL", "test", "low", 4, Quantity("test", "nll")),
        Column("ECE %", "test", "low", 2, Quantity("test", "ece"), 100),
        Column("acc. %", "test", "high", 2, Quantity("test", "accuracy"), 100),
        Column("log-lik.", "shifted", "high", 3, numbers.shifted("log_likelihood")),
        Column("ECE %", "shifted", "low", 2, numbers.shifted("ece"), 100),
        Column("MMC %", "shifted", None, 1, numbers.shifted("confidence"), 100),
        Column("acc. %", "shifted", "high", 2, numbers.shifted("accuracy"), 100),
        Column("MMC %", "outliers", "low", 1, Quantity(outliers, "confidence"), 100),
        Column("AUROC", "outliers", "high", 2, Quantity(outliers, "auroc", BY_CONFIDENCE), 100),
    ]
    along = (
        f" Columns for shifted data show means over all levels of {suite.shift_title}."
        if suite.of_role("shift")
        else ""
    )
    every = len(sets) == len(suite.of_role("outlier"))
    caption = (
        f"{runs_words(methods)}{along} Columns for outliers show means over "
        f"{'all outlier sets' if every else 'the following sets: ' + ', '.join(one.title for one in sets)}. AUROC is computed "
        f"from the confidence."
    )
    return records_table(f"{suite.title}: {GROUP_TITLES.get(group, group)}", caption, numbers, columns)


SETTINGS = ("components", "structure", "link", "rule", "weights")
TUNED = ("prior_precision", "temperature", "distance_exponent")


def _settings(suite: SuiteResults) -> Table:
    headings = [*SETTINGS, "other", *(name.replace("_", " ") for name in TUNED)]
    rows = {}
    for group in [MAIN, *ablation_groups(suite)]:
        for method, records in suite.groups.get(group, {}).items():
            settings = records[0].settings
            others = [f"{key} {_plain(value)}" for key, value in settings.items() if key not in SETTINGS]
            tuned = [_range(record.chosen.get(key) for record in records) for key in TUNED]
            rows[method] = [*(_plain(settings.get(key)) for key in SETTINGS), ", ".join(others), *tuned]
    kept = [index for index in range(len(headings)) if any(row[index] for row in rows.values())]
    columns = [Column(headings[index]) for index in kept]
    values = {method: [row[index] for index in kept] for method, row in rows.items()}
    caption = "Ranges extend from the smallest to the largest value over components and runs."
    return marked_table(f"{suite.title}: settings and tuned values", caption, columns, values)


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain(one) for one in value)
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _range(values: Iterable[Any]) -> str:
    # Return the range of all the given numbers; each value is a number, a list of numbers, or None.
    numbers = [
        number for value in values for number in (value if isinstance(value, list) else [value]) if number is not None
    ]
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
    here = {row["method"]: row for row in suite.cost["rows"]}
    columns: list[Column] = []
    values: dict[str, list[Number]] = {method: [] for method in here}
    for index, (group, unit, entry, factor, base) in enumerate(COSTS):
        ratio = f"\N{MULTIPLICATION SIGN} {base}"
        columns += [Column(name, group=group, digits=2) for name in (unit, ratio, f"paper {ratio}")]
        ours = {method: None if row[entry] is None else factor * row[entry] for method, row in here.items()}
        paper = {method: costs[index] for method, costs in paper_numbers.COST.items()}
        for method, row in values.items():
            row += [ours[method], *(_ratio(costs.get(method), costs.get(base)) for costs in (ours, paper))]
    settings = ", ".join(f"{key.replace('_', ' ')} = {value}" for key, value in suite.cost["settings"].items())
    caption = (
        f"Measured in one run{f' (settings: {settings})' if settings else ''}. Columns marked \N{MULTIPLICATION SIGN} show the "
        f"ratio to MAP, or to LLLA for fitting, because MAP requires no fitting. The 'paper' columns give the same ratios from the "
        f"paper's table ({paper_numbers.COST_SETTING}). Memory is the amount needed for prediction."
    )
    return marked_table(f"{suite.title}: cost", caption, columns, values) if here else None


def _ratio(mine: float | None, base: float | None) -> float | None:
    return mine / base if mine is not None and base else None
