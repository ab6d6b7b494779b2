"""Outlier scores for OOD detection. A higher score always means a more outlying input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from molaplace.errors import warn
from molaplace.likelihoods.base import ClassificationLikelihood

COMBINED = "far-field + energy + distance"
FAR_FIELD = "far-field"
MAX_PROBABILITY = "max-probability"
"""Names of the outlier scores for classification, starting with the score that uses the most information."""

DISTANCE = "distance"
NORM = "norm"
VARIANCE = "variance"
"""Names of the outlier scores for regression."""


TYPICAL = 0.2
"""Validation data seem to be training data if their mean score is below that of other validation data by this much, in standard
deviations of a score's terms."""


def warn_if_training_data(scores: Tensor, name: str, where: str) -> None:
    """Warn if outlier scores (n,), of the kind called `name`, are lower than validation data allow.

    The two standardised terms of the combined score have a mean of 0 on the validation data of the tuning, and the third is not negative.
    A clearly negative mean therefore shows more typical data. Other scores have no such reference.
    """
    if name != COMBINED or len(scores) < 2:
        return
    values = scores.detach().cpu().double()
    if float(values.mean()) < -max(TYPICAL, 4 * float(values.std()) / len(values) ** 0.5):
        warn(
            f"the outlier scores of {where} are lower than those of the validation data on which the posterior was tuned, by "
            f"{-float(values.mean()):.2g} standard deviations on average. If these are training data, every new input looks strange "
            f"beside them. Pass held-out data."
        )


def max_logit_score(logits: Tensor) -> Tensor:
    """Return the negative of the largest logit along the last axis (Hendrycks et al., 2022)."""
    return -logits.amax(-1)


def far_field_score(means: Tensor, norms: Tensor, weights: Tensor, likelihood: ClassificationLikelihood) -> Tensor:
    r"""Return an outlier score: the negative of the mixture's confidence in the limit of a vanishing prior.

    .. math:: -\max_c \sum_k \pi_k\, \frac{m^{(k)}_c - \bar m^{(k)}}{\sqrt{\phi_k^\top B_k^{-1} \phi_k}}

    As the prior precision goes to 0, the variance that Algorithm 1 gives each logit becomes a constant times :math:`\phi^\top B^{-1}
    \phi`, and the probit link becomes linear. In this limit, one minus the mixture's largest probability ranks inputs in the same
    order as the score. The score needs no prior precision, and the norms of the feature vectors cancel. For multi-label outputs, each
    logit is compared with a second logit fixed at 0, and the scores are averaged over the labels.

    Args:
        means: logits (K, n, C).
        norms: Mahalanobis norms (K, n) of the feature vectors with respect to the training features.
        weights: mixture weights (K,).
        likelihood: likelihood of the mixture.
    """
    # The logits at a feature vector of norm 0 are the biases, which contain no information about the input.
    factors = torch.where(norms > 0, weights[:, None] / norms, 0)
    return -likelihood.margin(torch.einsum("kn,knc->nc", factors, means))


class OutlierTerms(NamedTuple):
    """The terms of the outlier score."""

    far_field: Tensor
    """Far-field scores (n,)."""
    energy: Tensor
    """Mean energies (n,) of the networks."""
    departure: Tensor
    """Log departures (n,), which combine the distance with the excess norm (`Reference.log_departure`)."""
    energies: Tensor
    """Energy (K, n) of each network."""


def outlier_score(terms: OutlierTerms, reference: Sequence[tuple[float, float]]) -> Tensor:
    r"""Return the sum of the far-field score, the energy and the log departure, each standardised on the validation data.

    .. math:: z_\text{far field} + z_\text{energy} + \max(0, z_\text{departure} - 1)

    The departure, `Reference.log_departure`, combines the distance of the features' directions with their excess norm. It contributes only
    beyond one standard deviation above its mean, so typical inputs are ranked by the far-field score and the energy alone. Of 16 such
    sums, this one and the one with `max(0, z_departure)` performed best, both on the networks used to choose a sum and on the networks
    used to confirm the choice (docs/outliers.md).

    Args:
        terms: the terms of the score; the energies of the single networks are not used.
        reference: mean and standard deviation of each term on the validation data.
    """
    far_field, energy, departure = (
        (term - mean) / deviation for term, (mean, deviation) in zip(terms[:3], reference, strict=True)
    )
    return far_field + energy + (departure - 1).clamp_min(0)
