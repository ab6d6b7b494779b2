"""Sets and intervals hold the truth as often as promised: exactly, by leaving one out, and by definition."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import mola
from mola.decisions.calibration import Calibration, ranked
from mola.errors import DataError, MolaWarning, OptionError
from mola.likelihood import Gaussian


def data(count, classes=4, seed=0, ties=False):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.softmax(2 * torch.randn(count, classes, generator=generator, dtype=torch.float64), 1)
    if ties:
        probs = (8 * probs).round() + 0.5
        probs = probs / probs.sum(1, keepdim=True)
    labels = torch.multinomial(probs, 1, generator=generator)[:, 0]
    return probs, labels


def slow_scores(method, row, penalty, free):
    """Scores of one input, class by class."""
    order = sorted(range(len(row)), key=lambda c: (-row[c], c))
    found = {}
    for place, c in enumerate(order):
        if method == "lac":
            found[c] = -row[c]
        else:
            found[c] = sum(row[other] for other in order[:place]) + row[c]
            if method == "raps":
                found[c] += penalty * max(0, place + 1 - free)
    return [found[c] for c in range(len(row))]


@pytest.mark.parametrize("method", ["lac", "aps", "raps"])
def test_the_definition(method):
    probs, labels = data(60)
    sets = mola.prediction_sets(probs[:40], labels[:40], 0.8, method, penalty=0.1, free=1)
    calibration = sorted(
        slow_scores(method, row, 0.1, 1)[label]
        for row, label in zip(probs[:40].tolist(), labels[:40].tolist(), strict=True)
    )
    limit = calibration[math.ceil(41 * 0.8) - 1]
    expected = [[score <= limit + 1e-12 for score in slow_scores(method, row, 0.1, 1)] for row in probs[40:].tolist()]
    assert sets(probs[40:]).tolist() == expected


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("coverage", [0.5, 0.77, 0.9])
@pytest.mark.parametrize("method", ["lac", "aps", "raps"])
def test_the_promise_is_kept_exactly(method, coverage, ties):
    """Each datum in turn is the new one, and all others calibrate: the promise for exchangeable data, without sampling error."""
    probs, labels = data(61, ties=ties)
    held = 0
    for place in range(61):
        others = torch.arange(61) != place
        sets = mola.prediction_sets(probs[others], labels[others], coverage, method, penalty=0.05, free=1)
        held += int(sets(probs[place : place + 1])[0, labels[place]])
    exact = Fraction(coverage).limit_denominator(1000)
    assert Fraction(held, 61) >= exact
    if not ties and method == "lac":
        assert held == math.ceil(61 * exact)


@pytest.mark.parametrize("by", ["class", "group"])
def test_the_promise_is_kept_for_each_class_and_group(by):
    probs, labels = data(120, classes=3, seed=1)
    # The predictor is bad for one class, and for one group.
    probs[labels == 2] = probs[labels == 2].flip(1)
    names = np.where(np.arange(120) % 4 == 0, "few", "many")
    kinds = labels.numpy() if by == "class" else names
    held = np.zeros(120, dtype=bool)
    for place in range(120):
        others = np.arange(120) != place
        chosen = {"by": "class"} if by == "class" else {"groups": names[others]}
        sets = mola.prediction_sets(probs[others], labels[others], 0.8, **chosen)
        asked = {} if by == "class" else {"groups": names[place : place + 1]}
        held[place] = bool(sets(probs[place : place + 1], **asked)[0, labels[place]])
    for kind in np.unique(kinds):
        assert held[kinds == kind].mean() >= 0.8
    plain = mola.prediction_sets(probs, labels, 0.8)(probs)[torch.arange(120), labels].numpy()
    if by == "class":
        assert plain[kinds == 2].mean() < 0.8  # on average only


def test_randomised_sets_have_the_coverage_that_was_asked_for():
    """And no more: without randomisation the last class is held whole."""
    generator = torch.Generator().manual_seed(0)
    probs, labels = data(20_000, seed=2)
    every = torch.arange(10_000)
    found = {}
    for randomised in (False, True):
        sets = mola.prediction_sets(
            probs[:10_000], labels[:10_000], 0.7, "aps", randomised=randomised, generator=generator
        )
        held = sets(probs[10_000:], generator=generator)
        found[randomised] = (float(held[every, labels[10_000:]].double().mean()), float(held.sum(1).double().mean()))
    assert found[True][0] == pytest.approx(0.7, abs=4 * math.sqrt(2 * 0.21 / 10_000))
    assert found[True][1] < found[False][1]


def test_randomised_sets_repeat_with_their_generator():
    probs, labels = data(200)
    sets = [
        mola.prediction_sets(probs, labels, method="aps", randomised=True, generator=torch.Generator().manual_seed(1))
        for _ in range(2)
    ]
    held = [one(probs, generator=torch.Generator().manual_seed(2)) for one in sets]
    assert torch.equal(*held)


def test_empty_and_whole_sets():
    probs = torch.tensor([[0.98, 0.02], [0.95, 0.05], [0.9, 0.1], [0.85, 0.15]] * 10)
    labels = torch.zeros(40, dtype=torch.int64)
    unsure = torch.tensor([[0.6, 0.4], [0.2, 0.8], [0.99, 0.01]])
    sets = mola.prediction_sets(probs, labels, 0.9)
    assert sets.least_probability == pytest.approx(0.85)
    assert sets(unsure).tolist() == [[False, False], [False, False], [True, False]]
    filled = mola.prediction_sets(probs, labels, 0.9, at_least_one=True)
    assert filled(unsure).tolist() == [[True, False], [False, True], [True, False]]
    with pytest.warns(MolaWarning, match="at least 9 labelled data of each class: there are fewer of class 1"):
        whole = mola.prediction_sets(probs, labels, 0.9, by="class")
    assert whole(unsure)[:, 1].all()  # nothing is known of class 1: it cannot be ruled out
    with pytest.warns(MolaWarning, match="fewer of group b, whose sets therefore hold all"):
        grouped = mola.prediction_sets(probs, labels, 0.9, groups=["a"] * 35 + ["b"] * 5)
    assert grouped(unsure, groups=["a", "b", "b"]).tolist() == [[False, False], [True, True], [True, True]]


@pytest.mark.parametrize(("coverage", "needed"), [(0.9, 9), (0.95, 19), (0.99, 99), (0.5, 1)])
def test_too_few_data_are_refused_with_the_number_needed(coverage, needed):
    probs, labels = data(needed)
    if needed > 1:
        with pytest.raises(DataError, match=f"Give at least {needed}, or ask for less"):
            mola.prediction_sets(probs[1:], labels[1:], coverage)
    assert mola.prediction_sets(probs, labels, coverage).count == needed


def test_what_does_not_fit_together_is_refused():
    probs, labels = data(50)
    with pytest.raises(OptionError, match=r"90 % is 0\.9"):
        mola.prediction_sets(probs, labels, 90)
    with pytest.raises(OptionError, match="method must be one of lac, aps, raps"):
        mola.prediction_sets(probs, labels, 0.9, "thr")
    with pytest.raises(OptionError, match="not randomised"):
        mola.prediction_sets(probs, labels, randomised=True)
    with pytest.raises(OptionError, match="by must be 'class', or None"):
        mola.prediction_sets(probs, labels, by="klass")
    with pytest.raises(OptionError, match="not both"):
        mola.prediction_sets(probs, labels, by="class", groups=[0] * 50)
    with pytest.raises(OptionError, match="penalty must be"):
        mola.prediction_sets(probs, labels, method="raps", penalty=-1)
    with pytest.raises(DataError, match="one name or number for each of the 50"):
        mola.prediction_sets(probs, labels, groups=[0] * 49)
    sets = mola.prediction_sets(probs, labels)
    with pytest.raises(DataError, match="4 classes, got 3"):
        sets(torch.full((2, 3), 1 / 3))
    with pytest.raises(OptionError, match="not by group"):
        sets(probs, groups=[0] * 50)
    grouped = mola.prediction_sets(probs, labels, groups=[0] * 50)
    with pytest.raises(OptionError, match="give groups"):
        grouped(probs)
    with pytest.raises(DataError, match="no calibration data of the group 7"):
        grouped(probs, groups=[7] * 50)
    with pytest.raises(OptionError, match="least probability"):
        _ = mola.prediction_sets(probs, labels, method="aps").least_probability


def test_ranks_and_masses_of_equal_probabilities():
    above, rank = ranked(torch.tensor([[0.25, 0.25, 0.5], [0.2, 0.6, 0.2]], dtype=torch.float64))
    assert rank.tolist() == [[2, 3, 1], [2, 1, 3]]
    assert torch.allclose(above, torch.tensor([[0.5, 0.75, 0.0], [0.6, 0.0, 0.8]], dtype=torch.float64))


def test_columns_make_the_same_calibration_again():
    probs, labels = data(30)
    first = Calibration.of(probs, labels)
    again = Calibration.of_columns(first.columns(), 4)
    assert all(torch.equal(getattr(again, name), column) for name, column in first.columns().items())
    assert torch.equal(first.correct, probs.argmax(1) == labels)
    for name, column in (("label", first.label + 4), ("confidence", first.confidence[1:]), ("true_rank", first.label)):
        with pytest.raises(DataError, match="expected"):
            Calibration.of_columns(first.columns() | {name: column}, 4)


class Normal:
    """A stand-in for a regression prediction: independent normal targets."""

    def __init__(self, mean, scale):
        self.mean, self.scale = mean, scale

    @property
    def variance(self):
        return self.scale.square()

    def interval(self, level):
        reach = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor((1 + level) / 2, dtype=torch.float64))
        return self.mean - reach * self.scale, self.mean + reach * self.scale

    def rows(self, chosen):
        return Normal(self.mean[chosen], self.scale[chosen])


def regression(count, outputs=2, seed=0, misjudged=2.0):
    """Targets whose spread is `misjudged` times what is predicted."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(count, outputs, generator=generator, dtype=torch.float64)
    scale = torch.rand(count, outputs, generator=generator, dtype=torch.float64) + 0.5
    noise = torch.randn(count, outputs, generator=generator, dtype=torch.float64)
    return Normal(mean, scale), mean + misjudged * scale * noise


@pytest.mark.parametrize("misjudged", [0.3, 3.0])
@pytest.mark.parametrize(("method", "joint"), [("quantile", False), ("normalised", False), ("normalised", True)])
def test_intervals_keep_their_promise_exactly(method, joint, misjudged):
    prediction, targets = regression(61, misjudged=misjudged)
    held = np.zeros((61, 2), dtype=bool)
    for place in range(61):
        others = torch.arange(61) != place
        band = mola.prediction_intervals(prediction.rows(others), targets[others], 0.8, method, joint=joint)
        lower, upper = band(prediction.rows(~others))
        held[place] = ((lower <= targets[place]) & (targets[place] <= upper)).numpy()[0]
    found = [held.all(1).sum()] if joint else held.sum(0).tolist()
    assert all(one == math.ceil(61 * 0.8) for one in found)


@pytest.mark.parametrize("method", ["quantile", "normalised"])
def test_intervals_of_mixtures(method):
    """What a regression predicts has all that intervals read."""
    generator = torch.Generator().manual_seed(3)
    means = torch.randn(3, 120, 2, generator=generator, dtype=torch.float64)
    weights = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    prediction = mola.RegressionPrediction.of_means(means, weights, Gaussian(noise=(0.5, 0.7)))
    targets = prediction.mean + 3 * torch.randn(120, 2, generator=generator, dtype=torch.float64)
    lower, upper = mola.prediction_intervals(prediction, targets, 0.9, method)(prediction)
    held = ((lower <= targets) & (targets <= upper)).sum(0)
    assert held.tolist() == [math.ceil(121 * 0.9)] * 2


def test_intervals_by_definition():
    prediction, targets = regression(100)
    low, high = prediction.interval(0.9)
    band = mola.prediction_intervals(prediction, targets, 0.9)
    scores = torch.maximum(low - targets, targets - high).sort(0).values[math.ceil(101 * 0.9) - 1]
    lower, upper = band(prediction)
    assert torch.allclose(lower, low - scores)
    assert torch.allclose(upper, high + scores)
    stretched = mola.prediction_intervals(prediction, targets, 0.9, "normalised")
    ratio = ((targets - prediction.mean).abs() / prediction.scale).sort(0).values[math.ceil(101 * 0.9) - 1]
    lower, upper = stretched(prediction)
    assert torch.allclose(upper - lower, 2 * ratio * prediction.scale)


def test_intervals_that_would_be_empty_are_points():
    prediction, _ = regression(100)
    band = mola.prediction_intervals(prediction, prediction.mean, 0.9)
    narrow = Normal(torch.zeros(1, 2).double(), torch.full((1, 2), 0.01).double())
    lower, upper = band(narrow)
    assert torch.equal(lower, upper)
    assert torch.equal(lower, narrow.mean)


def test_intervals_by_group():
    prediction, targets = regression(300, outputs=1)
    loud = np.arange(300) % 3 == 0
    targets = torch.where(torch.from_numpy(loud)[:, None], 5 * targets, targets)
    band = mola.prediction_intervals(prediction, targets[:, 0], 0.9, groups=loud)
    lower, upper = band(prediction, groups=loud)
    held = ((lower <= targets) & (targets <= upper))[:, 0].numpy()
    assert held[loud].mean() >= 0.9
    assert held[~loud].mean() >= 0.9
    assert (upper - lower)[loud].mean() > 2 * (upper - lower)[~loud].mean()
    with pytest.raises(OptionError, match="give groups"):
        band(prediction)
    with pytest.raises(DataError, match="group 5"):
        band(prediction, groups=[5] * 300)
    with pytest.warns(MolaWarning, match="no ends"):
        mola.prediction_intervals(prediction, targets, 0.9, groups=[0] * 295 + [1] * 5)


def test_intervals_refuse_what_does_not_fit():
    prediction, targets = regression(50)
    with pytest.raises(DataError, match=r"mola\.prediction_sets"):
        mola.prediction_intervals(torch.zeros(50, 2), targets)
    with pytest.raises(DataError, match=r"shape \(50, 2\), as the predictions; got shape \(49, 2\)"):
        mola.prediction_intervals(prediction, targets[1:])
    with pytest.raises(DataError, match=r"too few for a coverage of 0\.99"):
        mola.prediction_intervals(prediction, targets, 0.99)
    with pytest.raises(OptionError, match="only its scores have none"):
        mola.prediction_intervals(prediction, targets, joint=True)
    with pytest.raises(OptionError, match="method must be one of quantile, normalised"):
        mola.prediction_intervals(prediction, targets, method="cqr")
    with pytest.raises(DataError, match="positive variances"):
        mola.prediction_intervals(Normal(prediction.mean, 0 * prediction.scale), targets, method="normalised")
    one, _ = regression(5, outputs=1)
    with pytest.raises(DataError, match="2 outputs, got 1"):
        mola.prediction_intervals(prediction, targets)(one)
