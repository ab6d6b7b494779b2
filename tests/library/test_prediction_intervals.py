"""Intervals contain the target with the given probability: exactly, by leaving one out, and by definition."""

import math

import numpy as np
import pytest
import torch

import mola
from mola.errors import DataError, MolaWarning, OptionError
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
    with pytest.raises(OptionError, match="pass groups"):
        band(prediction)
    with pytest.raises(DataError, match="group 5"):
        band(prediction, groups=[5] * 300)
    with pytest.warns(MolaWarning, match="infinite"):
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
