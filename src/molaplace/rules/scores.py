"""Scores of predictions on held-out data, and paired differences between scores."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from molaplace.likelihoods import ClassificationLikelihood, ClassificationPredictive, Likelihood, Predictive
from molaplace.rules.held_out import HeldOut

ScoreFunction = Callable[[Predictive, Tensor | None], dict[str, Tensor]]
"""A function that maps the labels and the predictive distributions of L candidates to named scores (L, m)."""


def label_scores(predictive: Predictive, labels: Tensor | None) -> dict[str, Tensor]:
    """Return named scores of predictions, given the labels: the log loss, and other scores that depend on the likelihood."""
    assert labels is not None
    return predictive.scores(labels)


def without_labels(likelihood: Likelihood) -> ScoreFunction:
    """Return a function that needs no labels; its scores are the confidence and the cross-entropy with the uniform distribution."""
    assert isinstance(likelihood, ClassificationLikelihood)

    def score(predictive: Predictive, _: Tensor | None) -> dict[str, Tensor]:
        assert isinstance(predictive, ClassificationPredictive)
        choices = predictive.choices  # (L, n, C), or (L, n, C, 2) for multi-label data
        uniformity = -choices.clamp_min(torch.finfo(torch.float64).tiny).log().mean(-1)
        return {"confidence": choices.amax(-1).flatten(1), "uniformity": uniformity.flatten(1)}

    return score


def paired(first: Tensor, second: Tensor, data: HeldOut) -> tuple[float, float]:
    """Return the mean difference between two scores (m,) on the same data, and its standard error over inputs."""
    gap = first - second
    group = data.score_groups()
    mean = gap.mean()
    # The labels of one input are not independent, so the differences are first summed within each input.
    total = gap.new_zeros(int(group.max()) + 1).index_add_(0, group, gap - mean)
    if len(total) == 1:
        return float(mean), math.inf  # a standard error needs more than one input
    return float(mean), float(total.square().sum().sqrt()) / len(gap) / math.sqrt(data.independent)
