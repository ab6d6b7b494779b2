"""Scores of candidate settings on held-out data.

The rows are processed in chunks, and each chunk is scored for many candidates at once if the link allows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from molaplace.likelihoods import ClassificationLikelihood, ClassificationPredictive, Likelihood, Predictive
from molaplace.metrics import bin_sums, calibration_gaps
from molaplace.rules.held_out import HeldOut
from molaplace.scaling import Candidates

if TYPE_CHECKING:
    from molaplace.posterior import MoLA

NUMBERS_AT_ONCE = 2**21
"""Largest number of values (candidates times rows times outputs) in memory at once: 16 MB in float64."""

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


def scores(
    posterior: MoLA,
    data: HeldOut,
    score: ScoreFunction = label_scores,
    *,
    precision: Sequence[Any] | None = None,
    temperature: Sequence[float] | float = 1.0,
    pooling: Sequence[float] | float = 1.0,
    exponent: Sequence[float] | float = 0.0,
    onset: float = 1.0,
) -> dict[str, Tensor]:
    """Return the scores (L, m) of L candidates on the data of all processes, one per datum or, for multi-label data, per known label.

    The settings of the candidates are broadcast against each other.

    Args:
        posterior: the mixture, whose scaling is ignored.
        data: the held-out data.
        score: function that maps a predictive distribution and labels to named scores (L, m).
        precision: prior precision of each candidate, as one number or one number per component; by default, the posterior's own.
        temperature: temperatures of the candidates.
        pooling: pooling coefficients of the candidates.
        exponent: distance exponents of the candidates.
        onset: distance beyond which logits shrink.
    """
    count = len(posterior.components)
    given = [posterior.prior_precision] if precision is None else precision
    precisions = torch.stack([torch.as_tensor(one, dtype=torch.float64, device="cpu").expand(count) for one in given])
    settings = (temperature, pooling, exponent, onset)
    others = [torch.as_tensor(one, dtype=torch.float64, device="cpu").flatten() for one in settings]
    size = max(len(precisions), *(len(one) for one in others))
    tried = Candidates(precisions.expand(size, count), *(one.expand(size) for one in others))

    outputs, features = data.outputs[0].shape[1], max(phi.shape[1] for phi in data.phi)
    together = posterior.link.variance_only and posterior.weighting != "evidence"
    at_once = len(tried) if together else 1
    parts: list[dict[str, Tensor]] = []
    for rows, labels in data.chunks(NUMBERS_AT_ONCE // max(at_once * posterior.link.row_size(outputs), features)):
        found = [score(posterior.predictive(rows, candidates=some), labels) for some in tried.split(at_once)]
        parts.append({name: torch.cat([one[name] for one in found]) for name in found[0]})
    # A rank without data has no names, so it uses the names from another rank.
    names = next(names for names in data.team.collect(list(parts[0]) if parts else None) if names)
    return {
        name: data.gather(torch.cat([part[name] for part in parts], 1).T.contiguous() if parts else None).T
        for name in names
    }


def mean_scores(
    posterior: MoLA, data: HeldOut, score: ScoreFunction = label_scores, **settings: Any
) -> dict[str, Tensor]:
    """Return the mean (L,) of each score and, for classification with labels, the calibration error "ece"."""
    scored = scores(posterior, data, score, **settings)
    found = {name: values.mean(1) for name, values in scored.items()}
    if "correct" in scored:
        found["ece"] = calibration_gaps(bin_sums(scored["confidence"], scored["correct"]))
    return found


def paired(first: Tensor, second: Tensor, data: HeldOut, *, least: float = 0.0) -> tuple[float, float]:
    """Return the mean difference between two scores (m,) on the same data, and its standard error over inputs.

    The standard error returned is never below `least`.
    """
    gap, group = first - second, data.score_groups()
    mean = gap.mean()
    # The labels of one input are not independent, so the differences are first summed within each input.
    total = torch.zeros(int(group.max()) + 1, dtype=gap.dtype).index_add_(0, group, gap - mean)
    if len(total) == 1:
        return float(mean), math.inf  # a standard error needs more than one input
    error = float(total.square().sum().sqrt()) / len(gap) / math.sqrt(data.independent)
    return float(mean), max(error, least)


def share_error(data: HeldOut) -> float:
    """Return a lower bound on the standard error of a proportion; it is positive even if all data agree."""
    return 1 / (data.independent * (int(data.score_groups().max()) + 1) + 2)
