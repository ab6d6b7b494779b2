r"""The paper's confidence bounds, and the exact far-field limit.

Under the probit link a cooled logit is bounded by what the weights allow, whatever the input:

.. math:: |z_i| = \frac{|\mu_i^\top \phi|}{\sqrt{1 + \frac\pi8 \phi^\top \Sigma_{(i)} \phi}} \le b_i :=
   \frac{\|\mu_i\|}{\sqrt{\frac\pi8 \lambda_{\min}(\Sigma_{(i)})}}.

The Lemma: a component's probability of class c is at most :math:`1 / (1 + \sum_{i \ne c} e^{-(b_i + b_c)})`. The Theorem:
the mixture's is at most the weighted sum of these. The paper states them for bias-free ReLU networks far away; the
inequality above shows that they hold for every input and, with the bias as one more weight, for every head.

For a bias-free ReLU network the features scale with the input, and the limit itself is known:
:math:`z_i \to \mu_i^\top \phi / \sqrt{\frac\pi8 \phi^\top \Sigma_{(i)} \phi}`.

Logits that are divided by s (`cooling.py`) have
:math:`z_i = \mu_i^\top \phi / \sqrt{s^2 + \frac\pi8 \phi^\top \Sigma_{(i)} \phi}`. The inequality holds as it is, whatever s,
and where s is known so does a sharper one:

.. math:: |z_i| \le \frac{\|\mu_i\| \|\phi\|}{\sqrt{s^2 + \frac\pi8 \lambda_{\min}(\Sigma_{(i)}) \|\phi\|^2}}.

A label that is yes or no by one logit has the probability :math:`\sigma(|z_i|)` of its answer, at most :math:`\sigma(b_i)`, and the
mixture's is at most the weighted sum: the Lemma for two classes, one of which has all weights at 0 and no variance.

With cooling by distance s grows at least like the square of the length of the features, so far away the bound and the limit are both
1/C: a constant temperature alone leaves the limit where it is.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mola.component import Component
from mola.errors import BoundError
from mola.laplace import FeatureSpread, LogitMoments, in_range
from mola.links import Link
from mola.numerics import exact

SCALE = 2.0**20
"""By which inputs are scaled to see whether features scale with them: a power of two, so that nothing is rounded."""


def largest_logits(weights: Tensor, smallest_variance: Tensor) -> Tensor:
    """Largest magnitude b (C,) that each cooled logit can reach.

    Args:
        weights: trained weights (C, P).
        smallest_variance: smallest eigenvalue (C,) of each class's marginal covariance.

    Returns:
        (C,)
    """
    return weights.norm(dim=1) / (math.pi / 8 * smallest_variance).sqrt()


def class_bounds(largest: Tensor) -> Tensor:
    """Upper bound (..., C) on the probability of each class, from the largest cooled logits (..., C)."""
    # exp(-b) is at most 1, so nothing overflows, and what rounding takes from a sum of others is nothing beside the 1.
    least = torch.exp(-largest)
    return 1 / (1 + least * (least.sum(-1, keepdim=True) - least))


def divided_bounds(component: Component, lengths: Tensor, divisors: Tensor) -> Tensor:
    """The Lemma for logits that are divided: upper bound (n, C) on each class's probability, at inputs of which more is known.

    Args:
        component: with curvature.
        lengths: of the features, the constant 1 included (n,).
        divisors: (n,).

    Returns:
        (n, C) in float64.
    """
    _, curvature = component.require_curvature("the bound")
    smallest = curvature.spectrum.smallest_class_variance(component.precision)
    # Divided by the length: whose square may not be in range.
    relative = (divisors / lengths)[:, None].square()
    return _bounds(component, curvature.weights.norm(dim=1) / (relative + math.pi / 8 * smallest).sqrt())


def component_bounds(component: Component, classes: int) -> Tensor:
    """The Lemma: upper bound (C,) on each class's probability under one component; 1 without covariance."""
    if component.head is None or component.curvature is None:
        return torch.ones(classes, dtype=torch.float64)
    smallest = component.curvature.spectrum.smallest_class_variance(component.precision)
    return _bounds(component, largest_logits(component.curvature.weights, smallest))


def _bounds(component: Component, largest: Tensor) -> Tensor:
    # Upper bound (..., C) on the probability of each class, or of the answer to each label.
    return class_bounds(largest) if component.likelihood.competing else torch.sigmoid(largest)


def far_field_logits(component: Component, once: LogitMoments, scaled: LogitMoments) -> Tensor:
    """Cooled logits (n, C) of one component infinitely far away in the direction of each input.

    Args:
        component: a network whose features scale with its input.
        once: moments at the inputs.
        scaled: moments at `SCALE` times the inputs, to see that the features scale.

    Returns:
        (n, C)
    """
    head, curvature = component.require_curvature("the far-field limit")
    width, spread = head.inputs, once.spread
    assert isinstance(spread, FeatureSpread)  # where there is curvature
    assert isinstance(scaled.spread, FeatureSpread)
    near, far = (exact(one.features[:, :width]) for one in (spread, scaled.spread))
    far = far / SCALE
    if not torch.allclose(far, near, rtol=1e-4, atol=1e-5 * float(near.abs().max())):
        raise BoundError(
            "the features do not scale with the input, so there is no closed-form limit. "
            "It is known for ReLU networks without biases and without normalisation layers."
        )
    direction = spread.features.clone()
    direction[:, width:] = 0  # the constant 1 is nothing beside features that grow
    slope = direction @ curvature.weights.T.to(direction)
    (limit,) = in_range([LogitMoments(slope, spread.posterior.at(direction), once.given, once.likelihood)])
    # Features of 0 stay 0 however far one goes: nothing is known there, and nothing is said.
    cooled = limit.mean / (math.pi / 8 * limit.variance).sqrt()
    return limit.returned(torch.where(limit.variance > 0, cooled, torch.zeros_like(cooled)))


def require_probit(link: Link) -> None:
    """Refuse any other link."""
    if link.cooled_by != "variance":  # a subclass of the probit may have a rule of its own
        raise BoundError(
            f"bounds and limit are proven for link 'probit', this posterior has {link.name!r}: use with_link('probit')."
        )
