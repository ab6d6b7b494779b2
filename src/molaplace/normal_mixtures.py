r"""Mixtures of normal distributions: density, distribution function, quantiles and CRPS.

.. math:: p(y) = \sum_k \pi_k\, \mathcal N(y; m_k, v_k), \qquad F(y) = \sum_k \pi_k\, \Phi\big((y - m_k) / \sqrt{v_k}\big).

Means and variances have shape (n, K, ..., D) for n data, K components and D outputs; weights have shape (K,). All functions use
float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from molaplace.numerics import to_float64

HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)

HALVINGS = 60
"""Number of bisection steps, enough to shrink any interval to float64 resolution."""


def _lifted(weights: Tensor, means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Return the weights (K, 1, ..., 1), the means and the standard deviations, all in float64.
    means = to_float64(means)
    deviations = to_float64(variances).sqrt()
    return to_float64(weights).to(means.device).view(-1, *[1] * (means.dim() - 2)), means, deviations


def normal_log_density(mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
    """Return the log density of a normal distribution at the targets."""
    return -0.5 * ((targets - mean).square() / variance + variance.log()) - HALF_LOG_TAU


def log_density(weights: Tensor, means: Tensor, variances: Tensor, targets: Tensor, *, joint: bool = False) -> Tensor:
    """Return the log density (n, D) of the mixture at targets (n, D) or, if `joint` is True, their joint log density (n,).

    Outputs are independent within each component, but not in the mixture.
    """
    shares, means, deviations = _lifted(weights, means, variances)
    log_densities = normal_log_density(means, deviations.square(), to_float64(targets).to(means.device)[:, None])
    if joint:
        return torch.logsumexp(log_densities.sum(-1) + shares.squeeze(-1).log(), dim=1)
    return torch.logsumexp(log_densities + shares.log(), dim=1)


def cdf(weights: Tensor, means: Tensor, variances: Tensor, values: Tensor) -> Tensor:
    """Return the probability (n, D) that a draw is at most `values` (n, D)."""
    shares, means, deviations = _lifted(weights, means, variances)
    steps = (to_float64(values).to(means.device)[:, None] - means) / deviations
    return (shares * torch.special.ndtr(steps)).sum(1)


def quantile(weights: Tensor, means: Tensor, variances: Tensor, level: float) -> Tensor:
    """Return the values (n, D) below which a draw falls with probability `level`, up to float64 rounding.

    The quantile of a mixture lies between the smallest and the largest quantile of its components. Bisection is used because it does
    not need the density, which can underflow to 0 between distant components.
    """
    if level > 0.5:  # digits are lost near F = 1, so use the mirror image
        return -quantile(weights, -means, variances, 1 - level)
    shares, means, deviations = _lifted(weights, means, variances)
    positive = shares.flatten() > 0
    shares = shares[positive]
    means = means[:, positive]
    deviations = deviations[:, positive]
    quantiles = means + deviations * torch.special.ndtri(means.new_tensor(level))
    low = quantiles.amin(1)
    high = quantiles.amax(1)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        below = (shares * torch.special.ndtr((middle[:, None] - means) / deviations)).sum(1) <= level
        low = torch.where(below, middle, low)
        high = torch.where(below, high, middle)
    return (low + high) / 2


def crps(weights: Tensor, means: Tensor, variances: Tensor, targets: Tensor) -> Tensor:
    r"""Return the continuous ranked probability score (CRPS) of targets (n, D): the integral of :math:`(F(t) - 1[t \ge y])^2`.

    The score is in the targets' units; lower is better. For a point prediction, it equals the absolute error.
    """
    shares, means, deviations = _lifted(weights, means, variances)
    distance = (shares * _mean_distance(to_float64(targets).to(means.device)[:, None] - means, deviations)).sum(1)
    spread = torch.zeros_like(distance)
    for share, mean, deviation in zip(shares, means.unbind(1), deviations.unbind(1), strict=True):
        pairs = _mean_distance(mean[:, None] - means, torch.hypot(deviation[:, None], deviations))
        spread += share * (shares * pairs).sum(1)
    return distance - spread / 2


def _mean_distance(mean: Tensor, deviation: Tensor) -> Tensor:
    scaled = mean / deviation
    density = torch.exp(-0.5 * scaled.square()) / math.sqrt(2 * math.pi)
    return deviation * (2 * density + scaled * (2 * torch.special.ndtr(scaled) - 1))
