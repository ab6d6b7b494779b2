"""Noise scaling: the best noise of each output, for every kind of regression predictor."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace import normal_mixtures
from molaplace.calibration import scale_noise
from molaplace.errors import DataError, OptionError
from molaplace.likelihoods import Gaussian
from tests.closeness import assert_close


def network(outputs=2, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, outputs)).eval()


def data(outputs=2, count=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator)
    return x, x[:, :outputs].sin() + 0.3 * torch.randn(count, outputs, generator=generator)


@pytest.mark.parametrize(
    "likelihood",
    [Gaussian(), Gaussian(noise=3.0), Gaussian(location=[7.0, 5.0], scale=3.0), Gaussian(heteroscedastic=True)],
)
def test_the_noise_is_the_best_for_each_output(likelihood):
    outputs = 4 if likelihood.heteroscedastic else 2
    plain = mola.ensemble([network(outputs, seed) for seed in range(3)], likelihood=likelihood)
    x, y = data(seed=4)
    scaled = scale_noise(plain, [(x[:40], y[:40]), (x[40:], y[40:])])
    assert plain.likelihood == likelihood
    assert scaled.likelihood.estimated

    def losses(posterior):
        actual = posterior.predict(x)
        parts = actual.weights, actual.component_mean, actual.component_variance
        return -normal_mixtures.log_density(*parts, y).mean(0)

    best = losses(scaled)
    for factor in (0.9, 0.999, 1.001, 1.1):
        assert bool((losses(scaled.with_settings(noise_factor=factor)) >= best - 1e-9).all())


def test_wrong_use_is_refused():
    x, y = data()
    net = network()
    ensemble = mola.ensemble(net, likelihood="gaussian")
    fitted = mola.fit(net, [(x, y)], likelihood="gaussian", progress=False)
    for error, words, predictor, loader in (
        (DataError, "batch 1 of the validation loader: targets must be finite", ensemble, [(x, y), (x, y * math.nan)]),
        (DataError, r"batch 0 .* shape \(60, 2\)", ensemble, [(x, y[:, 0])]),
        (DataError, "no labels", ensemble, [x]),
        (DataError, "exactly", ensemble, [(x, net(x).detach())]),
        (OptionError, r"posterior\.tune", fitted, [(x, y)]),
        (OptionError, "temperature_scaled", mola.ensemble(net), [(x, y)]),
    ):
        with pytest.raises(error, match=words):
            scale_noise(predictor, loader)


def test_a_component_alone_keeps_its_noise():
    """Tuning rescales the noise of each network, and functions are drawn from a component alone."""
    inputs = torch.randn(120, 3, generator=torch.Generator().manual_seed(0))
    targets = inputs[:, :2] + 0.3 * torch.randn(120, 2, generator=torch.Generator().manual_seed(1))
    networks = [nn.Linear(3, 2) for _ in range(2)]
    train, val = [(inputs[:60], targets[:60])], [(inputs[60:], targets[60:])]
    posterior = mola.fit(networks, train, val, likelihood="gaussian", progress=False)
    assert posterior.settings.noise_factor
    prediction = posterior.predict(inputs)
    for index in range(2):
        alone = posterior.alone(index).predict(inputs)
        assert_close(alone.component_noise[:, 0], prediction.component_noise[:, index], "float64")
    assert posterior.function(0)(inputs).shape == (120, 2)
