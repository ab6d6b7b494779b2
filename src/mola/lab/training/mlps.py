"""Multilayer perceptrons by recipe and loss."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from mola import perceptrons
from mola.lab.training.recipe import OPTIMISERS, Labelled, Recipe
from mola.options import one_of
from mola.perceptrons import Loss, mlp


def digits_mlp(classes: int = 10) -> nn.Sequential:
    """Make the network of the embedded digits: two hidden layers of 256 without biases, for which the far-field theory is exact."""
    return mlp(64, (256, 256), classes, bias=False)


def _cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, labels, reduction="none")


def _squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs - targets).square().sum(1)


LOSSES: dict[str, Loss] = {"cross-entropy": _cross_entropy, "squared-error": _squared_error}
"""Functions of outputs and labels that give the loss (n,) of each datum, by name; half the squared error is the NLL at unit noise."""


def train_mlps(
    inputs: int,
    hidden: Sequence[int],
    classes: int,
    data: Labelled,
    recipe: Recipe,
    *,
    members: int,
    seed: int,
    loss: str = "cross-entropy",
) -> list[nn.Sequential]:
    """Train multilayer perceptrons side by side that differ by their seed alone, as `train_ensemble` would one by one.

    `loss` is one of `LOSSES`.
    """
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
