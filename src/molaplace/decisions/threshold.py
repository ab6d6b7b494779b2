"""Thresholds: numbers that also store their guarantee, and the predictor and the score that they were calibrated on."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor

from molaplace.errors import DataError, OptionError
from molaplace.fingerprints import check_fingerprint
from molaplace.numerics import as_tensor
from molaplace.prediction import Prediction, RegressionPrediction

OWN = "own"
"""Name of a score that the user computed."""


def not_a_prediction(value: object, otherwise: str) -> DataError:
    """Return an error for a value, such as a data loader, that is neither a prediction nor what `otherwise` says."""
    return DataError(
        f"must be a mola.Prediction or {otherwise}, got a {type(value).__name__}. For a data loader, pass posterior.predict(loader).",
        argument="prediction",
    )


class Threshold(float):
    """A number to compare scores with. Calling it with a prediction compares the right score, and refuses another predictor's."""

    score: str
    """Name of the score to compare with the threshold, or "own" for the user's own scores."""
    count: int
    """Number of calibration examples."""
    fingerprint: str | None
    """Fingerprint of the predictor and its settings, or None if unknown."""

    def __new__(cls, value: float, **guarantee: Any) -> Self:
        """Create a number with the guarantee attached."""
        threshold = super().__new__(cls, value)
        vars(threshold).update(guarantee)
        return threshold

    def _above(self, scores: Any) -> Tensor:
        values = self._numbers(scores)
        if bool(values.isnan().any()):
            raise DataError(
                f"must be scores that can be compared with the threshold; got NaN for {int(values.isnan().sum())} of {values.numel()}.",
                argument="prediction",
            )
        return values.double() > float(self)  # in float64, as when the threshold was chosen

    def _numbers(self, values: Any) -> Tensor:
        try:
            return as_tensor(values)
        except (TypeError, ValueError, RuntimeError) as error:
            raise not_a_prediction(values, "numbers") from error

    def _check(self, prediction: Prediction | RegressionPrediction) -> None:
        if self.score == OWN:
            raise OptionError(
                "this threshold was chosen for your own scores. Call it with scores of shape (n,), not with a prediction.",
                argument="prediction",
            )
        check_fingerprint(prediction, self.fingerprint, "this threshold")
