"""Training: it learns, follows its seed, interrupted or not, and leaves no trace."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from molaplace.demo import LabelledData, two_moons
from molaplace.errors import DataError, OptionError, StorageError
from molaplace.perceptrons import mlp
from molaplace_lab.mimo import Mimo, train_mimo
from molaplace_lab.swag import fit_moments, fit_swag
from molaplace_lab.training import Recipe, Shuffled, TrainingCheckpoint, member_seeds, train, train_mlps

DATA = two_moons(40)


def _build():
    return mlp(2, (16,), 2)


def _weights(network):
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def test_it_learns_the_moons():
    data = two_moons(200)
    network = train(_build, data, Recipe(epochs=60, learning_rate=1e-2), seed=0)
    assert (network(data.inputs).argmax(1) == data.labels).float().mean() > 0.9
    assert not any(module.training for module in network.modules())
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}


def test_ensembles_of_neighbouring_seeds_share_no_member_and_larger_ensembles_begin_with_smaller_ones():
    assert len({*member_seeds(3, 0), *member_seeds(3, 1)}) == 6
    assert member_seeds(5, 0)[:3] == member_seeds(3, 0)


@pytest.mark.parametrize(
    "wrong",
    [{"epochs": 0}, {"learning_rate": 0.0}, {"batch_size": 0}, {"weight_decay": -1.0}, {"optimiser": "adamm"}],
)
def test_a_recipe_that_cannot_be_followed_is_refused(wrong):
    with pytest.raises(OptionError, match="must be"):
        Recipe(**({"epochs": 1} | wrong))


class Noisy:
    """Augmentation that draws from torch's own generator, counts its calls, and stops the training at one of them."""

    def __init__(self, stop=None):
        self.stop = stop
        self.calls = 0

    def __call__(self, inputs):
        self.calls += 1
        if self.calls == self.stop:
            raise KeyboardInterrupt
        return inputs + 0.1 * torch.randn_like(inputs)


def _noisy_network():
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)).float()


def _trained(kind, noisy, seed=1, folder=None):
    """All tensors of a training of five epochs, each of three batches."""
    loader = Shuffled(DATA, 16, noisy)
    path = None if folder is None else folder / "checkpoint.safetensors"
    with torch.random.fork_rng():
        torch.manual_seed(7)
        network = _noisy_network()
    if kind == "swag":
        options = {"epochs": 5, "rank": 3, "learning_rate": 0.05, "progress": False}
        return fit_moments(network, loader, seed=seed, checkpoint=path, **options).tensors()
    if kind == "mimo":
        mimo = Mimo(network, 2, example=DATA.inputs)
        options = {"epochs": 5, "progress": False}
        return train_mimo(mimo, loader, seed=seed, checkpoint=path, **options).state_dict()
    recipe = Recipe(epochs=5, batch_size=16, learning_rate=1e-2, optimiser=kind)
    checkpoint = None if path is None else TrainingCheckpoint(path, {"seed": seed})
    return train(_noisy_network, DATA, recipe, seed=seed, prepare=noisy, checkpoint=checkpoint).state_dict()


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd", "swag", "mimo"])
def test_the_same_seed_gives_the_same_bits_interrupted_or_not(kind, tmp_path):
    before = torch.get_rng_state()
    noisy = Noisy()
    whole = _trained(kind, noisy)
    again = _trained(kind, Noisy())
    other = _trained(kind, Noisy(), seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    for stop in (9, 7):  # in the third epoch, and one epoch later
        with pytest.raises(KeyboardInterrupt):
            _trained(kind, Noisy(stop), folder=tmp_path)
    rest = Noisy()
    resumed = _trained(kind, rest, folder=tmp_path)
    assert rest.calls <= noisy.calls - 9
    for name, tensor in whole.items():
        assert torch.equal(tensor, again[name]), name
        assert torch.equal(tensor, resumed[name]), name
    assert any(not torch.equal(tensor, other[name]) for name, tensor in whole.items())
    with pytest.raises(StorageError, match="another training"):
        _trained(kind, Noisy(), seed=2, folder=tmp_path)


@pytest.mark.parametrize("kind", ["swag", "mimo"])
def test_the_users_network_is_untouched(kind):
    network = _noisy_network().train()
    loader = Shuffled(DATA, 16)
    network[3].eval()
    before = copy.deepcopy(network.state_dict())
    modes = [module.training for module in network.modules()]
    options = {"epochs": 2, "progress": False}
    if kind == "swag":
        predictor = fit_swag(network, loader, samples=2, **options)[0]
    else:
        predictor = train_mimo(Mimo(network, 2, example=DATA.inputs), loader, **options)
    expected = predictor(DATA.inputs)
    assert modes == [module.training for module in network.modules()]
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in network.parameters())
    network[0].weight.data.zero_()  # and the copy is not the user's
    assert torch.equal(predictor(DATA.inputs), expected)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None], ids=["empty", "foreign", "cut off"])
def test_a_damaged_checkpoint_is_named(tmp_path, content):
    _trained("adam", Noisy(), folder=tmp_path)
    for file in tmp_path.iterdir():
        whole = file.read_bytes()
        file.write_bytes(whole[:-10] if content is None else content)
        with pytest.raises(StorageError, match="Delete it"):
            _trained("adam", Noisy(), folder=tmp_path)
        file.write_bytes(whole)


def test_wrong_data_and_learning_rates_are_named():
    wild = Recipe(epochs=3, learning_rate=1e30, optimiser="sgd")
    with pytest.raises(DataError, match="lower learning rate"):
        train(_build, DATA, wild, seed=0)
    holes = LabelledData(DATA.inputs.masked_fill(DATA.inputs > 1, torch.nan), DATA.labels)
    with pytest.raises(DataError, match="NaN"):
        train(_build, holes, Recipe(epochs=1), seed=0)


@pytest.mark.parametrize("optimiser", ["adamw", "adam", "sgd"])
def test_side_by_side_perceptrons_are_those_of_the_loop(optimiser):
    recipe = Recipe(epochs=3, batch_size=16, learning_rate=1e-2, optimiser=optimiser)
    data = LabelledData(DATA.inputs.double(), DATA.labels)
    together = train_mlps(2, (16,), 2, data, recipe, members=2, seed=3)
    for network, seed in zip(together, member_seeds(2, 3), strict=True):
        torch.testing.assert_close(_weights(network), _weights(train(_build, data, recipe, seed=seed)))
