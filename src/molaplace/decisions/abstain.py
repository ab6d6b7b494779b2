r"""Selective prediction: answer as often as possible while keeping the error rate of the answers low with high probability.

Let s be a score that is higher for more certain predictions, and let :math:`R(\tau) = P(\text{wrong} \mid s > \tau)` be the error rate
of the answers above a threshold. From n labelled examples, the procedure chooses :math:`\hat\tau` such that

.. math:: P\left(R(\hat\tau) \le \varepsilon\right) \ge 1 - \delta

over draws of these data. The procedure tests one threshold after another, from few answers to many (Learn then Test, Angelopoulos et
al., 2021).

*One threshold.* Given the number m of examples with scores above a fixed :math:`\tau`, the number of errors among them follows
Binomial(m, R). So :math:`p = P(\text{Bin}(m, \varepsilon) \le \text{errors})` is an exact p-value for the null hypothesis
:math:`R(\tau) > \varepsilon`, for every m. This also holds if :math:`\tau` is the (m + 1)-th largest of the n scores: given
:math:`\tau`, the m larger scores are independent draws from the distribution above :math:`\tau`.

*Many thresholds.* All real numbers are tested as thresholds, in an order fixed in advance: from high to low. A successful test
passes its significance level on to the next threshold; a failed test loses it. The level is spent in J equal parts of size
:math:`\delta / J`, at n/2, n/4, n/8, ... answers; J is the largest number for which :math:`n / 2^J` answers without an error would
pass the test. This is the fallback procedure (Wiens, 2003) or, if J = 1, fixed-sequence testing. A mistake among the most certain
answers costs only part of the level. If no test fails, the last tests use the full :math:`\delta`. Testing more thresholds
costs nothing, so every score in the data serves as a threshold, and ties need no special treatment.

*Proof.* Assume that there is one :math:`\tau^*` below which R exceeds :math:`\varepsilon` and above which it does not. The choice is
wrong only if a test below :math:`\tau^*` succeeds. There are two cases. In the first case, the level was passed on from above, and the
test at :math:`\tau^*` succeeded at a level equal to the sum of the parts spent above it. Given the number M of examples above
:math:`\tau^*`, the probability of this case is at most that sum. In the second case, one of the remaining parts was spent below
:math:`\tau^*`. Given the score at which this part was spent, the test succeeds with a probability of at most the size of the part. The
probabilities of the two cases add up to at most :math:`\delta`. The assumption is violated if the most certain predictions are wrong
more often than less certain ones. Each further crossing of :math:`\varepsilon` by R then adds at most :math:`\delta` to the
probability of failure.

The guarantee bounds the long-run error rate of answers above the particular :math:`\hat\tau` that was chosen. Conformal coverage, in
contrast, is an average over draws of the calibration data. The guarantee does not extend to shifted data.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from molaplace.decisions.calibration import Calibration, probs_of
from molaplace.decisions.ranks import ROUNDING, as_numbers
from molaplace.decisions.threshold import OWN, Threshold
from molaplace.errors import DataError
from molaplace.options import check_share, counted
from molaplace.prediction import Prediction

NEGLIGIBLE = 1e-17
"""A decreasing series is truncated after the first term smaller than this fraction of the sum."""


class AnswerThreshold(Threshold):
    """A threshold on the confidence or on a score of your own: answer if `threshold(prediction)` is true."""

    error_rate: float
    """Upper bound on the error rate of answers."""
    certainty: float
    """Probability, over draws of the calibration data, that the bound holds."""
    answered: int
    """Number of calibration examples that are answered."""
    errors: int
    """Number of calibration examples that are answered incorrectly."""

    @property
    def share(self) -> float:
        """Share of the calibration examples that are answered."""
        return self.answered / self.count

    def __call__(self, prediction: Prediction | Any) -> Tensor:
        """Return a mask of the inputs to answer, of shape (n,).

        Args:
            prediction: a `mola.Prediction`, probabilities (n, C), or scores (n,) if the threshold was chosen for your own scores. A
                prediction of another predictor, or of the same one with other settings, raises `OptionError`.
        """
        if isinstance(prediction, Prediction):
            self._check(prediction)
            return self._above(prediction.confidence.masked_fill(prediction.invalid, -torch.inf))
        values = self._numbers(prediction)
        if values.ndim == 2 and self.score != OWN:  # probabilities from any library
            values = probs_of(values).amax(1)
        return self._above(values)

    def __repr__(self) -> str:
        return (
            f"AnswerThreshold({float(self):.6g}: answers above it have an error rate of at most {self.error_rate:.3g} with certainty "
            f"{self.certainty:g}; {self.share:.1%} of {self.count} answered, {self.errors} wrong)"
        )


def abstain_threshold(
    prediction: Prediction | Any,
    labels: Any,
    error_rate: float,
    certainty: float = 0.95,
    *,
    score: Any = None,
) -> AnswerThreshold:
    """Find the lowest confidence above which the error rate of answers is provably at most the given rate (selective prediction).

    The guarantee holds for any sample size and any predictor. `mola.decisions.abstain` describes the procedure and its one assumption.
    The networks must not have been trained on the data. Tuning the prior precision on the same data violates this condition slightly;
    docs/decisions.md quantifies the effect.

    Args:
        prediction: predictions for labelled data that resemble future data, as a `mola.Prediction`, probabilities (n, C), or a
            `mola.decisions.Calibration`, which includes the labels.
        labels: class indices (n,), or None if `prediction` is a `Calibration`.
        error_rate: largest acceptable error rate of the answers, such as 0.01 for one wrong answer in a hundred.
        certainty: probability, over draws of the labelled data, that the bound holds.
        score: your own scores (n,), higher for more certain predictions; use minus infinity for inputs that must never be answered,
            such as inputs that raise an alarm. By default, the score is the confidence.

    Returns:
        The threshold as a number. Answer if the confidence (or your own score) is above it. If no threshold satisfies the
        bound with this certainty, a `DataError` explains why.
    """
    calibration = Calibration.of(prediction, labels)
    rate = check_share(error_rate, "error_rate", "1 % is 0.01.")
    certainty = check_share(certainty, "certainty", "95 % is 0.95.")
    scores = calibration.confidence
    errors_mask = ~calibration.correct
    if score is not None:
        scores = as_numbers(score, "score")
        if scores.shape != errors_mask.shape or bool(scores.isnan().any()):
            raise DataError(
                f"must be one number for each of the {len(errors_mask)} data points, none of them NaN; got shape "
                f"{tuple(scores.shape)} with {int(scores.isnan().sum())} NaN.",
                argument="score",
            )
    choice = _walk(scores, errors_mask, rate, 1 - certainty)
    if choice is None:
        raise DataError(_why_none(scores, errors_mask, rate, 1 - certainty))
    value, answered, errors = choice
    return AnswerThreshold(
        value if score is not None else max(value, 0.0),  # 0 instead of -inf, because every confidence is above 0
        score="confidence" if score is None else OWN,
        fingerprint=calibration.fingerprint,
        error_rate=rate,
        certainty=certainty,
        count=len(errors_mask),
        answered=answered,
        errors=errors,
    )


def binomial_tail(errors: int, count: int, rate: float) -> float:
    """Return `P(Bin(count, rate) <= errors)` to float64 precision, or 1 if `errors >= count * rate`."""
    if errors >= count * rate:
        return 1.0
    log_last = (
        math.lgamma(count + 1)
        - math.lgamma(errors + 1)
        - math.lgamma(count - errors + 1)
        + errors * math.log(rate)
        + (count - errors) * math.log1p(-rate)
    )
    # Sum from the last term backwards; in this direction, the ratio of successive terms decreases.
    total = term = 1.0
    for index in range(errors, 0, -1):
        term *= index * (1 - rate) / ((count - index + 1) * rate)
        total += term
        if term < NEGLIGIBLE * total:
            break
    return min(1.0, math.exp(log_last) * total)


def _fewest(rate: float, delta: float) -> int:
    # Return how many answers, all of them correct, are needed to pass a test at level delta.
    return math.ceil(math.log(delta) / math.log1p(-rate))


def _starts(count: int, rate: float, delta: float) -> list[int]:
    # Return the numbers of answers at which parts of the level are spent.
    least = _fewest(rate, delta)
    parts = 0
    while count >> (parts + 1) >= _fewest(rate, delta / (parts + 1)):
        parts += 1
    if parts:
        return [count >> power for power in range(1, parts + 1)]
    return [least] if least <= count else []


def _walk(scores: Tensor, errors_mask: Tensor, rate: float, delta: float) -> tuple[float, int, int] | None:
    # Return the chosen threshold, the number of answers above it, and the number of errors among these answers.
    count = len(scores)
    starts = _starts(count, rate, delta)
    if not starts:
        return None
    ordered, order = scores.sort(descending=True, stable=True)
    errors = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), errors_mask[order].long().cumsum(0)]).tolist()
    values = [*ordered.tolist(), -math.inf]
    # Number of answers above each threshold, i.e. the number of scores that precede the first score equal to the threshold.
    answer_counts = [0, *(torch.nonzero(ordered[1:] < ordered[:-1])[:, 0] + 1).tolist()]
    if values[count - 1] > -math.inf:
        answer_counts.append(count)
    spent: dict[int, float] = {}
    for start in starts:
        # The threshold is the (start + 1)-th largest score; with ties, fewer than `start` scores may be above it.
        answers = answer_counts[bisect_right(answer_counts, start) - 1]
        spent[answers] = spent.get(answers, 0.0) + delta / len(starts)
    # As long as no error is added, more answers only lower the p-value. Tests are therefore needed only where an error is added or a
    # part of the level is spent.
    counts = [errors[answers] for answers in answer_counts]
    tested = [
        index
        for index in range(1, len(answer_counts))
        if counts[index] != counts[index - 1] or answer_counts[index] in spent
    ]
    level = 0.0
    best = None
    for index, next_index in pairwise([*tested, len(answer_counts)]):
        answers = answer_counts[index]
        level += spent.get(answers, 0.0)
        if level and binomial_tail(errors[answers], answers, rate) <= level * (1 + ROUNDING):
            best = answer_counts[next_index - 1]
        else:
            level = 0.0
    return None if best is None else (values[best], best, errors[best])


def _lowest_rate(scores: Tensor, errors_mask: Tensor, rate: float, delta: float) -> str:
    # Name the lowest error rate above `rate`, in two significant digits, that some threshold guarantees. `_starts` depends on the rate,
    # so now and then a slightly lower rate is possible as well.
    rates = [digits * 10.0**power for power in range(-9, -1) for digits in range(10, 100)]
    higher = [candidate for candidate in rates if candidate > rate]
    index = bisect_left(higher, True, key=lambda candidate: _walk(scores, errors_mask, candidate, delta) is not None)
    choice = _walk(scores, errors_mask, higher[index], delta) if index < len(higher) else None
    if choice is None:
        return ""
    share = choice[1] / len(scores)
    return f" The lowest error rate possible with these data is about {higher[index]:.2g}, with {share:.1%} of them answered."


def _why_none(scores: Tensor, errors_mask: Tensor, rate: float, delta: float) -> str:
    count = len(scores)
    start = f"no threshold guarantees an error rate of {rate:g} with certainty {1 - delta:g}"
    possible = _lowest_rate(scores, errors_mask, rate, delta)
    fewest = _fewest(rate, delta)
    if count < fewest:
        return (
            f"{start} from {counted(count, 'labelled datum', 'labelled data')}: even without a wrong answer, at least {fewest:,} are "
            f"needed.{possible} Pass more data, or allow a higher error rate."
        )
    errors = errors_mask[scores.argsort(descending=True, stable=True)].long().cumsum(0)
    share, answers = min(
        (int(errors[answers_tested - 1]) / answers_tested, answers_tested)
        for answers_tested in _starts(count, rate, delta)
    )
    remedy = "use a better predictor or score" if share >= rate else "pass more data"
    return (
        f"{start}: among the {answers:,} most certain of {count:,} answers, {int(errors[answers - 1]):,} are wrong ({share:.2%})."
        f"{possible} Either {remedy}, or allow a higher error rate or a lower certainty."
    )
