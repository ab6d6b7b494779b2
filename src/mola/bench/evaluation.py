"""Predictions in, the numbers of a record out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mola import metrics
from mola.bench.record import CONFIDENCE_BINS, Examples, LabelledResult, OutlierResult

__all__ = ["METRICS", "compare_scores", "evaluate_labelled", "evaluate_outliers", "examples_of"]

METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "accuracy": metrics.accuracy,
    "log_likelihood": metrics.log_likelihood,
    "nll": metrics.negative_log_likelihood,
    "brier": metrics.brier,
    "ece": metrics.expected_calibration_error,
    "ece100": lambda probs, labels: metrics.expected_calibration_error(probs, labels, bins=100),
    "ece_legacy": metrics.expected_calibration_error_legacy,
    "mce": metrics.maximum_calibration_error,
    "mce_legacy": metrics.maximum_calibration_error_legacy,
    "confidence": lambda probs, _: metrics.mean_confidence(probs),
    "aurc": lambda probs, labels: metrics.area_under_risk_coverage(1 - probs.max(1).values, probs.argmax(1) == labels),
}
"""Of labelled data, by name."""


def evaluate_labelled(probs: Tensor, labels: Tensor, level: float, *, detail: bool = True) -> LabelledResult:
    """Every metric of predictions of labelled data; one that is not defined there is left out.

    Args:
        probs: (n, C)
        labels: (n,)
        level: how far the data are shifted.
        detail: whether to keep what reliability diagrams and histograms are drawn from.

    Returns:
        The numbers.
    """
    values = {name: metric(probs, labels) for name, metric in METRICS.items()}
    return LabelledResult(
        level=level,
        count=len(labels),
        # The legacy errors count nothing where every prediction is sure.
        metrics={name: value for name, value in values.items() if not math.isnan(value)},
        reliability=metrics.bin_confidences(probs, labels).tolist() if detail else [],
        histogram=_histogram(probs) if detail else [],
    )


def evaluate_outliers(
    probs: Tensor, scores: Mapping[str, tuple[Tensor, Tensor]], *, detail: bool = True
) -> OutlierResult:
    """How sure a method is of outliers, and how well each score tells them from the test set.

    Args:
        probs: of the outliers.
        scores: by name: those of the test set and those of the outliers, higher for the more outlying.
        detail: whether to keep the histogram.

    Returns:
        The numbers.
    """
    return OutlierResult(
        count=len(probs),
        confidence=metrics.mean_confidence(probs),
        scores={name: compare_scores(inside, outside) for name, (inside, outside) in scores.items()},
        histogram=_histogram(probs) if detail else [],
    )


def compare_scores(inside: Tensor, outside: Tensor) -> dict[str, float]:
    """AUROC, both areas under precision and recall, and the false positives at 95 % true positives."""
    return {
        "auroc": metrics.auroc(inside, outside),
        "aupr_in": metrics.aupr_in(inside, outside),
        "aupr_out": metrics.aupr_out(inside, outside),
        "fpr95": metrics.fpr_at_tpr(inside, outside),
    }


def examples_of(probs: Tensor) -> Examples:
    """Confidence and class of a few predictions."""
    confidence, label = probs.double().max(1)
    return Examples(confidence.tolist(), label.tolist())


def _histogram(probs: Tensor) -> list[int]:
    counts: list[float] = torch.histc(probs.double().max(1).values, CONFIDENCE_BINS, 0, 1).tolist()
    return [int(count) for count in counts]
