r"""The paper's confidence bounds and the exact far-field limit.

Under the probit link, the weights bound every scaled logit for all inputs:

.. math:: |z_i| = \frac{|\mu_i^\top \phi|}{\sqrt{1 + \frac\pi8 \phi^\top \Sigma_{(i)} \phi}} \le b_i :=
   \frac{\|\mu_i\|}{\sqrt{\frac\pi8 \lambda_{\min}(\Sigma_{(i)})}}.

By the paper's Lemma, a component's probability of class c is at most :math:`1 / (1 + \sum_{i \ne c} e^{-(b_i + b_c)})`. By its
Theorem, the mixture's probability is at most the weighted sum of the components' bounds. The paper states both results for bias-free
ReLU networks far from the data. The inequality shows that both results hold for every input and, if the bias is treated as one more
weight, for every head.

Logits divided by s (`scaling.py`) have :math:`z_i = \mu_i^\top \phi / \sqrt{s^2 + \frac\pi8 \phi^\top \Sigma_{(i)} \phi}`, and

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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from molaplace.errors import BoundError, OptionError
from molaplace.likelihoods.base import mixed, pooled
from molaplace.links import Link, Probit, probit_scaled
from molaplace.network import Captured, Rows, check_finite

if TYPE_CHECKING:
    from molaplace.posterior import MoLA

SCALE = 2.0**20
"""Factor by which inputs are scaled to test whether features scale with the inputs; a power of two avoids rounding."""

CERTAIN = 1e12
"""Logit of a class whose probability is 1 up to rounding."""

TINY = torch.finfo(torch.float64).tiny


def class_bounds(largest: Tensor) -> Tensor:
    """Return upper bounds on the class probabilities, given bounds on the scaled logits; both have shape (..., C)."""
    # exp(-b) is at most 1, so nothing overflows, and rounding errors in the sum of the other terms are negligible compared with 1.
    least = torch.exp(-largest)
    return 1 / (1 + least * (least.sum(-1, keepdim=True) - least))


def component_bounds(posterior: MoLA, rows: Rows) -> Tensor:
    """Return the Lemma's upper bounds (K, n, C) on each component's class probabilities, or ones if there is no covariance."""
    weights, scaling = posterior.weights, posterior.scaling
    divisors = posterior.divisors(rows, weights)
    free = (scaling.temperature, scaling.pooling, scaling.exponent) == (1, 1, 0)
    sizes, denominators = [], []
    for component, phi, divisor in zip(posterior.components, rows.phi, divisors, strict=True):
        layer = component.on(phi.device)
        if layer is None:
            return torch.ones_like(torch.stack(list(rows.outputs)))
        smallest = layer.curvature.smallest_class_variance(component.prior_precision)
        norms = torch.linalg.vector_norm(phi, dim=1, keepdim=True)
        # The numerator of the bound is |mu| |phi| / s, and its denominator is sqrt(s^2 + pi/8 lambda_min |phi|^2) / s.
        # Without scaling, |phi| is left out of both, and their ratio is the bound that holds for every input.
        sizes.append(layer.weights.norm(dim=1) * (torch.ones_like(norms) if free else norms / divisor))
        spread = math.pi / 8 * smallest * (1 if free else (norms / divisor).square())
        denominators.append((spread if free else 1 + spread).sqrt())
    means = pooled(sizes, weights, scaling.pooling)
    largest = torch.stack([one / two for one, two in zip(means, denominators, strict=True)])
    exclusive = posterior.likelihood.mutually_exclusive
    return class_bounds(largest) if exclusive else torch.sigmoid(largest)


def mixture_bound(posterior: MoLA, rows: Rows, *, lemma: bool) -> Tensor:
    """Return the Theorem's upper bound (n,) on the confidence or, if `lemma` is True, the Lemma's bound (K, n) for each component.

    For multi-label data, the result has an additional last dimension for the labels.
    """
    likelihood: Any = posterior.likelihood
    for phi, outputs in zip(rows.phi, rows.outputs, strict=True):
        check_finite(phi, outputs)  # otherwise the bound would be finite even though there is no prediction
    found = component_bounds(posterior, rows)
    members = likelihood.member_probabilities(posterior.members(rows), posterior.link)
    total = mixed(posterior.weights, list(found))
    if not likelihood.mutually_exclusive:
        return found if lemma else total
    if lemma:
        pairs = zip(found, members, strict=True)
        return torch.stack([bound.gather(1, probs.argmax(1)[:, None]).squeeze(1) for bound, probs in pairs])
    return total.gather(1, mixed(posterior.weights, members).argmax(1)[:, None]).squeeze(1)


def far_field_limit(posterior: MoLA, once: Sequence[Captured], far: Sequence[Captured]) -> Tensor:
    """Return the limit (n, C) of the probabilities as each input is scaled to infinity.

    Args:
        posterior: a posterior over networks whose features scale with their inputs.
        once: features and outputs captured for the unscaled inputs.
        far: features and outputs captured for the inputs multiplied by `SCALE`, to test whether the features grow in proportion.
    """
    if once[0].layout.sizes:
        raise BoundError(
            "the far-field limit is not defined for dense outputs. Use posterior.confidence_bound(inputs), whose bound holds "
            "everywhere."
        )
    likelihood: Any = posterior.likelihood
    weights, pooling = posterior.weights, posterior.scaling.pooling
    near, away = ([one.rows() for one in some] for some in (once, far))
    growing, grows, spreads = [], [], []
    for component, (phi, _), (far_phi, _) in zip(posterior.components, near, away, strict=True):
        layer = component.on(phi.device)
        if component.head is None or layer is None:
            raise OptionError(
                "the far-field limit needs a Laplace approximation, but this is a plain ensemble. Use mola.fit."
            )
        width = component.head.inputs
        features, scaled = phi[:, :width], far_phi[:, :width] / SCALE
        if not torch.allclose(scaled, features, rtol=1e-4, atol=1e-5 * float(features.abs().max())):
            raise BoundError(
                "the features do not scale with the input, so there is no closed-form limit. The limit is known only for ReLU "
                "networks without biases or normalisation layers."
            )
        # The constant 1 for the bias is negligible compared with growing features.
        direction = torch.cat([features, torch.zeros_like(phi[:, width:])], 1)
        growing.append(direction @ layer.weights.T)
        spreads.append(component.spread(direction))
        grows.append(features.any(1, keepdim=True))
    # If a network's features are all 0 at an input, its logits are the same at every positive multiple of that input.
    rows = Rows([phi for phi, _ in near], [outputs for _, outputs in near])
    here, around = replace(posterior.members(rows), pooling=1.0).scaled()
    still = pooled([torch.where(grow, 0.0, one) for grow, one in zip(grows, here, strict=True)], weights, pooling)
    members = []
    for grow, mean, spread, pulled, own in zip(
        grows, pooled(growing, weights, pooling), spreads, still, around, strict=True
    ):
        assert spread is not None
        assert own is not None
        logits = probit_scaled(pulled, torch.where(grow, 0.0, own.variance()))
        if posterior.scaling.exponent == 0:
            limit = mean / (math.pi / 8 * spread.variance()).clamp_min(TINY).sqrt()
            # If all features are 0, the variance does not grow; pooling with the growing logits of other networks leads to certainty.
            largest = mean.abs().amax(1, keepdim=True)
            certain = torch.where(largest > 0, CERTAIN * mean / largest.clamp_min(TINY), logits)
            logits = torch.where(grow, limit, certain)
        members.append(likelihood.probabilities(logits))
    return mixed(weights, members)


def require_probit(link: Link) -> None:
    """Raise `BoundError` unless the link is probit, the only link for which the bounds and the limit are proven."""
    if type(link) is not Probit:
        raise BoundError(
            f"the bounds and the limit are proven only for the 'probit' link, but this posterior uses {link.name!r}. Use "
            f"with_link('probit')."
        )
