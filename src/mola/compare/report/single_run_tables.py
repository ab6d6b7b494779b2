"""Tables of one run, of `mola evaluate` or of the demo: standard errors over data, and bold for a clear lead on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from mola.compare.measured import CLEAR
from mola.compare.record import Comparison, DecisionResult, SetInfo, SetResult
from mola.compare.regression import LEVELS
from mola.compare.report.estimate import Estimate
from mola.compare.report.numbers import Numbers, On, Shown, on_set, records_table
from mola.compare.report.tables import Column, Number, Table, make_table
from mola.compare.tally import ALL_SCORES
from mola.options import counted

SCORE_NAMES = {
    "max probability": "max prob.",
    "entropy": "entropy",
    "energy": "energy",
    "maximum logit": "max logit",
    "ood score": "ood_score",
    "variance": "variance",
}
"""Short names of outlier scores."""

FEW = 10
"""Classes in a short list."""

BOLD = f"bold leads every other method{{}}, ties aside, by more than {CLEAR:g} standard errors of their difference, input by input"


def set_words(one: SetInfo) -> str:
    """Return the size and name of a set: "300 inputs of test.npz", or "900 labels of 300 inputs of test.npz"."""
    if one.inputs is None:
        return f"{counted(one.count, 'input')} of {one.name}"
    return f"{counted(one.count, one.parts)} of {counted(one.inputs, 'input')} of {one.name}"


# --- classification --------------------------------------------------------------------------------------------------

TEST_DATA = {
    "accuracy": Column("accuracy %", better="high", digits=2),
    "nll": Column("NLL", better="low", digits=4),
    "brier": Column("Brier", better="low", digits=4),
    "ece": Column("ECE %", better="low", digits=2),
    "confidence": Column("mean conf. %", digits=2),
    "auroc": Column("AUROC %", better="high", digits=2),
    "average_precision": Column("AP %", better="high", digits=2),
    "miou": Column("mean IoU %", better="high", digits=2),
}


def evaluation_tables(comparison: Comparison) -> list[Table]:
    """Return the tables of the test data, of decisions, and of each set of outliers."""
    inside = _regression_tables(comparison) if comparison.regression else [_test_table(comparison)]
    outside = [table for one in comparison.of_role("outlier") for table in _outlier_tables(comparison, one)]
    return [*inside, *decision_tables(comparison), *outside]


def detail_table(comparison: Comparison, most: int | None = None) -> Table | None:
    """Return results by output for a regression, otherwise by class, with the `most` worst classes first."""
    return _output_table(comparison) if comparison.regression else class_table(comparison, most)


def _test_table(comparison: Comparison) -> Table:
    test = comparison.test
    caption = f"{set_words(test)}, with standard errors over inputs; {BOLD.format('')}."
    shown = on_set(test.name, TEST_DATA)
    return records_table("On the test data", caption, Numbers(comparison.runs), shown, leads=comparison.leads)


def _outlier_tables(comparison: Comparison, one: SetInfo) -> tuple[Table, Table]:
    # AUROC and false positives have separate tables: one table with both would be too wide.
    numbers, leads = Numbers(comparison.runs), comparison.leads
    first = Shown(Column("MMC %", better="low"), On(one.name, "confidence"), 100)
    if comparison.regression:
        first = Shown(Column("mean std.", digits=digits_of(comparison, "std")), On(one.name, "std"))
    caption = f"{set_words(one)}, with standard errors: AUROC of 50 is guessing; {BOLD.format(', by any score')}."
    below = "FPR95: outliers that pass where 95 % of the test data do, with errors and bold as above."
    areas = _by_score(numbers, one.name, "auroc", Column("", "AUROC %", "high"))
    rates = _by_score(numbers, one.name, "fpr95", Column("", "FPR95 %", "low"))
    return (
        records_table(f"Outliers: {one.title}", caption, numbers, [first, *areas], leads=leads),
        records_table(f"Missed outliers: {one.title}", below, numbers, rates, leads=leads),
    )


def _by_score(numbers: Numbers, name: str, metric: str, like: Column) -> list[Shown]:
    quantities = [On(name, metric, score) for score in ALL_SCORES]
    known = [one for on in quantities for one in numbers(on, 100).values() if one is not None]
    # A second digit is meaningful where all errors are below a tenth of a point.
    digits = 2 if all(one.error is not None and one.error < 0.1 for one in known) else 1
    return [Shown(replace(like, name=SCORE_NAMES[on.score], digits=digits), on, 100) for on in quantities]


def decision_tables(comparison: Comparison) -> list[Table]:
    """Compare the guarantees made on the validation data with the rates on the test data."""
    found = comparison.decisions
    if found is None:
        return []
    alarms: dict[str, list[Number]] = {"false alarms": [100 * found.false_alarm_rate, 100 * found.alarms, None]}
    if comparison.regression:
        return [_interval_table(comparison, found, alarms)]
    values = alarms
    for one in found.answers:
        realised, answered = (None if number is None else 100 * number for number in (one.realised, one.answered))
        values[f"wrong answers, at most {100 * one.promised:.0f} %"] = [100 * one.promised, realised, answered]
    if found.sets is not None:
        missed = [100 * (1 - share) for share in (found.sets.promised, found.sets.realised)]
        values[f"sets without the true class, at most {100 * (1 - found.sets.promised):.0f} %"] = [*missed, None]
    impossible = [one for one in found.answers if one.threshold is None]
    caption = "Thresholds come from the validation data, so test data may miss a promise by chance."
    caption = f"{impossible[-1].why[:1].upper()}{impossible[-1].why[1:]}" if impossible else caption
    columns = [Column("promised %"), Column("on test data %", digits=2), Column("answered %")]
    sets = [] if found.sets is None else [_set_table(found.sets, comparison.own)]
    return [make_table("Decisions", caption, columns, values), *sets]


def _set_table(sets: SetResult, method: str) -> Table:
    worst = sorted(sets.classes, key=lambda name: sets.classes[name])[:FEW]
    values: dict[str, list[Number]] = {name: [100 * sets.classes[name]] for name in worst}
    caption = (
        f"Sets of {method} with a coverage of {100 * sets.promised:g} % have {sets.size:.2f} classes on average; the least covered "
        f"classes are first, and `mola predict --by-class` gives every class this coverage."
    )
    return make_table("Prediction sets by class", caption, [Column("covered %")], values)


CLASS_COLUMNS = {
    "accuracy": "accuracy %",
    "confidence": "mean conf. %",
    "auroc": "AUROC %",
    "average_precision": "AP %",
    "ece": "ECE %",
    "iou": "IoU %",
}


def class_table(comparison: Comparison, most: int | None = None) -> Table:
    """Tabulate every class, or the `most` worst classes: count, accuracy and confidence, worst classes first."""
    methods = [comparison.baseline, comparison.own]
    # A label is counted once for each input where it is known, a class once for each position.
    unit = "position" if comparison.test.parts == "position" else "input"
    results = [comparison.methods[method].labelled[comparison.test.name].classes for method in methods]
    order = sorted(results[1], key=lambda name: (results[1][name].accuracy, -results[1][name].count))
    shown = {
        measure: title
        for measure, title in CLASS_COLUMNS.items()
        if any(getattr(one, measure) is not None for one in results[0].values())
    }
    columns = [Column(f"{unit}s", digits=0)]
    columns += [Column(method, group) for group in shown.values() for method in methods]
    values: dict[str, list[Number]] = {}
    for name in order[:most]:
        found = [getattr(result[name], measure) for measure in shown for result in results]
        values[name] = [float(results[0][name].count), *(None if one is None else 100 * one for one in found)]
    one, many = ("label", "labels") if "auroc" in shown else ("class", "classes")
    title = (
        f"{one.capitalize()} by {one}"
        if len(values) == len(order)
        else f"The worst {len(values)} of {len(order)} {many}"
    )
    caption = f"{many.capitalize()} with the most errors of {comparison.own} first."
    return make_table(title, caption, columns, values)


# --- regression ------------------------------------------------------------------------------------------------------

MOST_DIGITS = 8


def _digits(errors: Sequence[float | None], values: Sequence[float]) -> int:
    # Decimals that show two digits of the smallest error, but at most five of the values: constants have almost no error.
    largest = max((abs(one) for one in values), default=0.0)
    if largest == 0:
        return 1
    most = 4 - math.floor(math.log10(largest))
    known = [one for one in errors if one is not None and one > 1e-6 * largest]
    wanted = 1 - math.floor(math.log10(min(known))) if known else most
    return min(MOST_DIGITS, max(0, min(wanted, most)))


def digits_of(comparison: Comparison, metric: str) -> int:
    """Return the number of decimals of a metric on the test data: targets may have any unit."""
    found = [one.labelled[comparison.test.name] for one in comparison.methods.values()]
    return _digits([one.errors.get(metric) for one in found], [one.metrics[metric] for one in found])


REGRESSION = {"rmse": "RMSE", "nll": "NLL", "crps": "CRPS"}
"""Metrics of a regression; lower is better."""


def _regression_tables(comparison: Comparison) -> list[Table]:
    # On the test data, intervals, and differences.
    test, numbers = comparison.test.name, Numbers(comparison.runs)
    columns = {
        name: Column(title, better="low", digits=digits_of(comparison, name)) for name, title in REGRESSION.items()
    }
    columns["std"] = Column("mean std.", digits=digits_of(comparison, "std"))
    caption = (
        f"{set_words(comparison.test)}, in the targets' units, with standard errors over inputs; {BOLD.format('')}."
    )
    levels = [f"{100 * level:g}" for level in LEVELS]
    wide = max(digits_of(comparison, f"width_{name}") for name in levels)
    intervals = [Shown(Column(f"{name} %", "covered, in %"), On(test, f"coverage_{name}"), 100) for name in levels]
    intervals += [Shown(Column(f"{name} %", "mean width", digits=wide), On(test, f"width_{name}")) for name in levels]
    below = "Share of targets in central intervals by their probability, and the mean width of the intervals."
    return [
        records_table("On the test data", caption, numbers, on_set(test, columns), leads=comparison.leads),
        records_table("Intervals", below, numbers, intervals, leads={test: {}}),
        *([_difference_table(comparison)] if comparison.differences else []),
    ]


def _difference_table(comparison: Comparison) -> Table:
    found, columns = comparison.differences, []
    for name, title in REGRESSION.items():
        pairs = [one[name] for one in found.values()]
        columns.append(Column(title, digits=_digits([error for _, error in pairs], [value for value, _ in pairs])))
    values: dict[str, list[Number]] = {
        method: [Estimate(*one[name], 1) for name in REGRESSION] for method, one in found.items()
    }
    caption = f"Each method minus {comparison.own}, input by input: above 0, {comparison.own} is better."
    return make_table(f"Compared with {comparison.own}", caption, columns, values, best=set())


def _interval_table(comparison: Comparison, found: DecisionResult, values: dict[str, list[Number]]) -> Table:
    for one in found.intervals:
        realised = Estimate(one.realised, one.realised_error, 1).scaled(100)
        values[f"{100 * one.promised:g} % intervals"] = [100 * one.promised, realised, one.width]
    digits = max(digits_of(comparison, f"width_{100 * level:g}") for level in LEVELS)
    caption = "Alarm and intervals come from the validation data, so test data may miss a promise by chance."
    columns = [Column("promised %"), Column("on test data %"), Column("mean width", digits=digits)]
    return make_table("Decisions", caption, columns, values, best=set())


OUTPUT_COLUMNS = {**REGRESSION, "coverage_90": "90 % covered, %"}


def _output_table(comparison: Comparison) -> Table | None:
    """Return a table that compares the networks with the posterior for each output; None for one output."""
    methods, test = list(dict.fromkeys((comparison.baseline, comparison.own))), comparison.test.name
    found = {name: comparison.methods[name].labelled[test].regression for name in methods}
    known = {name: one.outputs for name, one in found.items() if one is not None}
    names = list(next(iter(known.values()), {}))
    if len(names) < 2:
        return None
    values: dict[str, list[Number]] = {}
    digits: dict[str, list[int]] = {}  # outputs may have different units
    for output in names:
        values[output], digits[output] = [], []
        for metric in OUTPUT_COLUMNS:
            both = [known[method][output] for method in methods]
            factor = 100 if metric == "coverage_90" else 1
            values[output] += [Estimate(one.metrics[metric], one.errors[metric], 1).scaled(factor) for one in both]
            shown = _digits([one.errors[metric] for one in both], [one.metrics[metric] for one in both])
            digits[output] += [1 if metric == "coverage_90" else shown] * len(methods)
    columns = [Column(method, title) for title in OUTPUT_COLUMNS.values() for method in methods]
    many = len(comparison.classes)
    title = "Output by output" if many == len(names) else f"The first {len(names)} of {many} outputs"
    caption = "Each output in its own units, with standard errors."
    return make_table(title, caption, columns, values, best=set(), digits=digits)


# --- the demo --------------------------------------------------------------------------------------------------------

ROTATED = {
    "accuracy": Column("acc. %"),
    "nll": Column("NLL", better="low", digits=2),
    "ece": Column("ECE %", better="low"),
}
TABLE_ANGLES = (15, 30, 45)


def demo_tables(comparison: Comparison) -> list[Table]:
    """Return tables in distribution, under rotation, and against each set of outliers by every score."""
    numbers, leads = Numbers(comparison.runs), comparison.leads
    rotated = [
        replace(shown, column=replace(shown.column, group=f"{one.level:g}°"))
        for one in comparison.of_role("shift")
        if one.level in TABLE_ANGLES
        for shown in on_set(one.name, ROTATED)
    ]
    return [
        _test_table(comparison),
        records_table("Under rotation", "Test digits turned counter-clockwise.", numbers, rotated, leads=leads),
        *(_outlier_tables(comparison, one)[0] for one in comparison.of_role("outlier")),
    ]
