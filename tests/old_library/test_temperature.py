"""Temperatures: the exact minimum, against scipy and a fine grid; the predictors that use them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import optimize, special

import mola
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
    found = mola.fit_temperature(logits, labels, weights)

    def loss(log_t):
        return nll(logits.numpy(), labels.numpy(), weights.numpy(), np.exp(log_t))

    scipys = optimize.minimize_scalar(loss, bracket=(np.log(found) - 1, np.log(found) + 1), tol=1e-12)
    assert abs(np.log(found) - scipys.x) < 1e-6  # scipy sees the loss alone, whose minimum is flat to rounding
    assert loss(np.log(found)) <= min(loss(log_t) for log_t in np.linspace(-4, 5, 400)) + 1e-12
    step = 1e-5
    slope = (loss(np.log(found) + step) - loss(np.log(found) - step)) / (2 * step)
    assert abs(slope) < 1e-9


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
            found = mola.fit_temperature(logits, labels)
            assert nll(logits.numpy(), labels.numpy(), [0.5, 0.5], found) <= losses.min() + 1e-12
    assert seen >= 2


def test_it_scales_with_the_logits_and_ignores_shifts():
    logits, labels = draw(2)
    base = mola.fit_temperature(logits, labels)
    assert mola.fit_temperature(1000 * logits, labels) == pytest.approx(1000 * base, rel=1e-9)
    shifts = torch.randn(2, logits.shape[1], 1)
    assert mola.fit_temperature(logits + shifts, labels) == pytest.approx(base, rel=1e-9)


def test_data_drawn_at_a_temperature_give_it_back():
    logits = 4 * torch.randn(1, 40_000, 5, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    labels = torch.distributions.Categorical(logits=logits[0] / 1.7).sample()
    assert mola.fit_temperature(logits, labels) == pytest.approx(1.7, abs=0.05)


def test_members_are_fitted_apart_and_the_pool_after_averaging():
    logits, labels = draw(3)
    assert mola.fit_member_temperatures(logits, labels) == [mola.fit_temperature(one, labels) for one in logits]
    weights = torch.tensor([0.5, 0.3, 0.2])
    pool = torch.einsum("k,knc->nc", weights, logits.softmax(-1)).log()
    assert mola.fit_pooled_temperature(logits, labels, weights) == pytest.approx(
        mola.fit_temperature(pool, labels), rel=1e-9
    )


def test_labels_that_are_all_right_take_the_end_of_the_range_with_a_warning():
    logits, _ = draw(1)
    with pytest.warns(mola.MolaWarning, match="goes to 0"):
        found = mola.fit_temperature(logits, logits[0].argmax(1))
    assert float((logits[0] / found).softmax(-1).amax(1).min()) > 0.99
    with pytest.warns(mola.MolaWarning, match="goes to infinity"):
        found = mola.fit_temperature(logits, logits[0].argmin(1))
    assert float((logits[0] / found).softmax(-1).amax()) < 0.26
    with pytest.warns(mola.MolaWarning, match="every temperature"):
        assert mola.fit_temperature(torch.ones(1, 5, 3), torch.zeros(5, dtype=torch.long)) == 1.0


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
    with pytest.raises(mola.DataError, match=words):
        mola.fit_temperature(logits, labels)


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
    predictor = mola.temperature_scaled(networks, loader, mode=mode, weights=[0.5, 0.3, 0.2], progress=False)
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
    torch.testing.assert_close(predictor(inputs), expected)
    said = predictor.predict([(part,) for part in inputs.split(7)])
    torch.testing.assert_close(said.probs, expected)
    assert bool((said.mutual_information >= 0).all())
    assert bool((said.aleatoric >= -1e-12).all())
    np.testing.assert_allclose(predictor.predict_proba(inputs.numpy()), expected.numpy())
    torch.testing.assert_close(mola.Mixture([predictor, predictor])(inputs), expected)


@pytest.mark.parametrize("mode", ["shared", "members", "pooled"])
def test_its_temperatures_do_best_on_the_validation_data(mode):
    made = problems()
    networks, first = [one.network for one in made], made[0]
    predictor = mola.temperature_scaled(networks, first.loader, mode=mode, progress=False)

    def loss(temperatures):
        if mode == "members":
            parts = zip(networks, temperatures, strict=True)
            scaled = [mola.TemperatureScaled(network, one) for network, one in parts]
        else:
            scaled = [mola.TemperatureScaled(networks, temperatures, pooled=mode == "pooled")]
        return [-float(one(first.inputs).gather(1, first.labels[:, None]).log().mean()) for one in scaled]

    best = loss(predictor.temperatures)
    for factor in (0.9, 0.99, 1.01, 1.1):
        for at, other in zip(best, loss([factor * value for value in predictor.temperatures]), strict=True):
            assert at < other


def test_networks_and_random_state_are_left_alone():
    problem = problems()[0]
    network = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Dropout(), problem.network).train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    state = torch.get_rng_state()
    predictor = mola.temperature_scaled(network, problem.loader, progress=False).eval()
    predictor.predict(problem.inputs)
    assert all(module.training for module in network.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("mode", ["shared", "members", "pooled"])
def test_files(tmp_path, mode):
    made = problems()
    networks = [one.network for one in made]
    predictor = mola.temperature_scaled(networks, made[0].loader, mode=mode, progress=False)
    predictor.save(tmp_path)
    again = mola.TemperatureScaled.load(tmp_path, networks)
    assert torch.equal(again(made[0].inputs), predictor(made[0].inputs))
    with pytest.raises(mola.StorageError, match="3 networks, got 2"):
        mola.TemperatureScaled.load(tmp_path, networks[:2])
    with pytest.raises(mola.StorageError, match=r"models\[0\]: this is not the network"):
        mola.TemperatureScaled.load(tmp_path, networks[::-1])


def test_another_kind_of_folder_is_refused(tmp_path):
    problem = make_problem()
    mola.fit(problem.network, problem.loader, progress=False).save(tmp_path)
    with pytest.raises(mola.StorageError, match="holds a saved posterior, expected a saved temperature"):
        mola.TemperatureScaled.load(tmp_path, problem.network)


@pytest.mark.parametrize(
    ("temperatures", "pooled", "words"),
    [
        (0.0, False, "above 0"),
        (float("nan"), False, "finite"),
        ([1.0, 2.0], False, "expected one number, or 3"),
        ([1.0, 2.0, 3.0], True, "a pool has one temperature"),
    ],
)
def test_bad_temperatures_are_refused(temperatures, pooled, words):
    with pytest.raises(mola.OptionError, match=words):
        mola.TemperatureScaled([one.network for one in problems()], temperatures, pooled=pooled)


def test_an_unknown_mode_is_refused():
    problem = make_problem()
    with pytest.raises(mola.OptionError, match="mode must be one of"):
        mola.temperature_scaled(problem.network, problem.loader, mode="share")
