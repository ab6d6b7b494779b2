"""Metrics for predicted probabilities and for outlier scores, as pure functions of tensors, without gradients.

A higher outlier score means a more outlying input, as everywhere in this package. Papers often define these metrics in terms of
confidence, with in-distribution data as positives. With score = -confidence, both definitions give the same values. The treatment of
ties never depends on the order of the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from molaplace.errors import DataError, OptionError
from molaplace.likelihoods import CATEGORICAL
from molaplace.numerics import as_tensor

Scores: TypeAlias = Tensor | np.ndarray[Any, Any]
"""Outlier scores (n,), from a prediction or from an estimator."""


@torch.no_grad()
def accuracy(probs: Tensor, labels: Tensor) -> float:
    """Return the share of the data whose most probable class is the true label."""
    return float((probs.argmax(1) == labels).double().mean())


@torch.no_grad()
def mean_confidence(probs: Tensor) -> float:
    """Return the largest class probability, averaged over the data (mean maximum confidence, MMC)."""
    return float(probs.double().max(1).values.mean())


@torch.no_grad()
def negative_log_likelihood(probs: Tensor, labels: Tensor) -> float:
    """Return the mean of `-log p(label)`; a probability that underflowed to 0 is replaced by the smallest positive normal number."""
    return float(CATEGORICAL.distribution(probs).scores(labels)["nll"].mean())


@torch.no_grad()
def brier(probs: Tensor, labels: Tensor) -> float:
    """Return the Brier score, the mean over the data of `sum_c (p_c - 1[label = c])^2`, which lies between 0 and 2."""
    return float(CATEGORICAL.distribution(probs).scores(labels)["brier"].mean())


@torch.no_grad()
def bin_confidences(probs: Tensor, labels: Tensor, bins: int = 15) -> Tensor:
    """Return a tensor (bins, 3) with each bin's number of predictions, sum of confidences and number of correct predictions.

    The confidence is the largest probability. The bins have equal width and are closed on the right. Every prediction is counted; the
    last bin includes confidence 1.
    """
    confidence, predicted = probs.double().max(1)
    return bin_sums(confidence, predicted == labels, bins)


def bin_index(confidence: Tensor, bins: int) -> Tensor:
    """Return the index of the equal-width bin that contains each confidence; bins are closed on the right."""
    return (torch.ceil(confidence * bins).long() - 1).clamp_(0, bins - 1)


@torch.no_grad()
def bin_sums(confidence: Tensor, correct: Tensor, bins: int = 15) -> Tensor:
    """Compute the sums for `bin_confidences`, of shape (..., bins, 3), from float64 confidences (..., n) and correctness (..., n)."""
    index = bin_index(confidence, bins)
    sums = confidence.new_zeros(3, *confidence.shape[:-1], bins)
    for total, values in zip(sums, (torch.ones_like(confidence), confidence, correct.double()), strict=True):
        total.scatter_add_(-1, index, values)
    return sums.movedim(0, -1)


def calibration_gap(binned: Tensor) -> float:
    """Return the mean |confidence - accuracy| over the bins, weighted by their counts, given the sums from `bin_confidences`."""
    return float(calibration_gaps(binned))


def calibration_gaps(binned: Tensor) -> Tensor:
    """Return the calibration gaps (...), given batched sums (..., bins, 3)."""
    return (binned[..., 1] - binned[..., 2]).abs().sum(-1) / binned[..., 0].sum(-1)


@torch.no_grad()
def expected_calibration_error(probs: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Return the expected calibration error (ECE) of the largest class probability; every prediction is counted."""
    return calibration_gap(bin_confidences(probs, labels, bins))


def largest_gap(binned: Tensor) -> float:
    """Return the largest |confidence - accuracy| of any bin, given the sums from `bin_confidences`; empty bins have a gap of 0."""
    return float(((binned[:, 1] - binned[:, 2]).abs() / binned[:, 0].clamp_min(1)).max())


@torch.no_grad()
def bin_sums_legacy(confidence: Tensor, correct: Tensor, bins: int) -> Tensor:
    """Return the same sums as `bin_sums`, but with the bins used in the authors' scripts, for comparison with published values.

    Bins are closed on the left, and predictions in the last bin are ignored. Very confident wrong
    predictions therefore do not raise the calibration error.
    """
    # NumPy's edges differ from i / bins in the last bit, which decides the bin of a confidence that lies on an edge.
    edges = torch.from_numpy(np.linspace(0, 1, bins + 1)).to(confidence.device)
    index = torch.bucketize(confidence, edges, right=True) - 1
    values = torch.stack([torch.ones_like(confidence), confidence, correct.double()], dim=1)
    counted = index < bins - 1
    return values.new_zeros(bins, 3).index_add_(0, index[counted], values[counted])


def _tied(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    # Sort keys and values by key, and replace the values of equal keys with their mean.
    distinct, inverse, counts = torch.unique(keys, return_inverse=True, return_counts=True)
    means = values.new_zeros(len(distinct)).index_add_(0, inverse, values) / counts
    return distinct.repeat_interleave(counts), means.repeat_interleave(counts)


@torch.no_grad()
def risk_coverage_curve(uncertainty: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Return the error rate at each coverage if predictions are made only for the least uncertain inputs.

    Predictions with equal uncertainty are accepted in random order, and the curve is the mean over all such orders.

    Args:
        uncertainty: uncertainties (n,), such as `1 - probs.amax(1)` or an outlier score; the most uncertain inputs are rejected first.
        correct: tensor (n,) with 1 for each correct prediction and 0 for each wrong one.

    Returns:
        The coverages 1/n, 2/n, ..., 1 and the error rate at each coverage, both of shape (n,).
    """
    if uncertainty.shape != correct.shape or uncertainty.ndim != 1 or len(correct) == 0 or uncertainty.isnan().any():
        raise DataError(
            f"the risk-coverage curve needs one uncertainty per prediction, none of them nan; got uncertainties of shape "
            f"{tuple(uncertainty.shape)} ({int(uncertainty.isnan().sum())} nan) for predictions of shape {tuple(correct.shape)}."
        )
    _, wrong = _tied(uncertainty.double(), 1 - correct.double())
    accepted = torch.arange(1, len(wrong) + 1, device=wrong.device, dtype=torch.float64)
    return accepted / len(wrong), wrong.cumsum(0) / accepted


@torch.no_grad()
def area_under_risk_coverage(uncertainty: Tensor, correct: Tensor) -> float:
    """Return the mean of the risk-coverage curve (AURC; Geifman et al., 2019).

    The best value is 0, and random rejection gives the overall error rate.
    """
    return float(risk_coverage_curve(uncertainty, correct)[1].mean())


def least_area_under_risk_coverage(count: int, wrong: int) -> float:
    """Return the lowest possible AURC of `count` predictions with `wrong` errors, obtained by rejecting all errors first."""
    accepted = torch.arange(count - wrong + 1, count + 1, dtype=torch.float64, device="cpu")
    return float((1 - (count - wrong) / accepted).sum() / count)


def check_scores(inlier_scores: Scores, outlier_scores: Scores) -> tuple[Tensor, Tensor]:
    """Check that both tensors or arrays hold one score per input and no NaN, and return them as tensors in float64."""
    inlier_scores = as_tensor(inlier_scores)
    outlier_scores = as_tensor(outlier_scores)
    for name, scores in (("inlier", inlier_scores), ("outlier", outlier_scores)):
        if scores.ndim != 1 or len(scores) == 0 or scores.isnan().any():
            raise DataError(
                f"{name}_scores must be a non-empty vector with one number per input and no NaN; got shape {tuple(scores.shape)} "
                f"(NaN values: {int(scores.isnan().sum())})."
            )
    return inlier_scores.double(), outlier_scores.double()


@torch.no_grad()
def auroc(inlier_scores: Scores, outlier_scores: Scores) -> float:
    """Return the probability that an outlier has a higher score than an inlier; a tie counts as one half."""
    inliers, outliers = check_scores(inlier_scores, outlier_scores)
    return float(share_below(outliers, inliers).mean())


def share_below(values: Tensor, others: Tensor) -> Tensor:
    """Return, for each of the n values, the share of the m `others` below it; a tie counts as one half."""
    ordered = others.sort().values
    ends = [torch.searchsorted(ordered, values, right=right) for right in (False, True)]
    return (ends[0] + ends[1]).double() / (2 * len(others))


def _average_precision(positives: Tensor, negatives: Tensor) -> float:
    # Sum the precision over the thresholds, weighted by the increase in recall, without interpolation. Positives have high scores.
    scores = torch.cat([positives, negatives])
    _, inverse = torch.unique(-scores, return_inverse=True)
    true = torch.bincount(inverse[: len(positives)], minlength=int(inverse.max()) + 1).double()
    all_counts = torch.bincount(inverse).double()
    return float((true * true.cumsum(0) / all_counts.cumsum(0)).sum() / len(positives))


def _by_label(probs: Tensor, labels: Tensor, measure: Callable[[Tensor, Tensor], float]) -> Tensor:
    # Apply the measure, label by label, to the probabilities of the negatives and of the positives. Missing labels are omitted.
    if probs.ndim != 2 or labels.shape != probs.shape:
        raise DataError(
            f"multi-label data need probabilities and labels of shape (n, C); got {tuple(probs.shape)} and {tuple(labels.shape)}."
        )
    by_label = zip(probs.double().unbind(1), labels.unbind(1), strict=True)
    values = [measure(scores[truth == 0], scores[truth == 1]) for scores, truth in by_label]
    return torch.tensor(values, dtype=torch.float64, device="cpu")


@torch.no_grad()
def auroc_of_labels(probs: Tensor, labels: Tensor) -> Tensor:
    """Return each label's area under the ROC curve: the probability that a positive datum scores higher than a negative datum.

    Args:
        probs: predicted probabilities (n, C) that the labels are 1.
        labels: labels (n, C), each 0 or 1; NaN or -100 marks a missing label.

    Returns:
        Areas (C,) in float64; NaN for labels that are always 0 or always 1. The mean of the areas is the macro-averaged AUROC.
    """

    def area(negatives: Tensor, positives: Tensor) -> float:
        return auroc(negatives, positives) if len(negatives) and len(positives) else math.nan

    return _by_label(probs, labels, area)


@torch.no_grad()
def average_precision_of_labels(probs: Tensor, labels: Tensor) -> Tensor:
    """Return each label's average precision: the mean precision, weighted by increases in recall, without interpolation.

    The arguments are the same as for `auroc_of_labels`. The value depends on the share of positive labels. The value is NaN for a
    label that is never 1.
    """

    def precision(negatives: Tensor, positives: Tensor) -> float:
        return _average_precision(positives, negatives) if len(positives) else math.nan

    return _by_label(probs, labels, precision)


@torch.no_grad()
def calibration_error_of_labels(probs: Tensor, labels: Tensor, bins: int = 15) -> Tensor:
    """Return each label's calibration error: the mean |probability - share of positives| over equal-width bins.

    The arguments are the same as for `auroc_of_labels`. Bins are closed on the right. The value is NaN for a label that is always
    missing.
    """

    def gap(negatives: Tensor, positives: Tensor) -> float:
        truth = torch.cat([torch.zeros_like(negatives), torch.ones_like(positives)])
        return calibration_gap(bin_sums(torch.cat([negatives, positives]), truth, bins)) if len(truth) else math.nan

    return _by_label(probs, labels, gap)


@torch.no_grad()
def aupr_in(inlier_scores: Scores, outlier_scores: Scores) -> float:
    """Return the average precision for detecting inliers by low scores. Unlike AUROC, the value depends on the share of outliers."""
    inliers, outliers = check_scores(inlier_scores, outlier_scores)
    return _average_precision(-inliers, -outliers)


@torch.no_grad()
def aupr_out(inlier_scores: Scores, outlier_scores: Scores) -> float:
    """Return the average precision for detecting outliers by high scores. Unlike AUROC, the value depends on the share of outliers."""
    inliers, outliers = check_scores(inlier_scores, outlier_scores)
    return _average_precision(outliers, inliers)


@torch.no_grad()
def fpr_at_tpr(inlier_scores: Scores, outlier_scores: Scores, tpr: float = 0.95) -> float:
    """Return the share of outliers accepted as inliers at a threshold that accepts a fraction `tpr` of the inliers (FPR95).

    The best value is 0. Inliers are the positives, as in the paper. An input passes if its score is at most the `tpr` quantile of the
    inliers' scores, interpolated linearly. If the score is -confidence and `tpr` is 0.95, this threshold is the 5th percentile of the
    inliers' confidence. Some packages treat outliers as the positives instead; see `fpr_at_tpr_out`.
    """
    inliers, outliers = check_scores(inlier_scores, outlier_scores)
    return float((outliers <= passing_threshold(inliers, tpr)).double().mean())


@torch.no_grad()
def fpr_at_tpr_out(inlier_scores: Scores, outlier_scores: Scores, tpr: float = 0.95) -> float:
    """Return the share of inliers rejected as outliers at a threshold that detects at least a fraction `tpr` of the outliers.

    The best value is 0. Outliers are the positives, as in OpenOOD's FPR@95. The threshold is the highest outlier score reached by at
    least a fraction `tpr` of the outliers, without interpolation.
    """
    inliers, outliers = check_scores(inlier_scores, outlier_scores)
    if not 0 < tpr <= 1:
        raise OptionError(
            f"must be above 0 and at most 1 (it is the share of outliers to detect), got {tpr!r}.", argument="tpr"
        )
    # The tolerance rounds 0.07 * 100, which is 7.000000000000001 in floating point, to 7.
    detected = math.ceil(tpr * len(outliers) - 1e-12 * len(outliers))
    threshold = outliers.sort(descending=True).values[max(detected, 1) - 1]
    return float((inliers >= threshold).double().mean())


def passing_threshold(inliers: Tensor, tpr: float) -> Tensor:
    """Return the `tpr` quantile of the inliers' scores (n,), interpolated linearly."""
    if not 0 <= tpr <= 1:
        raise OptionError(
            f"must be between 0 and 1, got {tpr!r}. It is the share of inliers that pass.", argument="tpr"
        )
    ordered = inliers.sort().values
    position = tpr * (len(inliers) - 1)
    if abs(position - round(position)) < 1e-12 * len(inliers):  # 0.57 * 100 is 56.99999999999999 in floating point
        position = round(position)
    below = ordered[int(position)]
    above = ordered[min(int(position) + 1, len(ordered) - 1)]
    share = position - int(position)
    # Do not average equal neighbours: rounding could move the threshold off a tie, and infinities would give NaN.
    return below if share == 0 or below == above else (1 - share) * below + share * above
