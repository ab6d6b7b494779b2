"""The Lemma, the Theorem and the exact far-field limit, on bias-free ReLU networks and beyond."""

import math
from dataclasses import fields, replace

import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.errors import BoundError, DataError, OptionError
from molaplace.settings import Settings
from tests.conftest import make_problem
from tests.library.problems import close, data, loader
from tests.reference import dense

DELTAS = [1.0, 10.0, 1e3, 1e6]


def bias_free(seed, classes=4, head_bias=False):
    torch.manual_seed(seed)
    layers = [nn.Linear(3, 12, bias=False), nn.ReLU(), nn.Linear(12, 8, bias=False), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(8, classes, bias=head_bias))


def fitted(members, **options):
    return mola.fit(members, loader(*data(), 7), **options), data()[0]


@pytest.fixture(params=[1e-3, 1.0, 100.0])
def far(request, structure):
    members = [bias_free(seed) for seed in range(3)]
    return fitted(members, structure=structure, prior_precision=request.param)


@pytest.mark.parametrize("pooling", [1.0, 0.4, 0.0])
def test_confidence_far_away_meets_the_limit_and_stays_below_the_bound(far, pooling):
    posterior, inputs = far
    posterior = posterior.with_pooling(pooling)
    for delta in DELTAS:
        there = posterior.predict(delta * inputs)
        assert bool((there.confidence <= posterior.confidence_bound(delta * inputs) + 1e-12).all())
    assert close(there.probs, posterior.far_field_limit(inputs), 1e-5)
    assert close(posterior(1e9 * inputs), posterior.far_field_limit(inputs), 1e-7)
    assert close(posterior.with_temperature(3.0).far_field_limit(inputs), posterior.far_field_limit(inputs))


def test_a_batch_may_be_a_tuple_or_a_mapping():
    posterior, inputs = fitted([bias_free(0)])
    limit = posterior.far_field_limit(inputs)
    assert close(posterior.far_field_limit((inputs,)), limit)
    assert close(posterior.far_field_limit({"input": inputs}), limit)
    with pytest.raises(DataError):
        posterior.far_field_limit([inputs])


@pytest.mark.parametrize("setting", [setting for setting in fields(Settings) if not setting.metadata["per_network"]])
@pytest.mark.parametrize("value", [0.01, 0.4, 2.5])
def test_the_bound_holds_at_every_setting(structure, setting, value):
    posterior, inputs = fitted([bias_free(seed) for seed in range(3)], structure=structure)
    _, high, _ = setting.metadata["bounds"]
    value = min(value, high)
    settings = replace(posterior.settings, **{"distance_exponent": 1.5, setting.name: value})
    posterior = posterior.with_parts(settings=settings)
    for scaled in (inputs, 0.1 * inputs, 30 * inputs):
        assert bool((posterior.predict(scaled).confidence <= posterior.confidence_bound(scaled) + 1e-12).all())


def alone(posterior):
    """Return each component as a posterior of its own."""
    pairs = zip(posterior.components, posterior.prior_precision, strict=True)
    return [mola.MoLA([component], Settings((precision,))) for component, precision in pairs]


def test_the_lemma_bounds_each_component(far):
    posterior, inputs = far
    bounds = posterior.confidence_bound(1e6 * inputs, lemma=True)
    for bound, member in zip(bounds.unbind(1), alone(posterior), strict=True):
        confidence = member.predict(1e6 * inputs).confidence
        assert bool((confidence <= bound + 1e-12).all())


def test_the_bound_against_its_definition(structure):
    problem = make_problem(bias=False)
    posterior = mola.fit(problem.network, problem.loader, structure=structure, prior_precision=0.7)
    precision = dense.precision(structure, problem.weights, problem.features(), problem.labels, 0.7)
    width = problem.weights.shape[1]
    blocks = torch.linalg.inv(precision).view(4, width, 4, width)
    b = [
        float(problem.weights[c].norm())
        / math.sqrt(math.pi / 8 * float(torch.linalg.eigvalsh(blocks[c, :, c].contiguous())[0]))
        for c in range(4)
    ]
    inputs = torch.randn(10, 3)
    for c, actual in zip(posterior(inputs).argmax(1).tolist(), posterior.confidence_bound(inputs), strict=True):
        expected = 1 / (1 + sum(math.exp(-(b[i] + b[c])) for i in range(4) if i != c))
        assert float(actual) == pytest.approx(expected, rel=1e-9)


def test_the_theorem_is_the_weighted_sum_of_lemmas(structure):
    posterior, inputs = fitted([bias_free(seed) for seed in range(2)], structure=structure, weights=[0.3, 0.7])
    first, second = alone(posterior)
    predicted = posterior(inputs).argmax(1)
    agree = (first(inputs).argmax(1) == predicted) & (second(inputs).argmax(1) == predicted)
    mixed = 0.3 * first.confidence_bound(inputs) + 0.7 * second.confidence_bound(inputs)
    assert int(agree.sum()) > 3
    assert close(posterior.confidence_bound(inputs)[agree], mixed[agree])


def test_the_limit_with_a_bias_in_the_head_alone(structure):
    posterior, inputs = fitted([bias_free(seed, head_bias=True) for seed in range(2)], structure=structure)
    for pooling in (1.0, 0.5):
        variant = posterior.with_pooling(pooling)
        assert close(variant(1e9 * inputs), variant.far_field_limit(inputs), 1e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("pooling", [1.0, 0.5])
@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_the_limit_where_a_network_s_features_are_all_0(bias, pooling, exponent):
    """Its logits stay where they are, and so does its share of pooled ones."""
    members = [bias_free(seed, head_bias=bias) for seed in range(2)]
    with torch.no_grad():
        for layer in (members[1][0], members[1][2]):
            layer.weight.copy_(torch.ones_like(layer.weight))
    inputs, labels = data()
    posterior = mola.fit(members, loader(inputs, labels, 7), weights=[0.7, 0.3])
    variant = posterior.with_pooling(pooling).with_distance_exponent(exponent)
    queries = inputs[inputs.sum(1) < 0]
    assert not bool(members[1][:-1](queries).any())
    assert close(variant(1e12 * queries), variant.far_field_limit(queries), 1e-6)


def test_with_a_distance_exponent_limit_and_bound_are_uniform():
    posterior, inputs = fitted([bias_free(seed) for seed in range(2)])
    queries = inputs[(posterior.networks[0][:-1](inputs).sum(1) > 0) & (posterior.networks[1][:-1](inputs).sum(1) > 0)]
    for pooling in (1.0, 0.3):
        cautious = posterior.with_distance_exponent(1.0).with_pooling(pooling)
        assert close(cautious.far_field_limit(queries), torch.full((len(queries), 4), 0.25), 1e-12)
        for scale in (1e9, 1e18, 1e30):
            assert close(cautious(scale * queries), torch.full((len(queries), 4), 0.25), 1e-6)
            assert close(cautious.confidence_bound(scale * queries), torch.full((len(queries),), 0.25), 1e-6)


def test_wrong_use_is_refused():
    problem = make_problem()
    ensemble = mola.ensemble(bias_free(0))
    inputs = torch.randn(5, 3)
    posterior = mola.fit(problem.network, problem.loader)
    other = posterior.with_link("mean-field")
    assert ensemble.confidence_bound(inputs).tolist() == [1.0] * 5
    for error, words, call in (
        (BoundError, "without biases", posterior.far_field_limit),
        (BoundError, "with_link", other.confidence_bound),
        (BoundError, "with_link", other.far_field_limit),
        (OptionError, "ensemble", ensemble.far_field_limit),
    ):
        with pytest.raises(error, match=words):
            call(inputs)
