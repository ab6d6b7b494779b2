"""Tables for a single run (`molaplace evaluate` and the demo).

Standard errors are computed over the inputs, and values that are clearly best are bold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from molaplace.evaluation.answers import ALL_SCORES
from molaplace.evaluation.leads import CLEAR
from molaplace.evaluation.record import Comparison, SetInfo
from molaplace.evaluation.regression import LEVELS
from molaplace.options import counted
from molaplace.report.estimate import Estimate
from molaplace.report.numbers import Numbers, On
from molaplace.report.tables import Column, Number, Table, make_table, on_set, records_table

SCORE_NAMES = {
    "max probability": "max prob.",
    "entropy": "entropy",
    "energy": "energy",
    "maximum logit": "max logit",
    "ood score": "ood_score",
    "variance": "variance",
}
"""Short names of outlier scores, for column headings."""

FEW = 10
"""Number of classes in tables that show only the worst classes."""

BOLD = (
    "Ties aside, a number is bold if it is better than that of every other method{} by more than "
    f"{CLEAR:g} standard errors of the paired difference"
)


def set_words(one: SetInfo) -> str:
    """Return the size and name of a set as text, such as "300 inputs from test.npz" or "900 labels of 300 inputs from test.npz"."""
    if one.inputs is None:
        return f"{counted(one.count, 'input')} from {one.name}"
    return f"{counted(one.count, one.parts)} of {counted(one.inputs, 'input')} from {one.name}"


# --- classification --------------------------------------------------------------------------------------------------

TEST_DATA = {
    "accuracy": Column("accuracy %", better="high", digits=2, factor=100),
    "nll": Column("NLL", better="low", digits=4),
    "brier": Column("Brier", better="low", digits=4),
    "ece": Column("ECE %", better="low", digits=2, factor=100),
    "confidence": Column("mean conf. %", digits=2, factor=100),
    "auroc": Column("AUROC %", better="high", digits=2, factor=100),
    "average_precision": Column("AP %", better="high", digits=2, factor=100),
    "miou": Column("mean IoU %", better="high", digits=2, factor=100),
}


def evaluation_tables(comparison: Comparison) -> list[Table]:
    """Return the tables for the test data, the decisions and each outlier set."""
    inside = _regression_tables(comparison) if comparison.regression else [_test_table(comparison)]
    outside = [table for one in comparison.of_role("outlier") for table in _outlier_tables(comparison, one)]
    return [*inside, *_decision_tables(comparison), *outside]


def detail_table(comparison: Comparison, most: int | None = None) -> Table | None:
    """Return a table with one row per output (for regression) or per class; list the worst classes first, at most `most` of them."""
    return _output_table(comparison) if comparison.regression else _class_table(comparison, most)


def _test_table(comparison: Comparison) -> Table:
    test = comparison.test
    caption = f"{set_words(test)}, with standard errors computed over the inputs. {BOLD.format('')}."
    columns = on_set(test.name, TEST_DATA)
    return records_table("On the test data", caption, Numbers(comparison.runs), columns, leads=comparison.leads)


def _outlier_tables(comparison: Comparison, one: SetInfo) -> tuple[Table, Table]:
    # AUROC and FPR95 have separate tables because a combined table would be too wide.
    numbers, leads = Numbers(comparison.runs), comparison.leads
    first = Column("MMC %", "", "low", 1, On(one.name, "confidence"), 100)
    if comparison.regression:
        first = Column("mean std.", digits=digits_of(comparison, "std"), on=On(one.name, "std"))
    caption = f"{set_words(one)}, with standard errors. An AUROC of 50 corresponds to random guessing. {BOLD.format(' and score')}."
    below = "FPR95, shown with standard errors, is the share of outliers accepted at the threshold that accepts 95 % of the test data."
    areas = _by_score(numbers, Column("", "AUROC %", "high", 1, On(one.name, "auroc"), 100))
    rates = _by_score(numbers, Column("", "FPR95 %", "low", 1, On(one.name, "fpr95"), 100))
    return (
        records_table(f"Outliers: {one.title}", caption, numbers, [first, *areas], leads=leads),
        records_table(f"Missed outliers: {one.title}", below, numbers, rates, leads=leads),
    )


def _by_score(numbers: Numbers, like: Column) -> list[Column]:
    columns = [replace(like, name=SCORE_NAMES[score], on=replace(like.on, score=score)) for score in ALL_SCORES]
    known = [one for column in columns for one in numbers(column.on, 100).values() if one is not None]
    # A second decimal place is meaningful if all errors are below 0.1 percentage points.
    digits = 2 if all(one.error is not None and one.error < 0.1 for one in known) else 1
    return [replace(column, digits=digits) for column in columns]


def _decision_tables(comparison: Comparison) -> list[Table]:
    # The rows compare the guarantees obtained from the validation data with the rates observed on the test data.
    found = comparison.decisions
    if found is None:
        return []
    values: dict[str, list[Number]] = {"false alarms": [100 * found.false_alarm_rate, 100 * found.alarms, None]}
    caption = "Thresholds come from the validation data, so rates on the test data may exceed their bounds by chance."
    if comparison.regression:
        for interval in found.intervals:
            realised = Estimate(interval.realised, interval.realised_error, 1).scaled(100)
            values[f"{100 * interval.promised:g} % intervals"] = [100 * interval.promised, realised, interval.width]
        digits = max(digits_of(comparison, f"width_{100 * level:g}") for level in LEVELS)
        columns = [Column("promised %"), Column("on test data %"), Column("mean width", digits=digits)]
        return [make_table("Decisions", caption, columns, values)]
    for one in found.answers:
        rates = [None if rate is None else 100 * rate for rate in (one.realised, one.answered)]
        values[f"wrong answers, at most {100 * one.promised:.0f} %"] = [100 * one.promised, *rates]
        if one.threshold is None:
            caption = f"{one.why[:1].upper()}{one.why[1:]}"
    columns = [Column("promised %"), Column("on test data %", digits=2), Column("answered %")]
    if (sets := found.sets) is None:
        return [make_table("Decisions", caption, columns, values)]
    missed = [100 * (1 - share) for share in (sets.promised, sets.realised)]
    values[f"sets without the true class, at most {missed[0]:.0f} %"] = [*missed, None]
    worst = sorted(sets.classes, key=sets.classes.__getitem__)[:FEW]
    empty = f" ({100 * sets.empty:.1f} % of the sets are empty)" if sets.empty else ""
    by_class = (
        f"Prediction sets of {comparison.own} with a coverage of {100 * sets.promised:g} % contain {sets.size:.2f} classes on "
        f"average{empty}. Classes with the lowest coverage come first. `molaplace predict --by-class` guarantees this coverage for "
        f"every class."
    )
    covered = {name: [100 * sets.classes[name]] for name in worst}
    return [
        make_table("Decisions", caption, columns, values),
        make_table("Prediction sets by class", by_class, [Column("covered %")], covered),
    ]


CLASS_COLUMNS = {
    "accuracy": "accuracy %",
    "confidence": "mean conf. %",
    "auroc": "AUROC %",
    "average_precision": "AP %",
    "ece": "ECE %",
    "iou": "IoU %",
}


def _class_table(comparison: Comparison, most: int | None) -> Table:
    methods = [comparison.baseline, comparison.own]
    # For dense outputs, classes are counted per position; otherwise, classes and labels are counted per input.
    unit = "position" if comparison.test.parts == "position" else "input"
    results = [comparison.methods[method].labelled[comparison.test.name].classes for method in methods]
    order = sorted(results[1], key=lambda name: (results[1][name]["accuracy"], -results[1][name]["count"]))
    shown = [key for key in CLASS_COLUMNS if any(key in one for one in results[0].values())]
    columns = [Column(f"{unit}s", digits=0)]
    columns += [Column(method, CLASS_COLUMNS[key]) for key in shown for method in methods]
    values: dict[str, list[Number]] = {}
    for name in order[:most]:
        found = [result[name].get(key) for key in shown for result in results]
        values[name] = [float(results[0][name]["count"]), *(None if one is None else 100 * one for one in found)]
    one, many = ("label", "labels") if "auroc" in shown else ("class", "classes")
    title = f"{one.capitalize()} by {one}"
    if len(values) < len(order):
        title = f"The worst {len(values)} of {len(order)} {many}"
    return make_table(
        title, f"The {many} for which {comparison.own} has the lowest accuracy come first.", columns, values
    )


# --- regression ------------------------------------------------------------------------------------------------------

MOST_DIGITS = 8


def _digits(pairs: Iterable[tuple[float, float | None]]) -> int:
    # Return the number of decimals needed to show two digits of the smallest error without showing more than five digits of the
    # largest value. The error of a constant quantity is almost zero and would otherwise require too many decimals.
    values, errors = zip(*pairs, strict=True)
    largest = max(map(abs, values))
    if largest == 0:
        return 1
    most = 4 - math.floor(math.log10(largest))
    known = [one for one in errors if one is not None and one > 1e-6 * largest]
    wanted = 1 - math.floor(math.log10(min(known))) if known else most
    return min(MOST_DIGITS, max(0, min(wanted, most)))


def digits_of(comparison: Comparison, metric: str) -> int:
    """Return the number of decimals for a metric on the test data, chosen from its values and standard errors."""
    found = [one.labelled[comparison.test.name] for one in comparison.methods.values()]
    return _digits((one.metrics[metric], one.errors.get(metric)) for one in found)


REGRESSION = {"rmse": "RMSE", "nll": "NLL", "crps": "CRPS"}
"""Regression metrics; lower is better for all of them."""


def _regression_tables(comparison: Comparison) -> list[Table]:
    test, numbers, own = comparison.test.name, Numbers(comparison.runs), comparison.own
    columns = {
        name: Column(title, better="low", digits=digits_of(comparison, name)) for name, title in REGRESSION.items()
    }
    columns["std"] = Column("mean std.", digits=digits_of(comparison, "std"))
    caption = f"{set_words(comparison.test)}, in the targets' units, with standard errors computed over the inputs. {BOLD.format('')}."
    levels = [f"{100 * level:g}" for level in LEVELS]
    wide = max(digits_of(comparison, f"width_{name}") for name in levels)
    intervals = [Column(f"{one} %", "covered, in %", None, 1, On(test, f"coverage_{one}"), 100) for one in levels]
    intervals += [Column(f"{one} %", "mean width", None, wide, On(test, f"width_{one}")) for one in levels]
    below = "Share of targets inside central intervals at each nominal coverage, and mean width of these intervals."
    tables = [
        records_table("On the test data", caption, numbers, on_set(test, columns), leads=comparison.leads),
        records_table("Intervals", below, numbers, intervals, leads={}),
    ]
    if found := comparison.differences:
        caption = f"Paired differences between each method and {own}. {own} is better if the difference is positive."
        heads = [Column(title, digits=_digits(one[key] for one in found.values())) for key, title in REGRESSION.items()]
        values = {method: [Estimate(*one[key], 1) for key in REGRESSION] for method, one in found.items()}
        tables.append(make_table(f"Compared with {own}", caption, heads, values, best=()))
    return tables


OUTPUT_COLUMNS = {**REGRESSION, "coverage_90": "90 % covered, %"}


def _output_table(comparison: Comparison) -> Table | None:
    # Return the results of the plain networks and of the posterior for each output, or None if there is only one output.
    methods, test = list(dict.fromkeys((comparison.baseline, comparison.own))), comparison.test.name
    details = [comparison.methods[name].labelled[test].regression for name in methods]
    found = [one.outputs for one in details if one is not None]
    if len(found[0]) < 2:
        return None
    values: dict[str, list[Number]] = {output: [] for output in found[0]}
    for output, row in values.items():  # each output is formatted separately, because units may differ
        for metric in OUTPUT_COLUMNS:
            pairs = [(one[output].metrics[metric], one[output].errors[metric]) for one in found]
            factor, digits = (100, 1) if metric == "coverage_90" else (1, _digits(pairs))
            row += [Estimate(*pair, 1).scaled(factor).text(digits) for pair in pairs]
    columns = [Column(method, title) for title in OUTPUT_COLUMNS.values() for method in methods]
    many = len(comparison.classes)
    title = "Output by output" if many == len(values) else f"The first {len(values)} of {many} outputs"
    return make_table(
        title,
        "RMSE and CRPS are in the unit of each output; all metrics are shown with standard errors.",
        columns,
        values,
    )


# --- the demo --------------------------------------------------------------------------------------------------------

ROTATED = {
    "accuracy": Column("acc. %", factor=100),
    "nll": Column("NLL", better="low", digits=2),
    "ece": Column("ECE %", better="low", factor=100),
}
TABLE_ANGLES = (15, 30, 45)


def demo_tables(comparison: Comparison) -> list[Table]:
    """Return the tables for the test digits, the rotated digits and each outlier set, with all scores."""
    turned = [one for one in comparison.of_role("shift") if one.level in TABLE_ANGLES]
    columns = [column for one in turned for column in on_set(one.name, ROTATED, f"{one.level:g}°")]
    caption = "Test digits rotated counter-clockwise by the given angle."
    return [
        _test_table(comparison),
        records_table("Under rotation", caption, Numbers(comparison.runs), columns, leads=comparison.leads),
        *(_outlier_tables(comparison, one)[0] for one in comparison.of_role("outlier")),
    ]
