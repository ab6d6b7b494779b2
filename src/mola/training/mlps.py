"""Multilayer perceptrons, and many of them trained side by side.

A layer of all members is one product; one by one, the calls would dominate the cost. The members are those that
`train_ensemble` gives, up to rounding: the same initial weights, the same order of the data for each, the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from mola.errors import DataError
from mola.options import one_of
from mola.training.labelled import Labelled
from mola.training.loop import member_seeds
from mola.training.losses import LOSSES
from mola.training.recipe import Recipe


def mlp(inputs: int, hidden: Sequence[int], classes: int, *, bias: bool = True) -> nn.Sequential:
    """Linear layers with ReLU between them.

    Args:
        inputs: number of input values; inputs of any shape are flattened.
        hidden: widths of the hidden layers; the last is the number of features.
        classes: number of outputs.
        bias: without, the network is positively homogeneous and the paper's far-field theory holds exactly.

    Returns:
        The network.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    width = inputs
    for size in hidden:
        layers += [nn.Linear(width, size, bias=bias), nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, classes, bias=bias))


def digits_mlp(classes: int = 10) -> nn.Sequential:
    """For the embedded digits: two hidden layers of 256, and no bias anywhere, so that the far-field theory holds to the letter."""
    return mlp(64, (256, 256), classes, bias=False)


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
    """Train multilayer perceptrons that differ by their seed alone. Torch's own random state is left as it was.

    Args:
        inputs: number of input values.
        hidden: widths of the hidden layers.
        classes: number of outputs.
        data: training data, rows of numbers, shuffled anew for every epoch and member.
        recipe: how to train.
        members: number of networks.
        seed: of all the members' seeds.
        loss: what is minimised, one of `LOSSES`.

    Returns:
        The networks in eval mode, in the precision of the data.
    """
    if not len(data):
        raise DataError("there are no training data: expected at least one.")
    of_each = LOSSES[one_of(loss, LOSSES, "loss")]
    networks, orders = _begin(inputs, hidden, classes, data, member_seeds(members, seed))
    layers = [[layer for layer in network if isinstance(layer, nn.Linear)] for network in networks]
    stacked = [_stack(same) for same in zip(*layers, strict=True)]
    parameters = [part for pair in stacked for part in pair]
    optimiser = recipe.make_optimiser(parameters)
    schedule = recipe.make_schedule(optimiser, len(data))
    for epoch in range(1, recipe.epochs + 1):
        shuffled = torch.stack([torch.randperm(len(data), generator=order) for order in orders])
        for rows in torch.split(shuffled, recipe.batch_size, dim=1):
            optimiser.zero_grad()
            losses = _losses(stacked, data.inputs[rows], data.labels[rows], of_each)
            losses.sum().backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
        if not math.isfinite(float(losses.detach().sum())):
            raise DataError(
                f"the loss is {losses.tolist()} after epoch {epoch}: lower the learning rate (now {recipe.learning_rate})."
            )
    with torch.no_grad():
        for (weight, bias), same in zip(stacked, zip(*layers, strict=True), strict=True):
            for member, layer in enumerate(same):
                layer.weight.copy_(weight[member].T)
                layer.bias.copy_(bias[member, 0])
    return [network.eval() for network in networks]


def _begin(
    inputs: int, hidden: Sequence[int], classes: int, data: Labelled, seeds: Sequence[int]
) -> tuple[list[nn.Sequential], list[torch.Generator]]:
    networks, orders = [], []
    with torch.random.fork_rng(devices=[]):
        for own in seeds:
            torch.manual_seed(own)
            networks.append(mlp(inputs, hidden, classes).to(data.inputs.dtype))
            orders.append(torch.Generator())
            orders[-1].set_state(torch.get_rng_state())
    return networks, orders


def _stack(layers: Sequence[nn.Linear]) -> tuple[nn.Parameter, nn.Parameter]:
    # Weights (K, in, out) and biases (K, 1, out) of the same layer of all members.
    weight = torch.stack([layer.weight.detach().T for layer in layers])
    return nn.Parameter(weight), nn.Parameter(torch.stack([layer.bias.detach()[None] for layer in layers]))


def _losses(
    stacked: Sequence[tuple[Tensor, Tensor]],
    inputs: Tensor,
    labels: Tensor,
    of_each: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    # Loss (K,) of every member on its own batch.
    values = inputs
    for index, (weight, bias) in enumerate(stacked):
        values = torch.baddbmm(bias, functional.relu(values) if index else values, weight)
    return of_each(values.flatten(0, 1), labels.flatten(0, 1)).view(labels.shape[:2]).mean(1)
