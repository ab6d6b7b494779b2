r"""Intervals for regression that hold the target as often as asked for, in each of D outputs or in all at once.

Both methods are split conformal (`mola.decisions.ranks`): q is the conformal quantile of the scores of n labelled data, and the
interval of a new input is where its score would be at most q. So it holds the target with probability at least the coverage for
exchangeable data, however wrong the predicted distribution is; a better one has shorter intervals.

- "quantile": the score of a target y is :math:`\max(l(x) - y,\; y - u(x))`, the interval :math:`[l(x) - q,\; u(x) + q]`.
- "normalised": the score is :math:`|y - m(x)| / \sigma(x)`, the interval :math:`m(x) \pm q\, \sigma(x)`.

l and u bound the central interval of the predicted mixture at the same coverage, m and :math:`\sigma` are its mean and standard
deviation. Conformalised quantiles (Romano et al., 2019) keep the shape of the mixture, skew and several peaks included, and add
one length to all; a negative q shortens intervals of a predictor that is too cautious. Normalised residuals (Papadopoulos et al.,
2008; Lei et al., 2018) stretch all by one factor, so that sure inputs stay sure. With `joint`, the score is the largest over the
D outputs, and all targets of a datum are held at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from heart.decisions.ranks import as_numbers, checked_share, conformal_quantile, data_needed
from heart.decisions.sets import group_names
from heart.errors import DataError, OptionError, warn
from heart.options import counted, one_of

METHODS = ("quantile", "normalised")


@runtime_checkable
class RegressionLike(Protocol):
    """What intervals read of a prediction: of n inputs with D outputs."""

    @property
    def mean(self) -> Tensor:
        """(n, D)."""

    @property
    def variance(self) -> Tensor:
        """(n, D), of a target: noise included."""

    def interval(self, level: float, /) -> tuple[Tensor, Tensor]:
        """Lower and upper end (n, D) of the central interval of that probability."""


@dataclass(frozen=True)
class PredictionIntervals:
    """Call it with a prediction: lower and upper ends, (n, D) each. Made by `mola.prediction_intervals`."""

    coverage: float
    """Share of intervals that hold the target."""
    method: str
    """"quantile" or "normalised"."""
    threshold: Tensor
    """q of each output (D,), in float64; the same for all where they are joint."""
    count: int
    """Calibration data."""
    joint: bool = False
    """Whether all outputs of a datum are held at once."""
    groups: Mapping[Any, Tensor] | None = None
    """q (D,) of each group, where they are by group."""

    def __call__(self, prediction: RegressionLike, *, groups: Any = None) -> tuple[Tensor, Tensor]:
        """The intervals of new inputs.

        Args:
            prediction: as the one they were calibrated with.
            groups: (n,), where they are by group.

        Returns:
            Lower and upper ends (n, D), in main memory. Intervals that would be empty are a point, in their middle.
        """
        if (groups is None) != (self.groups is None):
            words = "by group: give groups=(n,)." if groups is None else "not by group."
            raise OptionError(f"these intervals are {words}")
        low, high, scale = _ends(prediction, self.method, self.coverage)
        if low.shape[1] != len(self.threshold):
            raise DataError(f"expected predictions of {len(self.threshold)} outputs, got {low.shape[1]}.")
        limit = self.threshold
        if self.groups is not None:
            names = group_names(groups, len(low))
            unknown = sorted({str(name) for name in names if name not in self.groups})
            if unknown:
                raise DataError(
                    f"there were no calibration data of the group {unknown[0]}: nothing can be promised for it."
                )
            limit = torch.stack([self.groups[name] for name in names])
        lower, upper = low - limit * scale, high + limit * scale
        middle = (low + high) / 2
        return torch.minimum(lower, middle), torch.maximum(upper, middle)

    def __repr__(self) -> str:
        what = "all targets of a datum" if self.joint else "the target"
        return (
            f"PredictionIntervals({self.method}: hold {what} {self.coverage:.3g} of the time; from {self.count} data)"
        )


def prediction_intervals(
    prediction: RegressionLike,
    targets: Any,
    coverage: float = 0.9,
    method: str = "quantile",
    *,
    joint: bool = False,
    groups: Any = None,
) -> PredictionIntervals:
    """Intervals that hold the target as often as asked for, calibrated on labelled data. See `mola.decisions.intervals`.

    The promise is a mean over draws of the labelled data and over new data that are exchangeable with them.

    Args:
        prediction: of labelled data, with `mean` and `variance` (n, D) and `interval(level)`.
        targets: (n, D), or (n,) where D is 1.
        coverage: such as 0.9.
        method: "quantile" or "normalised".
        joint: whether all D targets of a datum are to be held at once; for the method "normalised", whose scores have no unit.
        groups: (n,), names or numbers of groups of inputs: the promise is kept for each.

    Returns:
        A callable from predictions to lower and upper ends.
    """
    share = checked_share(coverage, "coverage", "90 % is 0.9.")
    one_of(method, METHODS, "method")
    if joint and method != "normalised":
        raise OptionError(
            "joint=True is for the method 'normalised': outputs may have different units, and only its scores have none."
        )
    low, high, scale = _ends(prediction, method, share)
    known = as_numbers(targets, "targets must hold numbers")
    known = known[:, None] if known.ndim == 1 and low.shape[1] == 1 else known
    if known.shape != low.shape or not bool(known.isfinite().all()):
        raise DataError(
            f"targets must be finite and of shape {tuple(low.shape)}, as the predictions; got shape {tuple(known.shape)}."
        )
    scores = torch.maximum(low - known, known - high) / scale
    if joint:
        scores = scores.amax(1, keepdim=True).expand_as(scores)
    rate = 1 - share
    by_group = None
    if groups is not None:
        names = np.array(group_names(groups, len(scores)), dtype=object)
        by_group = {one: _quantiles(scores[torch.from_numpy(names == one)], rate) for one in dict.fromkeys(names)}
        lacking = [str(name) for name, limits in by_group.items() if bool(limits.isinf().any())]
        if lacking:
            warn(
                f"a coverage of {share:g} takes at least {data_needed(rate)} labelled data of each group: there are fewer of group "
                f"{', '.join(lacking[:5])}{', ...' if len(lacking) > 5 else ''}, whose intervals therefore have no ends."
            )
    limit = _quantiles(scores, rate)
    if by_group is None and bool(limit.isinf().any()):
        raise DataError(
            f"{counted(len(scores), 'labelled datum is', 'labelled data are')} too few for a coverage of {share:g}: only "
            f"intervals without ends would keep the promise. Give at least {data_needed(rate)}, or ask for less."
        )
    return PredictionIntervals(share, method, limit, len(scores), joint, by_group)


def _quantiles(scores: Tensor, rate: float) -> Tensor:
    return torch.tensor([conformal_quantile(column, rate) for column in scores.unbind(1)], dtype=torch.float64)


def _ends(prediction: RegressionLike, method: str, coverage: float) -> tuple[Tensor, Tensor, Tensor]:
    # What intervals grow from (n, D): lower ends, upper ends, and what a score of 1 adds to both.
    if not isinstance(prediction, RegressionLike):
        raise DataError(
            f"expected a prediction with mean, variance and interval(level), as regression gives it; got {type(prediction).__name__}. "
            f"For classes, see mola.prediction_sets."
        )
    if method == "quantile":
        low, high = (as_numbers(end, "an interval must hold numbers") for end in prediction.interval(coverage))
        scale = torch.ones_like(low)
    else:
        low = high = as_numbers(prediction.mean, "the mean must hold numbers")
        scale = as_numbers(prediction.variance, "the variance must hold numbers").sqrt()
    if low.ndim != 2 or low.shape != high.shape or low.shape != scale.shape:
        raise DataError(
            f"expected predictions (n, D), got shapes {tuple(low.shape)}, {tuple(high.shape)}, {tuple(scale.shape)}."
        )
    sound = bool((low.isfinite() & high.isfinite() & (low <= high) & (scale > 0) & (scale < math.inf)).all())
    if not sound:
        raise DataError(
            "expected finite predictions with positive variances, and lower ends that are not above upper ones."
        )
    return low, high, scale
