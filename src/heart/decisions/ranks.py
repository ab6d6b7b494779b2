r"""Split-conformal ranks: which of n sorted scores a further one exceeds as rarely as asked for.

Let :math:`s_1, \dots, s_{n+1}` be exchangeable, ties allowed, and :math:`s_{(1)} \le \dots \le s_{(n)}` the first n of them,
sorted. The last one is as likely to take any of the n + 1 places among all, so

.. math:: P\left(s_{n+1} > s_{(k)}\right) \le 1 - \frac{k}{n + 1} \le \alpha \quad\text{for}\quad k = \lceil (n + 1)(1 - \alpha) \rceil

with equality in the first place if there are no ties: for every n, and whatever the distribution (Vovk et al., 2005; Lei et al.,
2018). Where k is n + 1, no score is large enough, and only infinity keeps the promise. This is the mean over draws of the n
scores: with those at hand, the rate of a continuous score is a draw of Beta(n + 1 - k, k) (Vovk, 2012).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heart.errors import DataError, OptionError

ROUNDING = 1e-12
"""0.29 of 100 data are 29, whatever float64 makes of it."""


def checked_share(value: Any, name: str, example: str) -> float:
    """A number between 0 and 1, both excluded.

    Args:
        value: what the user gave.
        name: of the argument, for the message.
        example: how it is written, for the message.

    Returns:
        The number.
    """
    try:
        share = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        share = math.nan
    if not 0 < share < 1:
        raise OptionError(f"{name} must lie between 0 and 1, got {value!r}. {example}")
    return share


def conformal_rank(count: int, rate: float) -> int:
    """The k of this page: from 1 to n, or n + 1 where n scores are too few for the rate.

    Args:
        count: n.
        rate: alpha, between 0 and 1.

    Returns:
        k.
    """
    return count + 1 - math.floor((count + 1) * rate * (1 + ROUNDING))


def data_needed(rate: float) -> int:
    """The fewest scores for which k is one of them."""
    return math.ceil(1 / (rate * (1 + ROUNDING))) - 1


def conformal_quantile(scores: Tensor, rate: float) -> float:
    """The k-th smallest score; infinity where there are too few.

    Args:
        scores: (n,).
        rate: alpha, between 0 and 1.

    Returns:
        The score.
    """
    rank = conformal_rank(len(scores), rate)
    return math.inf if rank > len(scores) else float(scores.sort().values[rank - 1])


def as_numbers(values: Any, what: str) -> Tensor:
    """Numbers of any kind in float64, in main memory.

    Args:
        values: a tensor, an array or a list.
        what: they are to be, for the message.

    Returns:
        A tensor.
    """
    if isinstance(values, Tensor):
        return values.detach().cpu().double()
    try:
        # A copy: torch takes no arrays that are reversed, read-only or of foreign byte order.
        return torch.from_numpy(np.array(values, dtype=np.float64, order="C"))
    except (TypeError, ValueError) as error:
        raise DataError(f"{what}, got a {type(values).__name__} ({error}).") from error
