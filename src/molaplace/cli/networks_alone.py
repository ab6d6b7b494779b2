"""Predictions of a posterior's networks without their Laplace approximations: the single network and the deep ensemble."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from molaplace.calibration.noise import best_factors
from molaplace.likelihoods import GAUSSIAN, Gaussian, Likelihood
from molaplace.likelihoods.base import mixed
from molaplace.posterior import MoLA
from molaplace.prediction import Field, Prediction, RegressionPrediction
from molaplace.rules.held_out import HeldOut


def networks_alone(posterior: MoLA, prediction: Any, count: int, factor: Any = None) -> Any:
    """Return the prediction of a posterior's first `count` networks without Laplace approximations, from that of the posterior.

    The mixture weights are the posterior's. For classification, `factor` is a temperature. For regression, the standard deviation of
    the noise is its value before tuning (`untuned_noise`), multiplied by `factor` (D,). By default, nothing is scaled.
    """
    if isinstance(prediction, RegressionPrediction):
        means = prediction.component_mean[:count]
        noise = prediction.component_noise[:count] * untuned_noise(posterior)[:count, None].to(means)
        if factor is not None:
            noise = noise * factor.to(means).square()
        weights = prediction.weights[:count] / prediction.weights[:count].sum()
        return regression_prediction(means, noise, noise, weights, prediction.likelihood)
    logits = prediction.logit_mean[:count] / (factor or 1.0)
    probs = mixed(posterior.weights, prediction.likelihood.probabilities(logits))
    return Prediction({"probs": probs, "logit_mean": logits}, likelihood=prediction.likelihood)


def untuned_noise(posterior: MoLA) -> Tensor:
    """Return the ratio (K, D) of each network's noise variance before tuning to its current noise variance, in float64.

    The noise variance before tuning is the variance of the training residuals, the given noise, or the variance that a
    heteroscedastic network predicts.
    """
    rows = []
    for component in posterior.components:
        layer = component.require_layer("the noise")
        likelihood = component.likelihood
        assert isinstance(likelihood, Gaussian)
        width = len(layer.weights)
        before = likelihood
        if likelihood.estimated:
            before = replace(likelihood, noise=None, estimated=False).fitted(layer.sums)
        rows.append((before.deviation(width) / likelihood.deviation(width)).square())
    return torch.stack(rows) / posterior.temperature**2


def regression_prediction(
    means: Tensor, variances: Tensor, noise: Tensor, weights: Tensor, likelihood: Likelihood = GAUSSIAN
) -> RegressionPrediction:
    """Build a prediction, without an outlier score, from the components' means, variances and noise variances (K, n, D)."""
    fields: dict[str, Field] = {"component_mean": means, "component_variance": variances, "component_noise": noise}
    # Plain networks have no outlier score of their own; the variance of the prediction serves as a score for every method.
    fields["ood_score"] = means.new_zeros(means.shape[1])
    return RegressionPrediction(fields, weights=weights, ood_score_name="none", likelihood=likelihood)


def noise_factors(posterior: MoLA, held_out: HeldOut, count: int) -> Tensor:
    """Return the maximum-likelihood noise factors (D,) of the first `count` networks on the validation data of all processes."""
    predictions = []
    if len(held_out):
        prediction = posterior.predict_from_features(held_out.phi, held_out.outputs)
        predictions = [networks_alone(posterior, prediction, count)]
    alone = RegressionPrediction.gather(predictions, held_out.team)
    noise = alone.component_noise
    return best_factors(alone.weights, alone.component_mean, noise, noise, held_out.team.gather(held_out.labels))
