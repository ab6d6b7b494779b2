r"""Regression with D outputs, which are the means of independent normal distributions. The noise is a separate parameter.

.. math:: y_d \sim \mathcal N(\ell_d + s_d f_d,\; \sigma_d^2), \qquad \Lambda = \mathrm{diag}(s_d^2 / \sigma_d^2).

The curvature does not depend on the outputs, so the Laplace approximation of the last layer is its exact posterior. The sums over the
training data are computed at unit noise, so the noise can be chosen after the pass over the data. The curvature of output d is then
divided by its noise variance, and the log-likelihood follows from a few sums over the targets.

A heteroscedastic network has two outputs for each target: a mean and a value that determines the variance :math:`v_d(x)`. The noise
:math:`\sigma_d` is then a factor that multiplies the predicted standard deviation; a factor of 1 leaves the network's prediction
unchanged. Only the means are treated as uncertain.

Targets may have been standardised for training. If `location` and `scale` are given, all targets and results are in the user's
units. The sums, weights and curvature are in the network's units.

The mixture predicts :math:`\sum_k \pi_k \mathcal N(y; m_k, s^2 (v_k + \sigma_k^2))` exactly and without a link, because both the last
layer's posterior and the noise are normal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from molaplace import normal_mixtures
from molaplace.errors import DataError, HeadError, OptionError
from molaplace.likelihoods.base import (
    LatentFunctions,
    LinkFunction,
    Members,
    OutputCurvature,
    Ran,
    RegressionLikelihood,
    matrix_of,
    pooled,
)
from molaplace.likelihoods.predictive import RegressionPredictive
from molaplace.numerics import to_float64
from molaplace.options import counted, is_real, one_of
from molaplace.sums import Sums

VARIANCE_FLOOR = 1e-6
"""Lower bound on predicted variances, which are clamped as in `torch.nn.GaussianNLLLoss`."""

CONSTANT = 1e-12
"""Largest variance of the targets, relative to their mean square, that rounding alone can cause."""

EXACT = 1e-12
"""Largest root mean square of the residuals, relative to the scale of the targets, that counts as an exact fit."""

SMALLEST = 1e-30
LARGEST = 1e30
"""Smallest and largest allowed values for the noise and for the scale of the targets, whose squares are far from overflow."""


class NormalMixture(RegressionPredictive):
    """A mixture of K normal distributions for each of D outputs."""

    def log_density(self, targets: Tensor) -> Tensor:
        """Return the joint log density (n,) of targets (n, D)."""
        return normal_mixtures.log_density(self.weights, self.means, self.variances, targets, joint=True)

    def cdf(self, values: Tensor) -> Tensor:
        """Return the probability (n, D) that a target is less than or equal to `values`."""
        return normal_mixtures.cdf(self.weights, self.means, self.variances, values)

    def quantile(self, level: float) -> Tensor:
        """Return the values (n, D) below which the targets fall with probability `level`."""
        return normal_mixtures.quantile(self.weights, self.means, self.variances, level)

    def crps(self, targets: Tensor) -> Tensor:
        """Return the continuous ranked probability score (n, D) of the targets."""
        return normal_mixtures.crps(self.weights, self.means, self.variances, targets)


@dataclass(frozen=True)
class Gaussian(RegressionLikelihood):
    """Regression with normally distributed noise that has one standard deviation per output.

    Args:
        noise: standard deviation of the targets around the mean, in the targets' units, given as one number or one number per output.
            By default, the noise is estimated from the residuals of the training data, and tuning may change it. For heteroscedastic
            networks, the noise is a factor that multiplies the predicted standard deviation; the default is 1.
        shared: whether to estimate one noise level for all outputs.
        location: mean that was subtracted from the targets for training, given as one number or D numbers.
        scale: standard deviation by which the targets were divided for training, given as one number or D numbers.
        heteroscedastic: True if the network also predicts a variance for each target and therefore has 2 D outputs.
        order: "stacked" if all means come before all variances, or "interleaved" if each mean is followed by its variance.
        variance: encoding of each target's variance, one of "log-variance", "log-deviation" (the log of the standard deviation) or
            "softplus" (the variance is the softplus of the output).
        estimated: True if the noise was estimated, in which case tuning rules may change it. This argument is set by the fit.
    """

    noise: float | Sequence[float] | None = None
    shared: bool = False
    location: float | Sequence[float] | None = None
    scale: float | Sequence[float] | None = None
    heteroscedastic: bool = False
    order: str = "stacked"
    variance: str = "log-variance"
    estimated: bool = False
    name = "gaussian"
    mixture_type = NormalMixture

    def __post_init__(self) -> None:
        location = 0.0 if self.location is None else self.location
        scale = 1.0 if self.scale is None else self.scale
        noise = None if self.noise is None else _numbers(self.noise, "noise", positive=True)
        object.__setattr__(self, "noise", noise)
        object.__setattr__(self, "location", _numbers(location, "location", positive=False))
        object.__setattr__(self, "scale", _numbers(scale, "scale", positive=True))
        one_of(self.order, ("stacked", "interleaved"), "order")
        one_of(self.variance, ("log-variance", "log-deviation", "softplus"), "variance")

    # Outputs.

    def num_uncertain(self, outputs: int) -> int:
        """Return D, the number of means."""
        return outputs // 2 if self.heteroscedastic else outputs

    def _means(self, outputs: int) -> slice:
        if not self.heteroscedastic:
            return slice(outputs)
        return slice(outputs // 2) if self.order == "stacked" else slice(0, outputs, 2)

    def uncertain(self, weights: Tensor) -> Tensor:
        """Return the rows of a head's weights (C, P) that compute the means."""
        return weights[self._means(len(weights))]

    def means(self, outputs: Tensor) -> Tensor:
        """Return the means (..., D) contained in the outputs (..., C), in the network's units."""
        return outputs[..., self._means(outputs.shape[-1])]

    def check_outputs(self, outputs: Tensor, ran: Ran = ()) -> Tensor:
        """Return outputs of shape (n, D) or (n, 2 D). Outputs of shape (n,) are reshaped to (n, 1)."""
        expected = "outputs of shape (batch, outputs)"
        matrix = outputs[:, None] if outputs.dim() == 1 else matrix_of(outputs, ran, expected)
        width = matrix.shape[1]
        if self.heteroscedastic and width % 2:
            raise HeadError(
                f"heteroscedastic=True needs two outputs for each target, a mean and a variance, but the network has {width} outputs."
            )
        for name in ("noise", "location", "scale"):
            values: Any = getattr(self, name)
            if values is None or len(values) in (1, self.num_uncertain(width)):
                continue
            targets = counted(self.num_uncertain(width), "target")
            raise HeadError(
                f"{name} has {len(values)} values, but the networks have {counted(width, 'output')} for {targets} "
                f"with heteroscedastic={self.heteroscedastic}. With heteroscedastic=True, half of the outputs are variances. Pass one "
                f"value, or one value per target."
            )
        return matrix

    def predicted_variance(self, outputs: Tensor) -> Tensor:
        """Return the variances (..., D) at unit noise, in the network's units: 1 unless the network is heteroscedastic."""
        if not self.heteroscedastic:
            return torch.ones_like(outputs)
        encoded = outputs[..., outputs.shape[-1] // 2 :] if self.order == "stacked" else outputs[..., 1::2]
        if self.variance == "softplus":
            return functional.softplus(encoded).clamp_min(VARIANCE_FLOOR)
        return (encoded if self.variance == "log-variance" else 2 * encoded).exp().clamp_min(VARIANCE_FLOOR)

    def noise_variance(self, outputs: Tensor) -> Tensor:
        """Return the noise variances (..., D) for outputs (..., C), in the network's units."""
        predicted = self.predicted_variance(outputs)
        return predicted * self.deviation(predicted.shape[-1]).to(predicted).square()

    def deviation(self, width: int) -> Tensor:
        """Return the noise (D,) in the network's units or, for heteroscedastic networks, the noise factor (D,)."""
        if self.noise is None:
            if self.heteroscedastic:
                return torch.ones(width, dtype=torch.float64, device="cpu")
            raise _unknown_noise()
        noise = _expanded(self.noise, width, "noise")
        return noise if self.heteroscedastic else noise / self.units(width)[1]

    def units(self, width: int) -> tuple[Tensor, Tensor]:
        """Return the location (D,) and scale (D,) of the targets, in float64."""
        return _expanded(self.location, width, "location"), _expanded(self.scale, width, "scale")

    def in_units(self, means: Tensor) -> Tensor:
        """Convert the network's means (..., D) to the targets' units."""
        location, scale = self.units(means.shape[-1])
        return location.to(means) + scale.to(means) * means

    def variance_in_units(self, variance: Tensor) -> Tensor:
        """Convert the network's variances (..., D) to the targets' units."""
        return variance * self.units(variance.shape[-1])[1].square().to(variance)

    # Labels, log-likelihood and curvature.

    def check_labels(self, labels: Tensor, outputs: Tensor, where: str) -> Tensor:
        """Return targets (n, D) as float64, in the user's units. Targets of shape (n,) are accepted if D = 1."""
        return self.check_targets(labels, self.means(outputs), where)

    def check_targets(self, labels: Tensor, means: Tensor, where: str) -> Tensor:
        """Return targets (n, D) as float64, in the user's units, on the device of the means (n, D)."""
        count, width = means.shape
        targets = labels[:, None] if labels.dim() == 1 and width == 1 else labels
        if targets.shape != (count, width):
            raise DataError(
                f"expected targets of shape ({count}, {width}), one for each of the {width} outputs; got shape "
                f"{tuple(labels.shape)}. For class indices, use likelihood='categorical'. If half of the outputs are variances, use "
                f"mola.likelihoods.Gaussian(heteroscedastic=True).",
                place=where,
            )
        if targets.is_complex():
            raise DataError(f"expected real targets, got {labels.dtype}.", place=where)
        targets = to_float64(targets.to(means.device))
        if not bool(torch.isfinite(targets).all()):
            row = int((~torch.isfinite(targets)).any(1).nonzero()[0])
            raise DataError(
                f"targets must be finite, got {targets[row].tolist()}. Remove rows without a target.", place=where
            )
        return targets

    def _standardised(self, labels: Tensor) -> Tensor:
        location, scale = self.units(labels.shape[1])
        return (labels - location.to(labels)) / scale.to(labels)

    def log_likelihood(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the joint log density (n,) of each datum's targets, in the user's units."""
        means = to_float64(self.means(outputs))
        variance = to_float64(self.noise_variance(outputs))
        targets = self._standardised(labels.to(means))
        _, scale = self.units(means.shape[1])
        return (normal_mixtures.normal_log_density(means, variance, targets) - scale.log().to(means)).sum(1)

    def curvature(self, outputs: Tensor, labels: Tensor | None = None) -> OutputCurvature:
        """Return the curvature at unit noise, i.e. 1 or the reciprocal of the predicted variance; the noise is chosen later."""
        return OutputCurvature(separate=1 / self.predicted_variance(outputs))

    def label_sums(self, outputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """Return a (4, D) tensor of sums that determine the noise and the log-likelihood at any noise level.

        The rows are the sums of the squared residuals at unit noise, of the logarithms of the predicted variances, of the targets,
        and of the squared targets, all in the network's units.
        """
        means = to_float64(self.means(outputs))
        predicted = to_float64(self.predicted_variance(outputs))
        targets = self._standardised(labels.to(means.device))
        statistics = ((targets - means).square() / predicted, predicted.log(), targets, targets.square())
        return {"targets": torch.stack([values.sum(0) for values in statistics])}

    def fitted(self, sums: Sums) -> Gaussian:
        """Return the likelihood with the given noise or, if none was given, with noise estimated from the training residuals."""
        if self.noise is not None:
            return self
        if self.heteroscedastic:
            return replace(self, noise=1.0, estimated=True)
        if "targets" not in sums.tensors:
            raise _unknown_noise()
        residual_squares, _, target_sums, target_squares = sums.tensors["targets"].cpu()
        count = sums.count
        if count == 1:
            raise DataError(
                "the noise cannot be estimated from a single training example. Pass more data, or pass noise= to "
                "mola.likelihoods.Gaussian or mola.MolaRegressor."
            )
        means = target_sums / count
        mean_squares = target_squares / count
        constant = (mean_squares - means.square() <= CONSTANT * mean_squares).nonzero().flatten().tolist()
        if constant:
            subject = "the target is" if len(means) == 1 else f"target {constant[0]} is"
            value = float(self.in_units(means[None])[0, constant[0]])
            raise DataError(
                f"{subject} constant ({value:.6g}) in all {count:,} training examples, so the noise cannot be estimated. Check the "
                f"targets, or pass noise= to mola.likelihoods.Gaussian or mola.MolaRegressor."
            )
        variance = (residual_squares.mean().expand_as(means) if self.shared else residual_squares) / count
        if bool((variance.sqrt() <= EXACT).any()):
            raise DataError(
                "the network fits the training targets exactly, so the noise cannot be estimated from its residuals. Pass "
                "noise= to mola.likelihoods.Gaussian or mola.MolaRegressor."
            )
        noise = variance.sqrt() * self.units(len(variance))[1]
        return replace(self, noise=tuple(noise.tolist()), estimated=True)

    def as_specified(self) -> Gaussian:
        """Return the likelihood without an estimated noise."""
        return replace(self, noise=None, estimated=False) if self.estimated else self

    def nonnegative(self, sums: Sums) -> Sequence[Tensor]:
        """Return the sums of the squared residuals and of the squared targets."""
        return [values[[0, 3]] for values in sums.present("targets")]

    def noise_levels(self, width: int | None = None) -> Tensor:
        """Return the noise (width,) in the targets' units or, for heteroscedastic networks, the noise factors."""
        if self.noise is None:
            return self.deviation(width or 1)
        noise: Any = self.noise
        return _expanded(noise, width or len(noise), "noise")

    def sums_at_noise(self, sums: Sums) -> Sums:
        """Return the sums with the curvature of each output divided by its noise variance."""
        unit = sums.tensors["separate"]  # (D, ...)
        variance = self.deviation(len(unit)).square().to(unit).view(-1, *[1] * (unit.dim() - 1))
        return replace(sums, tensors=sums.tensors | {"separate": unit / variance})

    def total_log_likelihood(self, sums: Sums, noise_factor: float = 1.0) -> float | None:
        """Return the log-likelihood of all training targets at this noise level, multiplied by a factor."""
        if "targets" not in sums.tensors:
            return None
        residual_squares, log_variances, *_ = sums.tensors["targets"].cpu()
        width = len(residual_squares)
        variance = (noise_factor * self.deviation(width)).square()
        _, scale = self.units(width)
        constants = variance.log() + 2 * normal_mixtures.HALF_LOG_TAU + 2 * scale.log()
        return float(-0.5 * (residual_squares / variance + log_variances + sums.count * constants).sum())

    # Prediction.

    def of_means(self, weights: Tensor, means: Tensor) -> NormalMixture:
        """Return the mixture of normal distributions around means (n, K, D) in the targets' units, with the likelihood's noise."""
        means = to_float64(means)
        variance = self.variance_in_units(self.deviation(means.shape[-1]).square()).to(means).expand_as(means)
        return NormalMixture(weights, means, variance, variance)

    def latent(self, members: Members) -> LatentFunctions:
        """Return the noise-free targets in their units; a distance exponent multiplies the noise as well."""
        means = pooled([self.means(outputs) for outputs in members.outputs], members.weights, members.pooling)
        pairs = zip(_noises(members), members.divisors, strict=True)
        noises = [self.variance_in_units(noise * divisor.square()) for noise, divisor in pairs]
        scale = self.units(means[0].shape[-1])[1].to(means[0])
        return LatentFunctions([self.in_units(mean) for mean in means], members.divisors, scale, noises)

    def predictive(self, members: Members, link: LinkFunction, seed: int | None = None) -> NormalMixture:
        """Return `sum_k w_k N(m_k, s_k^2 (v_k + noise_k))`, where `noise_k` is the noise variance of member k."""
        means = pooled([self.means(outputs) for outputs in members.outputs], members.weights, members.pooling)
        noises = _noises(members)
        variances = [
            (noise if spread is None else noise + spread.variance()) * divisor.square()
            for noise, spread, divisor in zip(noises, members.spreads, members.divisors, strict=True)
        ]
        return NormalMixture(
            members.weights,
            self.in_units(torch.stack(list(means), 1)),
            self.variance_in_units(torch.stack(variances, 1)),
            self.variance_in_units(torch.stack(noises, 1) * members.temperature**2),
        )


def _noises(members: Members) -> list[Tensor]:
    # Return the noise variance (n, D) of each member, in the network's units.
    noises = []
    factors = members.noise_factors or (1.0,) * len(members.outputs)
    for likelihood, outputs, factor in zip(members.likelihoods, members.outputs, factors, strict=True):
        assert isinstance(likelihood, Gaussian)
        noises.append(likelihood.noise_variance(outputs) * factor**2)
    return noises


def _unknown_noise() -> OptionError:
    return OptionError(
        "the noise is unknown. Pass mola.likelihoods.Gaussian(noise=...), or fit with batches of (inputs, targets) to "
        "estimate the noise from the residuals. For an ensemble, use mola.calibration.scale_noise(ensemble, val_loader)."
    )


def _numbers(value: Any, argument: str, *, positive: bool) -> tuple[float, ...]:
    try:
        if isinstance(value, Tensor):
            value = value.detach().cpu().tolist()
        items = [value] if is_real(value) else list(value.tolist() if hasattr(value, "tolist") else value)
        numbers = tuple(math.nan if isinstance(item, (bool, str, bytes)) else float(item) for item in items)
    except (TypeError, ValueError, OverflowError):
        numbers = (math.nan,)
    low, high = (SMALLEST, LARGEST) if positive else (-math.inf, math.inf)
    if not numbers or not all(math.isfinite(number) and low <= number <= high for number in numbers):
        bounds = f" between {SMALLEST:g} and {LARGEST:g}" if positive else ""
        raise OptionError(
            f"must be a finite number{bounds}, or one such number per output; got {value!r}.", argument=argument
        )
    return numbers


def _expanded(values: Any, width: int, argument: str) -> Tensor:
    if len(values) not in (1, width):
        raise OptionError(
            f"must be one number, or {width} numbers (one per output); got {len(values)}.", argument=argument
        )
    return torch.tensor(values, dtype=torch.float64, device="cpu").expand(width)


GAUSSIAN = Gaussian()
