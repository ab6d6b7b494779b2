"""Results from tallies: the metrics of each method on each set, their errors over data, and the method that leads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from mola import metrics
from mola.compare.measured import Better, Lead, Measurement, Name, area_between, lead, leads, mean_of, pass_rate
from mola.compare.record import (
    CONFIDENCE_BINS,
    ClassResult,
    Examples,
    LabelledResult,
    OutlierResult,
    SetResult,
)
from mola.compare.tally import Tally

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
"""Metrics of labelled data, as `mola.metrics` defines them."""

LABEL_METRICS = ("auroc", "average_precision", "miou")
"""Further metrics: two means over labels, of multi-label data; mean intersection over union over classes, of dense outputs."""

EXAMPLES = 8
"""Inputs of each set that a report shows."""

CURVE_POINTS = 100
"""Points of a risk-coverage curve."""

LARGE_SET = 4
"""Prediction sets of at least this many classes are counted together."""

BETTER: dict[str, Better] = {"accuracy": "high", "nll": "low", "brier": "low", "ece": "low", "auroc": "high"}


def labelled_result(
    tally: Tally,
    level: float = 0.0,
    *,
    detail: bool = True,
    errors: bool = False,
    classes: Sequence[str] = (),
    types: Sequence[str] = (),
) -> LabelledResult:
    """Return every metric of a method on labelled data; a metric that is not defined there is left out.

    Args:
        tally: the predictions.
        level: shift of the data.
        detail: keep the bins of reliability diagrams and histograms.
        errors: estimate standard errors over data.
        classes: names of the classes, for results by class.
        types: types of shift, assigned to the data in turn, for results by type: datum i has type i modulo their number.
    """
    by_class = _by_class(tally, classes)
    found = _metrics(tally)
    if "question" in tally.columns:
        found |= {name: _mean_of_known(values) for name, values in _by_label(tally).items() if name != "ece"}
    elif classes and tally.groups is not None:
        found["miou"] = _mean_of_known(_overlaps(tally, len(classes)))
    return LabelledResult(
        level=level,
        count=tally.count,
        # The legacy errors have no value where every prediction is certain.
        metrics={name: found[name] for name in (*METRICS, *LABEL_METRICS) if not math.isnan(found.get(name, math.nan))},
        reliability=tally.bins.tolist() if detail else [],
        histogram=_histogram(tally) if detail else [],
        errors={name: one.error for name, one in tally.measured().items()} if errors else {},
        classes=by_class,
        types=_by_type(tally, types),
    )


def _metrics(tally: Tally) -> dict[str, float]:
    confidence, correct, bins = tally["confidence"], tally["correct"], tally.bins
    # Multi-label data: the uncertainty of a label, not of its input.
    uncertainty = 1 - confidence if "question" in tally.columns else tally["max probability"]
    measured = tally.labelled()
    legacy = metrics.bin_sums_legacy(confidence, correct, 100)
    counted = bool(legacy[:, 0].sum() > 0)
    return {
        **measured,
        "log_likelihood": -measured["nll"],
        "ece100": metrics.calibration_gap(metrics.bin_sums(confidence, correct, 100)),
        "ece_legacy": metrics.calibration_gap(legacy) if counted else math.nan,
        "mce": metrics.largest_gap(bins),
        "mce_legacy": metrics.largest_gap(legacy) if counted else math.nan,
        "aurc": metrics.area_under_risk_coverage(uncertainty, correct),
    }


def _mean_of_known(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _by_class(tally: Tally, classes: Sequence[str]) -> dict[str, ClassResult]:
    if not classes:
        return {}
    several = "question" in tally.columns
    labels = tally["question" if several else "label"].long()
    counts = torch.bincount(labels, minlength=len(classes)).tolist()
    right, sure = (torch.bincount(labels, tally[name], len(classes)).tolist() for name in ("correct", "confidence"))
    known = [place for place, count in enumerate(counts) if count]
    more: dict[str, dict[int, float]] = {}
    if several:
        more = {name: dict(zip(known, values, strict=True)) for name, values in _by_label(tally).items()}
    elif tally.groups is not None:
        more = {"iou": dict(enumerate(_overlaps(tally, len(classes))))}
    return {
        classes[place]: ClassResult(
            counts[place],
            right[place] / counts[place],
            sure[place] / counts[place],
            **{name: None if math.isnan(values[place]) else values[place] for name, values in more.items()},
        )
        for place in known
    }


def _by_label(tally: Tally) -> dict[str, list[float]]:
    # By label of multi-label data, for labels that occur; nan where a metric is not defined.
    labels, yes, truth = tally["question"], tally["yes"], tally["label"]
    measures = {
        "auroc": metrics.auroc_of_labels,
        "average_precision": metrics.average_precision_of_labels,
        "ece": metrics.calibration_error_of_labels,
    }
    rows = [labels == one for one in torch.unique(labels)]
    return {
        name: [float(measure(yes[own][:, None], truth[own][:, None])[0]) for own in rows]
        for name, measure in measures.items()
    }


def _overlaps(tally: Tally, classes: int) -> list[float]:
    # Intersection over union of each class; nan where it is neither a label nor a prediction.
    truth, predicted = tally["label"].long(), tally["predicted"].long()
    both = torch.bincount(truth[truth == predicted], minlength=classes)
    either = torch.bincount(truth, minlength=classes) + torch.bincount(predicted, minlength=classes) - both
    found: list[float] = torch.where(either > 0, both.double() / either, math.nan).tolist()
    return found


def _by_type(tally: Tally, types: Sequence[str]) -> dict[str, dict[str, float]]:
    found = {}
    for place, name in enumerate(types[: tally.count]):
        numbers = tally.dealt(place, len(types)).labelled()
        # Six digits are more than a few hundred data can tell, and keep files small.
        found[name] = {metric: float(f"{numbers[metric]:.6g}") for metric in ("accuracy", "nll", "ece")}
    return found


def outlier_result(inside: Tally, outside: Tally, *, detail: bool = True, errors: bool = False) -> OutlierResult:
    """Return the confidence of a method on outliers, and how well each score separates them from the test data.

    Args:
        inside: predictions for the test data.
        outside: predictions for the outliers.
        detail: keep the histogram of confidence.
        errors: estimate standard errors over data.
    """
    confidence, std = (
        mean_of(outside[name], outside.groups) if name in outside.columns else None
        for name in ("confidence", "std[all]")
    )
    separated = _separation(inside, outside) if errors else {}
    scores = {}
    for name, far in outside.scores.items():
        near = inside[name]
        scores[name] = {
            "auroc": metrics.auroc(near, far),
            "aupr_in": metrics.aupr_in(near, far),
            "aupr_out": metrics.aupr_out(near, far),
            "fpr95": metrics.fpr_at_tpr(near, far),
            "fpr95_out": metrics.fpr_at_tpr_out(near, far),
        }
    return OutlierResult(
        count=outside.count,
        confidence=None if confidence is None else confidence.value,
        scores=scores,
        histogram=_histogram(outside) if detail and confidence is not None else [],
        confidence_error=confidence.error if errors and confidence is not None else None,
        errors={score: {name: one.error for name, one in found.items()} for score, found in separated.items()},
        std=None if std is None else std.value,
        std_error=None if std is None else std.error,
    )


def risk_curve(tally: Tally) -> list[list[float]]:
    """Return pairs of coverage and error rate, the most confident predictions first: at most `CURVE_POINTS`, the last is all data."""
    coverage, risk = metrics.risk_coverage_curve(1 - tally["confidence"], tally["correct"])
    places = torch.linspace(0, len(risk), min(len(risk), CURVE_POINTS) + 1)[1:].round().long() - 1
    return [[float(x), float(y)] for x, y in zip(coverage[places], risk[places], strict=True)]


def set_result(tally: Tally, promised: float, classes: Sequence[str]) -> SetResult:
    """Return the coverage and size of prediction sets on labelled data."""
    sizes, held, labels = tally["set size"], tally["held"], tally["label"].long()
    counts = torch.bincount(labels, minlength=len(classes))
    inside = torch.bincount(labels, held, len(classes))
    few = {str(size): float((sizes == size).double().mean()) for size in range(LARGE_SET)}
    return SetResult(
        promised=promised,
        realised=float(held.mean()),
        size=float(sizes.mean()),
        sizes={**few, "more": float((sizes >= LARGE_SET).double().mean())},
        classes={
            name: float(inside[place] / counts[place]) for place, name in enumerate(classes) if int(counts[place]) > 0
        },
    )


def examples_of(tally: Tally) -> Examples:
    """Return the confidence and class of the first few predictions."""
    confidence, predicted = (tally[name][:EXAMPLES] for name in ("confidence", "predicted"))
    return Examples(confidence.tolist(), predicted.long().tolist())


def labelled_leads(tallies: Mapping[str, Tally]) -> dict[str, Lead]:
    """Return which method leads on labelled data, by accuracy, nll, brier and ece; for multi-label data also by auroc."""
    return leads({method: tally.measured() for method, tally in tallies.items()}, BETTER)


def _separation(inside: Tally, outside: Tally) -> dict[str, dict[str, Measurement]]:
    groups = (inside.groups, outside.groups)
    return {
        name: {"auroc": area_between(inside[name], far, groups), "fpr95": pass_rate(inside[name], far, groups)}
        for name, far in outside.scores.items()
    }


def outlier_leads(inside: Mapping[str, Tally], outside: Mapping[str, Tally]) -> dict[str, Lead]:
    """Return which method leads on outliers, by any score; for classifiers also by confidence. See `Comparison.leads`."""
    separated: dict[Name, dict[str, Measurement]] = {
        (method, score): found
        for method, tally in outside.items()
        for score, found in _separation(inside[method], tally).items()
    }
    areas, rates = ({name: one[metric] for name, one in separated.items()} for metric in ("auroc", "fpr95"))
    found = {"auroc": lead(areas, "high"), "fpr95": lead(rates, "low")}
    if not all("confidence" in tally.columns for tally in outside.values()):
        return found
    confidence: dict[Name, Measurement] = {
        (method,): mean_of(tally["confidence"], tally.groups) for method, tally in outside.items()
    }
    by_confidence: dict[Name, Measurement] = {(method,): areas[method, "max probability"] for method in outside}
    return {"confidence": lead(confidence, "low"), "max probability": lead(by_confidence, "high"), **found}


def _histogram(tally: Tally) -> list[int]:
    counts: list[float] = torch.histc(tally["confidence"], CONFIDENCE_BINS, 0, 1).tolist()
    return [int(count) for count in counts]
