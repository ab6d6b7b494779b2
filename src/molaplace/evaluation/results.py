"""Results for reports and records: the metrics of columns as plain values, and the evaluation of several methods."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from molaplace import metrics
from molaplace.evaluation.catalogue import CLASS_METRICS, CLASSIFICATION_METRICS
from molaplace.evaluation.columns import (
    MOST_OUTPUTS,
    NOMINAL_LEVELS,
    Columns,
    PredictionColumns,
)
from molaplace.evaluation.comparison import (
    CONFIDENCE_BINS,
    Evaluation,
    IntervalResult,
    LabelledResult,
    MethodResult,
    OutlierResult,
    OutputResult,
    RegressionDetail,
    Role,
    SetInfo,
    SetResult,
)
from molaplace.evaluation.estimates import Measurement, known_error, mean_column, measured, separation
from molaplace.evaluation.leads import differences, labelled_leads, outlier_leads
from molaplace.laplace_mixture import LaplaceMixture
from molaplace.likelihoods import Gaussian
from molaplace.options import listed

MOST_BINS, LEAST_ERRORS = 8, 2
"""Maximum number of bins in a reliability diagram of one run, and minimum number of expected errors in each."""

CURVE_POINTS = 100
"""Maximum number of points in a risk-coverage curve."""

MOST_TARGETS = 300
"""Maximum number of regression targets shown in a figure; the targets are evenly spaced in the data set."""


# --- plain values -----------------------------------------------------------------------------------------------------


def _values(measurements: Mapping[str, Measurement]) -> dict[str, float]:
    return {name: measurement.value for name, measurement in measurements.items()}


def _errors(measurements: Mapping[str, Measurement]) -> dict[str, float | None]:
    return {name: known_error(measurement) for name, measurement in measurements.items()}


# --- labelled data ---------------------------------------------------------------------------------------------------


def labelled_result(
    columns: PredictionColumns,
    level: float = 0.0,
    *,
    detail: bool = True,
    equal_errors: bool = False,
    classes: Sequence[str] = (),
    types: Sequence[str] = (),
) -> LabelledResult:
    """Return a method's results on labelled data, with every metric that is defined.

    If `detail` is True, the result includes the bins needed for figures. The bins of the reliability diagram have equal width, so that
    they can be added over runs, or, with `equal_errors`, equal numbers of expected errors. `classes` adds results for each class or, for
    regression, contains the names of the outputs. `types` adds results for each type of shift; data point i has the type with index i
    modulo the number of types.
    """
    measurements = measured(columns)
    data = columns.data
    regression = "square" in data
    bins = detail and not regression
    return LabelledResult(
        level=level,
        count=len(data),
        metrics=_values(measurements) if regression else _class_metrics(data, _values(measurements), classes),
        reliability=_reliability(data, equal_errors=equal_errors) if bins else [],
        histogram=_histogram(data) if bins else [],
        errors=_errors(measurements),
        classes=_by_class(data, classes) if classes and not regression else {},
        types=_by_type(data, types),
        regression=_regression_detail(columns, classes) if regression else None,
    )


def _class_metrics(data: Columns, values: Mapping[str, float], classes: Sequence[str]) -> dict[str, float]:
    confidence = data["confidence"]
    correct = data["correct"]
    legacy = metrics.bin_sums_legacy(confidence, correct, 100)
    defined = {
        **values,
        "log_likelihood": -values.get("nll", math.nan),
        "ece100": metrics.calibration_gap(metrics.bin_sums(confidence, correct, 100)),
        "mce": metrics.largest_gap(metrics.bin_sums(confidence, correct)),
    }
    if bool(legacy[:, 0].sum() > 0):  # all bins are empty if every confidence is at least 0.99
        defined |= {"ece_legacy": metrics.calibration_gap(legacy), "mce_legacy": metrics.largest_gap(legacy)}
    if "yes" in data:
        defined["average_precision"] = float(_by_label(data)["average_precision"].nanmean())
    elif classes and data.groups is not None:
        defined["miou"] = float(_overlaps(data, len(classes)).nanmean())
    names = (*CLASSIFICATION_METRICS, *CLASS_METRICS)
    return {name: defined[name] for name in names if not math.isnan(defined.get(name, math.nan))}


def _by_class(data: Columns, classes: Sequence[str]) -> dict[str, dict[str, float]]:
    labels = data["output" if "yes" in data else "label"].long()
    counts = torch.bincount(labels)
    indices = counts.nonzero().flatten()
    by_metric = {
        name: torch.bincount(labels, data[column])[indices] / counts[indices]
        for name, column in (("accuracy", "correct"), ("confidence", "confidence"))
    }
    if "yes" in data:
        by_metric |= _by_label(data)
    elif data.groups is not None:
        by_metric["iou"] = _overlaps(data, len(classes))[indices]
    return {
        classes[label]: {"count": int(counts[label])}
        | {name: float(values[index]) for name, values in by_metric.items() if not values[index].isnan()}
        for index, label in enumerate(indices.tolist())
    }


def _by_label(data: Columns) -> dict[str, Tensor]:
    # Return the metrics for each label in multi-label data, with NaN where a metric is undefined.
    yes = data["yes"][:, None]
    truth = data["label"][:, None]
    rows_of_labels = [data["output"] == label for label in torch.unique(data["output"])]
    functions = {
        "auroc": metrics.auroc_of_labels,
        "average_precision": metrics.average_precision_of_labels,
        "ece": metrics.calibration_error_of_labels,
    }
    return {
        name: torch.cat([metric(yes[rows], truth[rows]) for rows in rows_of_labels])
        for name, metric in functions.items()
    }


def _overlaps(data: Columns, classes: int) -> Tensor:
    # Return the intersection over union for each class, or NaN if the class occurs neither as a label nor as a prediction.
    truth = data["label"].long()
    predicted = data["predicted"].long()
    counts = torch.bincount(truth, minlength=classes) + torch.bincount(predicted, minlength=classes)
    intersection = torch.bincount(truth[truth == predicted], minlength=classes)
    union = counts - intersection
    return torch.where(union > 0, intersection.double() / union, math.nan)


def _by_type(data: Columns, types: Sequence[str]) -> dict[str, dict[str, float]]:
    by_type = {}
    for first, name in enumerate(types[: len(data)]):
        values = _values(measured(PredictionColumns(data.select(slice(first, None, len(types))))))
        # Six digits suffice for metrics on a few hundred examples and keep files small.
        by_type[name] = {metric: float(f"{values[metric]:.6g}") for metric in ("accuracy", "nll", "ece")}
    return by_type


def _reliability(data: Columns, *, equal_errors: bool) -> list[list[float]]:
    # Bins of equal width would put most predictions of an accurate network into one bin. Bins with equal sums of 1 - confidence spread
    # over the axis, and their error rates are estimated with about the same relative precision.
    confidence, order = data["confidence"].sort(stable=True)
    correct = data["correct"][order]
    if not equal_errors:
        return metrics.bin_sums(confidence, correct).tolist()
    expected_errors = 1 - confidence
    total = float(expected_errors.sum())
    bins = min(MOST_BINS, int(total / LEAST_ERRORS)) if total > 2 * LEAST_ERRORS else 1
    index = torch.zeros_like(order)
    if bins > 1:
        index = ((expected_errors.cumsum(0) - expected_errors / 2) * bins / total).long()
    return torch.stack(
        [torch.bincount(index), torch.bincount(index, confidence), torch.bincount(index, correct)], 1
    ).tolist()


def _histogram(data: Columns) -> list[int]:
    # Rounding lifts the confidence of ten certain networks above 1, where `histc` would leave it out.
    counts: list[float] = torch.histc(data["confidence"].clamp_max(1), CONFIDENCE_BINS, 0, 1).tolist()
    return [int(count) for count in counts]


def risk_curve(data: Columns) -> list[list[float]]:
    """Return at most `CURVE_POINTS` pairs of coverage and error rate, in order of increasing coverage."""
    coverage, risk = metrics.risk_coverage_curve(1 - data["confidence"], data["correct"])
    indices = torch.linspace(0, len(risk), min(len(risk), CURVE_POINTS) + 1, device="cpu")[1:].round().long() - 1
    return torch.stack([coverage[indices], risk[indices]], dim=1).tolist()


def set_result(data: Columns, promised: float, classes: Sequence[str]) -> SetResult:
    """Return the coverage and size of prediction sets on labelled data."""
    covered = data["covered"]
    labels = data["label"].long()
    counts = torch.bincount(labels)
    by_class = (torch.bincount(labels, covered) / counts).tolist()
    return SetResult(
        promised=promised,
        realised=float(covered.mean()),
        size=float(data["set size"].mean()),
        empty=float((data["set size"] == 0).double().mean()),
        classes={classes[label]: by_class[label] for label in counts.nonzero().flatten().tolist()},
    )


def interval_result(data: Columns, level: float) -> IntervalResult:
    """Return the coverage and width of the calibrated intervals at one level on labelled data."""
    covered = mean_column(data, f"calibrated[{level}]")
    width = mean_column(data, f"calibrated width[{level}]")
    return IntervalResult(level, covered.value, known_error(covered), width.value)


# --- regression ------------------------------------------------------------------------------------------------------


def _regression_detail(columns: PredictionColumns, names: Sequence[str]) -> RegressionDetail:
    coverages = {level: mean_column(columns.data, f"covered[{level}]") for level in NOMINAL_LEVELS}
    index = columns.outputs["output"]
    outputs = {name: columns.outputs.select(index == output) for output, name in enumerate(names[:MOST_OUTPUTS])}
    measurements = {name: measured(PredictionColumns(output)) for name, output in outputs.items()}
    return RegressionDetail(
        coverage=[[level, coverage.value, known_error(coverage)] for level, coverage in coverages.items()],
        examples={name: _targets(output) for name, output in outputs.items()},
        outputs={
            name: OutputResult(_values(by_metric), _errors(by_metric)) for name, by_metric in measurements.items()
        },
    )


def _targets(output: Columns) -> list[list[float]]:
    # For each example, return the target, the mean, and both ends of the 90 % interval.
    count = len(output)
    rows = torch.linspace(0, count - 1, min(count, MOST_TARGETS), dtype=torch.float64, device="cpu").round().long()
    return torch.stack([output[name][rows] for name in ("target", "mean", "lower", "upper")], 1).tolist()


# --- outliers --------------------------------------------------------------------------------------------------------


def outlier_result(inliers: PredictionColumns, outliers: PredictionColumns, *, detail: bool = True) -> OutlierResult:
    """Measure how well a method's scores separate outliers from the test data; `detail` adds the histogram."""
    data = outliers.data
    confidence = mean_column(data, "confidence") if "confidence" in data else None
    std = mean_column(data, "std") if "std" in data else None
    separated = separation(inliers, outliers)
    scores = {}
    for name, measurements in separated.items():
        inlier_scores = inliers.scores[name]
        outlier_scores = outliers.scores[name]
        scores[name] = {
            "auroc": measurements["auroc"].value,
            "aupr_in": metrics.aupr_in(inlier_scores, outlier_scores),
            "aupr_out": metrics.aupr_out(inlier_scores, outlier_scores),
            "fpr95": measurements["fpr95"].value,
            "fpr95_out": metrics.fpr_at_tpr_out(inlier_scores, outlier_scores),
        }
    return OutlierResult(
        count=len(outliers.scores),
        confidence=None if confidence is None else confidence.value,
        scores=scores,
        histogram=_histogram(data) if detail and confidence is not None else [],
        confidence_error=None if confidence is None else known_error(confidence),
        errors={score: _errors(measurements) for score, measurements in separated.items()},
        std=None if std is None else std.value,
        std_error=None if std is None else known_error(std),
    )


# --- several methods --------------------------------------------------------------------------------------------------


def set_info(name: str, title: str, role: Role, columns: PredictionColumns, level: float = 0.0) -> SetInfo:
    """Describe a data set, given any predictor's columns for it."""
    table = columns.scores if role == "outlier" else columns.data
    if table.groups is None:
        return SetInfo(name, title, role, len(table), level)
    return SetInfo(name, title, role, len(table), level, columns.parts, columns.count)


def compare(
    title: str,
    sets: Sequence[SetInfo],
    columns: Mapping[str, Mapping[str, PredictionColumns]],
    predictors: Mapping[str, Any],
    *,
    subject: str,
    classes: Sequence[str] | None = None,
    notes: Sequence[str] = (),
    **entries: Any,
) -> Evaluation:
    """Return the results of several methods on the same sets.

    Args:
        title: title of the comparison.
        sets: the sets; those with the role "train" or "validation" need no predictions.
        columns: predictions by set name and method.
        predictors: the methods, whose tuned values and notes are shown.
        subject: the method that the comparison is about.
        classes: names of the classes or outputs; by default, their indices.
        notes: notes in addition to those of the tunings.
        entries: further fields of the evaluation.
    """
    levels = {info.name: info.level for info in sets if info.role in ("test", "shift")}
    outliers = [info.name for info in sets if info.role == "outlier"]
    inliers = columns[next(info.name for info in sets if info.role == "test")]
    names = tuple(map(str, range(inliers[subject].width))) if classes is None else tuple(classes)
    methods = {
        method: MethodResult(
            chosen=tuned_values(predictor),
            labelled={
                name: labelled_result(columns[name][method], level, equal_errors=True, classes=names)
                for name, level in levels.items()
            },
            outliers={name: outlier_result(inliers[method], columns[name][method]) for name in outliers},
        )
        for method, predictor in predictors.items()
    }
    return Evaluation(
        title=title,
        subject=subject,
        sets={info.name: info for info in sets},
        methods=methods,
        classes=names,
        leads={name: labelled_leads(columns[name]) for name in levels}
        | {name: outlier_leads(inliers, columns[name]) for name in outliers},
        regression="square" in inliers[subject].data,
        differences=differences(inliers, subject),
        notes=(*tuning_notes(predictors), *notes),
        **entries,
    )


def tuned_values(predictor: Any) -> dict[str, Any]:
    """Return the tuned values of a posterior or ensemble, by name; empty for other predictors."""
    if not isinstance(predictor, LaplaceMixture):
        return {}
    has_covariance = predictor.structure is not None
    values: dict[str, Any] = {"prior_precision": list(predictor.prior_precision)} if has_covariance else {}
    if has_covariance and isinstance(predictor.likelihood, Gaussian):
        values["noise"] = predictor.noise[0].tolist()
    changed = predictor.settings.changed()
    return values | {name: value for name, value in changed.items() if has_covariance or name == "temperature"}


def tuning_notes(predictors: Mapping[str, Any]) -> list[str]:
    """Return the notes of the tunings of posteriors and ensembles, each with the names of all methods that have it."""
    methods: dict[str, list[str]] = {}
    for name, predictor in predictors.items():
        tuning = getattr(predictor, "tuning", None)
        for note in () if tuning is None else tuning.notes:
            methods.setdefault(note, []).append(name)
    return [f"{listed(names, len(names))}: {note}" for note, names in methods.items()]
