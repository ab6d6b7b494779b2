"""Intervals contain the target with the given probability: exactly, by leaving one out, and by definition."""

import math

import numpy as np
import pytest
import torch

import molaplace as mola
from molaplace.errors import DataError, OptionError
from tests.closeness import assert_close


def mixture(means, scale):
    """A prediction with components (K, n, D), given one by one, and equal weights."""
    variance = scale.square().expand_as(means)
    variance = variance.transpose(0, 1)
    fields = {"component_mean": means.transpose(0, 1), "component_variance": variance, "component_noise": variance}
    return mola.RegressionPrediction(fields, weights=torch.full((len(means),), 1 / len(means), dtype=torch.float64))


def regression(count, outputs=2, seed=0, misjudged=2.0):
    """Targets whose spread is `misjudged` times what is predicted."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(3, count, outputs, generator=generator, dtype=torch.float64)
    prediction = mixture(means, torch.rand(count, outputs, generator=generator, dtype=torch.float64) + 0.5)
    noise = torch.randn(count, outputs, generator=generator, dtype=torch.float64)
    return prediction, prediction.mean + misjudged * prediction.std * noise


@pytest.mark.parametrize("misjudged", [0.3, 3.0])
@pytest.mark.parametrize(("method", "joint"), [("quantile", False), ("normalised", False), ("normalised", True)])
def test_intervals_keep_their_promise_exactly(method, joint, misjudged):
    prediction, targets = regression(61, misjudged=misjudged)
    held = np.zeros((61, 2), dtype=bool)
    for index in range(61):
        others = torch.arange(61) != index
        band = mola.prediction_intervals(prediction[others], targets[others], 0.8, method, joint=joint)
        lower, upper = band(prediction[~others])
        held[index] = ((lower <= targets[index]) & (targets[index] <= upper)).numpy()[0]
    counts = [held.all(1).sum()] if joint else held.sum(0).tolist()
    assert all(count == math.ceil(61 * 0.8) for count in counts)


def test_intervals_by_definition():
    prediction, targets = regression(100)
    low, high = prediction.interval(0.9)
    band = mola.prediction_intervals(prediction, targets, 0.9)
    scores = torch.maximum(low - targets, targets - high).sort(0).values[math.ceil(101 * 0.9) - 1]
    lower, upper = band(prediction)
    assert torch.allclose(lower, low - scores)
    assert torch.allclose(upper, high + scores)
    stretched = mola.prediction_intervals(prediction, targets, 0.9, "normalised")
    ratio = ((targets - prediction.mean).abs() / prediction.std).sort(0).values[math.ceil(101 * 0.9) - 1]
    lower, upper = stretched(prediction)
    assert torch.allclose(upper - lower, 2 * ratio * prediction.std)


def test_targets_of_one_output_need_no_axis():
    prediction, targets = regression(50, outputs=1)
    plain, with_axis = (mola.prediction_intervals(prediction, values) for values in (targets[:, 0], targets))
    assert torch.equal(plain.threshold, with_axis.threshold)


def test_intervals_that_would_be_empty_are_points():
    prediction, _ = regression(100)
    band = mola.prediction_intervals(prediction, prediction.mean, 0.9)
    narrow = mixture(torch.zeros(1, 1, 2).double(), torch.full((1, 2), 0.01).double())
    lower, upper = band(narrow)
    assert torch.equal(lower, upper)
    assert_close(lower, narrow.mean, scale=0.01)


def test_wrong_use_is_refused():
    prediction, targets = regression(50)
    for error, words, changes in (
        (DataError, r"mola\.prediction_sets", {"prediction": torch.zeros(50, 2)}),
        (DataError, r"shape \(50, 2\).*got shape \(49, 2\)", {"targets": targets[1:]}),
        (DataError, r"shape \(50, 2\).*got shape \(50,\)", {"targets": targets[:, 0]}),
        (DataError, "too few for a coverage", {"coverage": 0.99}),
        (OptionError, "method must be 'normalised'", {"joint": True}),
        (OptionError, "method must be", {"method": "cqr"}),
        (DataError, "positive", {"prediction": mixture(targets[None], 0 * targets), "method": "normalised"}),
    ):
        with pytest.raises(error, match=words):
            mola.prediction_intervals(**{"prediction": prediction, "targets": targets} | changes)
    with pytest.raises(DataError, match="2 outputs, got 1"):
        mola.prediction_intervals(prediction, targets)(regression(5, outputs=1)[0])
