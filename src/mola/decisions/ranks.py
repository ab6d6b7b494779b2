r"""Split-conformal ranks: which of n sorted scores a further score exceeds with at most a given probability.

Let :math:`s_1, \dots, s_{n+1}` be exchangeable, ties allowed, and :math:`s_{(1)} \le \dots \le s_{(n)}` the first n of
them, sorted. The last score is equally likely to have each of the n + 1 ranks, so

.. math:: P\left(s_{n+1} > s_{(k)}\right) \le 1 - \frac{k}{n + 1} \le \alpha \quad\text{for}\quad k = \lceil (n + 1)(1 - \alpha) \rceil

with equality in the first place if there are no ties: for every n and every distribution (Vovk et al., 2005; Lei et
al., 2018). If k is n + 1, no score is large enough, and the threshold is infinite. The probability is a mean over
draws of the n scores. Given the n scores, the rate of a continuous score follows Beta(n + 1 - k, k) (Vovk, 2012).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mola.errors import DataError, OptionError, warn
from mola.options import counted

ROUNDING = 1e-12
"""Relative tolerance of products such as 0.29 * 100, which is not 29 in float64."""


def check_share(value: Any, name: str, example: str) -> float:
    """Return a number strictly between 0 and 1, or raise `OptionError` with an example."""
    try:
        share = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        share = math.nan
    if not 0 < share < 1:
        raise OptionError(f"{name} must be above 0 and below 1, got {value!r}. {example}")
    return share


def conformal_rank(count: int, rate: float) -> int:
    """Return `k = ceil((n + 1)(1 - alpha))`; n + 1 if n scores are too few for the rate."""
    return count + 1 - math.floor((count + 1) * rate * (1 + ROUNDING))


def data_needed(rate: float) -> int:
    """Return the smallest n for which k is at most n."""
    return math.ceil(1 / (rate * (1 + ROUNDING))) - 1


def thresholds(
    scores: Tensor, coverage: float, groups: Any, always: str, kind: str = "group", names: Sequence[Any] = ()
) -> tuple[Tensor, dict[Any, Tensor] | None]:
    """Return the conformal quantiles of scores (n, ...) at a coverage, and, if groups (n,) are given, the quantiles of each group.

    Too few data are refused. Groups with too few data, and groups among `names` without data, get an infinite quantile with a
    warning: only `always` reaches the coverage.
    """
    rate = 1 - coverage
    infinite = torch.full(scores.shape[1:], math.inf, dtype=torch.float64)

    def quantiles(some: Tensor) -> Tensor:
        rank = conformal_rank(len(some), rate)
        return infinite if rank > len(some) else some.sort(0).values[rank - 1]

    if groups is None:
        if conformal_rank(len(scores), rate) > len(scores):
            raise DataError(
                f"{counted(len(scores), 'labelled datum is', 'labelled data are')} too few for a coverage of {coverage:g}: only "
                f"{always} reach it. Pass at least {data_needed(rate)} data, or lower the coverage."
            )
        return quantiles(scores), None
    rows: dict[Any, list[int]] = {name: [] for name in names}
    for row, name in enumerate(_names(groups, len(scores))):
        rows.setdefault(name, []).append(row)
    lacking = [str(name) for name, own in rows.items() if len(own) < data_needed(rate)]
    if lacking:
        listed = ", ".join(lacking[:5]) + (", ..." if len(lacking) > 5 else "")
        warn(
            f"a coverage of {coverage:g} needs at least {data_needed(rate)} labelled data of each {kind}, and there are fewer of "
            f"{kind} {listed}, which gets {always}."
        )
    return infinite, {name: quantiles(scores[own]) for name, own in rows.items()}


def limits(threshold: Tensor, by_group: Mapping[Any, Tensor] | None, groups: Any, count: int) -> Tensor:
    """Return the thresholds of `count` new inputs: the common threshold, or (n, ...) by group."""
    if by_group is None:
        if groups is not None:
            raise OptionError("the calibration was not by group: leave groups out.")
        return threshold
    if groups is None:
        raise OptionError("the calibration was by group: pass groups=(n,).")
    names = _names(groups, count)
    unknown = next((name for name in names if name not in by_group), None)
    if unknown is not None:
        raise DataError(
            f"group {unknown} had no calibration data, so nothing is guaranteed for it. Known groups: "
            f"{', '.join(map(str, by_group))}."
        )
    return torch.stack([by_group[name] for name in names])


def _names(groups: Any, count: int) -> list[Any]:
    names = groups.tolist() if isinstance(groups, (Tensor, np.ndarray)) else list(groups)
    if len(names) != count or any(isinstance(name, (list, dict)) for name in names):
        raise DataError(f"groups: expected one name or number for each of the {count} inputs, got {len(names)}.")
    return names


def as_numbers(values: Any, what: str) -> Tensor:
    """Convert a tensor, array or list to float64 on the CPU; `what` begins the error message."""
    if isinstance(values, Tensor):
        return values.detach().cpu().double()
    try:
        # A copy: torch does not accept arrays that are reversed, read-only or of foreign byte order.
        return torch.from_numpy(np.array(values, dtype=np.float64, order="C"))
    except (TypeError, ValueError) as error:
        raise DataError(f"{what}, got a {type(values).__name__} ({error}).") from error
