"""The alarm threshold keeps its rate for exchangeable data: exactly, for every sample size, ties included."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import molaplace as mola
from molaplace.errors import DataError, OptionError

RATES = (0.01, 0.05, 0.29, 0.1, 0.3, 1 / 3, 0.5, 0.77, 0.9)


def share_of_alarms(scores, rate):
    """Leave each datum out in turn: for exchangeable data this is the probability of a false alarm given the n + 1 scores."""
    alarms = 0
    for index, score in enumerate(scores):
        others = np.delete(scores, index)
        alarms += score > mola.alarm_threshold(torch.from_numpy(others), rate)
    return Fraction(int(alarms), len(scores))


def draws(kind, count, seed):
    draw = np.random.default_rng(seed)
    if kind == "continuous":
        return draw.standard_cauchy(count)
    if kind == "ties":
        return draw.integers(0, 4, count).astype(float)
    return np.where(draw.random(count) < 0.9, 0.0, np.inf)  # all but a few equal, and the few infinite


@pytest.mark.parametrize("kind", ["continuous", "ties", "infinite"])
@pytest.mark.parametrize("rate", RATES)
def test_false_alarms_stay_below_the_rate(kind, rate):
    exact = Fraction(rate).limit_denominator(1000)
    for seed, count in enumerate((math.ceil(1 / exact), 21, 60, 101, 140)):
        if count * exact < 1:
            continue  # too few scores, refused below
        share = share_of_alarms(draws(kind, count, seed), rate)
        assert share <= exact
        if kind == "continuous":
            assert share == Fraction(math.floor(count * exact), count)
            assert share > exact - Fraction(1, count)


def test_tensors_arrays_lists_and_predictions_have_one_threshold():
    prediction = mola.ensemble([torch.nn.Linear(3, 2)]).predict(torch.randn(200, 3))
    scores = prediction.ood_score
    threshold = mola.alarm_threshold(prediction, 0.05)
    assert int((scores > threshold).sum()) == 9  # the 191st of 200 is no alarm itself
    for values in (scores, scores.numpy(), scores.tolist()):
        assert mola.alarm_threshold(values, 0.05) == threshold


def test_scores_are_compared_in_float64():
    single = torch.tensor([0.1], dtype=torch.float32)  # rounded up
    assert mola.alarm_threshold([0.1] * 20, 0.1)(single).tolist() == [True]


@pytest.mark.parametrize(("rate", "needed"), [(0.05, 19), (0.1, 9), (0.01, 99), (1 / 3, 2), (0.3, 3), (0.5, 1)])
def test_too_few_scores_are_refused_with_the_number_needed(rate, needed):
    scores = torch.arange(float(needed))
    if needed > 1:
        with pytest.raises(DataError, match=rf"at least {needed} scores"):
            mola.alarm_threshold(scores[:-1], rate)
    assert mola.alarm_threshold(scores, rate) == needed - 1


@pytest.mark.parametrize("rate", [5, 0.0, float("nan"), "5 %"])
def test_wrong_rates_are_refused(rate):
    with pytest.raises(OptionError, match=r"above 0 and below 1.*5 % is 0\.05"):
        mola.alarm_threshold(torch.zeros(50), rate)


def test_a_score_that_is_not_a_number_is_neither_an_alarm_nor_none():
    threshold = mola.alarm_threshold(torch.arange(50.0), 0.1)
    assert threshold([math.inf, 0.0, -math.inf]).tolist() == [True, False, False]
    with pytest.raises(DataError, match="NaN for 1 of 2"):
        threshold([math.nan, 0.0])


@pytest.mark.parametrize("scores", [[0.0, math.nan], torch.zeros(50, 2), ["high", "low"]])
def test_values_that_are_not_scores_are_refused(scores):
    with pytest.raises(DataError, match="scores must be"):
        mola.alarm_threshold(scores, 0.5)
