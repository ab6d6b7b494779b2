"""Noise scaling for regression predictors without a Laplace approximation: choose the noise that best fits the validation targets.

This is the regression counterpart of temperature scaling: it multiplies the noise of each output by a factor and leaves the means
unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from molaplace import normal_mixtures
from molaplace.errors import DataError, OptionError, located
from molaplace.likelihoods import Gaussian
from molaplace.network import batches
from molaplace.posterior import MoLA
from molaplace.prediction import RegressionPrediction
from molaplace.predictor import Predictor
from molaplace.rules.search import maximise

RANGE = 100.0  # largest factor by which the noise and the root mean squared error may differ, in either direction

Scaled = TypeVar("Scaled", bound=Predictor)


def scale_noise(predictor: Scaled, val_loader: Iterable[Any]) -> Scaled:
    """Return the predictor with each output's noise chosen to maximise the likelihood of the validation targets.

    Args:
        predictor: the regression predictor, for example `mola.ensemble(networks, likelihood="gaussian")`. A
            posterior from `mola.fit` is rejected, because its `tune` method already chooses the noise.
        val_loader: validation data as batches of (inputs, targets), with targets in their original units.
    """
    likelihood = predictor.likelihood
    if not isinstance(likelihood, Gaussian):
        raise OptionError(
            f"scale_noise is for regression, got likelihood {likelihood.name!r}. For classification, use "
            f"mola.calibration.temperature_scaled."
        )
    if isinstance(predictor, MoLA) and predictor.structure is not None:
        raise OptionError(
            "a posterior from mola.fit chooses its noise together with its prior precision. Call posterior.tune(val_loader)."
        )
    start: Any = likelihood
    if likelihood.noise is None:
        start = replace(likelihood, noise=1.0 if likelihood.heteroscedastic else likelihood.scale)
    prediction, targets = _predict(_with(predictor, start), val_loader)
    if bool((prediction.component_mean == targets).all(1).any()):
        raise DataError(
            "a network predicts all validation targets of an output exactly, so the targets do not determine the noise. Pass "
            "mola.likelihoods.Gaussian(noise=...)."
        )
    factors = best_factors(
        prediction.weights,
        prediction.component_mean,
        prediction.component_variance,
        prediction.component_noise,
        targets,
    )
    noise = torch.tensor(start.noise, dtype=torch.float64, device="cpu").expand(len(factors)) * factors
    return _with(predictor, replace(likelihood, noise=tuple(noise.tolist()), estimated=True))


def _predict(predictor: Predictor, loader: Iterable[Any]) -> tuple[RegressionPrediction, Tensor]:
    parts = []
    targets = []
    for index, batch in enumerate(batches(loader, "validation loader")):
        place = f"batch {index} of the validation loader"
        if batch.labels is None:
            raise DataError(f"{place} has no targets. Yield (inputs, targets).")
        with located(place):
            part = predictor.predict_batch(batch.inputs).cpu()
        if part.component_mean.dim() > 3:
            raise OptionError(
                "scale_noise needs a predictor with one row of outputs for each input, but this predictor has dense outputs. Pass "
                "the noise as mola.likelihoods.Gaussian(noise=...)."
            )
        with located(place):
            values = part._targets(batch.labels)
        if not bool(torch.isfinite(values).all()):
            raise DataError("expected finite targets. Remove rows without a target.", place=place)
        parts.append(part)
        targets.append(values)
    return RegressionPrediction.concatenate(parts), torch.cat(targets)


def _with(predictor: Any, likelihood: Gaussian) -> Any:
    if isinstance(predictor, MoLA):
        return predictor.with_parts(
            components=[component.with_likelihood(likelihood) for component in predictor.components]
        )
    return predictor.with_likelihood(likelihood)


def best_factors(weights: Tensor, means: Tensor, variances: Tensor, noises: Tensor, targets: Tensor) -> Tensor:
    """Find the noise factors (D,) that maximise the likelihood of the targets (n, D)."""
    means, variances, noises = (output.double() for output in (means, variances, noises))
    spread = variances - noises
    error = (torch.einsum("k,knd->nd", weights.to(means), means) - targets).square()
    start = (error.mean(0) / noises.mean((0, 1))).sqrt().clamp_min(1e-12).log()
    factors = []
    for index, log_start in enumerate(start.tolist()):
        output = slice(index, index + 1)

        def score(log: float, output: slice = output) -> float:
            scaled = spread[..., output] + noises[..., output] * math.exp(2 * log)
            return float(normal_mixtures.log_density(weights, means[..., output], scaled, targets[:, output]).mean())

        factors.append(math.exp(maximise(score, log_start - math.log(RANGE), log_start + math.log(RANGE), coarse=9)))
    return torch.tensor(factors, dtype=torch.float64, device=means.device)
