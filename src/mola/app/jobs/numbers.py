"""Numbers as outputs: what the networks alone say, whose noise is their own, and a few scores for a folder's document."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mola.baselines.noise import best_factors
from mola.compare import Tally
from mola.compare.numbers import numbers_measured
from mola.regression import RegressionMoLA
from mola.regression_prediction import RegressionPrediction

PROBABILITY = 0.9
"""Of the intervals that are written where no coverage is asked for."""


def untuned_noise(posterior: RegressionMoLA) -> Tensor:
    """Variance of the noise that each network has before anything was tuned, over that which it has now.

    It is that of the residuals of the training data, or as given; where networks say their own, as they say it.

    Args:
        posterior: tuned or not.

    Returns:
        Factors (K, D), in float64.
    """
    rows = []
    for component, likelihood in zip(posterior.components, posterior.likelihoods, strict=True):
        factors = component.require_curvature("the noise")[1].factors
        sums = factors.label_sums
        width = posterior.noise.shape[1] if sums is None else sums.shape[1]
        before = likelihood
        if likelihood.estimated:
            before = replace(likelihood, noise=None, estimated=False).settled(sums, factors.count)
        rows.append((before.deviation(width) / likelihood.deviation(width)).square())
    return torch.stack(rows) / posterior.temperature**2


def networks_alone(
    said: RegressionPrediction, count: int, untuned: Tensor, factors: Tensor | None = None
) -> RegressionPrediction:
    """What the first networks of a posterior say by themselves: means, and noise around them.

    Args:
        said: by the posterior, (n, D).
        count: how many networks.
        untuned: as `untuned_noise` gives it.
        factors: of the noise (D,), where it was scaled.

    Returns:
        The prediction, with the posterior's weights.
    """
    means = said.component_mean[:count]
    noise = said.component_noise[:count] * untuned[:count, None].to(means)
    if factors is not None:
        noise = noise * factors.to(means).square()
    weights = said.weights[:count] / said.weights[:count].sum()
    # Networks alone have no outlier score: their variance is one, and every method has that.
    none = means.new_zeros(means.shape[1])
    return RegressionPrediction(means, noise, noise, weights, none, "none", likelihood=said.likelihood)


def some_of(said: RegressionPrediction, rows: slice | Tensor) -> RegressionPrediction:
    """The prediction (n, D) of some inputs alone."""
    parts = (said.component_mean, said.component_variance, said.component_noise)
    means, variances, noises = (part[:, rows] for part in parts)
    return RegressionPrediction(
        means,
        variances,
        noises,
        said.weights,
        said.ood_score[rows],
        said.ood_score_name,
        None if said.distance is None else said.distance[rows],
        likelihood=said.likelihood,
    )


def noise_factors(alone: RegressionPrediction, targets: Tensor) -> Tensor:
    """What the noise (D,) of networks is to be multiplied by, so that targets (n, D) are most likely."""
    noise = alone.component_noise
    return best_factors(alone.weights, alone.component_mean, noise, noise, targets)


def summary(tally: Tally) -> dict[str, float]:
    """RMSE, NLL, CRPS, the share of targets in 90 % intervals and the mean standard deviation, as a folder's document has them."""
    found = numbers_measured(tally)
    names = {"rmse": "rmse", "nll": "nll", "crps": "crps", "coverage": "coverage_90", "std": "std"}
    return {name: found[metric].value for name, metric in names.items()}
