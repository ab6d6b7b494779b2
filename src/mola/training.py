"""Train classifiers, the same seed giving the same network. For benchmarks and the demo: `mola` never trains yours."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from mola.data.labelled import Labelled
from mola.errors import OptionError

__all__ = ["Recipe", "train", "train_ensemble"]


@dataclass(frozen=True)
class Recipe:
    """How to train: AdamW on the cross-entropy, the learning rate falling to 0 along a half cosine.

    Raises:
        OptionError: if a number cannot be used.
    """

    epochs: int
    batch_size: int = 64
    learning_rate: float = 3e-3
    """At the start; it is lowered after every batch."""
    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            OptionError: if one cannot be used.
        """
        if self.epochs < 1 or self.batch_size < 1 or not self.learning_rate > 0 or not self.weight_decay >= 0:
            message = f"epochs, batch_size and learning_rate must be above 0 and weight_decay not below, got {self}."
            raise OptionError(message)


def train(
    build: Callable[[], nn.Module],
    data: Labelled,
    recipe: Recipe,
    *,
    seed: int,
    on_epoch: Callable[[int], None] = lambda epoch: None,
) -> nn.Module:
    """Build a network and train it. Torch's own random state is left as it was.

    Args:
        build: makes a network with fresh weights; called once, after seeding.
        data: training data, shuffled anew for every epoch.
        recipe: how to train.
        seed: of the initial weights, the order of the data and any dropout.
        on_epoch: called after every epoch with the number of epochs done.

    Returns:
        The network in eval mode, on the device and in the precision of the inputs.
    """
    inputs, labels = data.inputs, data.labels
    accelerators = [inputs.device.index or 0] if inputs.device.type == "cuda" else []
    with torch.random.fork_rng(devices=accelerators):
        torch.manual_seed(seed)
        network = build().to(inputs.device, inputs.dtype).train()
        optimiser = torch.optim.AdamW(network.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
        steps = recipe.epochs * math.ceil(len(data) / recipe.batch_size)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        for epoch in range(1, recipe.epochs + 1):
            for rows in torch.split(torch.randperm(len(data)), recipe.batch_size):
                _step(network, optimiser, inputs[rows], labels[rows])
                schedule.step()
            on_epoch(epoch)
    return network.eval()


def _step(network: nn.Module, optimiser: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> None:
    optimiser.zero_grad()
    functional.cross_entropy(network(inputs), labels).backward()  # type: ignore[no-untyped-call]
    optimiser.step()


def train_ensemble(
    build: Callable[[], nn.Module],
    data: Labelled,
    recipe: Recipe,
    *,
    members: int,
    seed: int,
    on_epoch: Callable[[int, int], None] = lambda member, epoch: None,
) -> list[nn.Module]:
    """Train networks that differ by their seed alone: a deep ensemble.

    Args:
        build: makes a network with fresh weights.
        data: training data.
        recipe: how to train.
        members: number of networks.
        seed: of all the members' seeds.
        on_epoch: called after every epoch with the member's index and its number of epochs done.

    Returns:
        The networks.
    """
    # Drawn rather than counted up, so that ensembles of neighbouring seeds share no member.
    seeds = torch.randint(2**31, (members,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [
        train(build, data, recipe, seed=own, on_epoch=lambda epoch, member=member: on_epoch(member, epoch))  # type: ignore[misc]
        for member, own in enumerate(seeds)
    ]
