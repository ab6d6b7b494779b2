r"""Accuracy from labels that arrive late, or for some inputs only: an interval and an alarm that may be read at any time.

*The interval.* Let :math:`x_1, x_2, \dots \in [0, 1]` be whether predictions are correct (for several labels of one input, the share of
correct ones), with mean m given the past. For every q, :math:`\prod_i (q/m)^{x_i} ((1-q)/(1-m))^{1-x_i}` is the capital of bets on m,
with factors :math:`1 + \lambda (x_i - m)`, :math:`\lambda = (q - m) / (m (1 - m))`, if each x is 0 or 1; otherwise, it is at most this
capital, because a weighted geometric mean is at most the arithmetic mean. Mixed over q with the uniform distribution, it depends only
on the number n and the sum k:

.. math:: K_n(m) = \frac{B(k + 1, n - k + 1)}{m^k (1 - m)^{n - k}}, \qquad
   P\big(\exists n: K_n(m) \ge 1/\alpha\big) \le \alpha

by Ville's inequality (Robbins, 1970; Waudby-Smith and Ramdas, 2024). The interval contains every m with :math:`K_n(m) < 1 / \alpha`; it
covers a constant accuracy at all times together with probability :math:`1 - \alpha`. If the accuracy drifts, the interval is about its
mean over the labelled inputs: for independent x with means :math:`m_i`, :math:`E \prod (1 + \lambda (x_i - m)) = \prod (1 + \lambda
(m_i - m)) \le 1` at the mean m of the :math:`m_i`, so that it is valid at each time, though not at all times together.

*The alarm.* Let a be the expected accuracy on inputs like the validation data, and t the tolerance. If the accuracy never falls below
:math:`m_0 \le a - t`, the bets :math:`1 + \lambda (m_0 - x)`, :math:`0 \le \lambda \le 1 / (1 - m_0)`, are fair or worse, whatever else
changes. Their capital, mixed over bets and times of change (`mola.monitoring.evidence`), exceeds :math:`2 / \alpha` with a probability of
at most :math:`\alpha / 2`.

Nobody knows a. The accuracy :math:`\hat a` on m validation data is an estimate, whose error would be found sooner or later by a long
stream, without any fall. So :math:`m_0 = a_- - t` with a lower confidence bound :math:`a_-` for a, which takes the other half of
:math:`\alpha`: for independent values in [0, 1],

.. math:: a_- = \inf \{a \le \hat a : m\, \mathrm{KL}(\hat a \,\|\, a) \le \log(2 / \alpha)\}, \qquad P(a_- > a) \le \alpha / 2,

where KL is that of two Bernoulli distributions (Chernoff; Hoeffding, 1963). By the union bound, the alarm is false with a probability of
at most :math:`\alpha`, for any number of validation data. The price is a delay: with few validation data, only a large fall can be told
from an error of the estimate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from molaplace.monitoring.ranks import Array

SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7)
"""Stakes lambda of the bets on a fall, relative to their largest value 1 / (1 - m0)."""


VALIDATION_SHARE = 0.5
"""Share of alpha for the error of the accuracy on the validation data; the rest is for the bets."""


def log_fall_factors(correct: Array, least: float) -> Array:
    """Return the logarithms (B, n) of the factors of bets that win if the mean of values (n,) in [0, 1] is below `least`."""
    stakes = np.array(SHARES)[:, None] / max(1 - least, 1e-3)
    return np.log1p(stakes * (least - correct))


def confidence_sequence(total: float, count: int, error: float) -> tuple[float, float]:
    """Return the interval for a mean, given the sum and the number of values in [0, 1], whose probability of error is at most `error`."""
    log_beta = math.lgamma(total + 1) + math.lgamma(count - total + 1) - math.lgamma(count + 2)

    def excluded(mean: float) -> bool:
        log_likelihood = _times_log(total, mean) + _times_log(count - total, 1 - mean)
        return log_beta - log_likelihood >= -math.log(error)

    middle = total / count if count else 0.5
    ends = []
    for end in (0.0, 1.0):
        outside, inside = end, middle
        if not excluded(end):
            ends.append(end)
            continue
        for _ in range(60):  # K is convex in m, and smallest at the mean
            halfway = (outside + inside) / 2
            outside, inside = (halfway, inside) if excluded(halfway) else (outside, halfway)
        ends.append(outside)
    return ends[0], ends[1]


def lower_bound(mean: float, count: int, error: float) -> float:
    """Return the bound that the expectation of `count` values in [0, 1] with this mean undercuts with a probability of at most `error`."""

    def excluded(expectation: float) -> bool:
        log_ratio = _times_log(mean, expectation) + _times_log(1 - mean, 1 - expectation)
        return count * (_times_log(mean, mean) + _times_log(1 - mean, 1 - mean) - log_ratio) > -math.log(error)

    outside, inside = 0.0, mean
    if not excluded(0.0):
        return 0.0
    for _ in range(60):
        halfway = (outside + inside) / 2
        outside, inside = (halfway, inside) if excluded(halfway) else (outside, halfway)
    return outside


def _times_log(factor: float, value: float) -> float:
    if factor == 0:
        return 0.0
    return factor * math.log(value) if value > 0 else -math.inf


@dataclass(frozen=True)
class RecentAccuracy:
    """Accuracy on the most recent inputs whose labels are known or, for regression, coverage of the prediction intervals."""

    value: float | None
    """Mean over these inputs, or None if there are none."""
    low: float
    """Lower end of an interval that holds with probability 1 - alpha at any one time, but not at all times together."""
    high: float
    """Upper end of this interval."""
    count: int
    """Number of these inputs."""

    @classmethod
    def of(cls, correct: Array, error: float) -> RecentAccuracy:
        """Return the accuracy, given the correctness (n,) of the inputs and the interval's probability of error."""
        total = float(correct.sum())
        low, high = confidence_sequence(total, len(correct), error)
        return cls(total / len(correct) if len(correct) else None, low, high, len(correct))


@dataclass(frozen=True)
class LabelledAccuracy:
    """Accuracy on the inputs whose labels are known or, for regression, coverage of the prediction intervals."""

    value: float | None
    """Mean over all these inputs since the watch began, or None if there are none. After a change, `recent` is nearer to the present."""
    low: float
    """Lower end of an interval that holds at all times together with probability 1 - alpha."""
    high: float
    """Upper end of this interval."""
    count: int
    """Number of inputs with labels."""
    least: float | None
    """Lower confidence bound for the accuracy on data like the validation data, minus the tolerance; None without labels of these."""
    evidence: float
    """Largest capital so far of bets that accuracy has fallen below `least`, as a natural logarithm."""
    threshold: float
    """Logarithm of the capital at which the alarm is raised."""
    began: int | None
    """Number of labels that had arrived when accuracy began to fall, if the alarm is raised."""
    recent: RecentAccuracy
    """Accuracy on the last of these inputs, as many as `recent` of the watch, if they are in the window."""

    @property
    def raised(self) -> bool:
        """Whether accuracy has fallen below `least`. If it never fell by more than the tolerance, P(alarm) is at most alpha."""
        return self.least is not None and self.evidence >= self.threshold
