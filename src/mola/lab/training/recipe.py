"""Training data in memory, and recipes: optimiser and schedule as values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from mola.errors import OptionError
from mola.options import one_of

OPTIMISERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
}
"""Adam with decoupled weight decay; Adam with weight decay in the gradient; SGD with Nesterov momentum 0.9."""


@dataclass(frozen=True)
class Labelled:
    """Inputs (n, ...) and labels: class indices (n,), or targets (n, C) of another likelihood."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, size: int = 256) -> list[tuple[Tensor, Tensor]]:
        """Return a loader: the data in their order as a list of (inputs, labels)."""
        return list(zip(torch.split(self.inputs, size), torch.split(self.labels, size), strict=True))


@dataclass(frozen=True)
class Recipe:
    """Optimiser with its settings; the learning rate falls to 0 along a half cosine, batch by batch."""

    epochs: int
    batch_size: int = 64
    learning_rate: float = 3e-3
    """Initial learning rate."""
    weight_decay: float = 1e-2
    optimiser: str = "adamw"
    """One of `OPTIMISERS`."""
    augment: bool = False
    """Flip images at random and shift them by up to 4 pixels."""

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1 or not self.learning_rate > 0 or not self.weight_decay >= 0:
            raise OptionError(
                f"epochs, batch_size and learning_rate must be above 0 and weight_decay at least 0, got {self}."
            )
        one_of(self.optimiser, OPTIMISERS, "optimiser")

    def describe(self) -> dict[str, Any]:
        """Return the recipe as JSON values, with the schedule that records and trained networks name."""
        return {**asdict(self), "schedule": "cosine", "drops": []}

    def make_optimiser(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Make the optimiser of these parameters."""
        return OPTIMISERS[self.optimiser](parameters, lr=self.learning_rate, weight_decay=self.weight_decay)

    def make_schedule(self, optimiser: Optimizer, count: int) -> LRScheduler:
        """Make the learning-rate schedule over all batches of `count` data, stepped after each batch."""
        return CosineAnnealingLR(optimiser, self.epochs * math.ceil(count / self.batch_size))


RECIPES: dict[str, Recipe] = {
    "mnist": Recipe(epochs=100, batch_size=128, learning_rate=1e-3, weight_decay=5e-4, optimiser="adam"),
    "cifar10": Recipe(epochs=100, batch_size=128, learning_rate=0.1, weight_decay=5e-4, optimiser="sgd", augment=True),
}
"""The paper's recipes, by data set."""
