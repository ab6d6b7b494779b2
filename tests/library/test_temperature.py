"""Temperatures: the exact minimum, against scipy and a fine grid; the predictors that use them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import optimize, special
from torch import nn

import mola
from mola.baselines import (
    TemperatureScaled,
    fit_temperature,
    temperature_scaled,
)
from mola.errors import DataError, MolaWarning, OptionError, StorageError
from tests.closeness import assert_close
from tests.conftest import make_problem


def nll(logits, labels, weights, temperature):
    """The mixture's loss, written out."""
    members = special.softmax(logits / temperature, axis=-1)[:, np.arange(len(labels)), labels]
    return -np.log(np.tensordot(weights, members, axes=1)).mean()


def draw(members, count=60, classes=4, scale=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(members, count, classes, generator=generator)
    chosen = torch.distributions.Categorical(logits=logits.mean(0) / 2)
    torch.manual_seed(seed)
    return logits, chosen.sample()


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_temperature_is_scipys_and_the_best_of_a_fine_grid(members, seed):
    logits, labels = draw(members, seed=seed)
    weights = torch.arange(1.0, members + 1) / sum(range(1, members + 1))
    found = fit_temperature(logits, labels, weights)

    def loss(log_t):
        return nll(logits.numpy(), labels.numpy(), weights.numpy(), np.exp(log_t))

    scipys = optimize.minimize_scalar(loss, bracket=(np.log(found) - 1, np.log(found) + 1), tol=1e-12)
    assert abs(np.log(found) - scipys.x) < 1e-6  # scipy sees the loss alone, whose minimum is flat to rounding
    assert loss(np.log(found)) <= min(loss(log_t) for log_t in np.linspace(-4, 5, 400)) + 1e-12
    step = 1e-5
    slope = (loss(np.log(found) + step) - loss(np.log(found) - step)) / (2 * step)
    assert abs(slope) < 1e-7


def test_two_minima_and_the_lower_is_taken():
    """Members whose logits differ in scale want different temperatures: some such losses have two minima."""
    generator = torch.Generator().manual_seed(3)
    grid, seen = np.exp(np.linspace(-7, 9, 400)), 0
    for _ in range(60):
        logits = torch.tensor([0.05, 50.0])[:, None, None] * torch.randn(2, 12, 3, generator=generator)
        labels = torch.randint(3, (12,), generator=generator)
        losses = np.array([nll(logits.numpy(), labels.numpy(), [0.5, 0.5], t) for t in grid])
        inner = (losses[1:-1] < losses[:-2]) & (losses[1:-1] < losses[2:])
        if inner.sum() == 2 and 0 < losses.argmin() < len(grid) - 1:
            seen += 1
            found = fit_temperature(logits, labels)
            assert nll(logits.numpy(), labels.numpy(), [0.5, 0.5], found) <= losses.min() + 1e-12
    assert seen >= 2


def test_labels_that_are_all_right_take_the_end_of_the_range_with_a_warning():
    logits, _ = draw(1)
    with pytest.warns(MolaWarning, match="goes to 0"):
        found = fit_temperature(logits, logits[0].argmax(1))
    assert float((logits[0] / found).softmax(-1).amax(1).min()) > 0.99
    with pytest.warns(MolaWarning, match="goes to infinity"):
        found = fit_temperature(logits, logits[0].argmin(1))
    assert float((logits[0] / found).softmax(-1).amax()) < 0.26
    with pytest.warns(MolaWarning, match="every temperature"):
        assert fit_temperature(torch.ones(1, 5, 3), torch.zeros(5, dtype=torch.long)) == 1.0


@pytest.mark.parametrize(
    ("logits", "labels", "words"),
    [
        (torch.randn(3), torch.zeros(3, dtype=torch.long), "members, data, classes"),
        (torch.randn(1, 4, 1), torch.zeros(4, dtype=torch.long), "2 classes"),
        (torch.randn(1, 4, 3), torch.full((4,), 3), r"lie in \[0, 2\]"),
        (torch.randn(1, 4, 3), torch.zeros(5, dtype=torch.long), "4 class indices"),
        (torch.full((1, 4, 3), float("nan")), torch.zeros(4, dtype=torch.long), "NaN"),
    ],
)
def test_bad_data_are_refused(logits, labels, words):
    with pytest.raises(DataError, match=words):
        fit_temperature(logits, labels)


def problems():
    """Three networks, and labels that they know something about."""
    made = [make_problem(seed) for seed in range(3)]
    with torch.no_grad():
        probs = sum((one.network(made[0].inputs) / 2).softmax(-1) for one in made) / 3
    made[0].labels = torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(0)).squeeze(1)
    return made


@pytest.mark.parametrize("mode", ["shared", "members", "pooled"])
def test_the_predictor_is_the_formula(mode):
    made = problems()
    networks, loader, inputs = [one.network for one in made], made[0].loader, made[1].inputs
    predictor = temperature_scaled(networks, loader, mode=mode, weights=[0.5, 0.3, 0.2], progress=False)
    with torch.no_grad():
        logits = [network(inputs) for network in networks]
        if mode == "pooled":
            mean = sum(w * z.softmax(-1) for w, z in zip([0.5, 0.3, 0.2], logits, strict=True))
            expected = mean ** (1 / predictor.temperatures[0])
            expected = expected / expected.sum(1, keepdim=True)
        else:
            expected = sum(
                w * (z / t).softmax(-1) for w, z, t in zip([0.5, 0.3, 0.2], logits, predictor.temperatures, strict=True)
            )
        own = [network(made[0].inputs) for network in networks]
    pool = torch.einsum("k,knc->nc", torch.tensor([0.5, 0.3, 0.2]), torch.stack(own).softmax(-1)).log()
    wanted = {
        "shared": lambda: [fit_temperature(torch.stack(own), made[0].labels, torch.tensor([0.5, 0.3, 0.2]))] * 3,
        "members": lambda: [fit_temperature(one, made[0].labels) for one in own],
        "pooled": lambda: [fit_temperature(pool, made[0].labels)] * 3,
    }
    assert predictor.temperatures == pytest.approx(wanted[mode](), rel=1e-6)
    torch.testing.assert_close(predictor(inputs), expected)
    said = predictor.predict([(part,) for part in inputs.split(7)])
    torch.testing.assert_close(said.probs, expected)
    np.testing.assert_allclose(predictor.predict_proba(inputs.numpy()), expected.numpy())


@pytest.mark.parametrize(
    ("temperatures", "pooled", "words"),
    [
        (0.0, False, "above 0"),
        (float("nan"), False, "finite"),
        ([1.0, 2.0], False, "expected one value, or 3"),
        ([1.0, 2.0, 3.0], True, "one temperature"),
    ],
)
def test_bad_temperatures_are_refused(temperatures, pooled, words):
    with pytest.raises(OptionError, match=words):
        TemperatureScaled([one.network for one in problems()], temperatures, pooled=pooled)


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_the_mean_of_logits_is_an_ensemble_with_pooling_0_and_a_temperature(likelihood, tmp_path):
    made = problems()
    networks, inputs, labels = [one.network for one in made], made[0].inputs, made[0].labels
    weights = [0.5, 0.3, 0.2]
    if likelihood == "bernoulli":
        with torch.no_grad():
            labels = torch.bernoulli((sum(network(inputs) for network in networks) / 6).sigmoid())
        labels[0, 1] = torch.nan
    options = {"weights": weights, "likelihood": likelihood, "progress": False}
    predictor = temperature_scaled(networks, [(inputs, labels)], mean="logits", **options)
    plain = mola.ensemble(networks, weights, likelihood=likelihood).with_pooling(0.0)
    expected = plain.with_temperature(predictor.temperature)
    torch.testing.assert_close(predictor(inputs), expected(inputs))
    torch.testing.assert_close(
        predictor.predict(inputs).mutual_information, expected.predict(inputs).mutual_information
    )
    again = TemperatureScaled.load(predictor.save(tmp_path), networks)
    assert_close(again(inputs), predictor(inputs), "float64")
    with pytest.raises(StorageError, match="3 networks, got 2"):
        TemperatureScaled.load(tmp_path, networks[:2])
    with pytest.raises(StorageError, match=r"networks\[0\].*weights differ"):
        TemperatureScaled.load(tmp_path, networks[::-1])

    def loss(posterior):
        probs = posterior(inputs)
        if likelihood == "categorical":
            return float(nn.functional.nll_loss(probs.log(), labels))
        known = ~labels.isnan()
        return float(nn.functional.binary_cross_entropy(probs[known], labels[known]))

    for factor in (0.9, 0.99, 1.01, 1.1):
        assert loss(plain.with_temperature(factor * predictor.temperature)) > loss(predictor)


@pytest.mark.parametrize("mode", ["shared", "members", "pooled"])
def test_binary_labels_are_two_classes(mode):
    torch.manual_seed(0)
    networks = [nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)) for _ in range(2)]
    twins = [nn.Sequential(network, PairOfLogits()) for network in networks]
    inputs = 2 * torch.randn(60, 3)
    with torch.no_grad():
        labels = torch.bernoulli(sum(network(inputs)[:, 0] for network in networks).sigmoid()).long()
    one = temperature_scaled(networks, [(inputs, labels)], mode=mode, likelihood="bernoulli", progress=False)
    two = temperature_scaled(twins, [(inputs, labels)], mode=mode, progress=False)
    assert one.temperatures == pytest.approx(two.temperatures, rel=1e-6)
    torch.testing.assert_close(one(inputs)[:, 0], two(inputs)[:, 1])
    found, expected = one.predict(inputs), two.predict(inputs)
    torch.testing.assert_close(found.mutual_information[:, 0], expected.mutual_information)


class PairOfLogits(nn.Module):
    def forward(self, logits):
        return torch.cat([torch.zeros_like(logits), logits], 1)


def test_regressions_and_other_settings_are_refused():
    problem = make_problem()
    with pytest.raises(OptionError, match="scale_noise"):
        temperature_scaled(problem.network, problem.loader, likelihood="gaussian")
    with pytest.raises(OptionError, match="mode must be one of"):
        temperature_scaled(problem.network, problem.loader, mode="share")
    with pytest.raises(OptionError, match="mean must be one of"):
        temperature_scaled(problem.network, problem.loader, mean="logit")
    with pytest.raises(OptionError, match="temperature_scaled again"):
        TemperatureScaled(problem.network, 2.0).with_weights([1.0])
    with pytest.raises(OptionError, match="its own temperature"):
        _ = TemperatureScaled([problem.network, make_problem(1).network], [1.0, 2.0]).temperature
