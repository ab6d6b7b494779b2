"""The error rate of answers stays below its bound with the given certainty: by enumeration, and against a slow procedure."""

import math
import pickle
import re
from fractions import Fraction
from itertools import combinations_with_replacement, product

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import molaplace as mola
from molaplace.decisions.abstain import _starts, binomial_tail
from molaplace.errors import DataError, OptionError


def exact_tail(errors, count, rate):
    p = Fraction(rate)
    return sum(math.comb(count, k) * p**k * (1 - p) ** (count - k) for k in range(errors + 1))


def made(confidence, correct):
    """Binary predictions with these confidences: the first class is predicted, and true where that is correct."""
    confidence = torch.as_tensor(confidence, dtype=torch.float64)
    probs = torch.stack([confidence, 1 - confidence], 1)
    return probs, (~torch.as_tensor(correct)).long()


def slow(scores, wrong, rate, doubt):
    """The procedure as it is written down: every threshold there is, each with its own exact p-value."""
    starts = _starts(len(scores), rate, doubt)
    thresholds = [*sorted(set(scores), reverse=True), -math.inf]
    level = Fraction(0)
    best = None
    descending = sorted(scores, reverse=True)
    for threshold in thresholds:
        for start in starts:
            if (descending[start] if start < len(scores) else -math.inf) == threshold:
                level += Fraction(doubt) / len(starts)
        answered = [bad for score, bad in zip(scores, wrong, strict=True) if score > threshold]
        if level and answered and exact_tail(sum(answered), len(answered), rate) <= level:
            best = threshold
        else:
            level = Fraction(0)
    return best


def test_the_tail_of_many_data():
    scipy = pytest.importorskip("scipy.stats")
    for errors, count, rate in ((900, 100_000, 0.01), (9_700, 1_000_000, 0.01), (4_000, 10_000, 0.41)):
        assert binomial_tail(errors, count, rate) == pytest.approx(scipy.binom.cdf(errors, count, rate), rel=1e-8)


# The level of the first part, passed on, is needed where the second part is spent: after 6 of 12 answers.
@example([(12 - index, bad == "x") for index, bad in enumerate("......x.xxxx")], 0.5, 0.5)
# The first half of the answers has one score, so that the first threshold tested is one at which a part is spent.
@example([(6, False)] * 6 + [(5 - index, False) for index in range(6)], 0.5, 0.5)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=4, max_size=60),
    st.sampled_from([0.1, 0.3, 0.5]),
    st.sampled_from([0.5, 0.8, 0.95]),
)
def test_the_same_threshold_as_the_slow_procedure(data, rate, certainty):
    scores = [float(score) for score, _ in data]
    wrong = [bad for _, bad in data]
    probs, labels = made(torch.full((len(data),), 0.7), ~torch.tensor(wrong))
    expected = slow(scores, wrong, rate, 1 - certainty)
    if expected is None:
        with pytest.raises(DataError, match="no threshold guarantees"):
            mola.abstain_threshold(probs, labels, rate, certainty, score=scores)
    else:
        assert mola.abstain_threshold(probs, labels, rate, certainty, score=scores) == expected


def broken(masses, risks, count, rate, certainty):
    """Probability, over all draws of `count` data, that the threshold chosen has a higher error rate than promised; and of any choice.

    Scores are 0, 1, ..., the surest last; each has a mass and an error rate. All multisets of (score, wrong) are gone through.
    """
    cells = list(product(range(len(masses)), (False, True)))
    chance = {(s, bad): masses[s] * (risks[s] if bad else 1 - risks[s]) for s, bad in cells}

    def true_risk(threshold):
        above = [s for s in range(len(masses)) if s > threshold]
        return sum(masses[s] * risks[s] for s in above) / sum(masses[s] for s in above)

    wrong = 0.0
    chosen = 0.0
    total = 0.0
    for draw in combinations_with_replacement(cells, count):
        counts = [draw.count(cell) for cell in cells]
        weight = math.factorial(count) / math.prod(map(math.factorial, counts))
        weight *= math.prod(chance[cell] ** n for cell, n in zip(cells, counts, strict=True))
        total += weight
        probs, labels = made(torch.full((count,), 0.7), ~torch.tensor([bad for _, bad in draw]))
        try:
            threshold = mola.abstain_threshold(
                probs, labels, rate, certainty, score=torch.tensor([float(score) for score, _ in draw])
            )
        except DataError:
            continue
        chosen += weight
        wrong += weight * (true_risk(threshold) > rate + 1e-12)
    assert total == pytest.approx(1)
    return wrong, chosen


@pytest.mark.parametrize(
    ("masses", "risks", "rate"),
    [
        ((0.5, 0.5), (0.9, 0.35), 0.3),
        ((0.3, 0.3, 0.4), (0.95, 0.51, 0.1), 0.3),
        ((0.2, 0.2, 0.6), (1.0, 0.8, 0.31), 0.3),
        ((0.6, 0.2, 0.2), (0.6, 0.2, 0.05), 0.4),
        ((0.4, 0.3, 0.3), (0.7, 0.5, 0.45), 0.5),
    ],
)
def test_the_promise_is_kept_by_enumeration(masses, risks, rate):
    count = 8
    certainty = 0.8
    wrong, chosen = broken(masses, risks, count, rate, certainty)
    assert wrong <= 1 - certainty + 1e-12
    assert chosen > 0.01


def test_sure_mistakes_cost_at_most_as_much_as_the_page_says():
    """The one assumption broken: the surest predictions err most, so that R crosses the promised rate twice."""
    wrong, _ = broken((0.5, 0.35, 0.15), (0.9, 0.02, 0.8), 8, 0.3, 0.8)
    assert wrong <= 2 * 0.2


def test_the_threshold_is_a_number_and_a_rule():
    draw = np.random.default_rng(2)
    s = draw.random(1000)
    probs, labels = made((1 + s) / 2, torch.from_numpy(draw.random(1000) > (1 - s) / 2))
    prediction = mola.Prediction({"probs": probs})
    threshold = mola.abstain_threshold(prediction, labels, error_rate=0.1, certainty=0.95)
    by_entropy = mola.abstain_threshold(prediction, labels, 0.1, score=-prediction.entropy)
    answered = prediction.confidence > threshold
    # With two classes, entropy and confidence are one order.
    assert torch.equal(answered, by_entropy(-prediction.entropy))
    assert torch.equal(answered, threshold(prediction))
    assert torch.equal(answered, threshold(probs.numpy()))
    assert int(answered.sum()) == threshold.answered
    assert int((labels[answered] != 0).sum()) == threshold.errors
    again = pickle.loads(pickle.dumps(threshold))
    assert (again, vars(again)) == (threshold, vars(threshold))
    with pytest.raises(OptionError, match="chosen for your own scores"):
        by_entropy(prediction)


def test_everything_is_answered_but_minus_infinity():
    """As for inputs with an alarm: they are neither answered nor counted."""
    probs, labels = made(torch.linspace(0.6, 0.9, 800), torch.arange(800) % 2 == 0)
    score = torch.where(labels == 1, -math.inf, probs[:, 0])
    threshold = mola.abstain_threshold(probs, labels, 0.02, score=score)
    assert (threshold, threshold.answered, threshold.errors) == (-math.inf, 400, 0)
    assert int(threshold(score).sum()) == 400
    assert mola.abstain_threshold(probs, torch.zeros(800), 0.02, score=score).answered == 400
    plain = mola.abstain_threshold(probs[labels == 0], labels[labels == 0], 0.02)
    assert (plain, plain.share) == (0.0, 1.0)


@pytest.mark.parametrize(("rate", "certainty", "needed"), [(0.01, 0.95, 299), (0.05, 0.95, 59), (0.1, 0.9, 22)])
def test_too_few_data_are_refused_with_the_number_needed(rate, certainty, needed):
    assert (1 - Fraction(rate)) ** needed <= 1 - Fraction(certainty) < (1 - Fraction(rate)) ** (needed - 1)
    probs, labels = made(torch.linspace(0.6, 0.9, needed), torch.ones(needed, dtype=torch.bool))
    with pytest.raises(DataError, match=f"{needed} are needed"):
        mola.abstain_threshold(probs[1:], labels[1:], rate, certainty)
    assert mola.abstain_threshold(probs, labels, rate, certainty).answered == needed


def test_an_impossible_rate_names_the_lowest_that_is_possible():
    draw = np.random.default_rng(3)
    s = draw.random(500)
    probs, labels = made((1 + s) / 2, torch.from_numpy(draw.random(500) > (1 - s) / 2))
    with pytest.raises(DataError, match="lowest error rate") as refusal:
        mola.abstain_threshold(probs, labels, 0.001)
    words = re.search(r"is about ([0-9.]+), with ([0-9.]+)% of them", str(refusal.value))
    lowest, share = map(float, words.groups())
    assert mola.abstain_threshold(probs, labels, lowest).share == pytest.approx(share / 100, abs=5e-4)
    with pytest.raises(DataError, match=f"is about {words[1]}, "):
        mola.abstain_threshold(probs, labels, lowest - 0.01)


@pytest.mark.parametrize(
    ("error", "words", "changes"),
    [
        (OptionError, r"1 % is 0\.01", {"error_rate": 1}),
        (DataError, "score must be numbers", {"score": "entropy"}),
        (DataError, "better predictor", {"error_rate": 0.08}),
        (DataError, "pass more data", {"error_rate": 0.15}),
        (DataError, "1 NaN", {"score": [math.nan] + [0.0] * 49}),
        (DataError, "each of the 50", {"labels": torch.zeros(49)}),
        (DataError, r"integers from 0 to 1; got 0\.5", {"labels": torch.full((50,), 0.5)}),
        (DataError, "one-hot", {"labels": torch.zeros(50, 2)}),
        (DataError, "names such as 'cat'", {"labels": ["cat"] * 50}),
        (DataError, "Positions", {"prediction": torch.full((50, 2, 3, 3), 0.5)}),
        (DataError, "two classes; got shape", {"prediction": torch.full((50,), 0.7)}),
        (DataError, "two classes; got shape", {"prediction": torch.ones(50, 1)}),
        (DataError, r"row 0 sums to 1\.4", {"prediction": torch.full((50, 2), 0.7)}),
    ],
)
def test_wrong_use_is_refused(error, words, changes):
    probs, labels = made(torch.full((50,), 0.7), torch.arange(50) % 10 > 0)
    with pytest.raises(error, match=words):
        mola.abstain_threshold(**{"prediction": probs, "labels": labels, "error_rate": 0.1} | changes)
