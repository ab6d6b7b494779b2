"""Training: it learns, follows its seed, and leaves no trace."""

from __future__ import annotations

import pytest
import torch

from mola.errors import DataError, OptionError, StorageError
from mola.lab.data.embedded import two_moons
from mola.lab.training import Labelled, Recipe, TrainingCheckpoint, mlp, train, train_ensemble, train_mlps


def _build():
    return mlp(2, (16,), 2)


def _weights(network):
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def test_it_learns_the_moons():
    data = two_moons(200)
    network = train(_build, data, Recipe(epochs=60, learning_rate=1e-2), seed=0)
    assert (network(data.inputs).argmax(1) == data.labels).float().mean() > 0.9


def test_the_same_seed_gives_the_same_bits_and_another_gives_others():
    data, recipe = two_moons(40), Recipe(epochs=2)
    before = torch.get_rng_state()
    first, again, other = (train(_build, data, recipe, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module.training for module in first.modules())
    assert {parameter.dtype for parameter in first.parameters()} == {torch.float32}
    assert torch.equal(_weights(first), _weights(again))
    assert not torch.equal(_weights(first), _weights(other))


def test_ensembles_of_neighbouring_seeds_share_no_member():
    data, recipe = two_moons(40), Recipe(epochs=1)
    members = [
        tuple(_weights(network).tolist())
        for seed in (0, 1)
        for network in train_ensemble(_build, data, recipe, members=3, seed=seed)
    ]
    assert len(set(members)) == 6


@pytest.mark.parametrize(
    "wrong",
    [{"epochs": 0}, {"learning_rate": 0.0}, {"batch_size": 0}, {"weight_decay": -1.0}, {"optimiser": "adamm"}],
)
def test_a_recipe_that_cannot_be_followed_is_refused(wrong):
    with pytest.raises(OptionError, match="must be"):
        Recipe(**({"epochs": 1} | wrong))


class InterruptedHereError(Exception):
    pass


def _noisy(inputs):
    """Draws from torch's own generator, as augmentation does."""
    return inputs + 0.1 * torch.randn_like(inputs)


def _build_noisy():
    return torch.nn.Sequential(mlp(2, (16,), 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))


@pytest.mark.parametrize("optimiser", ["adamw", "adam", "sgd"])
def test_an_interrupted_training_goes_on_to_the_same_bits(optimiser, tmp_path):
    recipe = Recipe(epochs=5, batch_size=16, learning_rate=1e-2, optimiser=optimiser)
    data = two_moons(40)
    whole = train(_build_noisy, data, recipe, seed=1, prepare=_noisy)
    checkpoint = TrainingCheckpoint(tmp_path / "under-way", "training-checkpoint", {"seed": 1})
    epochs = []

    def stop(epoch):
        epochs.append(epoch)
        if epoch in (2, 3):
            raise InterruptedHereError

    for _ in range(2):
        with pytest.raises(InterruptedHereError):
            train(_build_noisy, data, recipe, seed=1, prepare=_noisy, checkpoint=checkpoint, on_epoch=stop)
            # The second time it is told of epoch 2, where it goes on, and stops there again.
        epochs.append(None)
    done = train(_build_noisy, data, recipe, seed=1, prepare=_noisy, checkpoint=checkpoint)
    assert epochs == [1, 2, None, 2, None]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, done.state_dict()[name]), name


def kept(folder, identity):
    return TrainingCheckpoint(folder, "training-checkpoint", identity)


def test_a_checkpoint_of_another_training_is_refused(tmp_path):
    path = tmp_path / "under-way"
    train(_build, two_moons(20), Recipe(epochs=1), seed=1, checkpoint=kept(path, {"seed": 1}))
    with pytest.raises(StorageError, match=r"another training .*: expected .*2.* got .*1.*Delete it"):
        train(_build, two_moons(20), Recipe(epochs=1), seed=2, checkpoint=kept(path, {"seed": 2}))


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None], ids=["empty", "foreign", "cut off"])
def test_a_damaged_checkpoint_is_named(tmp_path, content):
    path = tmp_path / "under-way"
    train(_build, two_moons(20), Recipe(epochs=1), seed=1, checkpoint=kept(path, {}))
    for file in path.iterdir():
        whole = file.read_bytes()
        file.write_bytes(whole[:-10] if content is None else content)
        with pytest.raises(StorageError, match=rf"{file.name} is .*To train from the start.* delete this one"):
            train(_build, two_moons(20), Recipe(epochs=1), seed=1, checkpoint=kept(path, {}))
        file.write_bytes(whole)


def test_a_training_that_diverges_says_so():
    with pytest.raises(DataError, match="lower learning rate"):
        train(_build, two_moons(40), Recipe(epochs=3, learning_rate=1e30, optimiser="sgd"), seed=0)


@pytest.mark.parametrize("optimiser", ["adamw", "adam", "sgd"])
def test_side_by_side_perceptrons_are_those_of_the_loop(optimiser):
    data, recipe = two_moons(40), Recipe(epochs=3, batch_size=16, learning_rate=1e-2, optimiser=optimiser)
    data = Labelled(data.inputs.double(), data.labels)
    together = train_mlps(2, (16,), 2, data, recipe, members=2, seed=3)
    for one, other in zip(together, train_ensemble(_build, data, recipe, members=2, seed=3), strict=True):
        torch.testing.assert_close(_weights(one), _weights(other))
