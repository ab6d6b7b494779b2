"""Training data in memory, recipes (optimiser and schedule settings), and perceptrons trained with a recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from molaplace import perceptrons
from molaplace.demo import LabelledData
from molaplace.errors import OptionError
from molaplace.options import one_of

OPTIMISERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
}
"""Optimisers: Adam with decoupled weight decay, Adam with weight decay in the gradient, and SGD with Nesterov momentum 0.9."""


@dataclass(frozen=True)
class Shuffled:
    """A loader that yields training data in a new random order on every pass; the order is drawn from torch's random state."""

    data: LabelledData
    batch_size: int
    prepare: Callable[[Tensor], Tensor] = lambda inputs: inputs
    """Function that turns a batch of stored inputs into network inputs."""
    images: int | None = None
    """Number of examples in each pass; all examples if None."""

    def __len__(self) -> int:
        return math.ceil(min(len(self.data), self.images or len(self.data)) / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.split(torch.randperm(len(self.data))[: self.images], self.batch_size):
            yield self.prepare(self.data.inputs[rows]), self.data.labels[rows]


@dataclass(frozen=True)
class Recipe:
    """An optimiser and its settings. The learning rate falls to 0 along a half cosine, batch by batch."""

    epochs: int
    batch_size: int = 64
    learning_rate: float = 3e-3
    """Initial learning rate."""
    weight_decay: float = 1e-2
    optimiser: str = "adamw"
    """Name of the optimiser, one of `OPTIMISERS`."""
    augment: bool = False
    """True to flip training images at random and shift them by up to 4 pixels."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "learning_rate"):
            if not getattr(self, name) > 0:
                raise OptionError(f"must be above 0, got {getattr(self, name):g}.", argument=name)
        if not self.weight_decay >= 0:
            raise OptionError(f"must be at least 0, got {self.weight_decay:g}.", argument="weight_decay")
        one_of(self.optimiser, OPTIMISERS, "optimiser")

    def describe(self) -> dict[str, Any]:
        """Return the recipe as JSON values, including the name of the schedule, to store in records and with trained networks."""
        return {**asdict(self), "schedule": "cosine", "drops": []}

    def make_optimiser(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Create the optimiser for the given parameters."""
        return OPTIMISERS[self.optimiser](parameters, lr=self.learning_rate, weight_decay=self.weight_decay)

    def make_schedule(self, optimiser: Optimizer, count: int) -> LRScheduler:
        """Create the learning-rate schedule for `count` training examples; it must be stepped after each batch."""
        return CosineAnnealingLR(optimiser, self.epochs * math.ceil(count / self.batch_size))


RECIPES: dict[str, Recipe] = {
    "mnist": Recipe(epochs=100, batch_size=128, learning_rate=1e-3, weight_decay=5e-4, optimiser="adam"),
    "cifar10": Recipe(epochs=100, batch_size=128, learning_rate=0.1, weight_decay=5e-4, optimiser="sgd", augment=True),
}
"""The paper's recipes, keyed by data set."""


LOSSES: dict[str, perceptrons.Loss] = {
    "cross-entropy": partial(functional.cross_entropy, reduction="none"),
    "squared-error": lambda outputs, targets: 0.5 * (outputs - targets).square().sum(1),
}
"""Loss functions, keyed by name: each maps outputs and labels to the losses (n,) of the individual examples. Up to a constant, half
the squared error is the negative log-likelihood under Gaussian noise with variance 1."""


def train_mlps(
    inputs: int,
    hidden: Sequence[int],
    classes: int,
    data: LabelledData,
    recipe: Recipe,
    *,
    members: int,
    seed: int,
    loss: str = "cross-entropy",
) -> list[nn.Sequential]:
    """Train `members` perceptrons in parallel, with different seeds; `loss` is the name of one of `LOSSES`."""
    return perceptrons.train_mlps(
        data.inputs.reshape(len(data), inputs),
        data.labels,
        classes,
        LOSSES[one_of(loss, LOSSES, "loss")],
        hidden=hidden,
        members=members,
        seed=seed,
        epochs=recipe.epochs,
        batch_size=recipe.batch_size,
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        optimiser=OPTIMISERS[recipe.optimiser],
    )
