"""The Lemma, the Theorem and the exact far-field limit, on bias-free ReLU networks and beyond."""

import math

import pytest
import torch
from torch import nn

import mola
from mola.lab.models import lenet
from tests.conftest import make_problem
from tests.library.test_laws import data, loader
from tests.reference import dense

DELTAS = [1.0, 10.0, 1e3, 1e6]


def bias_free(seed, classes=4, head_bias=False):
    torch.manual_seed(seed)
    layers = [nn.Linear(3, 12, bias=False), nn.ReLU(), nn.Linear(12, 8, bias=False), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(8, classes, bias=head_bias))


@pytest.fixture(params=[1e-3, 1.0, 100.0])
def far(request, structure):
    inputs, labels = data()
    members = [bias_free(seed) for seed in range(3)]
    fit = mola.fit(members, loader(inputs, labels, 7), structure=structure, prior_precision=request.param)
    return fit, inputs


def test_confidence_far_away_meets_the_limit_and_stays_below_the_bound(far):
    posterior, inputs = far
    limit = posterior.far_field_limit(inputs)
    bound = posterior.confidence_bound(inputs)
    for delta in DELTAS:
        there = posterior.predict(delta * inputs)
        assert bool((there.confidence <= posterior.confidence_bound(delta * inputs) + 1e-12).all())
    assert torch.allclose(there.probs, limit, atol=1e-7)
    assert bool((limit.max(1).values <= posterior.confidence_bound(1e6 * inputs) + 1e-12).all())
    same = posterior(inputs).argmax(1) == limit.argmax(1)
    assert bool((limit.max(1).values[same] <= bound[same] + 1e-12).all())


def test_the_plain_ensemble_is_certain_there(far):
    posterior, inputs = far
    certain = mola.ensemble(list(posterior.networks)).predict(1e6 * inputs).confidence
    limit = posterior.far_field_limit(inputs).max(1).values
    active = posterior.networks[0][:-1](inputs).abs().sum(1) > 0
    assert float(limit[active].mean()) < float(certain[active].mean()) - 0.01


def test_lemma_bounds_each_component(far):
    posterior, inputs = far
    bounds = posterior.confidence_bound(1e6 * inputs, lemma=True)
    for k, component in enumerate(posterior.components):
        alone = mola.MoLA([component]).predict(1e6 * inputs).confidence
        assert bool((alone <= bounds[k] + 1e-12).all())


def test_bound_against_its_definition(structure):
    problem = make_problem(bias=False)
    posterior = mola.fit(problem.network, problem.loader, structure=structure, prior_precision=0.7)
    precision = dense.precision(structure, problem.weights, problem.features(), problem.labels, 0.7)
    covariance = torch.linalg.inv(precision)
    width = problem.weights.shape[1]
    b = []
    for c in range(4):
        block = covariance[c * width : (c + 1) * width, c * width : (c + 1) * width]
        b.append(float(problem.weights[c].norm()) / math.sqrt(math.pi / 8 * float(torch.linalg.eigvalsh(block)[0])))
    inputs = torch.randn(10, 3)
    for x, found in zip(inputs, posterior.confidence_bound(inputs), strict=True):
        c = int(posterior(x[None]).argmax())
        expected = 1 / (1 + sum(math.exp(-(b[i] + b[c])) for i in range(4) if i != c))
        assert math.isclose(float(found), expected, rel_tol=1e-9)


def test_theorem_is_the_weighted_sum_of_lemmas(structure):
    inputs, labels = data()
    members = [bias_free(seed) for seed in range(2)]
    posterior = mola.fit(members, loader(inputs, labels, 7), structure=structure, weights=[0.3, 0.7])
    alone = [mola.MoLA([component]) for component in posterior.components]
    found = posterior.confidence_bound(inputs)
    predicted = posterior(inputs).argmax(1)
    agree = (alone[0](inputs).argmax(1) == predicted) & (alone[1](inputs).argmax(1) == predicted)
    mixed = 0.3 * alone[0].confidence_bound(inputs) + 0.7 * alone[1].confidence_bound(inputs)
    assert int(agree.sum()) > 3
    assert torch.allclose(found[agree], mixed[agree])


def test_bounds_hold_for_networks_with_biases_too(structure):
    inputs, labels = data()
    problem = make_problem()
    posterior = mola.fit(problem.network, loader(inputs, labels, 7), structure=structure, prior_precision=0.01)
    for delta in DELTAS:
        there = posterior.predict(delta * inputs)
        assert bool((there.confidence <= posterior.confidence_bound(delta * inputs) + 1e-12).all())


def test_limit_with_a_bias_in_the_head_alone(structure):
    inputs, labels = data()
    members = [bias_free(seed, head_bias=True) for seed in range(2)]
    posterior = mola.fit(members, loader(inputs, labels, 7), structure=structure)
    assert torch.allclose(posterior(1e9 * inputs), posterior.far_field_limit(inputs), atol=1e-6)


def test_limits_of_the_bound(structure):
    inputs, labels = data()
    posterior = mola.fit(bias_free(0), loader(inputs, labels, 7), structure=structure)
    certain = posterior.with_prior_precision(1e30).confidence_bound(inputs)
    assert torch.allclose(certain, torch.ones(40))
    if structure in ("kron-exact", "full"):  # the others keep a floor under lambda_min that data put there
        nothing = posterior.with_prior_precision(1e-12).confidence_bound(inputs)
        assert torch.allclose(nothing, torch.full((40,), 0.25), atol=1e-3)


def test_bias_free_lenet_in_float32(structure):
    torch.manual_seed(0)
    members = [lenet(bias=False).float() for _ in range(2)]
    images = torch.rand(60, 1, 28, 28, dtype=torch.float32)
    posterior = mola.fit(members, [(images, torch.randint(10, (60,)))], structure=structure, prior_precision=0.1)
    there = posterior.predict(1e6 * images)
    assert torch.allclose(there.probs, posterior.far_field_limit(images), atol=1e-4)
    assert bool((there.confidence <= posterior.confidence_bound(1e6 * images) + 1e-6).all())


def test_a_network_that_does_not_scale_has_no_limit():
    problem = make_problem()
    posterior = mola.fit(problem.network, problem.loader)
    with pytest.raises(mola.BoundError, match="without biases"):
        posterior.far_field_limit(torch.randn(5, 3))


@pytest.mark.parametrize("method", ["confidence_bound", "far_field_limit"])
def test_other_links_have_no_bound(method):
    problem = make_problem()
    posterior = mola.fit(problem.network, problem.loader, link="mean-field")
    with pytest.raises(mola.BoundError, match="with_link"):
        getattr(posterior, method)(torch.randn(5, 3))


def test_an_ensemble_has_the_trivial_bound():
    assert mola.ensemble(bias_free(0)).confidence_bound(torch.randn(5, 3)).tolist() == [1.0] * 5
