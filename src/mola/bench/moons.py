"""Four methods on two moons: how sure they are everywhere in the plane."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from mola.bench.demo_result import DemoSettings, MoonsResult
from mola.bench.methods import four_methods
from mola.data.moons import two_moons
from mola.models.mlp import mlp
from mola.training import Recipe, train_ensemble

__all__ = ["map_moons", "plane_points"]

POINTS = 200
REACH = 12.0
"""The data lie within 2 of the origin."""


def _build() -> nn.Sequential:
    # With biases, unlike the digits' networks: without, the predicted class is the same all along a ray from the origin.
    return mlp(2, (64, 64), 2)


def plane_points(reach: float, size: int) -> Tensor:
    """Points (size * size, 2) of the square from -reach to reach, row by row from the lowest, each from left to right."""
    axis = torch.linspace(-reach, reach, size, dtype=torch.float32)
    return torch.cartesian_prod(axis, axis).flip(1)


def map_moons(settings: DemoSettings, on_epoch: Callable[[int, int], None]) -> MoonsResult:
    """Train an ensemble on two moons, fit and tune, and map confidence far beyond the data.

    Args:
        settings: seed, number of networks, epochs, and size of the maps.
        on_epoch: called after every epoch with the member's index and its number of epochs done.

    Returns:
        The data and one map for each method.
    """
    train, val = two_moons(POINTS, seed=2 * settings.seed), two_moons(POINTS, seed=2 * settings.seed + 1)
    recipe = Recipe(epochs=settings.moons_epochs, batch_size=POINTS // 2, learning_rate=1e-2)
    networks = train_ensemble(_build, train, recipe, members=settings.members, seed=settings.seed, on_epoch=on_epoch)
    contestants = four_methods(networks, train.batches(), val.batches())
    size = settings.map_size
    plane = plane_points(REACH, size)
    maps = {
        name: np.asarray(method(plane).double().max(1).values.reshape(size, size).numpy())
        for name, method in contestants.predictors.items()
    }
    return MoonsResult(
        points=train.inputs.double().numpy(),
        labels=train.labels.numpy(),
        reach=REACH,
        maps=maps,
        prior_precision={name: posterior.prior_precision[0] for name, posterior in contestants.tuned().items()},
        notes=contestants.notes,
    )
