"""Probabilities and labels in, numbers out. Pure functions over tensors; each is one definition."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "accuracy",
    "auroc",
    "bin_confidences",
    "brier",
    "expected_calibration_error",
    "mean_confidence",
    "negative_log_likelihood",
]


def accuracy(probs: Tensor, labels: Tensor) -> float:
    """Share of data whose most probable class is the label."""
    return float((probs.argmax(1) == labels).double().mean())


def mean_confidence(probs: Tensor) -> float:
    """Mean of the largest probability (MMC)."""
    return float(probs.double().max(1).values.mean())


def negative_log_likelihood(probs: Tensor, labels: Tensor) -> float:
    """Mean of `-log p(label)`; a probability that underflowed to 0 counts as the smallest positive number."""
    chosen = probs.gather(1, labels[:, None]).squeeze(1)
    return float(-chosen.clamp_min(torch.finfo(probs.dtype).tiny).double().log().mean())


def brier(probs: Tensor, labels: Tensor) -> float:
    """Mean over data of `sum_c (p_c - 1[label = c])^2`, between 0 and 2."""
    one_hot = torch.nn.functional.one_hot(labels, probs.shape[1])
    return float((probs.double() - one_hot).square().sum(1).mean())


def bin_confidences(probs: Tensor, labels: Tensor, bins: int = 15) -> Tensor:
    """Sums over equal-width bins of the largest probability: (bins, 3) of count, confidence, and correct predictions.

    Bins are closed on the right; every prediction is counted, those with confidence 1 in the last bin.
    """
    confidence, predicted = probs.double().max(1)
    index = (torch.ceil(confidence * bins).long() - 1).clamp(0, bins - 1)
    values = torch.stack([torch.ones_like(confidence), confidence, (predicted == labels).double()], dim=1)
    return values.new_zeros(bins, 3).index_add_(0, index, values)


def calibration_gap(binned: Tensor) -> float:
    """Mean over predictions of |confidence - accuracy| within each bin, from `bin_confidences` sums."""
    return float((binned[:, 1] - binned[:, 2]).abs().sum() / binned[:, 0].sum())


def expected_calibration_error(probs: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Expected calibration error of the largest probability (ECE), every prediction counted."""
    return calibration_gap(bin_confidences(probs, labels, bins))


def auroc(inlier_scores: Tensor, outlier_scores: Tensor) -> float:
    """Probability that an outlier scores higher than an inlier, ties counting half. Higher score = more outlying."""
    scores = torch.cat([inlier_scores, outlier_scores]).double()
    _, inverse, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    # Mean rank of tied values: those below, plus half of those tied.
    ranks = (counts.cumsum(0) - counts).double() + (counts.double() + 1) / 2
    inliers, outliers = len(inlier_scores), len(outlier_scores)
    rank_sum = ranks[inverse][inliers:].sum()
    return float((rank_sum - outliers * (outliers + 1) / 2) / (inliers * outliers))
