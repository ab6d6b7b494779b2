"""Outlier scores (OOD detection): higher is more outlying, always."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mola.errors import OptionError
from mola.likelihoods.base import ClassificationLikelihood

COMBINED, FAR_FIELD, MAX_PROBABILITY = "far-field + energy + distance", "far-field", "max-probability"
"""Names of the scores of a classification, from the most information to the least."""

DISTANCE, NORM, VARIANCE = "distance", "norm", "variance"
"""Names of the scores of a regression."""


def max_probability_score(probs: Tensor, likelihood: ClassificationLikelihood) -> Tensor:
    """Return one minus the largest probability (n,); for multi-label data, averaged over labels."""
    score = 1 - likelihood.choices(probs).amax(-1)
    return score if likelihood.mutually_exclusive else score.mean(-1)


def max_logit_score(logits: Tensor) -> Tensor:
    """Minus the largest logit (Hendrycks et al., 2022), over the last axis."""
    return -logits.amax(-1)


def energy_score(logits: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Return the free energy :math:`-T \log \sum_c \exp(f_c / T)` of the logits (Liu et al., 2020), over the last axis.

    Unlike the probabilities it changes with a shift common to all logits, so members of an ensemble differ in its zero.
    """
    if not 0 < temperature < float("inf"):
        raise OptionError(f"temperature must be positive and finite, got {temperature!r}.")
    return -temperature * torch.logsumexp(logits / temperature, dim=-1)


def label_energy_score(logits: Tensor) -> Tensor:
    r"""Return the free energy of multi-label logits, :math:`-\sum_c \log(1 + e^{f_c})` (Wang et al., 2021), over the last axis.

    Where no label is found, an input is unlike the training data. For a single label a certain no is as good as a certain yes, so its
    energy is that of two classes with the logits :math:`(-f/2, f/2)`.
    """
    energy = -torch.nn.functional.softplus(logits)
    return (energy + logits / 2).squeeze(-1) if logits.shape[-1] == 1 else energy.sum(-1)


def far_field_score(means: Tensor, norms: Tensor, weights: Tensor, likelihood: ClassificationLikelihood) -> Tensor:
    r"""Return the mixture's confidence in the limit of a vanishing prior, read as a score.

    .. math:: -\max_c \sum_k \pi_k\, \frac{m^{(k)}_c - \bar m^{(k)}}{\sqrt{\phi_k^\top B_k^{-1} \phi_k}}

    As the prior precision goes to 0, Algorithm 1's variance of every logit becomes one constant times
    :math:`\phi^\top B^{-1} \phi`, the probit link becomes linear, and ranking inputs by the mixture's largest probability becomes
    ranking by this. It needs no prior precision, and the norms of the feature vectors cancel. A multi-label logit counts as one of two
    classes, the other with logit 0; scores are averaged over labels.

    Args:
        means: logits (K, n, C).
        norms: (K, n), each feature vector's length relative to the training features.
        weights: (K,).
        likelihood: likelihood of the mixture.
    """
    # A feature vector of norm 0 has all its logits at the bias: nothing is known there.
    factors = torch.where(norms > 0, weights[:, None] / norms, 0)
    if not likelihood.mutually_exclusive:
        return -torch.einsum("kn,knc->nc", factors, means).abs().mean(-1) / 2
    centred = means - means.mean(-1, keepdim=True)
    return -torch.einsum("kn,knc->nc", factors, centred).amax(-1)


def energies(means: Tensor, log_excess: Tensor, likelihood: ClassificationLikelihood) -> Tensor:
    """Return the energy (K, n) of each network's logits (K, n, C), divided by the square of the excess feature norm."""
    score = energy_score if likelihood.mutually_exclusive else label_energy_score
    return score(means * (-2 * log_excess).exp()[..., None])


def outlier_score(terms: Sequence[Tensor], reference: Sequence[tuple[float, float]]) -> Tensor:
    r"""Sum of the far-field score, the energy and the log distance, each standardised on validation data.

    .. math:: z_\text{far field} + z_\text{energy} + \max(0, z_\text{distance} - 1)

    Distance counts from one standard deviation above its mean, so that typical inputs are ranked by far field and energy alone.
    Among 16 such sums, this sum and the sum with `max(0, z_distance)` led on the networks used to choose and on those used to
    confirm (docs/outliers.md).

    Args:
        terms: the three terms (n,).
        reference: mean and standard deviation of each on validation data.
    """
    far_field, energy, distance = (
        (term - mean) / deviation for term, (mean, deviation) in zip(terms, reference, strict=True)
    )
    return far_field + energy + (distance - 1).clamp_min(0)
