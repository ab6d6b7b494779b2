"""Which outlier score a mixture of Laplace approximations gives, by what it knows, and its values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mola.cooling import Cooling, Usual
from mola.laplace import LogitMoments
from mola.uncertainty import far_field_score, max_probability_score, outlier_score, outlier_terms


class OutlierScore(NamedTuple):
    """How outlying inputs are, by which score."""

    values: Tensor
    far_field: Tensor | None
    """The far-field score alone, where every component knows how long features are."""


FAR_FIELD, COMBINED, LEAST_SURE = "far-field", "far-field + energy + distance", "max-probability"
"""Names of outlier scores."""


def score_name(moments: Sequence[LogitMoments], usual: Usual | None) -> str:
    """The name of the score that the moments of a mixture and what is usual of it allow."""
    spreads = [one.spread for one in moments]
    if not all(one is not None and one.has_length for one in spreads):
        return LEAST_SURE
    known = usual is not None and usual.score is not None
    return COMBINED if known and all(one is not None and one.has_distance for one in spreads) else FAR_FIELD


def ood_score(
    moments: Sequence[LogitMoments], mean: Tensor, probs: Tensor, weights: Tensor, cooling: Cooling
) -> OutlierScore:
    """The best closed-form score of what is known: of features and validation data, of features, of probabilities alone."""
    name = score_name(moments, cooling.usual)
    if name == LEAST_SURE:
        return OutlierScore(max_probability_score(probs, moments[0].likelihood), None)
    lengths = torch.stack([one.spread.length() for one in moments if one.spread is not None])
    if name == FAR_FIELD:
        far_field = far_field_score(mean, lengths, weights, moments[0].likelihood)
        return OutlierScore(far_field, far_field)
    assert cooling.usual is not None
    usual = cooling.usual.score_at(weights)
    assert usual is not None  # by its name
    distance, excess = cooling.log_distance(moments, weights), cooling.excess(moments)
    terms = outlier_terms(mean, lengths, distance, excess, weights, moments[0].likelihood)
    return OutlierScore(outlier_score(terms, usual), terms[0])
