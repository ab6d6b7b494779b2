"""Mixture weights: stacking is optimal, evidence weights are what the log evidences say."""

import math

import pytest
import torch

import mola
from mola.mixture import stacking_weights
from tests.library.test_laws import data, loader, networks


def log_score(likelihoods, weights):
    return float((likelihoods @ weights).log().mean())


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


def test_stacking_beats_a_fine_grid():
    likelihoods = torch.rand(200, 3, generator=torch.Generator().manual_seed(3))
    best = log_score(likelihoods, stacking_weights(likelihoods))
    for i in range(41):
        for j in range(41 - i):
            weights = torch.tensor([i, j, 40 - i - j]).double() / 40
            assert log_score(likelihoods, weights) <= best + 1e-10


@pytest.mark.parametrize("scale", [1e-300, 1.0])
def test_stacking_with_a_component_that_is_best_everywhere(scale):
    likelihoods = torch.tensor([[0.9, 0.1, 0.2], [0.8, 0.3, 0.1]]).repeat(50, 1) * scale
    assert torch.allclose(stacking_weights(likelihoods), torch.tensor([1.0, 0.0, 0.0]), atol=1e-8)


def test_stacking_survives_components_that_exclude_a_label():
    likelihoods = torch.tensor([[0.0, 0.5], [0.9, 0.5], [0.9, 0.0], [0.9, 0.5]])
    weights = stacking_weights(likelihoods)
    expected = max(
        (torch.tensor([i / 1000, 1 - i / 1000]) for i in range(1, 1000)), key=lambda w: log_score(likelihoods, w)
    )
    assert torch.allclose(weights, expected, atol=2e-3)


def test_identical_components_share(structure):
    inputs, labels = data()
    member = networks(1)[0]
    posterior = mola.fit([member] * 3, loader(inputs, labels, 7), structure=structure).reweight(
        loader(inputs, labels, 7)
    )
    assert torch.allclose(posterior.weights, torch.full((3,), 1 / 3))


def test_reweighting_raises_the_validation_likelihood(structure):
    inputs, labels = data()
    posterior = mola.fit(networks(4), loader(inputs, labels, 7), structure=structure)
    stacked = posterior.reweight(loader(inputs, labels, 7))

    def score(one):
        return float(one(inputs).gather(1, labels[:, None]).log().mean())

    assert score(stacked) > score(posterior)
    for k in range(4):
        assert score(stacked) >= score(posterior.with_weights(torch.eye(4)[k]))
    assert posterior.weights.tolist() == [0.25] * 4


def test_evidence_weights_follow_the_log_evidences(structure):
    inputs, labels = data()
    posterior = mola.fit(networks(3), loader(inputs, labels, 7), structure=structure, weights="evidence")
    assert torch.allclose(posterior.weights, torch.softmax(posterior.log_evidence(), 0))
    moved = posterior.with_prior_precision(0.01)
    assert torch.allclose(moved.weights, torch.softmax(moved.log_evidence(), 0))
    assert not torch.allclose(moved.weights, posterior.weights)


def test_given_weights_are_kept(structure):
    inputs, labels = data()
    posterior = mola.fit(networks(3), loader(inputs, labels, 7), structure=structure, weights=[0.2, 0.3, 0.5])
    assert posterior.with_prior_precision(0.1).with_link("mc").weights.tolist() == [0.2, 0.3, 0.5]
    draws = posterior.sample(20_000, generator=torch.Generator().manual_seed(0)).component
    assert torch.allclose(torch.bincount(draws) / 20_000, torch.tensor([0.2, 0.3, 0.5]), atol=0.02)
