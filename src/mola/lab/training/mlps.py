"""Multilayer perceptrons by recipe and loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from mola import perceptrons
from mola.errors import OptionError
from mola.lab.training.recipe import OPTIMISERS, Labelled, Recipe
from mola.likelihoods import BERNOULLI
from mola.options import one_of
from mola.perceptrons import Loss, mlp


def digits_mlp(classes: int = 10) -> nn.Sequential:
    """Make the network of the embedded digits: two hidden layers of 256 without biases, for which the far-field theory is exact."""
    return mlp(64, (256, 256), classes, bias=False)


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood (n,) of class indices (n,) under logits (n, C)."""
    return functional.cross_entropy(outputs, labels, reduction="none")


def binary_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood (n,) of labels 0 and 1 (n, C) under logits (n, C), summed over labels; NaN is missing."""
    return -BERNOULLI.log_likelihood(outputs, labels)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Half the squared error (n,) of means (n, D): the negative log-likelihood at unit noise, up to a constant."""
    return 0.5 * (outputs - targets).square().sum(1)


def gaussian_nll(outputs: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood (n,) of targets (n, D) under means and log-variances (n, 2 D), up to a constant."""
    means, logs = torch.tensor_split(outputs, 2, dim=1)
    return 0.5 * ((targets - means).square() * (-logs).exp() + logs).sum(1)


LOSSES: dict[str, Loss] = {
    "cross-entropy": cross_entropy,
    "binary-cross-entropy": binary_cross_entropy,
    "squared-error": squared_error,
    "gaussian-nll": gaussian_nll,
}
"""From outputs and labels to the loss (n,) of each datum, by name."""


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

    Args:
        inputs: number of input values.
        hidden: widths of the hidden layers.
        classes: number of outputs.
        data: training data with inputs (n, inputs).
        recipe: how to train, with the cosine schedule.
        members: number of networks.
        seed: from which the members' seeds are drawn.
        loss: name of the loss, one of `LOSSES`.
    """
    if recipe.schedule != "cosine":
        raise OptionError(f"perceptrons are trained side by side with the cosine schedule alone, got {recipe}.")
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
