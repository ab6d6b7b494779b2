"""Numbers as outputs: what the networks alone say, whose noise is their own, and a few scores for a folder's document."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mola.baselines.noise import best_factors
from mola.compare import Tally
from mola.compare.regression import regression_measured
from mola.likelihoods import GAUSSIAN, Gaussian
from mola.posterior import MoLA
from mola.prediction import Field, RegressionPrediction

PROBABILITY = 0.9
"""Of the intervals that are written where no coverage is asked for."""


def untuned_noise(posterior: MoLA) -> Tensor:
    """Variance of the noise that each network has before anything was tuned, over that which it has now.

    It is that of the residuals of the training data, or as given; where networks say their own, as they say it.

    Args:
        posterior: tuned or not.

    Returns:
        Factors (K, D), in float64.
    """
    rows = []
    for component in posterior.components:
        layer, likelihood = component.require_layer("the noise"), component.likelihood
        assert isinstance(likelihood, Gaussian)
        width, before = len(layer.weights), likelihood
        if likelihood.estimated:
            before = replace(likelihood, noise=None, estimated=False).fitted(layer.sums)
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
    return regression_prediction(means, noise, noise, weights, said.likelihood)


def regression_prediction(
    means: Tensor, variances: Tensor, noise: Tensor, weights: Tensor, likelihood: Gaussian = GAUSSIAN
) -> RegressionPrediction:
    """A prediction from means, variances and noise variances (K, n, D) of its components; it has no outlier score."""
    fields: dict[str, Field] = {"component_mean": means, "component_variance": variances, "component_noise": noise}
    # Networks alone have no outlier score: their variance is one, and every method has that.
    fields["ood_score"] = means.new_zeros(means.shape[1])
    return RegressionPrediction(fields, weights=weights, ood_score_name="none", likelihood=likelihood)


def noise_factors(alone: RegressionPrediction, targets: Tensor) -> Tensor:
    """What the noise (D,) of networks is to be multiplied by, so that targets (n, D) are most likely."""
    noise = alone.component_noise
    return best_factors(alone.weights, alone.component_mean, noise, noise, targets)


def summary(tally: Tally) -> dict[str, float]:
    """RMSE, NLL, CRPS, the share of targets in 90 % intervals and the mean standard deviation, as a folder's document has them."""
    found = regression_measured(tally)
    names = {"rmse": "rmse", "nll": "nll", "crps": "crps", "coverage": "coverage_90", "std": "std"}
    return {name: found[metric].value for name, metric in names.items()}
