r"""Split-conformal ranks: which of n sorted scores a further score exceeds with at most a given probability.

Let :math:`s_1, \dots, s_{n+1}` be exchangeable, ties allowed, and :math:`s_{(1)} \le \dots \le s_{(n)}` the first n of
them, sorted. The last score is equally likely to take each of the n + 1 places among all, so

.. math:: P\left(s_{n+1} > s_{(k)}\right) \le 1 - \frac{k}{n + 1} \le \alpha \quad\text{for}\quad k = \lceil (n + 1)(1 - \alpha) \rceil

with equality in the first place if there are no ties: for every n and every distribution (Vovk et al., 2005; Lei et
al., 2018). Where k is n + 1, no score is large enough, and the threshold is infinite. The probability is a mean over
draws of the n scores. Given the n scores, the rate of a continuous score follows Beta(n + 1 - k, k) (Vovk, 2012).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mola.errors import DataError, OptionError

ROUNDING = 1e-12
"""Relative tolerance of products such as 0.29 * 100, which is not 29 in float64."""


def check_share(value: Any, name: str, example: str) -> float:
    """A number strictly between 0 and 1, or `OptionError` with an example."""
    try:
        share = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        share = math.nan
    if not 0 < share < 1:
        raise OptionError(f"{name} must lie between 0 and 1, got {value!r}. {example}")
    return share


def conformal_rank(count: int, rate: float) -> int:
    """`k = ceil((n + 1)(1 - alpha))`; n + 1 where n scores are too few for the rate."""
    return count + 1 - math.floor((count + 1) * rate * (1 + ROUNDING))


def data_needed(rate: float) -> int:
    """The smallest n for which k is at most n."""
    return math.ceil(1 / (rate * (1 + ROUNDING))) - 1


def conformal_quantile(scores: Tensor, rate: float) -> float:
    """The k-th smallest of the scores (n,); infinity where there are too few."""
    rank = conformal_rank(len(scores), rate)
    return math.inf if rank > len(scores) else float(scores.sort().values[rank - 1])


def group_quantiles(scores: Tensor, groups: Any, rate: float) -> dict[Any, Tensor]:
    """The conformal quantile of the scores (n, ...) of each group; `groups` (n,) may be of any type."""
    rows: dict[Any, list[int]] = {}
    for row, name in enumerate(group_names(groups, len(scores))):
        rows.setdefault(name, []).append(row)
    found = {}
    for name, own in rows.items():
        limits = [conformal_quantile(column, rate) for column in scores[own].reshape(len(own), -1).unbind(1)]
        found[name] = torch.tensor(limits, dtype=torch.float64).reshape(scores.shape[1:])
    return found


def group_names(groups: Any, count: int) -> list[Any]:
    """The groups of `count` inputs, from a tensor, an array or a list, as plain values."""
    names = groups.tolist() if isinstance(groups, (Tensor, np.ndarray)) else list(groups)
    if len(names) != count or any(isinstance(name, (list, dict)) for name in names):
        raise DataError(f"groups: expected one name or number for each of the {count} inputs, got {len(names)}.")
    return names


def check_groups(groups: Any, known: Collection[Any] | None, count: int) -> list[Any] | None:
    """The groups of `count` new inputs; refuse unknown groups, and groups where there should be none or none given."""
    if groups is None and known is None:
        return None
    if groups is None:
        raise OptionError("the calibration was by group: pass groups=(n,).")
    if known is None:
        raise OptionError("the calibration was not by group: leave groups out.")
    names = group_names(groups, count)
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        listed = ", ".join(map(str, known))
        raise DataError(
            f"group {unknown} had no calibration data, so nothing is guaranteed for it. Known groups: {listed}."
        )
    return names


def shortened(names: Collection[Any]) -> str:
    """The first five names, for messages."""
    return ", ".join(map(str, list(names)[:5])) + (", ..." if len(names) > 5 else "")


def as_numbers(values: Any, what: str) -> Tensor:
    """A tensor, array or list as a float64 tensor on the CPU; `what` was expected, for the message."""
    if isinstance(values, Tensor):
        return values.detach().cpu().double()
    try:
        # A copy: torch does not accept arrays that are reversed, read-only or of foreign byte order.
        return torch.from_numpy(np.array(values, dtype=np.float64, order="C"))
    except (TypeError, ValueError) as error:
        raise DataError(f"{what}, got a {type(values).__name__} ({error}).") from error
