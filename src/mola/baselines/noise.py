"""Noise scaling: the noise that does best on validation data, for predictors of numbers that have no curvature to tune.

What temperature scaling is for classes: one number for each output, and means stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mola import normal_mixtures
from mola.errors import DataError, OptionError, StorageError, located
from mola.likelihood import CATEGORICAL, Gaussian, Likelihood
from mola.mixture import Mixture
from mola.network import as_batch, batches_of
from mola.regression import RegressionMoLA
from mola.saving.archive import pack_likelihood, unpack_likelihood
from mola.saving.storage import COOLED_VERSION

STEPS = 60
"""Of golden sections: the interval shrinks to a part in 10^12."""

RANGE = 100.0
"""How many times smaller or larger than the errors the noise may be."""

GOLDEN = (math.sqrt(5) - 1) / 2


def only_means(likelihood: Likelihood, what: str) -> Likelihood:
    """A likelihood for a predictor whose members say means or probabilities, and nothing else."""
    if isinstance(likelihood, Gaussian) and likelihood.heteroscedastic:
        raise OptionError(
            f"{what} averages means: networks that say their variance, too, go through mola.fit or mola.ensemble."
        )
    return likelihood


def saved_likelihood(likelihood: Likelihood) -> dict[str, Any]:
    """What a file says of the outputs' meaning, noise and units included; of classes it says nothing, as it always has."""
    return {} if likelihood == CATEGORICAL else {"version": COOLED_VERSION, **pack_likelihood(likelihood)}


def loaded_likelihood(document: dict[str, Any], what: str) -> Likelihood:
    """What `saved_likelihood` said."""
    try:
        return only_means(unpack_likelihood(document), what)
    except OptionError as error:
        raise StorageError(f"the saved likelihood cannot be used: {error}") from error


def scale_noise(predictor: Mixture, val_loader: Iterable[Any]) -> Any:
    """The same predictor with the noise that makes validation targets most likely: one number for each output.

    Args:
        predictor: an ensemble of `mola.ensemble(models, likelihood="gaussian")`, a `mola.Swag` or a `mola.McDropout` of numbers. A
            posterior of `mola.fit` chooses its noise in `tune`.
        val_loader: validation data as batches of (inputs, targets), the targets in their own units.

    Returns:
        A predictor of the same kind.
    """
    likelihood = predictor.likelihood
    if not isinstance(likelihood, Gaussian):
        raise OptionError(
            f"scale_noise is for numbers, got likelihood {likelihood.name!r}: for classes, use mola.temperature_scaled."
        )
    if isinstance(predictor, RegressionMoLA) and predictor.structure is not None:
        raise OptionError(
            "the noise of a posterior of mola.fit is chosen with its prior precision: call posterior.tune(val_loader)."
        )
    unit: Any = likelihood if likelihood.noise is not None else replace(likelihood, noise=likelihood.scale)
    if likelihood.noise is None and likelihood.heteroscedastic:
        unit = replace(likelihood, noise=1.0)
    started = _with(predictor, unit)
    parts, targets = [], []
    for index, raw in enumerate(batches_of(val_loader, "the validation loader")):
        place = f"batch {index} of the validation loader"
        batch = as_batch(raw, place)
        if batch.labels is None:
            raise DataError(f"{place} has no targets. Yield (inputs, targets).")
        said = started._predict_batch(batch.inputs, None, place).cpu()
        if said.component_mean.dim() > 3:
            raise OptionError(
                "scale_noise takes predictors with one row of numbers for each input, and this one predicts at many positions. Give "
                "the noise: mola.Gaussian(noise=...)."
            )
        parts.append(said)
        with located(place):
            given = said._targets(batch.labels)
        if not bool(torch.isfinite(given).all()):
            raise DataError(f"{place}: targets must be finite. Leave out rows without a target.")
        targets.append(given)
    if not parts:
        raise DataError("the validation loader is empty: it yielded no batch.")
    said = type(parts[0]).concatenate(parts)
    observed = torch.cat(targets)
    if bool((said.component_mean == observed).all(1).any()):
        raise DataError(
            "a network predicts all validation targets of an output exactly: they say nothing of its noise. Pass "
            "mola.Gaussian(noise=...)."
        )
    factors = best_factors(said.weights, said.component_mean, said.component_variance, said.component_noise, observed)
    noise = torch.tensor(unit.noise, dtype=torch.float64, device="cpu").expand(len(factors)) * factors
    return _with(predictor, replace(likelihood, noise=tuple(noise.tolist()), estimated=True))


def _with(predictor: Any, likelihood: Gaussian) -> Any:
    if isinstance(predictor, RegressionMoLA):
        return predictor._with(components=[one.of_likelihood(likelihood) for one in predictor.components])
    return predictor.of_likelihood(likelihood)


def best_factors(weights: Tensor, means: Tensor, variances: Tensor, noises: Tensor, targets: Tensor) -> Tensor:
    """Factors (D,) of the noise at which targets (n, D) are most likely, by golden sections over its logarithm."""
    means, variances, noises = (one.double() for one in (means, variances, noises))
    rest = variances - noises
    error = (torch.einsum("k,knd->nd", weights.to(means), means) - targets).square()
    start = (error.mean(0) / noises.mean((0, 1))).sqrt().clamp_min(1e-12).log()
    low, high = start - math.log(RANGE), start + math.log(RANGE)

    def loss(logs: Tensor) -> Tensor:
        return -normal_mixtures.log_density(weights, means, rest + noises * (2 * logs).exp(), targets).mean(0)

    for _ in range(STEPS):
        width = GOLDEN * (high - low)
        left, right = high - width, low + width
        better = loss(left) < loss(right)
        low, high = torch.where(better, low, left), torch.where(better, right, high)
    return ((low + high) / 2).exp()
