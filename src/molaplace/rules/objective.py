"""What a rule knows of a mixture: a function from settings to scores on held-out data, and a few facts.

The rows are processed in chunks, and each chunk is scored for many candidates at once if the link allows it. Scores are functions of
predictive distributions, with or without labels; `paired` compares the scores of two candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from molaplace.likelihoods import ClassificationPredictive, Likelihood, Predictive
from molaplace.links import Link
from molaplace.metrics import bin_sums, calibration_gaps
from molaplace.network import Rows
from molaplace.rules.held_out import HeldOut
from molaplace.settings import Reference, Settings
from molaplace.structures.distance import ClassDistance

ScoreFunction = Callable[[Predictive, Tensor | None], dict[str, Tensor]]
"""A function that maps the labels and the predictive distributions of L candidates to named scores (L, m)."""


def label_scores(predictive: Predictive, labels: Tensor | None) -> dict[str, Tensor]:
    """Return named scores of predictions, given the labels: the log loss, and other scores that depend on the likelihood."""
    assert labels is not None
    return predictive.scores(labels)


def scores_without_labels(predictive: Predictive, _: Tensor | None) -> dict[str, Tensor]:
    """Return scores of classifications that need no labels: the confidence, and the cross-entropy with the uniform distribution."""
    assert isinstance(predictive, ClassificationPredictive)
    choices = predictive.choices  # (L, n, C), or (L, n, C, 2) for multi-label data
    uniformity = -choices.clamp_min(torch.finfo(torch.float64).tiny).log().mean(-1)
    return {"confidence": choices.amax(-1).flatten(1), "uniformity": uniformity.flatten(1)}


def paired(first: Tensor, second: Tensor, data: HeldOut) -> tuple[float, float]:
    """Return the mean difference between two scores (m,) on the same data, and its standard error over inputs."""
    gap = first - second
    group = data.score_groups()
    mean = gap.mean()
    # The labels of one row are not independent, so the differences are first summed within each row. Nor are the positions of one
    # input, which `independent_share` accounts for.
    total = gap.new_zeros(int(group.max()) + 1).index_add_(0, group, gap - mean)
    if len(total) == 1:
        return float(mean), math.inf  # a standard error needs more than one input
    return float(mean), float(total.square().sum().sqrt()) / len(gap) / math.sqrt(data.independent_share)


@dataclass(frozen=True)
class Distances:
    """Distances from the training classes."""

    networks: Sequence[ClassDistance]
    """The distances of each network's features."""
    reference: Reference
    """Typical distances and norms of the validation data."""
    relative_logs: Callable[[], Tensor]
    """Function that returns the log distances (n,) of the validation data of all processes, relative to their median."""


@dataclass(frozen=True)
class Objective:
    """A mixture as a function from settings to scores on held-out data.

    Rules read `settings`, make candidates with `settings.candidates(...)`, and compare them with `scores` or `mean_scores`.
    """

    likelihood: Likelihood
    settings: Settings
    """The prior precision before tuning; all other settings are neutral."""
    held_out: HeldOut | None
    """The validation data, or None for a rule that uses only the training data."""
    link: Link
    """Map from logits to probabilities."""
    predictor_at: Callable[[Settings], Callable[[Rows], Predictive]]
    """Function that maps candidates to a function from rows to predictive distributions, `LaplaceMixture.distribution_of`."""
    fixed_weights: bool
    """True if the mixture's weights do not depend on the settings, so that many candidates can be evaluated at once."""
    log_evidence: Sequence[Callable[[Tensor], Tensor]]
    """For each network, a function that maps a prior precision to the log marginal likelihood of the training labels."""
    with_noise: Callable[[float | Sequence[float]], Objective]
    """Function that returns the objective after the noise has been multiplied by a factor, or by one factor per network."""
    read: Callable[[Iterable[Any], str], HeldOut]
    """Function that runs the networks over another loader with the given name, whose labels are ignored."""
    distances: Distances | None
    """Distances from the training classes, or None if the mixture cannot compute them."""

    @property
    def data(self) -> HeldOut:
        """The validation data."""
        assert self.held_out is not None  # `as_rule` requires data for rules that use them
        return self.held_out

    @property
    def num_networks(self) -> int:
        """Number of networks in the mixture."""
        return len(self.settings.precisions)

    def scores(
        self, settings: Settings, score: ScoreFunction = label_scores, data: HeldOut | None = None
    ) -> dict[str, Tensor]:
        """Return the scores (L, m) of L candidates, one per datum or, for multi-label data, per known label.

        The scores cover the data of all processes.

        Args:
            settings: the candidates.
            score: function that maps a predictive distribution and labels to named scores (L, m).
            data: other held-out data, instead of the validation data.
        """
        data = self.data if data is None else data
        candidates = settings if settings.is_search else settings.candidates()
        at_once = len(candidates) if self.link.variance_only and self.fixed_weights else 1
        starts = range(0, len(candidates), at_once)
        predictors = [self.predictor_at(candidates[start : start + at_once]) for start in starts]
        chunks = []
        for rows in data.chunks(at_once * self.link.row_size(data.outputs[0].shape[1])):
            scores = [score(predictor(rows), rows.labels) for predictor in predictors]
            chunks.append({name: torch.cat([part[name] for part in scores]) for name in scores[0]})
        return {
            name: data.team.gather(torch.cat([chunk[name] for chunk in chunks], 1).T.contiguous()).T
            for name in chunks[0]
        }

    def mean_scores(
        self, settings: Settings, score: ScoreFunction = label_scores, data: HeldOut | None = None
    ) -> dict[str, Tensor]:
        """Return the mean (L,) of each score and, for classification with labels, the calibration error "ece"."""
        scores = self.scores(settings, score, data)
        means = {name: values.mean(1) for name, values in scores.items()}
        if "correct" in scores:
            means["ece"] = calibration_gaps(bin_sums(scores["confidence"], scores["correct"]))
        return means
