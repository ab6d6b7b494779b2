"""Metrics of probabilities and labels, and of outlier scores: pure functions of tensors.

Outlier scores are higher for more outlying inputs, as everywhere in this package. Papers often define these metrics for the
confidence, with in-distribution data as positives; with score = -confidence the numbers are equal. Ties never depend on the order of
the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mola.errors import DataError, OptionError


def accuracy(probs: Tensor, labels: Tensor) -> float:
    """Return the share of data whose most probable class is the label."""
    return float((probs.argmax(1) == labels).double().mean())


def mean_confidence(probs: Tensor) -> float:
    """Return the mean of the largest probability (MMC)."""
    return float(probs.double().max(1).values.mean())


def negative_log_likelihood(probs: Tensor, labels: Tensor) -> float:
    """Return the mean of `-log p(label)`; a probability that underflowed to 0 counts as the smallest positive number."""
    chosen = probs.gather(1, labels[:, None]).squeeze(1)
    return float(-chosen.clamp_min(torch.finfo(probs.dtype).tiny).double().log().mean())


def brier(probs: Tensor, labels: Tensor) -> float:
    """Return the mean over data of `sum_c (p_c - 1[label = c])^2`, between 0 and 2."""
    one_hot = torch.nn.functional.one_hot(labels, probs.shape[1])
    return float((probs.double() - one_hot).square().sum(1).mean())


def bin_confidences(probs: Tensor, labels: Tensor, bins: int = 15) -> Tensor:
    """Return the sums over equal-width bins of the largest probability: (bins, 3) of count, confidence, and correct predictions.

    Bins are closed on the right; every prediction is counted, those with confidence 1 in the last bin.
    """
    confidence, predicted = probs.double().max(1)
    return bin_sums(confidence, predicted == labels, bins)


def bin_index(confidence: Tensor, bins: int) -> Tensor:
    """Return the index of the equal-width bin, closed on the right, of each confidence."""
    return (torch.ceil(confidence * bins).long() - 1).clamp_(0, bins - 1)


def bin_sums(confidence: Tensor, correct: Tensor, bins: int = 15) -> Tensor:
    """Return the sums of `bin_confidences` (..., bins, 3) from confidences (..., n) in float64 and their correctness."""
    index = bin_index(confidence, bins)
    sums = confidence.new_zeros(3, *confidence.shape[:-1], bins)
    for total, values in zip(sums, (torch.ones_like(confidence), confidence, correct.double()), strict=True):
        total.scatter_add_(-1, index, values)
    return sums.movedim(0, -1)


def calibration_gap(binned: Tensor) -> float:
    """Return the mean over predictions of |confidence - accuracy| within each bin, from `bin_confidences` sums."""
    return float(calibration_gaps(binned))


def calibration_gaps(binned: Tensor) -> Tensor:
    """Return calibration gaps (...) from sums (..., bins, 3)."""
    return (binned[..., 1] - binned[..., 2]).abs().sum(-1) / binned[..., 0].sum(-1)


def expected_calibration_error(probs: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Return the expected calibration error of the largest probability (ECE), every prediction counted."""
    return calibration_gap(bin_confidences(probs, labels, bins))


def largest_gap(binned: Tensor) -> float:
    """Return the largest |confidence - accuracy| of any bin, from `bin_confidences` sums; an empty bin counts as 0."""
    return float(((binned[:, 1] - binned[:, 2]).abs() / binned[:, 0].clamp_min(1)).max())


def bin_sums_legacy(confidence: Tensor, correct: Tensor, bins: int) -> Tensor:
    """Return the sums of `bin_sums` with the bins of the authors' scripts, for comparison with published figures.

    Bins are closed on the left, and predictions in the last bin are left out: a network that is confident and always wrong there
    looks calibrated.
    """
    # numpy's edges, not i / bins: they differ in the last bit, which decides for confidences on an edge.
    edges = torch.from_numpy(np.linspace(0, 1, bins + 1)).to(confidence.device)
    index = torch.bucketize(confidence, edges, right=True) - 1
    values = torch.stack([torch.ones_like(confidence), confidence, correct.double()], dim=1)
    kept = index < bins - 1
    return values.new_zeros(bins, 3).index_add_(0, index[kept], values[kept])


def _tied(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    # Both in ascending order of the keys, the values of equal keys replaced by their mean.
    distinct, inverse, counts = torch.unique(keys, return_inverse=True, return_counts=True)
    means = values.new_zeros(len(distinct)).index_add_(0, inverse, values) / counts
    return distinct.repeat_interleave(counts), means.repeat_interleave(counts)


def risk_coverage_curve(uncertainty: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Return the error rate if only the least uncertain inputs are predicted, at every coverage.

    Predictions of equal uncertainty are accepted in random order: the curve is the mean over these orders.

    Args:
        uncertainty: (n,), such as `1 - probs.amax(1)` or an outlier score; the highest are rejected first.
        correct: (n,), whether each prediction is right.

    Returns:
        Coverage (n,): 1/n, 2/n, ..., 1; and the error rate (n,) among that share of the predictions.
    """
    if uncertainty.shape != correct.shape or uncertainty.ndim != 1 or len(correct) == 0 or uncertainty.isnan().any():
        raise DataError(
            f"risk and coverage need one uncertainty per prediction, none of them nan; got {tuple(uncertainty.shape)} "
            f"uncertainties ({int(uncertainty.isnan().sum())} nan) for {tuple(correct.shape)} predictions."
        )
    _, wrong = _tied(uncertainty.double(), 1 - correct.double())
    accepted = torch.arange(1, len(wrong) + 1, device=wrong.device, dtype=torch.float64)
    return accepted / len(wrong), wrong.cumsum(0) / accepted


def area_under_risk_coverage(uncertainty: Tensor, correct: Tensor) -> float:
    """Return the mean of the risk-coverage curve (AURC; Geifman et al., 2019): 0 is best, random rejection gives the error rate."""
    return float(risk_coverage_curve(uncertainty, correct)[1].mean())


def least_area_under_risk_coverage(count: int, wrong: int) -> float:
    """Return the lowest possible AURC of `count` predictions with this number of errors: all errors are rejected first."""
    accepted = torch.arange(count - wrong + 1, count + 1, dtype=torch.float64)
    return float((1 - (count - wrong) / accepted).sum() / count)


def check_scores(inlier_scores: Tensor, outlier_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores in float64."""
    for name, scores in (("inlier", inlier_scores), ("outlier", outlier_scores)):
        if scores.ndim != 1 or len(scores) == 0 or scores.isnan().any():
            raise DataError(
                f"{name}_scores must hold one number per input, at least one and none nan; "
                f"got shape {tuple(scores.shape)} with {int(scores.isnan().sum())} nan."
            )
    return inlier_scores.double(), outlier_scores.double()


def auroc(inlier_scores: Tensor, outlier_scores: Tensor) -> float:
    """Return the probability that an outlier scores higher than an inlier, ties counting half. Higher score = more outlying."""
    inliers, outliers = check_scores(inlier_scores, outlier_scores)
    return float(share_below(outliers, inliers).mean())


def share_below(values: Tensor, others: Tensor) -> Tensor:
    """Return the share (n,) of the `others` (m,) below each value (n,), ties counting half."""
    ordered = others.sort().values
    ends = [torch.searchsorted(ordered, values, right=right) for right in (False, True)]
    return (ends[0] + ends[1]).double() / (2 * len(others))


def _average_precision(positives: Tensor, negatives: Tensor) -> float:
    # Sum over thresholds of the step in recall times the precision, if positives score high; no interpolation.
    scores = torch.cat([positives, negatives])
    _, inverse = torch.unique(-scores, return_inverse=True)
    true = torch.bincount(inverse[: len(positives)], minlength=int(inverse.max()) + 1).double()
    all_counts = torch.bincount(inverse).double()
    return float((true * true.cumsum(0) / all_counts.cumsum(0)).sum() / len(positives))


def _each_label(probs: Tensor, labels: Tensor, measure: Callable[[Tensor, Tensor], float]) -> Tensor:
    # The measure of each label's probabilities on negatives and on positives; missing labels are neither.
    if probs.ndim != 2 or labels.shape != probs.shape:
        raise DataError(
            f"multi-label data need probabilities and labels (n, C); got {tuple(probs.shape)} and {tuple(labels.shape)}."
        )
    pairs = zip(probs.double().unbind(1), labels.unbind(1), strict=True)
    found = [measure(column[answer == 0], column[answer == 1]) for column, answer in pairs]
    return torch.tensor(found, dtype=torch.float64)


def auroc_of_labels(probs: Tensor, labels: Tensor) -> Tensor:
    """Return the area under the ROC curve of each label: the probability that a positive datum scores higher than a negative one.

    Args:
        probs: probabilities of yes (n, C).
        labels: 0 or 1 (n, C); NaN or -100 if a label is missing.

    Returns:
        (C,) in float64, NaN for a label that is always yes or always no; the mean over labels is the macro average.
    """
    return _each_label(probs, labels, lambda no, yes: auroc(no, yes) if len(no) and len(yes) else math.nan)


def average_precision_of_labels(probs: Tensor, labels: Tensor) -> Tensor:
    """Return the average precision of each label: the mean of the precision over the steps of recall, without interpolation.

    Arguments as for `auroc_of_labels`. NaN for a label that is never yes; it depends on how rare yes is.
    """
    return _each_label(probs, labels, lambda no, yes: _average_precision(yes, no) if len(yes) else math.nan)


def calibration_error_of_labels(probs: Tensor, labels: Tensor, bins: int = 15) -> Tensor:
    """Return the calibration error of each label: mean |probability of yes - share of yes| over equal-width bins of that probability.

    Arguments as for `auroc_of_labels`. Bins are closed on the right; NaN if every label is missing.
    """

    def gap(no: Tensor, yes: Tensor) -> float:
        truth = torch.cat([torch.zeros_like(no), torch.ones_like(yes)])
        return calibration_gap(bin_sums(torch.cat([no, yes]), truth, bins)) if len(truth) else math.nan

    return _each_label(probs, labels, gap)


def aupr_in(inlier_scores: Tensor, outlier_scores: Tensor) -> float:
    """Return the average precision of finding the inliers by low scores. It depends on the share of outliers, unlike AUROC."""
    inliers, outliers = check_scores(inlier_scores, outlier_scores)
    return _average_precision(-inliers, -outliers)


def aupr_out(inlier_scores: Tensor, outlier_scores: Tensor) -> float:
    """Return the average precision of finding the outliers by high scores. It depends on the share of outliers, unlike AUROC."""
    inliers, outliers = check_scores(inlier_scores, outlier_scores)
    return _average_precision(outliers, inliers)


def fpr_at_tpr(inlier_scores: Tensor, outlier_scores: Tensor, tpr: float = 0.95) -> float:
    """Return the share of outliers taken for inliers if `tpr` of the inliers pass (FPR95): 0 is best.

    The positives are the inliers, as in the paper: an input passes if its score is at most the `tpr` quantile of the inliers' scores
    (linear between two of them), which is the 5th percentile of their confidence. Some packages take the outliers as positives
    instead: see `fpr_at_tpr_out`.
    """
    inliers, outliers = check_scores(inlier_scores, outlier_scores)
    return float((outliers <= passing_threshold(inliers, tpr)).double().mean())


def fpr_at_tpr_out(inlier_scores: Tensor, outlier_scores: Tensor, tpr: float = 0.95) -> float:
    """Return the share of inliers taken for outliers if at least `tpr` of the outliers are found: 0 is best.

    The positives are the outliers, as in OpenOOD's FPR@95: the threshold is the highest score of an outlier at or above which that
    share of the outliers lies, without interpolation.
    """
    inliers, outliers = check_scores(inlier_scores, outlier_scores)
    if not 0 < tpr <= 1:
        raise OptionError(f"tpr must be above 0 and at most 1 (the share of outliers to find), got {tpr!r}.")
    # The tolerance keeps 0.07 of 100, which is 7.000000000000001, at 7.
    found = math.ceil(tpr * len(outliers) - 1e-12 * len(outliers))
    threshold = outliers.sort(descending=True).values[max(found, 1) - 1]
    return float((inliers >= threshold).double().mean())


def passing_threshold(inliers: Tensor, tpr: float) -> Tensor:
    """Return the score up to which inputs pass if `tpr` of the inliers should: a quantile of their scores (n,)."""
    if not 0 <= tpr <= 1:
        raise OptionError(f"tpr must be between 0 and 1 (the share of inliers that pass), got {tpr!r}.")
    ordered, position = inliers.sort().values, tpr * (len(inliers) - 1)
    if abs(position - round(position)) < 1e-12 * len(inliers):  # 0.57 of 100 is 57, not 56.99999999999999
        position = round(position)
    below, above = ordered[int(position)], ordered[min(int(position) + 1, len(ordered) - 1)]
    share = position - int(position)
    # Equal neighbours are not averaged: rounding must not move the threshold off a tie, nor infinities cancel.
    return below if share == 0 or below == above else (1 - share) * below + share * above
