"""Methods that train further or anew: SWAG from a suite's networks, MIMO from its architecture. Interrupted, they go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from mola.baselines.mimo import Mimo
from mola.baselines.swag import Swag
from mola.bench.activations import Network
from mola.bench.budget import MimoBudget, SwagBudget
from mola.bench.layout import fast_inputs, fast_network
from mola.bench.suite import TrainingData
from mola.training import Recipe

__all__ = ["Shuffled", "fit_mimo", "fit_swag"]


class Shuffled:
    """Training data as a loader: a new order every time, drawn from torch's random state.

    Args:
        training: data and what is done to them.
        batch_size: images a batch.
        images: how many of them each time, drawn without replacement; None is all.
    """

    def __init__(self, training: TrainingData, batch_size: int, images: int | None = None) -> None:
        self.training, self.batch_size = training, batch_size
        self.count = len(training.data) if images is None else min(images, len(training.data))

    def __len__(self) -> int:
        """Number of batches."""
        return math.ceil(self.count / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of (inputs, labels) as the network sees them."""
        data = self.training.data
        for rows in torch.split(torch.randperm(len(data))[: self.count], self.batch_size):
            yield fast_inputs(self.training.prepare(data.inputs[rows])), data.labels[rows]


def fit_swag(
    network: Network, training: TrainingData, budget: SwagBudget, folder: Path | None, device: str = "cpu"
) -> Swag:
    """SWAG from one trained network; its seed belongs to the network, so that it is the same in whatever run.

    Args:
        network: trained.
        training: what it was trained on.
        budget: how much to train.
        folder: to keep the path and the draws in; what is there already is taken up.
        device: where to train.

    Returns:
        The predictor.
    """
    return Swag.fit(
        fast_network(network.load().to(device), _example(training)),
        Shuffled(training, budget.batch_size, budget.images),
        learning_rate=budget.learning_rate,
        epochs=budget.snapshots,
        rank=budget.snapshots,
        samples=budget.samples,
        seed=int(network.checksum, 16) % 2**31,
        checkpoint=folder,
        progress=False,
    )


def fit_mimo(
    build: Callable[[], nn.Module],
    training: TrainingData,
    recipe: Recipe,
    budget: MimoBudget,
    seed: int,
    folder: Path | None,
    device: str = "cpu",
) -> Mimo:
    """The MIMO form of an architecture, trained by the suite's own recipe.

    Args:
        build: makes a network with fresh weights.
        training: what to train on.
        recipe: optimiser, schedule and batch size; the number of epochs is the budget's.
        budget: how much to train.
        seed: of weights, orders and augmentation.
        folder: to keep the training in; what is there already is taken up.
        device: where to train.

    Returns:
        The trained network.
    """
    example = _example(training)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = build().to(device, example.dtype)
    mimo = Mimo(network, budget.members, example=example, seed=seed)
    fast_network(mimo, example)
    return mimo.fit(
        Shuffled(training, recipe.batch_size),
        epochs=budget.epochs,
        batch_repetition=budget.batch_repetition,
        optimiser=recipe.make_optimiser,
        seed=seed,
        checkpoint=folder,
        progress=False,
    )


def _example(training: TrainingData) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return training.prepare(training.data.inputs[:2])
