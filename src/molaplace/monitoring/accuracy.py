r"""Expected accuracy without labels: average-thresholded confidence (ATC; Garg et al., 2022).

On the validation data, choose the threshold t at which the share of confidences c above it equals the accuracy. On new data, the share
above t is the estimate: :math:`\hat A = \frac1n \sum_i g_i`, :math:`g_i = 1[c_i > t]`. Confidences equal to t count as a fraction, so
that the shares agree exactly. For several labels per input, each label has its own threshold, and :math:`g_i` is the mean over the
labels; for dense outputs, it is the mean over the positions.

*Sampling error.* Let d = g - correct. On the validation data, its mean is 0. The estimate differs from the accuracy of the n inputs by
the mean of n new values of d, minus its expectation, which the m validation data estimate. So

.. math:: \mathrm{error}^2 = v_\text{new} / n + v / m, \qquad v = E[d^2].

A d of 1 is a wrong prediction above the threshold, and a d of -1 a right one below it. :math:`v_\text{new}` is v for the new share
above the threshold, with the rates of both errors on the validation data. The interval counts this error only: under shift, confidence
can lose its relation to accuracy, and no estimate from unlabelled data is right under every shift.

*Where there is no estimate.* If more than a share `MOST_STRANGE` of the inputs score higher than 99 % of the validation data, the
inputs lie beyond the range in which the relation was observed, and the estimate is withheld. docs/watch.md shows how often this
happens, and where the estimate fails.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from molaplace.monitoring.ranks import Array

STRANGE = 0.99
"""Quantile of the validation scores above which an input is strange."""

MOST_STRANGE = 0.25
"""Share of strange inputs above which the accuracy is not estimated. It was chosen on one group of MNIST networks and rotated digits, and
tested on other networks and data."""

FEWEST = 50
"""Fewest inputs from which the accuracy is estimated."""

TWO_SIDED = 1.96
"""Half-width of a 95 % interval in standard errors."""


@dataclass(frozen=True)
class ExpectedAccuracy:
    """The expected accuracy of recent inputs, or the reason why it is unknown."""

    value: float | None
    """Expected accuracy, from 0 to 1, or None if it cannot be estimated."""
    low: float | None
    """Lower end of a 95 % interval, which counts the sampling error."""
    high: float | None
    """Upper end of the interval."""
    count: int
    """Number of recent inputs."""
    strange: float | None
    """Share of these inputs that score higher than 99 % of the validation data; None if there are no inputs."""
    reason: str | None = None
    """Why the accuracy cannot be estimated: "strange inputs", "few inputs", "no labelled validation data", "regression", or None."""


@dataclass(frozen=True)
class ConfidenceThreshold:
    """The confidences above which predictions count as correct, chosen on validation data."""

    thresholds: tuple[float | None, ...]
    """One threshold, or one for each label; None for a label without validation data, which the estimate leaves out."""
    fractions: tuple[float, ...]
    """Value of a prediction whose confidence equals the threshold."""
    wrong_above: float
    """Share of wrong predictions among those above the threshold."""
    right_below: float
    """Share of right predictions among those below the threshold."""
    variance: float
    """Mean square of the difference between the estimate and correctness for one input."""
    accuracy: float
    """Accuracy on the validation data."""
    count: int
    """Number of labelled validation data."""

    @classmethod
    def fit(cls, confidence: Array, correct: Array, *, pooled: bool = False) -> ConfidenceThreshold:
        """Choose thresholds on validation data.

        Args:
            confidence: confidences (m, q) of the q predictions for each input.
            correct: whether these predictions are right (m, q), 0 or 1, or NaN where a label is missing.
            pooled: whether all q predictions share one threshold, as for the positions of dense outputs.
        """
        columns = [(confidence, correct)] if pooled else list(zip(confidence.T, correct.T, strict=True))
        pairs = [_threshold(*column) for column in columns]
        thresholds, fractions = (tuple(values) for values in zip(*pairs, strict=True))
        known = ~np.isnan(correct)
        above = _above(confidence, thresholds, fractions)
        outcomes = correct[known]
        # Half an error is added, because a few data may have none by chance.
        wrong_above = float(((above[known] * (1 - outcomes)).sum() + 0.5) / (above[known].sum() + 1))
        right_below = float((((1 - above[known]) * outcomes).sum() + 0.5) / ((1 - above[known]).sum() + 1))
        labelled = known.any(1)
        differences = np.where(known, above - correct, 0).sum(1)
        squares = np.square(differences[labelled] / known[labelled].sum(1))
        variance = max(float(squares.mean()), 1 / (len(squares) + 2))
        return cls(
            thresholds, fractions, wrong_above, right_below, variance, float(outcomes.mean()), int(labelled.sum())
        )

    def shares(self, confidence: Array) -> Array:
        """Return, for each input with confidences (n, q), the share of its predictions above the threshold (n,)."""
        return np.nanmean(_above(confidence, self.thresholds, self.fractions), axis=1)

    def estimate(self, shares: Array, strange: Array) -> ExpectedAccuracy:
        """Return the expected accuracy, given shares (n,) from `shares`, and which inputs (n,) are strange."""
        count = len(shares)
        share_strange = float(strange.mean()) if count else None
        if count < FEWEST or share_strange is None:
            return ExpectedAccuracy(None, None, None, count, share_strange, "few inputs")
        if share_strange > MOST_STRANGE:
            return ExpectedAccuracy(None, None, None, count, share_strange, "strange inputs")
        value = float(shares.mean())
        ratio = self._disagreement(value) / self._disagreement(self.accuracy)
        error = math.sqrt(self.variance * (ratio / count + 1 / self.count))
        low = max(0.0, value - TWO_SIDED * error)
        high = min(1.0, value + TWO_SIDED * error)
        return ExpectedAccuracy(value, low, high, count, share_strange)

    def _disagreement(self, share: float) -> float:
        return share * self.wrong_above + (1 - share) * self.right_below


def _threshold(confidences: Array, correct: Array) -> tuple[float | None, float]:
    # Return the threshold, and the fraction for confidences equal to it, at which the share above equals the accuracy.
    known = ~np.isnan(correct)
    if not known.any():
        return None, 0.0
    confidences = confidences[known]
    right = correct[known].sum()
    ordered = np.sort(confidences)[::-1]
    threshold = float(ordered[min(int(right), len(ordered) - 1)])
    above = (confidences > threshold).sum()
    return threshold, float((right - above) / (confidences == threshold).sum())


def _above(confidence: Array, thresholds: tuple[float | None, ...], fractions: tuple[float, ...]) -> Array:
    # Return whether confidences (n, q) are above their thresholds, from 0 to 1, and NaN where there is no threshold.
    limits = np.array(thresholds, dtype=float)
    above = np.where(confidence == limits, np.array(fractions), confidence > limits)
    return np.where(np.isnan(limits), np.nan, above)
