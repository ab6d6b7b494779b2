"""Numbers as outputs, in a few scores: how far predictions are off, how likely targets are, and how often intervals hold them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mola.baselines.noise import best_factors
from mola.regression_prediction import RegressionPrediction

__all__ = ["MEASURES", "best_noise", "measures", "summary"]

MEASURES = ("rmse", "nll", "crps", "coverage", "std")
"""Root mean squared error, negative log-likelihood, CRPS, share of targets in 90 % intervals, mean standard deviation."""

PROBABILITY = 0.9
"""Of the intervals."""


def measures(said: RegressionPrediction, targets: Tensor) -> Tensor:
    """A row (n, 5) for each input, whose means over inputs `summary` makes scores of; the first is the squared error.

    Args:
        said: of the inputs.
        targets: (n, D), in their own units.

    Returns:
        Squared error, negative log-likelihood of all outputs, CRPS, whether intervals hold the targets, standard deviation; those of
        each output averaged over outputs.
    """
    lower, upper = said.interval(PROBABILITY)
    values = targets.to(said.mean.dtype)
    columns = (
        (said.mean - values).square().mean(1),
        -said.log_prob(targets),
        said.crps(targets).mean(1),
        ((values >= lower) & (values <= upper)).double().mean(1),
        said.std.mean(1),
    )
    return torch.stack([column.double() for column in columns], 1)


def summary(rows: Tensor) -> dict[str, float]:
    """Scores by name, from the rows of all inputs."""
    means = rows.mean(0).tolist()
    return dict(zip(MEASURES, [math.sqrt(means[0]), *means[1:]], strict=True))


def errors(rows: Tensor) -> dict[str, float]:
    """Standard errors of the scores, over inputs; that of the root by the rule of its derivative."""
    spread = (rows.std(0) / math.sqrt(len(rows))).tolist() if len(rows) > 1 else [math.nan] * len(MEASURES)
    root = math.sqrt(float(rows[:, 0].mean()))
    return dict(zip(MEASURES, [spread[0] / (2 * root) if root > 0 else 0.0, *spread[1:]], strict=True))


def best_noise(weights: Tensor, means: Tensor, targets: Tensor) -> Tensor:
    """Standard deviation (D,) of the noise at which targets are most likely, for members who know nothing but a mean (K, n, D)."""
    unit: Any = torch.ones_like(means)
    return best_factors(weights, means, unit, unit, targets)
