r"""Intervals for regression that contain the target with a given probability, for each of D outputs or for all at once.

Both methods are split conformal (`mola.decisions.ranks`): q is the conformal quantile of the scores of n labelled data,
and the interval of a new input holds all targets with a score of at most q. It contains the target with at least the given
probability for exchangeable data, however wrong the predicted distribution is; a better distribution has shorter
intervals.

- "quantile": the score of a target y is :math:`\max(l(x) - y,\; y - u(x))`, the interval :math:`[l(x) - q,\; u(x) +
  q]`.
- "normalised": the score is :math:`|y - m(x)| / \sigma(x)`, the interval :math:`m(x) \pm q\, \sigma(x)`.

l and u bound the central interval of the predicted mixture at the same coverage, m and :math:`\sigma` are its mean and
standard deviation. Conformalised quantiles (Romano et al., 2019) keep the shape of the mixture, skew and several modes
included, and add the same length everywhere; a negative q shortens the intervals of an underconfident predictor.
Normalised residuals (Papadopoulos et al., 2008; Lei et al., 2018) multiply all lengths by the same factor, so narrow
intervals stay narrow. With `joint`, the score is the largest over the D outputs, and the intervals contain all targets
of a datum at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mola.decisions.ranks import as_numbers, check_share, thresholds
from mola.errors import DataError, OptionError
from mola.options import counted, one_of
from mola.prediction import RegressionPrediction

METHODS = ("quantile", "normalised")


@dataclass(frozen=True)
class PredictionIntervals:
    """Call it with a prediction to get lower and upper ends, (n, D) each. Made by `mola.prediction_intervals`."""

    coverage: float
    """Probability that an interval contains the target."""
    method: str
    """"quantile" or "normalised"."""
    threshold: Tensor
    """q of each output (D,), in float64; equal for all outputs of joint intervals."""
    count: int
    """Number of calibration data."""
    joint: bool = False
    """True if the coverage holds for all outputs of a datum at once."""

    def __call__(self, prediction: RegressionPrediction | Any) -> tuple[Tensor, Tensor]:
        """Return the lower and upper ends (n, D), on the CPU; an interval that would be empty is the point in its middle.

        Args:
            prediction: from the predictor that was calibrated.
        """
        low, high, scale = _ends(prediction, self.method, self.coverage)
        if low.shape[1] != len(self.threshold):
            raise DataError(f"expected predictions with {counted(len(self.threshold), 'output')}, got {low.shape[1]}.")
        middle = (low + high) / 2
        return torch.minimum(low - self.threshold * scale, middle), torch.maximum(high + self.threshold * scale, middle)

    def __repr__(self) -> str:
        of = " of all outputs at once" if self.joint else ""
        return f"PredictionIntervals({self.method}: {self.coverage:.3g} coverage{of}, from {self.count} data)"


def prediction_intervals(
    prediction: RegressionPrediction | Any,
    targets: Any,
    coverage: float = 0.9,
    method: str = "quantile",
    *,
    joint: bool = False,
) -> PredictionIntervals:
    """Calibrate intervals that contain the target with a given probability, on labelled data.

    The probability is over draws of the labelled data and of new data that are exchangeable with them. Methods and
    proof: `mola.decisions.intervals`.

    Args:
        prediction: prediction for labelled data, with `mean` and `variance` (n, D) and `interval(level)`.
        targets: (n, D), or (n,) if D is 1.
        coverage: such as 0.9.
        method: "quantile" or "normalised".
        joint: guarantee the coverage for all D targets of a datum at once; only with "normalised", whose scores have no
            unit.

    Returns:
        A callable from predictions to lower and upper ends. `DataError` if there are too few data for the coverage.
    """
    share = check_share(coverage, "coverage", "90 % is 0.9.")
    one_of(method, METHODS, "method")
    if joint and method != "normalised":
        raise OptionError(
            "joint=True needs method='normalised': outputs may have different units, and only its scores have none."
        )
    low, high, scale = _ends(prediction, method, share)
    known = as_numbers(targets, "targets: expected numbers")
    known = known[:, None] if known.ndim == 1 and low.shape[1] == 1 else known
    if known.shape != low.shape or not bool(known.isfinite().all()):
        raise DataError(
            f"targets: expected finite values of shape {tuple(low.shape)}, as the predictions; got shape {tuple(known.shape)}."
        )
    scores = torch.maximum(low - known, known - high) / scale
    if joint:
        scores = scores.amax(1, keepdim=True).expand_as(scores)
    return PredictionIntervals(share, method, thresholds(scores, share, "infinite intervals"), len(scores), joint)


def _ends(prediction: RegressionPrediction | Any, method: str, coverage: float) -> tuple[Tensor, Tensor, Tensor]:
    # Lower and upper ends (n, D) before calibration, and what a score of 1 adds to both.
    if not hasattr(prediction, "interval"):
        raise DataError(
            f"expected a regression's prediction with mean, variance and interval(level); got {type(prediction).__name__}. For "
            f"classes use mola.prediction_sets."
        )
    if method == "quantile":
        low, high = (as_numbers(end, "expected intervals of numbers") for end in prediction.interval(coverage))
        scale = torch.ones_like(low)
    else:
        low = high = as_numbers(prediction.mean, "expected a mean of numbers")
        scale = as_numbers(prediction.variance, "expected a variance of numbers").sqrt()
    shaped = low.ndim == 2 and low.shape == high.shape == scale.shape
    if not shaped or not bool(
        (low.isfinite() & high.isfinite() & (low <= high) & (scale > 0) & scale.isfinite()).all()
    ):
        raise DataError(
            f"expected finite predictions (n, D) with positive variances, and lower ends that are not above upper ends; got shapes "
            f"{tuple(low.shape)}, {tuple(high.shape)} and {tuple(scale.shape)}."
        )
    return low, high, scale
