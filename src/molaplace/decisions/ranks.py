r"""Split-conformal ranks: how to choose k so that a new score exceeds the k-th smallest of n scores with probability at most alpha.

Let :math:`s_1, \dots, s_{n+1}` be exchangeable scores, possibly with ties, and let :math:`s_{(1)} \le \dots \le s_{(n)}` be the first
n scores in sorted order. The last score is equally likely to have any of the n + 1 ranks, so

.. math:: P\left(s_{n+1} > s_{(k)}\right) \le 1 - \frac{k}{n + 1} \le \alpha \quad\text{for}\quad k = \lceil (n + 1)(1 - \alpha) \rceil

for every n and every distribution (Vovk et al., 2005; Lei et al., 2018). The first inequality is an equality if there are no ties. If
k is n + 1, no score is large enough, and the threshold is infinite. The probability is an average over draws of the n scores. The rate
at which new scores exceed the threshold varies between draws; for continuous scores, it follows Beta(n + 1 - k, k) (Vovk, 2012).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from molaplace.errors import DataError
from molaplace.options import counted

ROUNDING = 1e-12
"""Relative tolerance for products such as 0.29 * 100, which is not exactly 29 in float64."""


def conformal_rank(count: int, rate: float) -> int:
    """Return `k = ceil((n + 1)(1 - alpha))`, which is n + 1 if n scores are too few for the rate."""
    return count + 1 - math.floor((count + 1) * rate * (1 + ROUNDING))


def data_needed(rate: float) -> int:
    """Return the smallest number n of scores for which the conformal rank k is at most n."""
    return math.ceil(1 / (rate * (1 + ROUNDING))) - 1


def conformal_quantiles(scores: Tensor, rate: float) -> Tensor:
    """Return the k-th smallest of the scores (n, ...) along the first axis, or infinity if there are too few scores."""
    rank = conformal_rank(len(scores), rate)
    infinite = torch.full(scores.shape[1:], math.inf, dtype=torch.float64, device="cpu")
    return infinite if rank > len(scores) else scores.sort(0).values[rank - 1]


def thresholds(scores: Tensor, coverage: float, always: str) -> Tensor:
    """Return the conformal quantiles of scores (n, ...) for a given coverage; raise `DataError` if there are too few data."""
    rate = 1 - coverage
    if len(scores) < data_needed(rate):
        raise DataError(
            f"{counted(len(scores), 'labelled datum is', 'labelled data are')} too few for a coverage of {coverage:g}: only {always} "
            f"reach this coverage. Pass at least {data_needed(rate)} data points, or ask for a coverage of at most {len(scores)}/"
            f"{len(scores) + 1}."
        )
    return conformal_quantiles(scores, rate)


def as_numbers(values: Any, argument: str) -> Tensor:
    """Convert a tensor, array or list to float64 on the CPU."""
    if isinstance(values, Tensor):
        return values.detach().cpu().double()
    try:
        # Copy the values, because torch rejects arrays that are reversed, read-only or in another byte order.
        return torch.from_numpy(np.array(values, dtype=np.float64, order="C"))
    except (TypeError, ValueError) as error:
        raise DataError(f"must be numbers, got a {type(values).__name__} ({error}).", argument=argument) from error
