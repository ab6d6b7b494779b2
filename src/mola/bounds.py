r"""The paper's confidence bounds, and the exact far-field limit.

Under the probit link a cooled logit is bounded by what the weights allow, whatever the input:

.. math:: |z_i| = \frac{|\mu_i^\top \phi|}{\sqrt{1 + \frac\pi8 \phi^\top \Sigma_{(i)} \phi}} \le b_i :=
   \frac{\|\mu_i\|}{\sqrt{\frac\pi8 \lambda_{\min}(\Sigma_{(i)})}}.

The Lemma: a component's probability of class c is at most :math:`1 / (1 + \sum_{i \ne c} e^{-(b_i + b_c)})`. The Theorem:
the mixture's is at most the weighted sum of these. The paper states them for bias-free ReLU networks far away; the
inequality above shows that they hold for every input and, with the bias as one more weight, for every head.

For a bias-free ReLU network the features scale with the input, and the limit itself is known:
:math:`z_i \to \mu_i^\top \phi / \sqrt{\frac\pi8 \phi^\top \Sigma_{(i)} \phi}`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["class_bounds", "far_field_logits", "largest_logits"]


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
    """Upper bound (C,) on the probability of each class, from the largest cooled logits (C,)."""
    # log(1 + sum_{i != c} exp(-(b_i + b_c))), as a log-sum-exp so that a small bound on a far class survives.
    exponents = -(largest[:, None] + largest[None, :])
    exponents.fill_diagonal_(0.0)
    return torch.exp(-torch.logsumexp(exponents, dim=1))


def far_field_logits(mean: Tensor, variance: Tensor) -> Tensor:
    """Cooled logits (n, C) infinitely far away in the direction of the features that gave mean and variance."""
    return mean / (math.pi / 8 * variance).sqrt()
