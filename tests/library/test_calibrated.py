"""The calibrated rule: what it gains and spends on validation data, and what it leaves alone."""

import copy
import math
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.rules.objective import Objective
from molaplace.settings import NO_COVARIANCE
from tests.closeness import assert_close
from tests.library.problems import train


def trained(seed, inputs, labels):
    torch.manual_seed(seed)
    # The initial weights depend on the type in which they are drawn, and a fixture of a module does not know torch's default type.
    layers = [nn.Linear(6, 24, dtype=torch.float32), nn.ReLU(), nn.Linear(24, 4, dtype=torch.float32)]
    return train(nn.Sequential(*layers).double(), inputs, labels, 120, 0.03)


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
    candidates = [posterior.settings.at_precision(NO_COVARIANCE, temperature=value) for value in temperatures]
    actual = Objective([(posterior, data)]).mean_scores(candidates)
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


def test_the_pooling_coefficient_has_the_best_loss_and_prior(problem):
    _, posterior, validation, _ = problem
    tuned = posterior.tune([validation], rule="calibrated", progress=False)
    curve = {name: np.array(values) for name, values in tuned.tuning.curve.items()}
    pooled = (curve["pooling"] < 1) & (curve["prior_precision"] >= NO_COVARIANCE) & (curve["distance_exponent"] == 0)
    prior = 2 * np.minimum(0, np.log(curve["temperature"])) ** 2 + 2 * (1 - curve["pooling"]) ** 2
    penalised = np.where(pooled, curve["nll"] + prior / 500, np.inf)
    assert tuned.pooling == curve["pooling"][penalised.argmin()]
    assert tuned.pooling > curve["pooling"][np.where(pooled, curve["nll"], np.inf).argmin()]  # the prior matters here


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


# --- each step against its definition -----------------------------------------------------------------------------------


@dataclass
class Tuned:
    """A posterior tuned by the rule, and its validation data."""

    posterior: mola.MoLA
    training: tuple[torch.Tensor, torch.Tensor]
    validation: tuple[torch.Tensor, torch.Tensor]

    def losses(self, **settings):
        """Log losses (n,) at the temperature with the lowest mean, without covariance and at other settings of the posterior."""
        data = self.posterior.read([self.validation], "validation loader", labelled=True)
        temperatures = torch.linspace(math.log(0.3), math.log(10), 150).exp().tolist()
        start = self.posterior.settings.at_precision(settings.pop("prior_precision", NO_COVARIANCE), **settings)
        candidates = [replace(start, temperature=temperature) for temperature in temperatures]
        losses = Objective([(self.posterior, data)]).scores(candidates)["nll"]
        return losses[int(losses.mean(1).argmin())]


def in_errors(gain):
    return float(gain.mean() / gain.std()) * len(gain) ** 0.5


CASES = {
    "disagreement": {"noise": 2.0},
    "some disagreement": {"noise": 1.0, "count": 400, "seed": 1},
    "little disagreement": {"noise": 0.5, "seed": 1},
    "few data": {"noise": 2.0, "count": 100, "seed": 1},
    "one network": {"noise": 0.5, "networks": 1},
    "one network, few data": {"noise": 0.5, "networks": 1, "count": 100},
    "underconfident": {"noise": 0.2, "count": 100, "confidence": 0.5},
}


@pytest.fixture(scope="module", params=CASES)
def tuned(request):
    """Linear networks with logits 1.5 or 0.5 times too large, plus noise; one in eight validation inputs lies far away."""
    options = {"networks": 3, "count": 2000, "seed": 0, "confidence": 1.5} | CASES[request.param]
    generator = torch.Generator().manual_seed(options["seed"])

    def normals(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    truth = 2.0 * normals(4, 8)

    def labelled(count, far):
        inputs = normals(count, 8)
        uniform = torch.rand(2, count, 1, generator=generator, dtype=torch.float64)
        inputs[:, 6:] *= 0.03 + far * 3.0 * 0.01 ** uniform[0] * (uniform[1] < 0.13)
        return inputs, torch.multinomial((inputs @ truth.T).softmax(1), 1, generator=generator).squeeze(1)

    networks = []
    for _ in range(options["networks"]):
        network = nn.Linear(8, 4).double()
        with torch.no_grad():
            network.weight.copy_(options["confidence"] * truth + options["noise"] * normals(4, 8))
            network.bias.zero_()
        networks.append(network)
    training = labelled(2000, far=False)
    validation = labelled(options["count"], far=True)
    return Tuned(mola.fit(networks, [training], [validation], progress=False), training, validation)


def test_pooling_is_kept_if_its_gain_exceeds_two_standard_errors(tuned):
    if len(tuned.posterior.networks) == 1:
        assert tuned.posterior.pooling == 1
        return
    mixed = tuned.losses(pooling=1.0, distance_exponent=0.0)
    pooled = [tuned.losses(pooling=eighth / 8, distance_exponent=0.0) for eighth in range(8)]
    errors = in_errors(mixed - min(pooled, key=torch.mean))
    assert abs(errors - 2) > 0.5  # no borderline case
    assert (tuned.posterior.pooling < 1) == (errors > 2)


def test_the_distance_exponent_spends_the_budget_and_no_more(tuned):
    chosen = tuned.posterior.settings
    scaled = float(tuned.losses(pooling=1.0, distance_exponent=0.0).mean())
    best = float(tuned.losses(distance_exponent=0.0).mean())
    budget = max((scaled - best) / 2, 0.01 * best)
    assert float(tuned.losses().mean()) <= best + budget + 1e-4 * best
    larger = chosen.distance_exponent + 0.1
    assert chosen.distance_exponent == 2 or float(tuned.losses(distance_exponent=larger).mean()) > best + budget


def test_the_added_covariance_costs_half_a_percent_at_most_with_its_error(tuned):
    posterior = tuned.posterior
    bare = log_loss(posterior.with_prior_precision(NO_COVARIANCE), tuned.validation)
    chosen = posterior.prior_precision[0]

    def cost(precision):
        change = log_loss(posterior.with_prior_precision(precision), tuned.validation) - bare
        return float(change.mean() + change.std(correction=0) / len(change) ** 0.5) / float(bare.mean())

    assert cost(chosen) <= 0.005
    assert chosen == pytest.approx(1e-3) or cost(chosen / 10**0.5) > 0.005


def test_one_in_ten_validation_inputs_lies_beyond_the_onset(tuned):
    posterior = tuned.posterior
    inputs, _ = tuned.validation
    beyond = posterior.predict(inputs).distance > posterior.settings.onset
    assert float(beyond.double().mean()) == pytest.approx(0.1, abs=1 / len(inputs))
    nearby = posterior.with_distance_exponent(0.0)
    norms = torch.stack([inputs.norm(dim=1) / scale.norm for scale in posterior.reference.scales])
    unchanged = ~beyond & (norms <= 1).all(0)
    assert_close(posterior(inputs[unchanged]), nearby(inputs[unchanged]), "float64")
    assert float(posterior(inputs[beyond]).amax(1).mean()) < float(nearby(inputs[beyond]).amax(1).mean())


def test_copies_of_a_position_are_no_more_evidence(tuned):
    """As dense outputs, whose positions depend on each other: nothing that was not clear becomes so."""
    copied = [
        [(x[:, None].expand(-1, count, -1), y[:, None].expand(-1, count))]
        for (x, y), count in ((tuned.training, 1), (tuned.validation, 4))
    ]
    dense = mola.fit(tuned.posterior.networks, *copied, progress=False)
    assert_close(dense.tuning.settings.as_json(), tuned.posterior.settings.as_json(), "search")
    assert dense.tuning.summary == tuned.posterior.tuning.summary
    copies, originals = (
        posterior.read(data, "validation loader", labelled=True).accuracy()
        for posterior, data in ((dense, copied[1]), (tuned.posterior, [tuned.validation]))
    )
    assert copies == pytest.approx(originals)
