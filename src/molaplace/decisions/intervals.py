r"""Prediction intervals with guaranteed coverage for regression, either for each of the D outputs or for all outputs at once.

Both methods use split conformal prediction (`mola.decisions.ranks`). Let q be the conformal quantile of the scores of n labelled
examples. The interval for a new input contains all targets with a score of at most q. For exchangeable data, the interval contains
the target with at least the given probability, even if the predicted distribution is wrong. A better distribution gives shorter
intervals.

- "quantile": the score of a target y is :math:`\max(l(x) - y,\; y - u(x))`, and the interval is :math:`[l(x) - q,\; u(x) + q]`.
- "normalised": the score is :math:`|y - m(x)| / \sigma(x)`, and the interval is :math:`m(x) \pm q\, \sigma(x)`.

Here, l and u are the ends of the mixture's central interval at the same coverage, and m and :math:`\sigma` are the mixture's mean and
standard deviation. Conformalised quantiles (Romano et al., 2019) preserve the shape of the mixture, including skew and multimodality,
and add the same length to every interval. A negative q shortens the intervals of an underconfident predictor. Normalised residuals
(Papadopoulos et al., 2008; Lei et al., 2018) multiply all lengths by the same factor, so narrow intervals stay narrow. With `joint`,
the score of a data point is its largest score over the D outputs, and the coverage holds for all of its targets at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from molaplace.decisions.ranks import as_numbers, thresholds
from molaplace.errors import DataError, OptionError
from molaplace.fingerprints import check_fingerprint
from molaplace.options import check_share, counted, one_of
from molaplace.prediction import RegressionPrediction

INTERVAL_METHODS = ("quantile", "normalised")


@dataclass(frozen=True, eq=False)
class PredictionIntervals:
    """A callable, made by `mola.prediction_intervals`, that maps a prediction to lower and upper interval ends, each (n, D)."""

    coverage: float
    """Probability that an interval contains the target."""
    method: str
    """Conformal method ("quantile" or "normalised")."""
    threshold: Tensor
    """Conformal quantile q of each output, shape (D,), in float64. Joint intervals have the same q for all outputs."""
    count: int
    """Number of calibration examples."""
    joint: bool = False
    """True if the coverage holds for all outputs of a data point at once."""
    fingerprint: str | None = None
    """Fingerprint of the predictor and its settings, or None if unknown."""

    def __call__(self, prediction: RegressionPrediction | Any) -> tuple[Tensor, Tensor]:
        """Return the lower and upper ends (n, D), on the CPU; an interval that would be empty shrinks to its midpoint.

        Args:
            prediction: a prediction made by the calibrated predictor. A prediction of another predictor, or of the same one with other
                settings, raises `OptionError`.
        """
        check_fingerprint(prediction, self.fingerprint, "these intervals")
        invalid = prediction.invalid if isinstance(prediction, RegressionPrediction) else None
        if invalid is not None and bool(invalid.any()):
            infinite = torch.full((len(invalid), len(self.threshold)), torch.inf, dtype=torch.float64, device="cpu")
            lower, upper = -infinite, infinite.clone()
            valid = (~invalid).nonzero().flatten()
            lower[valid], upper[valid] = self(prediction[valid])
            return lower, upper
        low, high, scale = _ends(prediction, self.method, self.coverage)
        if low.shape[1] != len(self.threshold):
            raise DataError(f"expected predictions with {counted(len(self.threshold), 'output')}, got {low.shape[1]}.")
        middle = (low + high) / 2
        return torch.minimum(low - self.threshold * scale, middle), torch.maximum(high + self.threshold * scale, middle)

    def __repr__(self) -> str:
        of = " of all outputs at once" if self.joint else ""
        return f"PredictionIntervals({self.method}: {self.coverage:.3g} coverage{of}, from {self.count} examples)"


def prediction_intervals(
    prediction: RegressionPrediction | Any,
    targets: Any,
    coverage: float = 0.9,
    method: str = "quantile",
    *,
    joint: bool = False,
) -> PredictionIntervals:
    """Use labelled data to calibrate intervals that contain the target with a given probability.

    The probability is taken over draws of the labelled data and of exchangeable new data.
    `mola.decisions.intervals` describes the methods and explains why the guarantee holds.

    Args:
        prediction: predictions for labelled data, with `mean` and `variance` (n, D) and `interval(level)`.
        targets: targets (n, D), or (n,) if D is 1.
        coverage: probability that an interval contains the target, such as 0.9.
        method: conformal method ("quantile" or "normalised").
        joint: guarantee the coverage for all D targets of a data point at once; only for "normalised", whose scores have no unit.

    Returns:
        A callable that maps predictions to the lower and upper ends of intervals. `DataError` is raised if there are not enough data
        for this coverage.
    """
    coverage = check_share(coverage, "coverage", "90 % is 0.9.")
    one_of(method, INTERVAL_METHODS, "method")
    if joint and method != "normalised":
        raise OptionError(
            "must be 'normalised' for joint=True: outputs may have different units, and only normalised scores have no unit.",
            argument="method",
        )
    low, high, scale = _ends(prediction, method, coverage)
    values = as_numbers(targets, "targets")
    values = values[:, None] if values.ndim == 1 and low.shape[1] == 1 else values
    if values.shape != low.shape or not bool(values.isfinite().all()):
        raise DataError(
            f"must be finite values of shape {tuple(low.shape)}, matching the predictions; got shape {tuple(values.shape)}.",
            argument="targets",
        )
    scores = torch.maximum(low - values, values - high) / scale
    if joint:
        scores = scores.amax(1, keepdim=True).expand_as(scores)
    return PredictionIntervals(
        coverage=coverage,
        method=method,
        threshold=thresholds(scores, coverage, "infinite intervals"),
        count=len(scores),
        joint=joint,
        fingerprint=getattr(prediction, "fingerprint", None),
    )


def _ends(prediction: RegressionPrediction | Any, method: str, coverage: float) -> tuple[Tensor, Tensor, Tensor]:
    # Return the lower and upper ends (n, D) before calibration, and the length that a score of 1 adds at each end.
    if not hasattr(prediction, "interval"):
        raise DataError(
            f"expected a regression prediction with mean, variance and interval(level); got {type(prediction).__name__}. For "
            f"classes, use mola.prediction_sets."
        )
    if method == "quantile":
        low, high = (as_numbers(end, "prediction.interval(level)") for end in prediction.interval(coverage))
        scale = torch.ones_like(low)
    else:
        low = high = as_numbers(prediction.mean, "prediction.mean")
        scale = as_numbers(prediction.variance, "prediction.variance").sqrt()
    if low.ndim > 2:
        raise DataError(
            f"expected one row of means for each input, got predictions for each position, of shape {tuple(low.shape)}. Positions of an "
            f"input are not independent, so no guarantee would hold. Decide for whole inputs, with a score for each: "
            f"mola.alarm_threshold(prediction.ood_score.flatten(1).mean(1), 0.05)."
        )
    shaped = low.ndim == 2 and low.shape == high.shape == scale.shape
    if not shaped or not bool(
        (low.isfinite() & high.isfinite() & (low <= high) & (scale > 0) & scale.isfinite()).all()
    ):
        raise DataError(
            f"expected finite predictions (n, D) with positive variances and lower ends no greater than the upper ends; got shapes "
            f"{tuple(low.shape)}, {tuple(high.shape)} and {tuple(scale.shape)}."
        )
    return low, high, scale
