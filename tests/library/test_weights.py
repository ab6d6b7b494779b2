"""Mixture weights: stacking is optimal, evidence weights follow the log evidences."""

import math

import pytest
import torch

import molaplace as mola
from molaplace.weights import stacking_weights
from tests.library.problems import blob_loader, blobs, close, data, loader, networks, trained

# Labels of `data` have nothing to do with its inputs.
pytestmark = pytest.mark.filterwarnings("ignore:only .* of the labels")


def log_score(likelihoods, weights):
    return float((likelihoods @ weights).log().mean())


def fitted(count=3, **options):
    return mola.fit(networks(count), loader(*data(), 7), **options)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [1, 2, 5, 20])
def test_stacking_meets_the_optimality_conditions(seed, count):
    """At the optimum every component's mean ratio p_k / mixture is at most 1, and 1 where its weight is positive."""
    likelihoods = torch.rand(300, count, generator=torch.Generator().manual_seed(seed)) ** 3
    weights = stacking_weights(likelihoods)
    ratios = (likelihoods / (likelihoods @ weights)[:, None]).mean(0)
    assert math.isclose(float(weights.sum()), 1.0, abs_tol=1e-12)
    assert bool((weights >= 0).all())
    assert float(ratios.max()) < 1 + 1e-8
    assert bool((ratios[weights > 1e-4] > 1 - 1e-4).all())


@pytest.mark.parametrize("scale", [1e-300, 1.0])
def test_stacking_with_a_component_that_is_best_everywhere(scale):
    likelihoods = torch.tensor([[0.9, 0.1, 0.2], [0.8, 0.3, 0.1]]).repeat(50, 1) * scale
    assert close(stacking_weights(likelihoods), torch.tensor([1.0, 0.0, 0.0]), 1e-8)


def test_stacking_survives_components_that_exclude_a_label():
    likelihoods = torch.tensor([[0.0, 0.5], [0.9, 0.5], [0.9, 0.0], [0.9, 0.5]])
    grid = [torch.tensor([i / 1000, 1 - i / 1000]) for i in range(1, 1000)]
    assert close(stacking_weights(likelihoods), max(grid, key=lambda w: log_score(likelihoods, w)), 2e-3)


@pytest.mark.filterwarnings("ignore:the same network")
def test_identical_components_share(structure):
    posterior = mola.fit(networks(1) * 3, loader(*data(), 7), structure=structure)
    assert torch.allclose(posterior.reweight(loader(*data(), 7)).weights, torch.full((3,), 1 / 3))


def test_reweighting_raises_the_validation_likelihood(structure):
    inputs, labels = data()
    posterior = fitted(4, structure=structure)
    stacked = posterior.reweight(loader(inputs, labels, 7))

    def score(posterior_scored):
        return float(posterior_scored(inputs).gather(1, labels[:, None]).log().mean())

    assert score(stacked) > score(posterior)
    for one_hot in torch.eye(4):
        assert score(stacked) >= score(posterior.with_weights(one_hot)) - 1e-9
    assert posterior.weights.tolist() == [0.25] * 4


@pytest.mark.parametrize(("exponent", "pooling"), [(2.0, 1.0), (0.0, 0.3), (1.0, 0.0)])
@pytest.mark.parametrize("before", [(0.98, 0.01, 0.01), (0.0, 0.3, 0.7)])
def test_stacking_where_predictions_depend_on_the_weights(before, exponent, pooling):
    """It ends where it stays, and is no worse than where it began or than uniform weights."""
    members = [trained(seed) for seed in range(3)]
    held = blob_loader(1, spread=2.5)
    inputs, labels = blobs(1, spread=2.5)
    tuned = mola.fit(members, blob_loader(), link="probit-centred", progress=False).tune(
        held, rule=mola.rules.Score(grid=[3.0]), progress=False
    )
    posterior = tuned.with_distance_exponent(exponent).with_pooling(pooling).with_weights(before)

    def score(posterior_scored):
        return float(posterior_scored(inputs).gather(1, labels[:, None]).log().mean())

    stacked = posterior.reweight(held, progress=False)
    assert close(stacked.reweight(held, progress=False).weights, stacked.weights, 1e-6)
    assert score(stacked) >= max(score(posterior), score(posterior.with_weights("uniform"))) - 1e-9
    plain = tuned.with_weights(before).reweight(held, progress=False)
    assert close(plain.weights, tuned.reweight(held, progress=False).weights)


def test_evidence_weights_follow_the_log_evidences(structure):
    posterior = fitted(structure=structure, weights="evidence")
    variant = posterior.with_prior_precision(0.01)
    for weighted in (posterior, variant):
        assert torch.allclose(weighted.weights, torch.softmax(weighted.log_evidence(), 0))
    assert not torch.allclose(variant.weights, posterior.weights)


def test_given_weights_are_kept(structure):
    posterior = fitted(structure=structure, weights=[0.2, 0.3, 0.5])
    variant = posterior.with_prior_precision(0.1).with_link("mc").with_pooling(0.5).with_temperature(2.0)
    assert variant.weights.tolist() == [0.2, 0.3, 0.5]
    draws = posterior.sample(20_000, generator=torch.Generator().manual_seed(0)).component
    assert close(torch.bincount(draws) / 20_000, torch.tensor([0.2, 0.3, 0.5]), 0.02)
