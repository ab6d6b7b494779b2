"""Tables of a comparison: standard errors are computed over the inputs, and values that are clearly best are bold."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from molaplace.evaluation import CLEAR, Estimate, Evaluation, SetInfo
from molaplace.evaluation.catalogue import (
    CATALOGUE,
    CLASS_METRICS,
    CLASSIFICATION_METRICS,
    COVERAGE_METRICS,
    COVERAGES,
    OUTLIER_METRICS,
    REGRESSION_METRICS,
    WIDTH_METRICS,
)
from molaplace.evaluation.columns import INTERVAL, OUTLIER_SCORES
from molaplace.evaluation.comparison import SetResult
from molaplace.options import counted
from molaplace.report.numbers import Numbers, Quantity
from molaplace.report.tables import Column, Number, Table, columns_on, make_table, quantity_table

SCORE_HEADINGS = {
    "max probability": "max prob.",
    "entropy": "entropy",
    "energy": "energy",
    "maximum logit": "max logit",
    "ood score": "ood_score",
    "variance": "variance",
}
"""Short names of outlier scores, for column headings."""

FEW = 10
"""Number of classes in the table of prediction sets."""

ABBREVIATIONS = "NLL is the log loss, Brier the squared error of the probabilities, and ECE the calibration error."

BOLD = (
    "Ties aside, a number is bold if it is better than that of every other method{} by more than "
    f"{CLEAR:g} standard errors of the paired difference"
)


def set_words(info: SetInfo) -> str:
    """Return the size and name of a set as text, such as "300 inputs from test.npz" or "900 labels of 300 inputs from test.npz"."""
    if info.inputs is None:
        return f"{counted(info.count, 'input')} from {info.name}"
    return f"{counted(info.count, info.parts)} of {counted(info.inputs, 'input')} from {info.name}"


# --- classification --------------------------------------------------------------------------------------------------

SUITES_ONLY = ("log_likelihood", "ece100", "ece_legacy", "mce", "mce_legacy", "aurc")
"""Metrics on test data that only the tables of suites show."""


def evaluation_tables(evaluation: Evaluation) -> list[Table]:
    """Return the tables for the test data, the decisions, each set of shifted data and each outlier set."""
    on_test = _regression_tables(evaluation) if evaluation.regression else [test_table(evaluation)]
    on_outliers = [table for info in evaluation.of_role("outlier") for table in outlier_tables(evaluation, info)]
    return [*on_test, *_decision_tables(evaluation), *shift_tables(evaluation), *on_outliers]


def detail_table(evaluation: Evaluation) -> Table | None:
    """Return a table with one row per output (for regression) or per class, with the worst classes first."""
    return _output_table(evaluation) if evaluation.regression else _class_table(evaluation)


def above_chance(evaluation: Evaluation, quantity: Quantity, method: str) -> bool:
    """Return whether a method's AUROC by the quantity's score exceeds 50 % by more than `CLEAR` standard errors, if these are known."""
    area = Numbers(evaluation.methods)(replace(quantity, metric="auroc"))[method]
    assert area is not None
    return area.value - (0.0 if math.isnan(area.error) else CLEAR * area.error) > 0.5


def comparison_table(
    evaluation: Evaluation, title: str, caption: str, columns: Sequence[Column], *, marked: bool = True
) -> Table:
    """Return a table with a row for each method; `marked` makes the clear leads bold."""

    def clear_leads(column: Column, values: Mapping[str, Number]) -> Collection[str]:
        # If the metric depends on an outlier score, only leads with that score count.
        lead = evaluation.leads.get(str(column.quantity.sets), {}).get(column.quantity.metric)
        entries = lead.clear if lead is not None and marked else ()
        leading = {name for name, *score in entries if score in ([], [column.quantity.score])}
        if column.quantity.metric in OUTLIER_METRICS:
            leading = {name for name in leading if above_chance(evaluation, column.quantity, name)}
        return [name for name in values if name in leading]

    return quantity_table(title, caption, Numbers(evaluation.methods), columns, best=clear_leads)


def test_table(evaluation: Evaluation) -> Table:
    """Return the metrics on the test data."""
    test = evaluation.test
    errors = "with standard errors computed over the inputs."
    if evaluation.regression:
        caption = f"{set_words(test)}, in the targets' units, {errors} {BOLD.format('')}."
        return comparison_table(evaluation, "On the test data", caption, columns_on(test.name, REGRESSION_METRICS))
    catalogue = {**CLASSIFICATION_METRICS, **CLASS_METRICS}
    metrics = {name: metric for name, metric in catalogue.items() if name not in SUITES_ONLY}
    caption = f"{set_words(test)}, {errors} {ABBREVIATIONS} {BOLD.format('')}."
    return comparison_table(evaluation, "On the test data", caption, columns_on(test.name, metrics))


def shift_tables(evaluation: Evaluation) -> list[Table]:
    """Return a table for each of the main metrics on shifted data, with a column for each set."""
    tables = []
    sets = evaluation.of_role("shift")
    catalogue = REGRESSION_METRICS if evaluation.regression else CLASSIFICATION_METRICS
    for name in ("rmse", "nll", "crps") if evaluation.regression else ("accuracy", "nll", "ece"):
        columns = [
            replace(column, name=info.title)
            for info in sets
            for column in columns_on(info.name, {name: catalogue[name]})
        ]
        title = f"Shifted data: {catalogue[name].name}"
        unit = "In %, with" if catalogue[name].factor == 100 else "With"
        caption = f"{unit} standard errors computed over the inputs. {BOLD.format('')}."
        tables += [comparison_table(evaluation, title, caption, columns)] if sets else []
    return tables


def outlier_tables(evaluation: Evaluation, info: SetInfo) -> tuple[Table, Table]:
    """Return the AUROC and the FPR95 of every score on a set of outliers; a combined table would be too wide."""
    mean = Column("MMC %", "", "low", 1, Quantity(info.name, "confidence"), 100)
    if evaluation.regression:
        mean = Column("mean std.", digits=None, quantity=Quantity(info.name, "std"))
    chance = "An AUROC of 50 corresponds to random guessing."
    bold = f"{BOLD.format(' and score')}, and the AUROC is clearly above 50."
    caption = f"{set_words(info)}, with standard errors. {chance} {bold}"
    fpr_note = "FPR95, shown with standard errors, is the share of outliers accepted at the threshold that accepts 95 % of the test data."
    areas = _by_score(evaluation, info, "auroc")
    rates = _by_score(evaluation, info, "fpr95")
    return (
        comparison_table(evaluation, f"Outliers: {info.title}", caption, [mean, *areas]),
        comparison_table(evaluation, f"Missed outliers: {info.title}", fpr_note, rates),
    )


def _by_score(evaluation: Evaluation, info: SetInfo, metric: str) -> list[Column]:
    heading = f"{OUTLIER_METRICS[metric].heading} %"
    (template,) = columns_on(info.name, {metric: OUTLIER_METRICS[metric]}, heading)
    columns = [
        replace(template, name=SCORE_HEADINGS[score], quantity=replace(template.quantity, score=score))
        for score in OUTLIER_SCORES
    ]
    numbers = Numbers(evaluation.methods)
    estimates = [value for column in columns for value in numbers(column.quantity, 100).values() if value is not None]
    # A second decimal place is meaningful if all errors are known and below 0.1 percentage points.
    digits = 2 if all(estimate.error < 0.1 for estimate in estimates) else 1
    return [replace(column, digits=digits) for column in columns]


def _decision_tables(evaluation: Evaluation) -> list[Table]:
    # The rows compare the guarantees obtained from the validation data with the rates observed on the test data.
    decisions = evaluation.decisions
    if decisions is None:
        return []
    rows: dict[str, list[Number]] = {"false alarms": [100 * decisions.false_alarm_rate, 100 * decisions.alarms, None]}
    caption = "Thresholds come from the validation data, so rates on the test data may exceed their bounds by chance."
    if evaluation.regression:
        for interval in decisions.intervals:
            realised = Estimate.of(interval.realised, interval.realised_error).scaled(100)
            rows[f"{100 * interval.promised:g} % intervals"] = [100 * interval.promised, realised, interval.width]
        last = Column("mean width", digits=None)
        return [make_table("Decisions", caption, [Column("promised %"), Column("on test data %"), last], rows)]
    caption += " Inputs above the outlier threshold are not answered."
    for answers in decisions.answers:
        rates = [None if rate is None else 100 * rate for rate in (answers.realised, answers.answered)]
        rows[f"wrong answers \N{LESS-THAN OR EQUAL TO} {100 * answers.promised:.0f} %"] = [
            100 * answers.promised,
            *rates,
        ]
        if answers.threshold is None:
            caption += f" {answers.why[:1].upper()}{answers.why[1:]}"
    columns = [Column("promised %"), Column("on test data %", digits=2), Column("answered %")]
    sets = decisions.sets
    if sets is not None:
        missed = [100 * (1 - share) for share in (sets.promised, sets.realised)]
        rows[f"sets without the class \N{LESS-THAN OR EQUAL TO} {missed[0]:.0f} %"] = [*missed, None]
    tables = [make_table("Decisions", caption, columns, rows)]
    return tables if sets is None else [*tables, _set_table(evaluation.subject, sets)]


def _set_table(method: str, sets: SetResult) -> Table:
    empty = f" ({100 * sets.empty:.1f} % of the sets are empty)" if sets.empty else ""
    caption = (
        f"Prediction sets of {method} with a coverage of {100 * sets.promised:g} % contain {sets.size:.2f} classes on average{empty}. "
        f"Classes with the lowest coverage come first. `molaplace predict --by-class` guarantees this coverage for every class."
    )
    worst = sorted(sets.classes, key=sets.classes.__getitem__)[:FEW]
    covered: dict[str, list[Number]] = {name: [100 * sets.classes[name]] for name in worst}
    return make_table("Prediction sets by class", caption, [Column("covered %")], covered)


def _class_table(evaluation: Evaluation) -> Table:
    # For dense outputs, classes are counted per position; otherwise, classes and labels are counted per input.
    unit = "position" if evaluation.test.parts == "position" else "input"
    by_method = {method: evaluation.on_test[method].classes for method in (evaluation.baseline, evaluation.subject)}
    baseline, subject = by_method[evaluation.baseline], by_method[evaluation.subject]
    order = sorted(subject, key=lambda name: (subject[name]["accuracy"], -subject[name]["count"]))
    metrics = [metric for metric in CATALOGUE if any(metric in values for values in baseline.values())]
    columns = [Column(f"{unit}s", digits=0)]
    columns += [Column(method, CATALOGUE[metric].heading) for metric in metrics for method in by_method]
    rows: dict[str, list[Number]] = {}
    for name in order:
        rows[name] = [float(baseline[name]["count"])]
        for metric in metrics:
            values = [classes[name].get(metric) for classes in by_method.values()]
            rows[name] += [None if value is None else CATALOGUE[metric].factor * value for value in values]
    singular, plural = ("label", "labels") if "auroc" in metrics else ("class", "classes")
    caption = f"The {plural} for which {evaluation.subject} has the lowest accuracy come first."
    return make_table(f"{singular.capitalize()} by {singular}", caption, columns, rows)


# --- regression ------------------------------------------------------------------------------------------------------

COMPARED = {name: metric for name, metric in REGRESSION_METRICS.items() if metric.better}
"""Regression metrics by which methods are compared."""


def _regression_tables(evaluation: Evaluation) -> list[Table]:
    test = evaluation.test.name
    subject = evaluation.subject
    coverages = columns_on(test, COVERAGE_METRICS, "covered, in %")
    widths = columns_on(test, WIDTH_METRICS, "mean width")
    intervals_caption = (
        "Share of targets inside central intervals at each nominal coverage, and mean width of these intervals."
    )
    tables = [
        test_table(evaluation),
        comparison_table(evaluation, "Intervals", intervals_caption, [*coverages, *widths], marked=False),
    ]
    if gaps := evaluation.differences:
        caption = (
            f"Paired differences between each method and {subject}. {subject} is better if the difference is positive."
        )
        heads = [Column(metric.heading, digits=metric.digits) for metric in COMPARED.values()]
        values = {method: [Estimate.of(*gap[metric]) for metric in COMPARED] for method, gap in gaps.items()}
        tables.append(make_table(f"Compared with {subject}", caption, heads, values))
    return tables


OUTPUT_METRICS = {**COMPARED, COVERAGES[INTERVAL]: COVERAGE_METRICS[COVERAGES[INTERVAL]]}
"""Metrics of each output of a regression model."""


def _output_table(evaluation: Evaluation) -> Table | None:
    # Return the results of the plain networks and of the posterior for each output, or None if there is only one output.
    methods = list(dict.fromkeys((evaluation.baseline, evaluation.subject)))
    details = [evaluation.on_test[method].regression for method in methods]
    results = [detail.outputs for detail in details if detail is not None]
    if len(results[0]) < 2:
        return None
    columns = [
        Column(method, metric.name, digits=metric.digits) for metric in OUTPUT_METRICS.values() for method in methods
    ]
    values: dict[str, list[Number]] = {output: [] for output in results[0]}
    for output, row in values.items():
        for name, metric in OUTPUT_METRICS.items():
            estimates = [Estimate.of(result[output].metrics[name], result[output].errors[name]) for result in results]
            row += [estimate.scaled(metric.factor) for estimate in estimates]
    count = len(evaluation.classes)
    title = "Output by output" if count == len(values) else f"The first {len(values)} of {count} outputs"
    return make_table(
        title,
        "RMSE and CRPS are in the unit of each output; all metrics are shown with standard errors.",
        columns,
        values,
    )
