"""Training: it learns, follows its seed, and leaves no trace."""

from __future__ import annotations

import pytest
import torch

import mola
from mola.data.moons import two_moons
from mola.models.mlp import mlp
from mola.training import Recipe, train, train_ensemble


def _build():
    return mlp(2, (16,), 2)


def _weights(network):
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def test_it_learns_the_moons():
    data = two_moons(200)
    network = train(_build, data, Recipe(epochs=60, learning_rate=1e-2), seed=0)
    assert (network(data.inputs).argmax(1) == data.labels).float().mean() > 0.9


def test_the_network_comes_in_eval_mode_and_in_the_precision_of_its_data():
    network = train(_build, two_moons(40), Recipe(epochs=1), seed=0)
    assert not any(module.training for module in network.modules())
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}


def test_the_same_seed_gives_the_same_bits_and_another_gives_others():
    data, recipe = two_moons(40), Recipe(epochs=2)
    first, again, other = (train(_build, data, recipe, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(_weights(first), _weights(again))
    assert not torch.equal(_weights(first), _weights(other))


def test_the_random_state_is_left_as_it_was():
    before = torch.get_rng_state()
    train(_build, two_moons(40), Recipe(epochs=1), seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_ensembles_of_neighbouring_seeds_share_no_member():
    data, recipe = two_moons(40), Recipe(epochs=1)
    members = [
        tuple(_weights(network).tolist())
        for seed in (0, 1)
        for network in train_ensemble(_build, data, recipe, members=3, seed=seed)
    ]
    assert len(set(members)) == 6


def test_every_epoch_is_reported():
    seen = []
    train_ensemble(
        _build,
        two_moons(40),
        Recipe(epochs=2),
        members=2,
        seed=0,
        on_epoch=lambda member, epoch: seen.append((member, epoch)),
    )
    assert seen == [(0, 1), (0, 2), (1, 1), (1, 2)]


def test_a_network_without_biases_is_positively_homogeneous():
    network = mlp(4, (8, 8), 3, bias=False)
    inputs = torch.randn(5, 4)
    torch.testing.assert_close(network(1000 * inputs), 1000 * network(inputs))


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"learning_rate": 0.0}, {"batch_size": 0}, {"weight_decay": -1.0}])
def test_a_recipe_that_cannot_be_followed_is_refused(wrong):
    with pytest.raises(mola.OptionError, match="must be above 0"):
        Recipe(**({"epochs": 1} | wrong))
