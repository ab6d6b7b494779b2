r"""When to answer and when to hand over: the largest share of answers whose error rate is, with the certainty asked for, low enough.

Let s be a score, higher for surer predictions, and :math:`R(\tau) = P(\text{wrong} \mid s > \tau)` the error rate of the answers
above a threshold. From n labelled data the procedure chooses :math:`\hat\tau` such that

.. math:: P\left(R(\hat\tau) \le \varepsilon\right) \ge 1 - \delta

over draws of these data. It tests one threshold after the other, from few answers to many (Learn then Test, Angelopoulos et al.,
2021), in this way.

*One threshold.* Of the m data above a fixed :math:`\tau`, given m, the number of wrong ones is Binomial(m, R). So :math:`p =
P(\text{Bin}(m, \varepsilon) \le \text{errors})` is an exact p-value of :math:`R(\tau) > \varepsilon`: no approximation, for every
m. The same holds if :math:`\tau` is the (m + 1)-th largest of the n scores: given its value, the m above it are independent draws
from above it.

*Many thresholds.* They are ordered before the data are seen: all numbers, from high to low. Along the order a level is handed on
while tests pass, and is lost when one fails. It is handed out in J equal parts of :math:`\delta / J`, at n/2, n/4, n/8, ...
answers, as long as so few can still pass without an error (the fallback procedure: Wiens, 2003; with J = 1, fixed-sequence
testing). A sure mistake at the top thus costs a part of the level, not all of it, and where nothing fails the last tests are at
the full :math:`\delta`. As nothing is paid for the number of thresholds, every score of the data is one, and ties need no care.

*Why that is enough.* Assume that there is one :math:`\tau^*` below which R exceeds :math:`\varepsilon` and above which it does
not. A wrong choice is a test passed below :math:`\tau^*`. Either the level got there from above, and the test at :math:`\tau^*`
passed, at a level of the number of parts handed out above it; given the number M of data above :math:`\tau^*`, this has at most
that probability. Or the level was handed out below, by one of the remaining parts, each of which passes with at most its own
probability, given the score where it was handed out. The sum is at most :math:`\delta`. A score for which the surest predictions
err more often than others breaks the assumption; the certainty is then lower by at most a :math:`\delta` for each further
crossing.

This is a promise about the error rate of answers in the long run with these calibration data, unlike conformal coverage, which is
a mean over calibration data. It says nothing of shifted data.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

from heart.decisions.calibration import Calibration, probs_of
from heart.decisions.ranks import ROUNDING, as_numbers, checked_share
from heart.errors import DataError, OptionError
from heart.options import counted, did_you_mean
from heart.prediction import Prediction
from heart.uncertainty import entropy

SCORES = ("confidence", "entropy")
"""Scores by name; answers are above the confidence, and below the entropy."""

NEGLIGIBLE = 1e-17
"""A term of a sum, relative to the sum, from which on the others do not matter."""

MOST_DATA = 10**9
"""Data beyond which nobody is told to collect as many."""


class AnswerThreshold(float):
    """The threshold as a number, with what it promises: `prediction.confidence > answer`, or `answer(prediction)` for any score.

    Attributes:
        score: "confidence", "entropy", or "own".
        error_rate: that answers have at most,
        certainty: with this probability over calibration data.
        count: of calibration data.
        answered: how many of them are answered.
        errors: how many of these are wrong.
    """

    score: str
    error_rate: float
    certainty: float
    count: int
    answered: int
    errors: int

    def __new__(
        cls, value: float, score: str, error_rate: float, certainty: float, count: int, answered: int, errors: int
    ) -> Self:
        """A number with its promise."""
        made = super().__new__(cls, value)
        made.score, made.error_rate, made.certainty = score, error_rate, certainty
        made.count, made.answered, made.errors = count, answered, errors
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        settings = (self.score, self.error_rate, self.certainty, self.count, self.answered, self.errors)
        return (float(self), *settings)

    @property
    def share(self) -> float:
        """Share of the calibration data that is answered."""
        return self.answered / self.count

    def __call__(self, prediction: Prediction | Any) -> Tensor:
        """Which inputs to answer.

        Args:
            prediction: a `mola.Prediction`, or probabilities (n, C); or scores (n,), of the kind that the threshold was made with.

        Returns:
            (n,) of truth values.
        """
        scores = prediction
        if isinstance(prediction, Prediction):
            if self.score not in SCORES:
                raise OptionError(
                    "this threshold is of scores of your own: call it with such scores (n,), not with a Prediction."
                )
            scores = getattr(prediction, self.score)
        values = torch.as_tensor(scores)
        if values.ndim == 2 and self.score in SCORES:  # probabilities of any library
            probs = probs_of(values)
            values = probs.amax(1) if self.score == "confidence" else entropy(probs)
        # In float64, as they were compared when the threshold was chosen.
        return values.double() < float(self) if self.score == "entropy" else values.double() > float(self)

    def __repr__(self) -> str:
        side = "below" if self.score == "entropy" else "above"
        return (
            f"AnswerThreshold({float(self):.6g}: answers {side} it are wrong at most {self.error_rate:.3g} of the time, with "
            f"certainty {self.certainty:g}; {self.share:.1%} of {self.count} answered, {self.errors} wrong)"
        )


def abstain_threshold(
    prediction: Prediction | Any,
    labels: Any,
    error_rate: float,
    certainty: float = 0.95,
    *,
    score: str | Any = "confidence",
) -> AnswerThreshold:
    """The confidence above which to answer, so that answers are wrong no more often than asked for.

    As many are answered as can be promised. The bound is exact, for every number of data and whatever the predictor: see
    `mola.decisions.abstain` for the procedure and its one assumption. The data must not have been used to train the networks; that
    the prior precision was tuned on them is a small breach, measured in docs/decisions.md.

    Args:
        prediction: of labelled data that are like those to come; a `mola.Prediction`, or probabilities (n, C).
        labels: (n,).
        error_rate: epsilon, such as 0.01 for one wrong answer in a hundred.
        certainty: the probability, over draws of the labelled data, that the promise is kept.
        score: what answers are chosen by: "confidence", "entropy", or numbers of your own (n,), higher for surer predictions and
            minus infinity for what is never answered, as where the alarm rings.

    Returns:
        The threshold, a number: answer where the confidence (or your own score) is above it, where the entropy is below it.
        `DataError` if no threshold can promise it, with how many data would; `OptionError` for rates outside 0 to 1.
    """
    known = Calibration.of(prediction, labels)
    return threshold_of(known, error_rate, certainty, score=score)


def threshold_of(
    calibration: Calibration, error_rate: float, certainty: float = 0.95, *, score: str | Any = "confidence"
) -> AnswerThreshold:
    """As `abstain_threshold`, of numbers that were kept.

    Args:
        calibration: of labelled data.
        error_rate: epsilon.
        certainty: one minus delta.
        score: as for `abstain_threshold`.

    Returns:
        The threshold.
    """
    rate = checked_share(error_rate, "error_rate", "1 % is 0.01.")
    certain = checked_share(certainty, "certainty", "95 % is 0.95.")
    name, scores = _surety(calibration, score)
    found = _walk(scores, ~calibration.correct, rate, 1 - certain)
    if found is None:
        raise DataError(_why_none(scores, ~calibration.correct, rate, 1 - certain))
    value, answered, errors = found
    if name == "entropy":
        value = -value
    elif name == "confidence":
        value = max(value, 0.0)  # every confidence is above 0
    return AnswerThreshold(value, name, rate, certain, len(scores), answered, errors)


def _surety(calibration: Calibration, score: str | Any) -> tuple[str, Tensor]:
    if isinstance(score, str):
        if score == "confidence":
            return score, calibration.confidence
        if score == "entropy":
            return score, -calibration.entropy
        message = (
            f"score must be one of {', '.join(SCORES)}, or numbers (n,), higher for surer predictions; got {score!r}."
        )
        raise OptionError(message + did_you_mean(score, SCORES))
    own = as_numbers(score, "score must hold one number for each datum")
    if own.shape != (len(calibration),) or bool(own.isnan().any()):
        raise DataError(
            f"score must hold one number for each of the {len(calibration)} data and none nan; got shape {tuple(own.shape)} with "
            f"{int(own.isnan().sum())} nan."
        )
    return "own", own


def binomial_tail(errors: int, count: int, rate: float) -> float:
    """`P(Bin(count, rate) <= errors)` to relative rounding, where it is below one half; 1 where it need not be known.

    Args:
        errors: from 0.
        count: from 0.
        rate: between 0 and 1.

    Returns:
        The probability, or 1 if `errors >= count * rate`, where it is at least one half.
    """
    if errors >= count * rate:
        return 1.0
    log_last = (
        math.lgamma(count + 1)
        - math.lgamma(errors + 1)
        - math.lgamma(count - errors + 1)
        + errors * math.log(rate)
        + (count - errors) * math.log1p(-rate)
    )
    # Each term before the last is smaller by a factor that falls.
    total = term = 1.0
    for place in range(errors, 0, -1):
        term *= place * (1 - rate) / ((count - place + 1) * rate)
        total += term
        if term < NEGLIGIBLE * total:
            break
    return min(1.0, math.exp(log_last) * total)


def _fewest(rate: float, doubt: float) -> int:
    return math.ceil(math.log(doubt) / math.log1p(-rate))


def _starts(count: int, rate: float, doubt: float) -> list[int]:
    least, parts = _fewest(rate, doubt), 0
    while count >> (parts + 1) >= _fewest(rate, doubt / (parts + 1)):
        parts += 1
    if parts:
        return [count >> place for place in range(1, parts + 1)]
    return [least] if least <= count else []


def _walk(scores: Tensor, wrong: Tensor, rate: float, doubt: float) -> tuple[float, int, int] | None:
    count = len(scores)
    starts = _starts(count, rate, doubt)
    if not starts:
        return None
    ordered, order = scores.sort(descending=True, stable=True)
    errors = torch.cat([torch.zeros(1, dtype=torch.int64), wrong[order].long().cumsum(0)]).tolist()
    values = [*ordered.tolist(), -math.inf]
    # Answers above each threshold: as many as come before the first score that is equal to it.
    places = [0, *(torch.nonzero(ordered[1:] < ordered[:-1])[:, 0] + 1).tolist()]
    if values[count - 1] > -math.inf:
        places.append(count)
    handed: dict[int, float] = {}
    for start in starts:
        # The threshold is the (start + 1)-th largest score; with ties, fewer are above it.
        place = places[bisect_right(places, start) - 1]
        handed[place] = handed.get(place, 0.0) + doubt / len(starts)
    # With no further error, more answers only lower the p-value: only where one is added, or level is handed out, is there a test.
    counts = [errors[place] for place in places]
    tested = [0, *(i for i in range(1, len(places)) if counts[i] != counts[i - 1] or places[i] in handed), len(places)]
    level, best = 0.0, None
    for index, following in pairwise(tested):
        place = places[index]
        level += handed.get(place, 0.0)
        if level and binomial_tail(errors[place], place, rate) <= level * (1 + ROUNDING):
            best = places[following - 1]
        else:
            level = 0.0
    return None if best is None else (values[best], best, errors[best])


def _why_none(scores: Tensor, wrong: Tensor, rate: float, doubt: float) -> str:
    # Why no threshold can promise it, and what would help.
    count, certain = len(scores), 1 - doubt
    promise = f"an error rate of {rate:g} with certainty {certain:g}"
    starts = _starts(count, rate, doubt)
    least = _fewest(rate, doubt)
    if not starts:
        return (
            f"no threshold can promise {promise} with {counted(count, 'labelled datum', 'labelled data')}: even if no answer is "
            f"wrong, it takes {least:,}. Give at least as many, or allow an error rate of "
            f"{1 - doubt ** (1 / count) if count else 1:.2g}."
        )
    ordered, order = scores.sort(descending=True, stable=True)
    errors = wrong[order].long().cumsum(0)
    share, answers, bad = min(
        (int(errors[start - 1]) / start, start, int(errors[start - 1]))
        for start in starts
        if float(ordered[start - 1]) > -math.inf or start == starts[-1]
    )
    seen = f"of the surest {answers:,} of {count:,} answers, {bad:,} are wrong ({share:.2%})"
    if share >= rate:
        return (
            f"no threshold can promise {promise}: {seen}. More data would not help; a better predictor or score would, or a higher "
            f"error rate."
        )
    needed = _needed(share, rate, doubt) * count / answers
    much = f"about {math.ceil(needed):,} labelled data" if needed < MOST_DATA else "more data than can be had"
    return (
        f"no threshold can promise {promise}: {seen}, which is lower, but by too little for so few. If it stays so, {much} "
        f"would do; or allow a higher error rate or less certainty."
    )


def _needed(share: float, rate: float, doubt: float) -> int:
    low, high = 1, 2

    def passes(count: int) -> bool:
        return binomial_tail(math.ceil(share * count), count, rate) <= doubt

    while not passes(high) and high < MOST_DATA:
        low, high = high, 2 * high
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if passes(middle) else (middle, high)
    return high
