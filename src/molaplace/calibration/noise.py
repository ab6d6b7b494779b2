"""Noise scaling for regression predictors without a Laplace approximation: choose the noise that best fits the validation targets.

This is the regression counterpart of temperature scaling: it multiplies the noise of each output by a factor and leaves the means
unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from molaplace import normal_mixtures
from molaplace.component import Component
from molaplace.errors import DataError, OptionError
from molaplace.likelihoods import Gaussian
from molaplace.posterior import MoLA
from molaplace.rules.held_out import HeldOut
from molaplace.rules.search import maximise

NOISE_RANGE = 100.0  # largest factor by which the noise and the root mean squared error may differ, in either direction


def scale_noise(ensemble: MoLA, val_loader: Iterable[Any] | HeldOut) -> MoLA:
    """Return the ensemble with each output's noise chosen to maximise the likelihood of the validation targets.

    If the networks have different noises, all are multiplied by the same factors.

    Args:
        ensemble: regression networks without a Laplace approximation, from `mola.ensemble(networks, likelihood="gaussian")`. The
            `tune` method of a posterior from `mola.fit` already chooses the noise.
        val_loader: validation data as batches of (inputs, targets), with targets in their original units.
    """
    likelihood = ensemble.likelihood
    if not isinstance(likelihood, Gaussian):
        raise OptionError(
            f"scale_noise is for regression, got likelihood {likelihood.name!r}. For classification, use "
            f"mola.calibration.temperature_scaled."
        )
    if ensemble.structure is not None:
        raise OptionError(
            "a posterior from mola.fit chooses its noise together with its prior precision. Call posterior.tune(val_loader)."
        )
    data = ensemble.read(val_loader, "validation loader", labelled=True)
    starts: list[Any] = [
        replace(start, noise=1.0 if start.heteroscedastic else start.scale) if start.noise is None else start
        for start in ensemble.likelihoods
        if isinstance(start, Gaussian)
    ]
    prediction = _with(ensemble, starts).make_prediction(data)
    means, noises = prediction.component_mean, prediction.component_noise
    targets = data.labels
    assert targets is not None  # `read` requires them
    if bool((means == targets[:, None]).all(0).any()):
        raise DataError(
            "a network predicts all validation targets of an output exactly, so the targets do not determine the noise. Pass "
            "mola.likelihoods.Gaussian(noise=...)."
        )
    factors = best_factors(ensemble.weights, means, noises, targets)
    width = len(factors)
    noises_of_networks = [start.noise_levels(width) * factors.cpu() for start in starts]
    pairs = zip(starts, noises_of_networks, strict=True)
    return _with(ensemble, [replace(start, noise=noise.tolist(), estimated=True) for start, noise in pairs])


def _with(ensemble: MoLA, likelihoods: Sequence[Gaussian]) -> MoLA:
    pairs = zip(ensemble.networks, likelihoods, strict=True)
    return ensemble.with_parts(components=[Component(network, None, None, likelihood) for network, likelihood in pairs])


def best_factors(weights: Tensor, means: Tensor, noises: Tensor, targets: Tensor) -> Tensor:
    """Find the factors (D,) of the noise that maximise the likelihood of the targets (n, D) under networks without covariance."""
    means = means.double()
    noises = noises.double()
    error = (torch.einsum("k,nkd->nd", weights.to(means), means) - targets).square()
    start = (error.mean(0) / noises.mean((0, 1))).sqrt().clamp_min(1e-12).log()
    factors = []
    for index, log_start in enumerate(start.tolist()):
        output = slice(index, index + 1)

        def score(log: float, output: slice = output) -> float:
            scaled = noises[..., output] * math.exp(2 * log)
            return float(normal_mixtures.log_density(weights, means[..., output], scaled, targets[:, output]).mean())

        factors.append(
            math.exp(maximise(score, log_start - math.log(NOISE_RANGE), log_start + math.log(NOISE_RANGE), coarse=9))
        )
    return torch.tensor(factors, dtype=torch.float64, device=means.device)
