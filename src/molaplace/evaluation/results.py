"""Results computed from tallies: each method's metrics on each set, with standard errors, and the best methods."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from molaplace import metrics
from molaplace.evaluation.answers import outlier_columns
from molaplace.evaluation.leads import Better, Lead, Name, lead
from molaplace.evaluation.measurement import Measurement, area_between, mean_area_of_labels, pass_rate
from molaplace.evaluation.record import (
    CONFIDENCE_BINS,
    Examples,
    LabelledResult,
    OutlierResult,
    SetResult,
)
from molaplace.evaluation.regression import regression_detail, regression_metrics
from molaplace.evaluation.tally import Tally

METRICS = (
    "accuracy",
    "log_likelihood",
    "nll",
    "brier",
    "ece",
    "ece100",
    "ece_legacy",
    "mce",
    "mce_legacy",
    "confidence",
    "aurc",
)
"""Names of the metrics on labelled data, defined in `mola.metrics`."""

LABEL_METRICS = ("auroc", "average_precision", "miou")
"""Names of additional metrics: AUROC and average precision, averaged over the labels of multi-label data, and the mean intersection
over union of dense outputs."""

EXAMPLES = 8
"""Number of inputs from each set that a report shows."""

CURVE_POINTS = 100
"""Maximum number of points in a risk-coverage curve."""

BETTER: dict[str, Better] = {
    "accuracy": "high",
    "rmse": "low",
    "nll": "low",
    "crps": "low",
    "brier": "low",
    "ece": "low",
    "auroc": "high",
}
"""Metrics by which methods are compared, and whether low or high values are better."""


def measured(tally: Tally) -> dict[str, Measurement]:
    """Compute, on labelled data, the metrics that have standard errors."""
    if "square[all]" in tally.columns:
        return regression_metrics(tally)
    found, area = tally.classified(), None
    if "question" in tally.columns:
        area = mean_area_of_labels(tally["yes"], tally["label"], tally["question"], tally.groups)
    return found if area is None else {**found, "auroc": area}


def labelled_result(
    tally: Tally,
    level: float = 0.0,
    *,
    detail: bool = True,
    classes: Sequence[str] = (),
    types: Sequence[str] = (),
) -> LabelledResult:
    """Return a method's results on labelled data, with every metric that is defined.

    If `detail` is True, the result includes the bins needed for figures. `classes` adds results for each class or, for regression,
    contains the names of the outputs. `types` adds results for each type of shift; data point i has the type with index i modulo the
    number of types.
    """
    found = measured(tally)
    values = {name: one.value for name, one in found.items()}
    regression = "square[all]" in tally.columns
    detail = detail and not regression
    return LabelledResult(
        level=level,
        count=tally.count,
        metrics=values if regression else _class_metrics(tally, values, classes),
        reliability=metrics.bin_sums(tally["confidence"], tally["correct"]).tolist() if detail else [],
        histogram=_histogram(tally) if detail else [],
        errors={name: one.error for name, one in found.items()},
        classes=_by_class(tally, classes) if classes and not regression else {},
        types=_by_type(tally, types),
        regression=regression_detail(tally, classes) if regression else None,
    )


def _class_metrics(tally: Tally, values: Mapping[str, float], classes: Sequence[str]) -> dict[str, float]:
    confidence, correct = tally["confidence"], tally["correct"]
    # For multi-label data, use the uncertainty of each label rather than that of the whole input.
    uncertainty = 1 - confidence if "question" in tally.columns else tally["max probability"]
    legacy = metrics.bin_sums_legacy(confidence, correct, 100)
    found = {
        **values,
        "log_likelihood": -values["nll"],
        "ece100": metrics.calibration_gap(metrics.bin_sums(confidence, correct, 100)),
        "mce": metrics.largest_gap(metrics.bin_sums(confidence, correct)),
        "aurc": metrics.area_under_risk_coverage(uncertainty, correct),
    }
    if bool(legacy[:, 0].sum() > 0):  # all bins are empty if every confidence is at least 0.99
        found |= {"ece_legacy": metrics.calibration_gap(legacy), "mce_legacy": metrics.largest_gap(legacy)}
    if "question" in tally.columns:
        found |= {name: float(each.nanmean()) for name, each in _by_label(tally).items() if name != "ece"}
    elif classes and tally.groups is not None:
        found["miou"] = float(_overlaps(tally, len(classes)).nanmean())
    return {name: found[name] for name in (*METRICS, *LABEL_METRICS) if not math.isnan(found.get(name, math.nan))}


def _by_class(tally: Tally, classes: Sequence[str]) -> dict[str, dict[str, float]]:
    several = "question" in tally.columns
    labels = tally["question" if several else "label"].long()
    counts = torch.bincount(labels)
    known = counts.nonzero().flatten()
    columns = {
        name: torch.bincount(labels, tally[column])[known] / counts[known]
        for name, column in (("accuracy", "correct"), ("confidence", "confidence"))
    }
    if several:
        columns |= _by_label(tally)
    elif tally.groups is not None:
        columns["iou"] = _overlaps(tally, len(classes))[known]
    return {
        classes[place]: {"count": int(counts[place])}
        | {name: float(each[index]) for name, each in columns.items() if not each[index].isnan()}
        for index, place in enumerate(known.tolist())
    }


def _by_label(tally: Tally) -> dict[str, Tensor]:
    # Return the metrics for each label in multi-label data, with NaN where a metric is undefined.
    yes, truth = tally["yes"][:, None], tally["label"][:, None]
    rows = [tally["question"] == label for label in torch.unique(tally["question"])]
    measures = {
        "auroc": metrics.auroc_of_labels,
        "average_precision": metrics.average_precision_of_labels,
        "ece": metrics.calibration_error_of_labels,
    }
    return {name: torch.cat([measure(yes[own], truth[own]) for own in rows]) for name, measure in measures.items()}


def _overlaps(tally: Tally, classes: int) -> Tensor:
    # Return the intersection over union for each class, or NaN if the class occurs neither as a label nor as a prediction.
    truth, predicted = tally["label"].long(), tally["predicted"].long()
    both = torch.bincount(truth[truth == predicted], minlength=classes)
    either = torch.bincount(truth, minlength=classes) + torch.bincount(predicted, minlength=classes) - both
    return torch.where(either > 0, both.double() / either, math.nan)


def _by_type(tally: Tally, types: Sequence[str]) -> dict[str, dict[str, float]]:
    found = {}
    for place, name in enumerate(types[: tally.count]):
        part = Tally(tally.columns, [torch.cat(tally.parts)[place :: len(types)]])
        numbers = {metric: one.value for metric, one in part.classified().items()}
        # Six digits suffice for metrics on a few hundred examples and keep files small.
        found[name] = {metric: float(f"{numbers[metric]:.6g}") for metric in ("accuracy", "nll", "ece")}
    return found


def outlier_result(inside: Tally, outside: Tally, *, detail: bool = True) -> OutlierResult:
    """Measure how well a method's scores separate outliers from the test data (`inside`); `detail` adds the histogram."""
    confidence, std = (outside.mean(name) if name in outside.columns else None for name in ("confidence", "std[all]"))
    separated = _separation(inside, outside)
    scores = {}
    for name, far in outlier_columns(outside).items():
        near = inside[name]
        scores[name] = {
            "auroc": separated[name]["auroc"].value,
            "aupr_in": metrics.aupr_in(near, far),
            "aupr_out": metrics.aupr_out(near, far),
            "fpr95": separated[name]["fpr95"].value,
            "fpr95_out": metrics.fpr_at_tpr_out(near, far),
        }
    return OutlierResult(
        count=outside.count,
        confidence=None if confidence is None else confidence.value,
        scores=scores,
        histogram=_histogram(outside) if detail and confidence is not None else [],
        confidence_error=None if confidence is None else confidence.error,
        errors={score: {name: one.error for name, one in found.items()} for score, found in separated.items()},
        std=None if std is None else std.value,
        std_error=None if std is None else std.error,
    )


def risk_curve(tally: Tally) -> list[list[float]]:
    """Return at most `CURVE_POINTS` pairs of coverage and error rate, in order of increasing coverage."""
    coverage, risk = metrics.risk_coverage_curve(1 - tally["confidence"], tally["correct"])
    places = torch.linspace(0, len(risk), min(len(risk), CURVE_POINTS) + 1)[1:].round().long() - 1
    return [[float(x), float(y)] for x, y in zip(coverage[places], risk[places], strict=True)]


def set_result(tally: Tally, promised: float, classes: Sequence[str]) -> SetResult:
    """Return the coverage and size of prediction sets on labelled data."""
    held, labels = tally["held"], tally["label"].long()
    counts = torch.bincount(labels)
    covered = (torch.bincount(labels, held) / counts).tolist()
    return SetResult(
        promised=promised,
        realised=float(held.mean()),
        size=float(tally["set size"].mean()),
        empty=float((tally["set size"] == 0).double().mean()),
        classes={classes[place]: covered[place] for place in counts.nonzero().flatten().tolist()},
    )


def examples_of(tally: Tally) -> Examples:
    """Return the confidences and predicted classes for the first few inputs."""
    confidence, predicted = (tally[name][:EXAMPLES] for name in ("confidence", "predicted"))
    return Examples(confidence.tolist(), predicted.long().tolist())


def labelled_leads(tallies: Mapping[str, Tally]) -> dict[str, Lead]:
    """Return the best method on labelled data for each metric in `BETTER` that all methods have."""
    found = {method: measured(tally) for method, tally in tallies.items()}
    return {
        name: lead({(method,): one[name] for method, one in found.items()}, end)
        for name, end in BETTER.items()
        if all(name in one for one in found.values())
    }


def differences(tallies: Mapping[str, Tally], own: str) -> dict[str, dict[str, tuple[float, float | None]]]:
    """Return the nll (for regression, also rmse and crps) of every other method minus that of `own`, with standard errors."""
    found = {method: measured(tally) for method, tally in tallies.items()}
    mine = found.pop(own)
    return {
        method: {
            name: ((gap := one[name].minus(mine[name])).value, gap.error)
            for name in ("rmse", "nll", "crps")
            if name in one
        }
        for method, one in found.items()
    }


def _separation(inside: Tally, outside: Tally) -> dict[str, dict[str, Measurement]]:
    groups = (inside.groups, outside.groups)
    return {
        name: {"auroc": area_between(inside[name], far, groups), "fpr95": pass_rate(inside[name], far, groups)}
        for name, far in outlier_columns(outside).items()
    }


def outlier_leads(inside: Mapping[str, Tally], outside: Mapping[str, Tally]) -> dict[str, Lead]:
    """Return the best methods on outliers by AUROC and FPR95 and, for classifiers, also by confidence; see `Comparison.leads`."""
    separated: dict[Name, dict[str, Measurement]] = {
        (method, score): found
        for method, tally in outside.items()
        for score, found in _separation(inside[method], tally).items()
    }
    areas, rates = ({name: one[metric] for name, one in separated.items()} for metric in ("auroc", "fpr95"))
    found = {"auroc": lead(areas, "high"), "fpr95": lead(rates, "low")}
    if not all("confidence" in tally.columns for tally in outside.values()):
        return found
    confidence: dict[Name, Measurement] = {(method,): tally.mean("confidence") for method, tally in outside.items()}
    by_confidence: dict[Name, Measurement] = {(method,): areas[method, "max probability"] for method in outside}
    return {"confidence": lead(confidence, "low"), "max probability": lead(by_confidence, "high"), **found}


def _histogram(tally: Tally) -> list[int]:
    counts: list[float] = torch.histc(tally["confidence"], CONFIDENCE_BINS, 0, 1).tolist()
    return [int(count) for count in counts]
