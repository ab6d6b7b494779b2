"""Intervals contain the target with the given probability: exactly, by leaving one out, and by definition."""

import math

import numpy as np
import pytest
import torch

import mola
from mola.errors import DataError, OptionError
from mola.likelihoods import Gaussian


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
    """Intervals work on the prediction of a regression."""
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


def test_wrong_use_is_refused():
    prediction, targets = regression(50)
    for error, words, changes in (
        (DataError, r"mola\.prediction_sets", {"prediction": torch.zeros(50, 2)}),
        (DataError, r"shape \(50, 2\).*got shape \(49, 2\)", {"targets": targets[1:]}),
        (DataError, "too few for a coverage", {"coverage": 0.99}),
        (OptionError, "needs method='normalised'", {"joint": True}),
        (OptionError, "method must be", {"method": "cqr"}),
        (DataError, "positive", {"prediction": Normal(prediction.mean, 0 * prediction.scale), "method": "normalised"}),
    ):
        with pytest.raises(error, match=words):
            mola.prediction_intervals(**{"prediction": prediction, "targets": targets} | changes)
    with pytest.raises(DataError, match="2 outputs, got 1"):
        mola.prediction_intervals(prediction, targets)(regression(5, outputs=1)[0])
