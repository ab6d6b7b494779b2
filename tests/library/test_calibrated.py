"""The calibrated rule: what it gains and spends on validation data, and what it leaves alone."""

import copy
import re

import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.settings import NO_COVARIANCE
from tests.library.problems import train


def trained(seed, inputs, labels):
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 4)).double()
    return train(network, inputs, labels, 120, 0.03)


@pytest.fixture(scope="module")
def problem():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1200, 6, generator=generator, dtype=torch.float64)
    labels = (inputs[:, :4] + 0.7 * torch.randn(1200, 4, generator=generator, dtype=torch.float64)).argmax(1)
    networks = [trained(seed, inputs[:300], labels[:300]) for seed in range(3)]
    posterior = mola.fit(networks, [(inputs[:300], labels[:300])], progress=False)
    return networks, posterior, (inputs[300:800], labels[300:800]), (inputs[800:], labels[800:])


def log_loss(posterior, data):
    inputs, labels = data
    return -posterior(inputs).gather(1, labels[:, None]).squeeze(1).log()


def test_validation_loss_stays_within_the_budget(problem):
    _, posterior, validation, _ = problem
    tuned = posterior.tune([validation], rule="calibrated", progress=False)
    data = posterior.read([validation], "validation loader", labelled=True)
    temperatures = torch.logspace(-1, 1, 401).tolist()
    candidates = posterior.settings.candidates(prior_precision=[NO_COVARIANCE], temperature=temperatures)
    actual = posterior.objective(data).mean_scores(candidates)
    scaled = float(actual["nll"].min())
    loss = float(log_loss(tuned, validation).mean())
    assert loss <= scaled * 1.01 + 1e-9
    assert tuned.distance_exponent > 0
    assert loss <= min(tuned.tuning.curve["nll"]) + max(0.5 * (scaled - min(tuned.tuning.curve["nll"])), 0.011 * loss)
    assert tuned.tuning.summary.startswith("The validation log loss is")
    cost, allowed = re.search(
        r"(?:raised|lowered) the log loss by ([\d.e-]+)(?: \(allowed: ([\d.e-]+)\))?\.$", tuned.tuning.summary
    ).groups()
    assert ("raised" in tuned.tuning.summary) == (allowed is not None)
    assert allowed is None or 0 < float(cost) <= 1.1 * float(allowed)


def test_it_gains_on_test_data_of_overconfident_networks(problem):
    networks, posterior, validation, test = problem
    tuned = posterior.tune([validation], rule="calibrated", progress=False)
    gain = log_loss(mola.ensemble(networks), test) - log_loss(tuned, test)
    assert float(gain.mean()) > 2 * float(gain.std()) / len(gain) ** 0.5


def test_equal_networks_are_not_pooled(problem):
    networks, _, validation, _ = problem
    with pytest.warns(mola.errors.MolaWarning, match="more than once"):
        twins = mola.fit([networks[0]] * 2, [validation], progress=False)
    assert twins.tune([validation], rule="calibrated", progress=False).pooling == 1


def test_one_network_has_no_pooling_and_pays_its_price_alone(problem):
    networks, _, validation, _ = problem
    single = mola.fit(networks[0], [validation], progress=False)
    free, careful = (
        single.tune([validation], rule=mola.rules.Calibrated(price=price_allowed), progress=False)
        for price_allowed in (0.001, 0.05)
    )
    assert free.pooling == careful.pooling == 1
    assert careful.distance_exponent >= free.distance_exponent
    for tuned, price in ((free, 0.001), (careful, 0.05)):
        scaled = tuned.tuning.curve["nll"][1]
        assert log_loss(tuned, validation).mean() <= (1 + price) * 1.005 * scaled + 1e-9


def test_without_distances_it_chooses_the_rest(problem):
    networks, _, validation, _ = problem
    posterior = mola.fit(networks, [validation], distances=False, progress=False)
    tuned = posterior.tune([validation], rule="calibrated", progress=False)
    assert tuned.distance_exponent == 0


def test_validation_data_without_errors_neither_pool_nor_sharpen_without_end(problem):
    _, posterior, (inputs, labels), _ = problem
    predicted = posterior(inputs).argmax(1)
    right = (predicted == labels).nonzero().flatten()[:50]
    tuned = posterior.tune([(inputs[right], labels[right])], rule="calibrated", progress=False)
    assert 0.1 < tuned.temperature < 1
    assert tuned.pooling == 1
    many = posterior.tune([(inputs[right].repeat(40, 1), labels[right].repeat(40))], rule="calibrated", progress=False)
    assert many.temperature < tuned.temperature  # two thousand data are stronger evidence
    assert many.pooling < 1


def test_a_covariance_that_does_not_gain_only_lowers_confidence(problem):
    _, posterior, validation, test = problem
    tuned = posterior.tune([validation], rule="calibrated", progress=False)
    assert max(tuned.prior_precision) < NO_COVARIANCE
    bare = tuned.with_prior_precision(NO_COVARIANCE)
    bare = bare.with_temperature(tuned.temperature).with_pooling(tuned.pooling)
    assert bool((tuned(test[0]).amax(1) <= bare(test[0]).amax(1) + 0.01).all())
    assert log_loss(tuned, validation).mean() <= 1.005 * log_loss(bare, validation).mean()
    assert bool((tuned.predict(test[0]).epistemic > 0).all())


@pytest.mark.filterwarnings("ignore:.*end of its range")
@pytest.mark.parametrize("factor", [30.0, 0.02])
def test_logits_of_any_scale_are_brought_back(problem, factor):
    networks, _, validation, test = problem
    scaled = []
    for network in networks:
        copied = copy.deepcopy(network)
        with torch.no_grad():
            copied[2].weight.mul_(factor), copied[2].bias.mul_(factor)
        scaled.append(copied)
    tuned = mola.fit(scaled, [validation], [validation], progress=False)
    expected = mola.fit(networks, [validation], [validation], progress=False)
    assert log_loss(tuned, test).mean() < 1.02 * log_loss(expected, test).mean()


@pytest.mark.parametrize("price", [-0.1, 2, "low", None])
def test_wrong_prices_are_refused(price):
    with pytest.raises(mola.errors.OptionError, match="price"):
        mola.rules.Calibrated(price=price)
