r"""The paper's confidence bounds and the exact far-field limit.

Under the probit link, the weights bound every scaled logit for all inputs:

.. math:: |z_i| = \frac{|\mu_i^\top \phi|}{\sqrt{1 + \frac\pi8 \phi^\top \Sigma_{(i)} \phi}} \le b_i :=
   \frac{\|\mu_i\|}{\sqrt{\frac\pi8 \lambda_{\min}(\Sigma_{(i)})}}.

By the paper's Lemma, a component's probability of class c is at most :math:`1 / (1 + \sum_{i \ne c} e^{-(b_i + b_c)})`. By its
Theorem, the mixture's probability is at most the weighted sum of the components' bounds. The paper states both results for bias-free
ReLU networks far from the data. The inequality shows that both results hold for every input and, if the bias is treated as one more
weight, for every head.

Logits divided by s (`settings.py`) have :math:`z_i = \mu_i^\top \phi / \sqrt{s^2 + \frac\pi8 \phi^\top \Sigma_{(i)} \phi}`, and

.. math:: |z_i| \le \frac{\|\mu_i\| \|\phi\|}{\sqrt{s^2 + \frac\pi8 \lambda_{\min}(\Sigma_{(i)}) \|\phi\|^2}}.

Pooling contracts the means: :math:`|m'_{k,i}| \le c |m_{k,i}| + (1 - c) \sum_j \pi_j |m_{j,i}|`, where each mean is first divided by
its own s. For pooled logits, the numerators of the components' bounds are therefore pooled in the same way, and the denominators are
unchanged. For a binary logit, the predicted label has probability :math:`\sigma(|z_i|)`. The bound on this probability is the Lemma's
bound for two classes, one of which has zero weights and no variance.

For a bias-free ReLU network, the features scale with the input, and the limit has a closed form: :math:`z_i \to \mu_i^\top \phi /
\sqrt{\frac\pi8 \phi^\top \Sigma_{(i)} \phi}`. With a distance exponent, s grows at least as fast as the squared norm of the
features; far from the data, both the bound and the limit are therefore 1/C. A temperature alone does not change the limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from molaplace.errors import BoundError, OptionError
from molaplace.likelihoods.base import Likelihood, Members, mixed, pooled
from molaplace.links import Link, Probit, probit_scaled
from molaplace.settings import Settings
from molaplace.structures.base import LayerCurvature, Spread

SCALE = 2.0**20
"""Factor by which inputs are scaled to test whether features scale with the inputs; a power of two avoids rounding."""

CERTAIN = 1e12
"""Logit of a class whose probability is 1 up to rounding."""

TINY = torch.finfo(torch.float64).tiny


def scaled(values: Tensor) -> Tensor:
    """Return an input multiplied by `SCALE`, or unchanged if it holds no floating-point numbers, such as indices."""
    return SCALE * values if values.is_floating_point() else values


def class_bounds(largest: Tensor) -> Tensor:
    """Return upper bounds on the class probabilities, given bounds on the scaled logits; both have shape (..., C)."""
    # exp(-b) is at most 1, so nothing overflows, and rounding errors in the sum of the other terms are negligible compared with 1.
    least = torch.exp(-largest)
    return 1 / (1 + least * (least.sum(-1, keepdim=True) - least))


def component_bounds(
    members: Members, features: Sequence[Tensor], trained_weights: Sequence[Tensor], settings: Settings
) -> Tensor:
    """Return the Lemma's upper bounds (K, n, C) on each component's class probabilities, or ones if there is no covariance.

    `features` (n, P) are those of each network, `trained_weights` (C, P) the weights of its last layer, and `settings` those at which the
    members were computed.
    """
    if any(spread is None for spread in members.spreads):  # a plain ensemble
        return torch.ones_like(torch.stack(list(members.outputs)))
    sizes = []
    denominators = []
    for spread, phi, weights, divisor in zip(members.spreads, features, trained_weights, members.divisors, strict=True):
        assert isinstance(spread, Spread)
        assert isinstance(spread.curvature, LayerCurvature)
        smallest = spread.curvature.smallest_class_variance(spread.precision)
        norms = torch.linalg.vector_norm(phi, dim=1, keepdim=True)
        # The numerator of the bound is |mu| |phi| / s, and its denominator is sqrt(s^2 + pi/8 lambda_min |phi|^2) / s.
        # Without scaling, |phi| is left out of both, and their ratio is the bound that holds for every input.
        if settings.neutral:
            sizes.append(weights.norm(dim=1) * torch.ones_like(norms))
            denominators.append((math.pi / 8 * smallest).sqrt())
        else:
            sizes.append(weights.norm(dim=1) * (norms / divisor))
            denominators.append((1 + math.pi / 8 * smallest * (norms / divisor).square()).sqrt())
    means = pooled(sizes, members.weights, members.pooling)
    largest = torch.stack([mean / denominator for mean, denominator in zip(means, denominators, strict=True)])
    exclusive = members.likelihoods[0].mutually_exclusive
    return class_bounds(largest) if exclusive else torch.sigmoid(largest)


def confidence_bounds(
    members: Members,
    features: Sequence[Tensor],
    trained_weights: Sequence[Tensor],
    link: Link,
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    """Return the Theorem's upper bound (n,) on the mixture's confidence, and the Lemma's bounds (K, n) on the components' confidence.

    For multi-label data, the shapes are (n, C) and (K, n, C). The arguments are those of `component_bounds`, and the mixture's link.
    """
    likelihood: Any = members.likelihoods[0]
    bounds = component_bounds(members, features, trained_weights, settings)
    probs = likelihood.member_probabilities(members, link)
    mixture = _of_predicted(mixed(members.weights, list(bounds)), mixed(members.weights, probs), likelihood)
    return mixture, _of_predicted(bounds, torch.stack(probs), likelihood)


def _of_predicted(bounds: Tensor, probs: Tensor, likelihood: Likelihood) -> Tensor:
    # Return the bounds of the predicted classes; binary labels have one bound each.
    if not likelihood.mutually_exclusive:
        return bounds
    return bounds.gather(-1, probs.argmax(-1, keepdim=True)).squeeze(-1)


def far_field_limit(
    members: Members,
    features: Sequence[Tensor],
    trained_weights: Sequence[Tensor],
    widths: Sequence[int],
    far_features: Sequence[Tensor],
    settings: Settings,
) -> Tensor:
    """Return the limit (n, C) of the probabilities as each input is scaled to infinity.

    Besides the arguments of `component_bounds`, `widths` are the numbers of features without the constant 1, and `far_features`
    (n, P) those of the inputs multiplied by `SCALE`, to test whether the features grow in proportion.
    """
    weights = members.weights
    growing_logits = []
    grows = []
    variances = []
    if any(spread is None for spread in members.spreads):
        raise OptionError(
            "the far-field limit needs a Laplace approximation, but this is a plain ensemble. Use mola.fit."
        )
    for spread, phi, trained, width, far in zip(
        members.spreads, features, trained_weights, widths, far_features, strict=True
    ):
        assert isinstance(spread, Spread)
        growing = phi[:, :width]
        if not torch.allclose(far[:, :width] / SCALE, growing, rtol=1e-4, atol=1e-5 * float(growing.abs().max())):
            raise BoundError(
                "the features do not scale with the input, so there is no closed-form limit. The limit is known only for ReLU "
                "networks without biases or normalisation layers."
            )
        # The constant 1 for the bias is negligible compared with growing features.
        direction = torch.cat([growing, torch.zeros_like(phi[:, width:])], 1)
        growing_logits.append(direction @ trained.T)
        variances.append(spread.curvature.variance(spread.curvature.project(direction), spread.precision))
        grows.append(growing.any(1, keepdim=True))
    # If a network's features are all 0 at an input, its logits are the same at every positive multiple of that input.
    means, scaled_spreads = replace(members, pooling=1.0).scaled()
    constant_logits = [torch.where(grow, 0.0, mean) for grow, mean in zip(grows, means, strict=True)]
    limits = []
    for grow, mean, variance, constant_mean, scaled_spread in zip(
        grows,
        pooled(growing_logits, weights, members.pooling),
        variances,
        pooled(constant_logits, weights, members.pooling),
        scaled_spreads,
        strict=True,
    ):
        assert scaled_spread is not None
        logits = probit_scaled(constant_mean, torch.where(grow, 0.0, scaled_spread.variance()))
        if not settings.uses_distance:
            limit = mean / (math.pi / 8 * variance).clamp_min(TINY).sqrt()
            # If all features are 0, the variance does not grow; pooling with the growing logits of other networks leads to certainty.
            largest = mean.abs().amax(1, keepdim=True)
            certain = torch.where(largest > 0, CERTAIN * mean / largest.clamp_min(TINY), logits)
            logits = torch.where(grow, limit, certain)
        likelihood: Any = members.likelihoods[0]
        limits.append(likelihood.probabilities(logits))
    return mixed(weights, limits)


def require_probit(link: Link) -> None:
    """Raise `BoundError` unless the link is probit, the only link for which the bounds and the limit are proven."""
    if type(link) is not Probit:
        raise BoundError(
            f"the bounds and the limit are proven only for the 'probit' link, but this posterior uses {link.name!r}. Use "
            f"with_link('probit')."
        )
