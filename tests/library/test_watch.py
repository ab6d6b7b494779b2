"""Watching a deployed model: exact ranks and evidence, alarms at any time, expected accuracy, late labels, files and merged streams."""

import copy
import itertools
import math
import pickle
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
import scipy.special
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import molaplace as mola
from molaplace.errors import DataError, OptionError, StorageError
from molaplace.likelihoods import BERNOULLI
from molaplace.monitoring import alarm as alarms
from molaplace.monitoring.accuracy import FEWEST, ConfidenceThreshold
from molaplace.monitoring.baseline import Baseline
from molaplace.monitoring.evidence import GRIDS, Evidence, start_weights, unspent
from molaplace.monitoring.labelled import SHARES, confidence_sequence, log_fall_factors, lower_bound
from molaplace.monitoring.ranks import ScoreCounts, bins_of, uniform_draws
from molaplace.monitoring.stream import Stream, WatchOptions
from molaplace.monitoring.watching import Watch
from tests.library import problems


def predicted(scores, confidence=0.9, labels=0, classes=3):
    """A prediction with the given outlier scores, confidences and most probable classes."""
    scores = torch.as_tensor(scores, dtype=torch.float64)
    confidence = torch.as_tensor(confidence, dtype=torch.float64).expand(len(scores))
    labels = torch.as_tensor(labels).expand(len(scores))
    probs = ((1 - confidence) / (classes - 1))[:, None].repeat(1, classes)
    probs[torch.arange(len(scores)), labels] = confidence
    return mola.Prediction({"probs": probs, "ood_score": scores})


def new_watch(scores, confidence=None, correct=None, **options):
    confidence = np.full(len(scores), 0.9) if confidence is None else confidence
    outcomes = None if correct is None else np.asarray(correct, dtype=float)[:, None]
    baseline = Baseline.of_columns(np.asarray(scores, dtype=float), np.asarray(confidence)[:, None], outcomes)
    return Watch(baseline, WatchOptions(**options), (Stream("", baseline.scores),))


def normal_watch(count=500, seed=0, **options):
    draw = np.random.default_rng(seed)
    correct = draw.random(count) < 0.9
    return new_watch(draw.normal(size=count), draw.random(count) ** 0.2, correct, **options)


# --- ranks --------------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=20))
def test_bins_keep_the_order_of_scores(values):
    scores = np.sort(np.array(values))
    bins = bins_of(scores)
    assert (np.diff(bins) >= 0).all()
    for low, high, difference in zip(scores[:-1], scores[1:], np.diff(bins), strict=True):
        if high / 2 - low / 2 > max(abs(low), abs(high), 1e-30) / 2**8:
            assert difference > 0, "scores further apart have different bins"


def test_zeros_share_a_bin_and_numbers_beyond_float32_are_infinite():
    assert len(set(bins_of(np.array([-0.0, 0.0])).tolist())) == 1
    assert np.array_equal(bins_of(np.array([-1e300, 1e300])), bins_of(np.array([-np.inf, np.inf])))


def slow_p_values(scores, first, draws):
    """The definition: the rank of each bin among all bins so far."""
    bins = bins_of(scores)
    values = []
    for index in range(first, len(scores)):
        above = (bins[:index] > bins[index]).sum()
        equal = (bins[: index + 1] == bins[index]).sum()
        values.append((above + draws[index - first] * equal) / (index + 1))
    return np.array(values)


@pytest.mark.parametrize("kind", ["continuous", "ties", "infinite"])
def test_p_values_follow_the_definition(kind):
    draw = np.random.default_rng(0)
    scores = {
        "continuous": draw.standard_cauchy(900),
        "ties": draw.integers(-2, 3, 900).astype(float),
        "infinite": np.where(draw.random(900) < 0.5, -np.inf, draw.normal(size=900)),
    }[kind]
    draws = uniform_draws(3, 0, 800)
    counts, _ = ScoreCounts().add(scores[:100], np.zeros(100))
    counts, p_values = counts.add(scores[100:], draws)
    assert np.array_equal(p_values, slow_p_values(scores, 100, draws))
    assert len(counts) == 900
    with pytest.raises(DataError, match="NaN"):
        counts.add(np.array([1.0, math.nan]), np.zeros(2))


@pytest.mark.parametrize("scores", [(1, 2, 3, 4), (1, 1, 2, 3), (2, 2, 2, 5), (7, 7, 7, 7)])
def test_p_values_of_exchangeable_scores_are_independent_and_uniform(scores):
    """Exactly: over all orders of the scores, the joint distribution of the last three p-values has density 1."""
    orders = list(itertools.permutations(scores))
    # Given an order, each p-value is uniform on an interval, whose ends are multiples of 1/2, 1/3 and 1/4.
    points = [Fraction(2 * step + 1, 24) for step in range(12)]
    density = dict.fromkeys(itertools.product(points, repeat=3), Fraction(0))
    for order in orders:
        values = np.array(order, dtype=float)
        counts, _ = ScoreCounts().add(values[:1], np.zeros(1))
        ends = [counts.add(values[1:], np.full(3, draw))[1] for draw in (0.0, 1.0)]
        intervals = [
            (Fraction(low).limit_denominator(24), Fraction(high).limit_denominator(24))
            for low, high in zip(*ends, strict=True)
        ]
        volume = math.prod(high - low for low, high in intervals)
        for point in density:
            if all(low < value < high for value, (low, high) in zip(point, intervals, strict=True)):
                density[point] += Fraction(1, len(orders)) / volume
    assert set(density.values()) == {Fraction(1)}


# --- evidence -----------------------------------------------------------------------------------------------------------


def test_the_stakes_are_never_worth_more_than_the_capital():
    weights = start_weights(0, 100_000)
    assert (weights > 0).all()
    spent = np.cumsum(weights)
    assert np.allclose(1 - spent, unspent(np.arange(100_000)), atol=1e-12)
    assert spent[-1] < 1
    assert np.array_equal(start_weights(7000, 3000), weights[7000:10_000])


def slow_evidence(factors):
    """The capital by its definition: the sum over bets and starts."""
    count = factors.shape[1]
    weights = start_weights(0, count)
    capital = []
    for last in range(count):
        products = [factors[:, start : last + 1].prod(1).mean() for start in range(last + 1)]
        capital.append(1 - weights[: last + 1].sum() + weights[: last + 1] @ products)
    return np.array(capital)


def test_evidence_is_the_sum_over_bets_and_starts():
    factors = np.random.default_rng(0).uniform(0.3, 1.8, (3, 40))
    capital = slow_evidence(factors)
    for count in (1, 7, 40):
        evidence = Evidence.none(3).add(np.log(factors[:, :count]))
        assert evidence.log_value == pytest.approx(math.log(capital[count - 1]), abs=1e-12)
        assert evidence.log_peak == pytest.approx(max(0, math.log(capital[:count].max())), abs=1e-12)
    leader = evidence.leader
    peak = int(capital.argmax())
    gains = [factors[leader, start : peak + 1].prod() for start in range(peak + 1)]
    assert evidence.began == int(np.argmax(gains))


def test_capital_has_a_mean_of_one_under_the_hypothesis():
    """Exactly: over all outcomes of fair bets on a coin."""
    stakes = np.array([0.1, 0.5, 0.9])[:, None]
    capitals = [
        math.exp(Evidence.none(3).add(np.log1p(stakes * np.array(signs))).log_value)
        for signs in itertools.product((-1, 1), repeat=9)
    ]
    assert np.mean(capitals) == pytest.approx(1, abs=1e-12)


def test_every_bet_on_p_values_is_fair():
    """The integral of each factor over the p-values, in the variable log p (or log(1 - p)) where the factors are steep."""
    logs = np.linspace(math.log(2.0**-52), math.log(0.5), 200_001)
    near = np.exp(logs)
    step = logs[1] - logs[0]
    weights = near * step
    weights[[0, -1]] /= 2
    integral = np.exp(alarms.log_factors(near)) @ weights + np.exp(alarms.log_factors(1 - near)) @ weights
    # The deciles have jumps, at which the quadrature errs by a step. Below 2^-52, up to 3 % of the steepest factors is left out.
    assert (integral < 1 + 5e-4).all()
    assert (integral > 0.97).all()


@pytest.mark.parametrize("cuts", [(0,), (1, 2, 3), (256, 257, 700), tuple(range(1, 700, 13))])
def test_results_do_not_depend_on_how_the_stream_is_cut(cuts):
    draw = np.random.default_rng(2)
    scores = np.concatenate([draw.normal(size=300), draw.normal(1, 1, size=423)])
    labels = torch.from_numpy(draw.integers(0, 2, 723))
    prediction = predicted(scores, draw.random(723))
    whole = normal_watch(window=600, recent=100).update(prediction, labels=labels)
    parts = normal_watch(window=600, recent=100)
    for start, end in itertools.pairwise((0, *cuts, 723)):
        parts.update(prediction[start:end], labels=labels[start:end])
    assert parts.count == whole.count == 723
    for name, column in whole.streams[0].window.items():
        assert np.array_equal(parts.streams[0].window[name], column), name
    assert parts.accuracy == whole.accuracy
    first, second = whole.alarm, parts.alarm
    assert first.raised
    assert second.raised
    assert second.began == first.began
    assert second.evidence == pytest.approx(first.evidence, abs=1e-9)
    assert [entry.position for entry in first.contributions] == [entry.position for entry in second.contributions]
    assert parts.labelled.evidence == pytest.approx(whole.labelled.evidence, abs=1e-9)
    assert (parts.labelled.low, parts.labelled.high) == (whole.labelled.low, whole.labelled.high)


# --- the alarm ----------------------------------------------------------------------------------------------------------


def test_false_alarms_over_the_life_of_a_stream_are_rare():
    alpha = 0.1
    raised = 0
    for seed in range(200):
        scores = np.random.default_rng(seed).standard_t(3, 1100)
        watch = new_watch(scores[:100], alpha=alpha, seed=seed)
        raised += watch.update(predicted(scores[100:])).alarm.raised
    assert raised <= 200 * alpha


def test_ranks_in_a_fixed_validation_set_raise_an_alarm_in_the_end():
    """Without any change: the reason for ranks among all scores so far. The bets are small, as in the proof."""

    def peak(p_values):
        deciles = np.minimum((10 * p_values).astype(int), 9)
        wins = 10 * (deciles == np.arange(10)[:, None]) - 1
        return Evidence.none(20).add(np.log1p(np.concatenate([0.05 * wins, -0.05 * wins]))).log_peak

    for seed in range(8):
        draw = np.random.default_rng(seed)
        scores = draw.normal(size=30_100)
        validation, stream = scores[:100], scores[100:]
        draws = draw.random(len(stream))
        fixed = (100 - np.searchsorted(np.sort(validation), stream) + draws) / 101
        counts, _ = ScoreCounts().add(validation, np.zeros(100))
        assert peak(fixed) > math.log(1000)
        assert peak(counts.add(stream, draws)[1]) < math.log(1000)


@pytest.mark.parametrize(
    ("change", "most"),
    [
        (lambda draw, count: draw.normal(6, 1, count), 40),  # everything is strange
        (lambda draw, count: draw.normal(0.4, 1, count), 700),  # a small persistent shift
        (lambda draw, count: np.where(draw.random(count) < 0.05, 8, draw.normal(size=count)), 900),  # outliers
        (lambda draw, count: draw.normal(-1.5, 0.5, count), 80),  # too typical
        (lambda draw, count: np.full(count, 0.3), 80),  # a stuck camera
    ],
)
def test_changes_are_seen_also_after_a_long_calm(change, most):
    calm = 5000
    draw = np.random.default_rng(1)
    watch = normal_watch(2000).update(predicted(draw.normal(size=calm)))
    assert not watch.alarm
    changed = change(draw, 2000)
    needed = next(
        count for count in range(10, 2001, 10) if watch.update(predicted(changed[count - 10 : count])).alarm.raised
    )
    assert needed <= most
    alarm = watch.alarm
    assert abs(alarm.began - calm) < max(40, most)
    assert all(entry.position >= alarm.began for entry in alarm.contributions)
    gains = [entry.gain for entry in alarm.contributions]
    assert gains == sorted(gains, reverse=True)
    assert "alarm, the change began at input" in repr(watch)
    assert len(repr(alarm)) < 250


def test_contributions_are_the_strangest_inputs():
    draw = np.random.default_rng(0)
    watch = normal_watch(1000).update(predicted(draw.normal(size=500)))
    scores = np.where(np.arange(200) % 10 == 0, 9.0 + np.arange(200) / 100, draw.normal(size=200))
    watch.update(predicted(scores))
    strangest = {500 + 10 * index for index in range(20)}
    assert watch.alarm
    assert len(watch.alarm.contributions) == 10
    assert {entry.position for entry in watch.alarm.contributions} <= strangest
    assert all(entry.score >= 9 for entry in watch.alarm.contributions)


def test_memory_does_not_grow_with_the_stream():
    draw = np.random.default_rng(0)
    watch = normal_watch(300, window=1000)
    sizes = []
    for _ in range(12):
        watch.update(predicted(draw.normal(size=2000)))
        stream = watch.streams[0]
        arrays = [*stream.window.values(), stream.scores.bins, stream.scores.counts]
        sizes.append(sum(array.nbytes for array in arrays))
    assert sizes[-1] < 1.25 * sizes[5]
    assert len(stream.scores.bins) <= 2**18
    assert len(stream.window["score"]) == 1000
    assert stream.first == watch.count - 1000


# --- expected accuracy --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [1, 2, 5, 1000])
@pytest.mark.parametrize("rate", [0.0, 0.37, 1.0])
def test_on_validation_data_the_expected_accuracy_is_the_accuracy(levels, rate):
    draw = np.random.default_rng(levels)
    confidence = draw.integers(1, levels + 1, (400, 1)) / levels
    correct = (draw.random((400, 1)) < rate).astype(float)
    threshold = ConfidenceThreshold.fit(confidence, correct)
    expected = threshold.estimate(threshold.shares(confidence), np.zeros(400, dtype=bool))
    assert expected.value == pytest.approx(correct.mean(), abs=1e-12)
    assert expected.low <= expected.value <= expected.high
    assert expected.reason is None


def test_the_interval_covers_the_accuracy_of_new_data():
    covered = 0
    for seed in range(300):
        draw = np.random.default_rng(seed)
        confidence = draw.random((900, 1)) ** 0.3
        correct = (draw.random((900, 1)) < confidence).astype(float)
        threshold = ConfidenceThreshold.fit(confidence[:600], correct[:600])
        expected = threshold.estimate(threshold.shares(confidence[600:]), np.zeros(300, dtype=bool))
        covered += expected.low <= correct[600:].mean() <= expected.high
    assert 0.92 < covered / 300 < 0.98


def test_each_label_has_its_own_threshold_and_positions_share_one():
    draw = np.random.default_rng(0)
    confidence = draw.random((500, 3))
    correct = (draw.random((500, 3)) < np.array([0.2, 0.5, 0.9])).astype(float)
    correct[draw.random((500, 3)) < 0.1] = math.nan
    by_label = ConfidenceThreshold.fit(confidence, correct)
    for label in range(3):
        known = ~np.isnan(correct[:, label])
        alone = ConfidenceThreshold.fit(confidence[known, label : label + 1], correct[known, label : label + 1])
        assert by_label.thresholds[label] == alone.thresholds[0]
    pooled = ConfidenceThreshold.fit(confidence, correct, pooled=True)
    known = ~np.isnan(correct)
    flat = ConfidenceThreshold.fit(confidence[known][:, None], correct[known][:, None])
    assert pooled.thresholds == flat.thresholds
    assert np.array_equal(pooled.shares(confidence), flat.shares(confidence.reshape(-1, 1)).reshape(500, 3).mean(1))


def test_accuracy_is_not_estimated_where_it_cannot_be():
    draw = np.random.default_rng(0)
    watch = normal_watch()
    assert watch.accuracy.reason == "few inputs"
    watch.update(predicted(draw.normal(size=FEWEST - 1)))
    assert (watch.accuracy.value, watch.accuracy.reason) == (None, "few inputs")
    watch.update(predicted(draw.normal(size=500)))
    assert watch.accuracy.reason is None
    assert watch.accuracy.strange < 0.05
    watch.update(predicted(np.full(1000, 20.0)))
    assert (watch.accuracy.value, watch.accuracy.reason) == (None, "strange inputs")
    assert watch.accuracy.strange == 1
    unlabelled = new_watch(draw.normal(size=100)).update(predicted(draw.normal(size=100)))
    assert unlabelled.accuracy.reason == "no labelled validation data"
    assert "no labelled validation data" in repr(unlabelled)


# --- labels -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("total", "count"), [(0, 0), (0, 5), (7, 7), (30, 40), (3.5, 11)])
def test_the_confidence_sequence_inverts_the_mixture_of_bets(total, count):
    """Against the capital of bets, averaged over their alternatives by quadrature."""
    alternatives = (np.arange(20_000) + 0.5) / 20_000
    low, high = confidence_sequence(total, count, 0.05)

    def capital(mean):
        return np.mean((alternatives / mean) ** total * ((1 - alternatives) / (1 - mean)) ** (count - total))

    for mean in np.linspace(0.005, 0.995, 100):
        if min(abs(mean - low), abs(mean - high)) > 1e-3:
            assert (capital(mean) < 20) == (low < mean < high), mean


def test_the_confidence_sequence_covers_at_all_times_together():
    missed = 0
    for seed in range(200):
        totals = np.cumsum(np.random.default_rng(seed).random(400) < 0.8)
        ends = [confidence_sequence(float(totals[count - 1]), count, 0.1) for count in range(1, 401, 7)]
        missed += any(not low <= 0.8 <= high for low, high in ends)
    assert missed <= 20


def test_bets_on_a_fall_lose_nothing_if_accuracy_is_kept():
    for least in (0.5, 0.87, 0.999):
        factors = np.exp(log_fall_factors(np.array([0.0, 1.0]), least))
        assert factors.shape == (len(SHARES), 2)
        assert (factors > 0).all()
        for accuracy in (least, (1 + least) / 2, 1.0):
            assert ((1 - accuracy) * factors[:, 0] + accuracy * factors[:, 1] <= 1 + 1e-12).all()


def test_labels_may_come_late_in_any_order_or_at_once():
    draw = np.random.default_rng(0)
    prediction = predicted(draw.normal(size=300), draw.random(300))
    labels = torch.from_numpy(draw.integers(0, 2, 300))
    at_once = normal_watch().update(prediction, labels=labels).labelled
    assert at_once.value == pytest.approx(float((prediction.label == labels).double().mean()))
    late = normal_watch().update(prediction)
    assert late.labelled.value is None
    assert late.update(labels=labels).labelled == at_once
    order = torch.from_numpy(draw.permutation(300))
    shuffled = normal_watch().update(prediction[:100]).update(prediction[100:])
    for part in order.split(64):
        shuffled.update(labels=labels[part], positions=part)
    for name in ("value", "low", "high", "count"):
        assert getattr(shuffled.labelled, name) == pytest.approx(getattr(at_once, name))


def test_late_labels_find_their_inputs_by_id_after_a_loss(tmp_path):
    """A restart from yesterday's file loses 30 inputs: by position, each later label would meet another prediction."""
    draw = np.random.default_rng(0)
    truth = torch.from_numpy(draw.integers(0, 2, 200))
    names = [f"request {index}" for index in range(200)]
    prediction = predicted(draw.normal(size=200), labels=truth)
    watch = normal_watch().update(prediction[:20])  # inputs without ids may come before those with ids
    watch.update(prediction[20:100], ids=names[20:100])
    folder = watch.save(tmp_path / "watch")
    watch.update(prediction[100:130], ids=names[100:130])
    watch = mola.Watch.load(folder).update(prediction[130:], ids=names[130:])
    with pytest.raises(OptionError, match="30 of 180 are unknown"):
        watch.update(labels=truth[20:], ids=names[20:])
    order = draw.permutation(np.r_[20:100, 130:200])
    watch.update(labels=truth[order], ids=[names[index] for index in order])
    assert (watch.labelled.value, watch.labelled.count) == (1, 150)
    with pytest.raises(OptionError, match="earlier input"):
        watch.update(prediction[:1], ids=names[150:151])
    by_number = normal_watch().update(prediction, ids=torch.arange(200) + 10**15)
    assert by_number.update(labels=truth[:3], ids=np.arange(3) + 10**15).labelled.value == 1


def test_the_recent_labelled_accuracy_follows_a_fall():
    draw = np.random.default_rng(0)
    correct = np.concatenate([np.ones(4000), draw.random(500) < 0.8])
    watch = normal_watch(recent=300).update(predicted(draw.normal(size=4500)), labels=(1 - correct).astype(int))
    recent = watch.labelled.recent
    assert watch.labelled.value == pytest.approx(correct.mean())
    assert (recent.value, recent.count) == (pytest.approx(correct[-300:].mean()), 300)
    assert recent.low < 0.8 < recent.high < watch.labelled.low
    assert normal_watch().labelled.recent.value is None


def test_no_labels_yet_change_nothing():
    watch = normal_watch()
    watch.update(predicted(np.zeros(3)))
    watch.update(labels=[], positions=[])
    assert watch.labelled.count == 0


def test_missing_labels_wait():
    watch = normal_watch().update(predicted(np.zeros(4)), labels=[0, -100, math.nan, 1])
    assert (watch.labelled.count, watch.labelled.value) == (2, 0.5)
    watch.update(labels=[0, 0])
    assert (watch.labelled.count, watch.labelled.value) == (4, 0.75)


def test_the_alarm_for_accuracy_is_raised_by_a_fall_and_by_nothing_else():
    draw = np.random.default_rng(0)
    watch = normal_watch(tolerance=0.05)
    labels = torch.from_numpy((draw.random(3000) > 0.9).astype(int))
    watch.update(predicted(draw.normal(size=3000)), labels=labels)
    assert not watch.labelled.raised
    labels_after_fall = torch.from_numpy((draw.random(300) > 0.6).astype(int))
    watch.update(predicted(draw.normal(size=300)), labels=labels_after_fall)
    assert watch.labelled.raised
    assert abs(watch.labelled.began - 3000) < 60
    assert not watch.alarm


@given(st.floats(0, 1), st.integers(1, 3000), st.floats(1e-4, 0.5))
def test_the_lower_bound_solves_the_chernoff_bound(mean, count, error):
    bound = lower_bound(mean, count, error)
    assert 0 <= bound <= mean
    if mean == 1:
        assert bound == pytest.approx(error ** (1 / count))  # the exact bound if every prediction is right
    if count == 1 or 0 < bound < mean - 1e-6:
        divergence = scipy.special.rel_entr(mean, bound) + scipy.special.rel_entr(1 - mean, 1 - bound)
        assert mean == 0 or count * divergence == pytest.approx(-math.log(error), rel=1e-4)


@pytest.mark.parametrize("count", [5, 10, 20, 50])
def test_few_validation_data_raise_no_alarm_about_an_unchanged_accuracy(count):
    """The accuracy on few validation data is an estimate; its error is no fall."""
    alpha, raised, streams = 0.05, 0, 200
    for seed in range(streams):
        draw = np.random.default_rng(seed)
        correct = draw.random(count + 1000) < 0.9
        watch = new_watch(draw.normal(size=count), correct=correct[:count], alpha=alpha)
        watch.update(predicted(np.zeros(1000)), labels=(~correct[count:]).astype(int))
        raised += watch.labelled.raised
    assert raised <= alpha * streams


def test_wrong_labels_are_refused_and_change_nothing():
    watch = normal_watch(window=100, recent=50).update(predicted(np.zeros(150)))
    before = watch.streams
    wrong = [
        ({"labels": [0, 1]}, OptionError, "positions"),
        ({"labels": [0], "positions": [3]}, OptionError, "from 50 to 149"),
        ({"labels": [0, 0], "positions": [60, 60]}, OptionError, "twice"),
        ({"labels": [0], "positions": [61.9]}, OptionError, "whole numbers, got 61.9"),
        ({"labels": [0], "positions": [math.nan]}, OptionError, "whole numbers"),
        ({"labels": [0], "positions": [60], "ids": [60]}, OptionError, "combined with ids"),
        ({"labels": [0], "ids": [60]}, OptionError, "1 of 1 are unknown"),
        ({"labels": [0], "ids": [1.5]}, OptionError, "strings or non-negative whole numbers"),
        ({"prediction": predicted(np.zeros(2)), "ids": ["a"]}, OptionError, "one for each of 2 inputs"),
        ({"prediction": predicted(np.zeros(2)), "ids": ["a", "a"]}, OptionError, "twice"),
        ({"labels": [[0, 1]], "positions": [60]}, DataError, "one row for each of 1 input"),
        ({"labels": ["cat"], "positions": [60]}, DataError, "must be numbers"),
        ({}, OptionError, "pass predictions"),
        ({"prediction": predicted(np.zeros(2)), "positions": [0, 1]}, OptionError, "labels without a prediction"),
        ({"prediction": torch.zeros(2, 3)}, OptionError, "mola.Prediction"),
    ]
    for arguments, error, words in wrong:
        with pytest.raises(error, match=re.escape(words)):
            watch.update(**arguments)
        assert watch.streams is before
    watch.update(labels=[0], positions=[60])
    with pytest.raises(OptionError, match="already has a label"):
        watch.update(labels=[0], positions=[60])
    with pytest.raises(OptionError, match="window = 10"):
        normal_watch(window=10, recent=20)
    for name in ("alpha", "tolerance"):
        with pytest.raises(OptionError, match=name):
            normal_watch(**{name: 1.5})


# --- threads ------------------------------------------------------------------------------------------------------------


def test_threads_count_every_input_once_and_in_some_order():
    threads, each = 8, 400
    draw = np.random.default_rng(0)
    scores = draw.permutation(np.linspace(-2, 3, threads * each)).reshape(threads, each)
    watch = normal_watch()
    inputs = [[(predicted([score]), [int(score > 2)]) for score in column] for column in scores]
    readings = []

    def serve(column):
        for prediction, labels in column:
            watch.update(prediction, labels=labels)
            readings.append(watch.alarm)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(serve, inputs))
    finally:
        sys.setswitchinterval(interval)
    assert watch.count == watch.labelled.count == threads * each
    order = watch.streams[0].window["score"]
    assert np.array_equal(np.sort(order), np.sort(scores.ravel()))
    for column in scores:  # each thread's inputs keep their order
        assert np.array_equal(order[np.isin(order, column)], column)
    serial = normal_watch().update(predicted(order), labels=(order > 2).astype(int))
    assert np.array_equal(watch.streams[0].window["p_value"], serial.streams[0].window["p_value"])
    assert watch.alarm.evidence == pytest.approx(serial.alarm.evidence, abs=1e-9)
    assert watch.alarm.began == serial.alarm.began
    assert watch.labelled.evidence == pytest.approx(serial.labelled.evidence, abs=1e-9)
    for alarm in readings:  # of one moment
        assert alarm.raised == (alarm.evidence >= alarm.threshold)
        assert alarm.began is None or alarm.began < alarm.count


def test_a_watch_is_copied_by_value():
    watch = normal_watch().update(predicted(np.zeros(3)))
    other = copy.deepcopy(watch).update(predicted(np.zeros(4)))
    assert (watch.count, other.count) == (3, 7)


# --- several processes, and files ---------------------------------------------------------------------------------------


def watches(count=3):
    parts = []
    for seed in range(count):
        watch = normal_watch()
        watch.streams = (Stream(f"process {seed}", watch.baseline.scores),)
        draw = np.random.default_rng(seed)
        labels = torch.from_numpy(draw.integers(0, 2, 200))
        parts.append(watch.update(predicted(draw.normal(0.3 * seed, 1, 200), draw.random(200)), labels=labels))
    return parts


def reading(watch):
    return watch.count, watch.alarm, watch.accuracy, watch.labelled


def test_merging_is_associative_and_commutative():
    first, second, third = watches()
    merged = first.merge(second, third)
    assert reading(first.merge(second).merge(third)) == reading(merged)
    assert reading(third.merge(first.merge(second))) == reading(merged)
    assert reading(second.merge(third, first)) == reading(merged)
    assert merged.count == 600
    assert merged.alarm.threshold == pytest.approx(first.alarm.threshold + math.log(3))
    assert merged.alarm.evidence == max(part.alarm.evidence for part in (first, second, third))
    assert merged.alarm.stream == "process 2"
    assert merged.labelled.count == 600
    with pytest.raises(OptionError, match="cannot be updated"):
        merged.update(predicted(np.zeros(2)))
    with pytest.raises(OptionError, match="same validation data"):
        first.merge(normal_watch(seed=5))
    with pytest.raises(OptionError, match="same validation data and options"):
        first.merge(normal_watch(alpha=0.2))


def test_a_stream_is_merged_once(tmp_path):
    first, second, _ = watches()
    earlier = mola.Watch.load(first.save(tmp_path / "watch"))
    first.update(predicted(np.zeros(5)))
    new = normal_watch()
    for one, other in ((first, first), (first, earlier), (first.merge(second), second), (new, new)):
        with pytest.raises(OptionError, match="merged only once"):
            one.merge(other)
    folder = new.save(tmp_path / "new")
    servers = [mola.Watch.load(folder).update(predicted(np.zeros(5))) for _ in range(3)]
    assert servers[0].merge(*servers[1:]).count == 15, "servers may begin with one saved watch"


def test_a_merged_watch_names_the_stream_of_its_alarm():
    draw = np.random.default_rng(0)
    parts = []
    for index in range(4):
        watch = normal_watch(recent=100)
        watch.streams = (Stream(f"server {index}", watch.baseline.scores),)
        scores = draw.normal(size=900) + (4 if index == 2 else 0) * (np.arange(900) >= 800)
        confidence = np.where(np.arange(900) < 875, 0.99, 0.5)
        parts.append(watch.update(predicted(scores, confidence)))
    merged = parts[0].merge(*parts[1:])
    assert merged.alarm.stream == "server 2"
    assert merged.alarm.count == 900
    assert abs(merged.alarm.began - 800) < 20
    assert "of the 900 in stream 'server 2'" in repr(merged)
    assert merged.accuracy.count == 100
    assert merged.accuracy.value == pytest.approx(parts[0].baseline.confidence.shares(np.array([[0.5]]))[0])


def test_a_bare_network_is_no_predictor():
    with pytest.raises(OptionError, match=r"posterior must be .*got a Linear.*mola\.ensemble") as caught:
        mola.watch(nn.Linear(2, 3), [torch.zeros(4, 2)])
    assert caught.value.argument == "posterior"


def test_a_team_collects_watches_as_they_are():
    watch = watches(1)[0]
    assert reading(pickle.loads(pickle.dumps(watch))) == reading(watch)


def test_half_precision_is_read():
    prediction = mola.Prediction(
        {"probs": torch.tensor([[0.25, 0.75]] * 3).bfloat16(), "ood_score": torch.arange(3.0).bfloat16()}
    )
    watch = normal_watch().update(prediction)
    assert watch.streams[0].window["score"].tolist() == [0, 1, 2]


def test_a_loaded_watch_continues_as_if_nothing_had_happened(tmp_path):
    draw = np.random.default_rng(0)
    prediction = predicted(draw.normal(0.2, 1, 500), draw.random(500))
    watch = normal_watch().update(prediction[:300])
    loaded = mola.Watch.load(watch.save(tmp_path / "watch"))
    assert reading(loaded) == reading(watch)
    for each in (watch, loaded):
        each.update(labels=torch.zeros(300)).update(prediction[300:])
    assert reading(loaded) == reading(watch)
    first = watch.merge(*watches())
    assert reading(mola.Watch.load(first.save(tmp_path / "merged"))) == reading(first)
    new = normal_watch()
    assert reading(mola.Watch.load(new.save(tmp_path / "watch"))) == reading(new), "an earlier watch is replaced"


def test_damaged_watches_are_refused(tmp_path):
    with pytest.raises(StorageError, match="nowhere contains no watch"):
        mola.Watch.load(tmp_path / "nowhere")
    folder = normal_watch().update(predicted(np.zeros(10))).save(tmp_path / "watch")
    for path in folder.glob("[!.]*"):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(StorageError):
            mola.Watch.load(folder)
        path.write_bytes(content)
    mola.Watch.load(folder)
    with pytest.raises(StorageError, match="watch"):
        mola.load(folder, [nn.Linear(3, 2)])


# --- predictors of every kind -------------------------------------------------------------------------------------------


def test_a_posterior_is_watched_from_its_validation_loader():
    networks = [problems.trained(seed) for seed in range(2)]
    val = [(inputs.double(), labels) for inputs, labels in problems.blob_loader(1, count=400)]
    posterior = mola.fit(networks, [(inputs.double(), labels) for inputs, labels in problems.blob_loader()], val)
    watch = mola.watch(posterior, val, alpha=0.05, name="server")
    inputs, labels = problems.blobs(2, count=600)
    prediction = posterior.predict(inputs.double())
    watch.update(prediction, labels=labels)
    truth = float((prediction.label == labels).double().mean())
    assert not watch.alarm
    assert watch.accuracy.low <= truth <= watch.accuracy.high
    assert watch.labelled.value == pytest.approx(truth)
    assert watch.streams[0].name == "server"
    watch.update(posterior.predict(10 * inputs.double().flip(1)))
    assert watch.alarm
    with pytest.raises(DataError, match="empty"):
        mola.watch(posterior, [])


def test_predictions_of_another_predictor_and_unknown_classes_are_refused(tmp_path):
    train, val = ([(inputs.double(), labels)] for inputs, labels in (problems.blobs(0), problems.blobs(1)))
    posterior = mola.fit([problems.trained(0)], train, val)
    watch = mola.watch(posterior, val)
    before = watch.streams
    inputs, labels = val[0]
    others = {
        "tuned": posterior.tune(val, rule="nll"),
        "hotter": posterior.with_temperature(2.0),
        "networks": mola.fit([problems.trained(1)], train, val),
    }
    for watching in (watch, mola.Watch.load(watch.save(tmp_path / "watch"))):
        for name, other in others.items():
            with pytest.raises(OptionError, match="another predictor"):
                watching.update(other.predict(inputs))
            assert watching.count == 0, name
    for wrong in (labels + 1.5, labels - 3, torch.full_like(labels, 99)):
        with pytest.raises(DataError, match="whole numbers from 0 to"):
            watch.update(posterior.predict(inputs), labels=wrong)
        assert watch.streams is before
    watch.update(mola.load(posterior.save(tmp_path / "posterior"), posterior.networks).predict(inputs))
    with pytest.raises(DataError, match="whole numbers from 0 to"):
        watch.update(labels=labels + 10)
    assert watch.update(labels=labels).labelled.count == len(labels)
    with pytest.raises(DataError, match="whole numbers from 0 to"):
        mola.watch(mola.ensemble([problems.trained(0)]), [(inputs, labels + 10)])


def test_unlabelled_validation_data_suffice_for_the_alarm():
    ensemble = mola.ensemble([problems.trained(0)])
    inputs, labels = problems.blobs(1, count=300)
    watch = mola.watch(ensemble, [inputs.double()])
    watch.update(ensemble.predict(inputs.double()))
    assert watch.accuracy.reason == "no labelled validation data"
    watch.update(labels=labels)
    assert watch.labelled.least is None
    assert not watch.labelled.raised
    correct = (ensemble.predict(inputs.double()).label == labels).double().mean()
    assert watch.labelled.value == pytest.approx(float(correct))
    assert watch.labelled.low < watch.labelled.value < watch.labelled.high


def test_regression_is_judged_by_the_coverage_of_its_intervals():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    inputs = torch.randn(900, 3)
    targets = inputs.sum(1, keepdim=True) + 0.3 * torch.randn(900, 1)
    problems.train(network, inputs[:300], targets[:300], 200, 0.02, nn.functional.mse_loss)
    train, val = [(inputs[:300], targets[:300])], [(inputs[300:600], targets[300:600])]
    posterior = mola.fit(network, train, likelihood="gaussian")
    watch = mola.watch(posterior, val)
    prediction = posterior.predict(inputs[600:])
    watch.update(prediction)
    assert watch.accuracy.reason == "regression"
    watch.update(labels=targets[600:, 0])
    low, high = prediction.interval(0.9)
    covered = ((low <= targets[600:]) & (targets[600:] <= high)).double().mean()
    assert watch.labelled.value == pytest.approx(float(covered))
    assert not watch.labelled.raised
    far = posterior.predict(6 * inputs[600:])
    watch.update(far, labels=targets[600:] + 30)
    assert watch.alarm
    assert watch.labelled.raised


def test_multi_label_outputs():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    inputs = torch.randn(900, 4)
    labels = (inputs[:, :3] + 0.5 * torch.randn(900, 3) > 0).float()
    problems.train(network, inputs[:300], labels[:300], 150, 0.02, nn.functional.binary_cross_entropy_with_logits)
    ensemble = mola.ensemble([network], likelihood=BERNOULLI)
    watch = mola.watch(ensemble, [(inputs[300:600], labels[300:600])])
    prediction = ensemble.predict(inputs[600:])
    watch.update(prediction)
    truth = float((prediction.label == labels[600:]).double().mean())
    assert watch.accuracy.low <= truth <= watch.accuracy.high
    labels[600, 0] = math.nan
    assert watch.update(labels=labels[600:]).labelled.value == pytest.approx(truth, abs=0.002)


def test_a_label_without_validation_data_is_left_out_of_the_expected_accuracy(tmp_path):
    draw = np.random.default_rng(0)
    confidence = draw.random((2000, 3))
    correct = (draw.random((2000, 3)) < confidence).astype(float)
    correct[:, 1] = math.nan
    fitted = ConfidenceThreshold.fit(confidence[:1000], correct[:1000])
    two_labels = ConfidenceThreshold.fit(confidence[:1000, ::2], correct[:1000, ::2])
    assert np.array_equal(fitted.shares(confidence[1000:]), two_labels.shares(confidence[1000:, ::2]))
    baseline = Baseline.of_columns(draw.normal(size=1000), confidence[:1000], correct[:1000])
    watch = Watch.of(baseline, WatchOptions())
    assert not Watch.load(watch.save(tmp_path)).differences(watch)


def test_dense_outputs_are_judged_input_by_input():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))
    images = torch.rand(240, 1, 6, 7)
    labels = (nn.functional.avg_pool2d(images, 3, 1, 1)[:, 0] + 0.05 * torch.randn(240, 6, 7) > 0.5).long()
    problems.train(network, images[:80], labels[:80], 60, 0.02)
    ensemble = mola.ensemble([network])
    watch = mola.watch(ensemble, [(images[80:160], labels[80:160])])
    prediction = ensemble.predict(images[160:])
    truth = float((prediction.label == labels[160:]).double().mean())
    watch.update(prediction, labels=labels[160:])
    assert watch.count == 80
    assert watch.accuracy.low - 0.01 <= truth <= watch.accuracy.high + 0.01
    assert watch.labelled.value == pytest.approx(truth)
    with pytest.raises(OptionError, match="dense"):
        watch.update(labels=labels[160:])


def test_dense_outputs_may_have_another_size_in_each_batch():
    torch.manual_seed(0)
    ensemble = mola.ensemble([nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))])
    texts = [torch.randn(40, length, 4) for length in (7, 5)]
    loader = [(text, text[..., :3].argmax(-1)) for text in texts]
    correct = [ensemble.predict(inputs).label == labels for inputs, labels in loader]
    watch = mola.watch(ensemble, loader)
    shares = torch.cat([part.flatten(1).double().mean(1) for part in correct])
    assert watch.baseline.accuracy == pytest.approx(float(shares.mean()))
    for inputs, _ in loader:
        watch.update(ensemble.predict(inputs))
    assert watch.accuracy.value == pytest.approx(watch.baseline.accuracy, abs=0.02)


def test_a_single_batch_is_no_loader():
    ensemble = mola.ensemble([problems.trained(0)])
    with pytest.raises(DataError, match=r"Pass a DataLoader, or a single batch in a list"):
        mola.watch(ensemble, problems.blobs(1, count=30)[0].double())


def test_starts_lie_on_grids():
    """The k-th start on every grid has the weight of the k-th start on the finest."""
    weights = start_weights(0, 3 * max(GRIDS))
    assert weights[1] == pytest.approx((1 / math.log2(3) - 1 / math.log2(4)) / len(GRIDS))
    assert weights[0] == pytest.approx(1 - 1 / math.log2(3))
    assert weights[8] > weights[7]
