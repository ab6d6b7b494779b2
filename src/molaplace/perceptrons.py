"""Multilayer perceptrons for tabular data, trained in parallel: one batched matrix product computes one layer of all K networks.

Up to rounding, training in parallel gives the same networks as training them one by one: each network has its own seed for its initial
weights and for the order of its data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from molaplace.errors import DataError

Loss: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
"""Function that maps outputs (n, C) and labels to the losses (n,) of the data."""


def mlp(inputs: int, hidden: Sequence[int], outputs: int, *, bias: bool = True) -> nn.Sequential:
    """Build a network of linear layers with ReLUs in between; inputs of any shape are flattened.

    Args:
        inputs: number of input values.
        hidden: widths of the hidden layers; the last width is the number of features.
        outputs: number of outputs.
        bias: include biases. Without biases, the network is positively homogeneous, and the far-field theory holds exactly.
    """
    widths = [inputs, *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for width, next_width in zip(widths, hidden, strict=False):
        layers += [nn.Linear(width, next_width, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs, bias=bias))


def train_mlps(
    inputs: Tensor,
    labels: Tensor,
    outputs: int,
    loss: Loss,
    *,
    hidden: Sequence[int],
    members: int,
    seed: int,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    weight_decay: float,
    optimiser: Callable[..., Optimizer] = torch.optim.AdamW,
    bias: bool = True,
    on_epoch: Callable[[int], None] = lambda epoch: None,
) -> list[nn.Sequential]:
    """Train K perceptrons with a learning rate that falls to 0 along a half cosine, without changing torch's random state.

    Args:
        inputs: input rows (n, features).
        labels: labels or targets, of shape (n,) or (n, C).
        outputs: number of outputs.
        loss: loss to minimise.
        hidden: widths of the hidden layers.
        members: number of networks, K.
        seed: random seed for all members; a larger ensemble with the same seed begins with the same members.
        epochs: number of passes over the data, which are reshuffled for every epoch and member.
        batch_size: number of rows per training step.
        learning_rate: initial learning rate.
        weight_decay: weight decay of the optimiser.
        optimiser: function that creates an optimiser from parameters, `lr` and `weight_decay`.
        bias: include biases.
        on_epoch: function that is called with the number of completed epochs.

    Returns:
        The trained networks, in eval mode and with the data type of the inputs.
    """
    if not len(inputs):
        raise DataError("expected at least one row of training data, got none.")
    # Member seeds are drawn at random, so that ensembles with consecutive seeds share no members.
    seeds = torch.randint(2**31, (members,), generator=torch.Generator().manual_seed(seed), device="cpu").tolist()
    networks = []
    orders = []
    with torch.random.fork_rng(devices=[]), inputs.device:  # not torch's default device
        for member_seed in seeds:
            torch.manual_seed(member_seed)
            networks.append(mlp(inputs.shape[1], hidden, outputs, bias=bias).to(inputs.dtype))
            orders.append(torch.Generator())
            orders[-1].set_state(torch.get_rng_state())
    layers = list(
        zip(*([module for module in network if isinstance(module, nn.Linear)] for network in networks), strict=True)
    )
    # Weights (K, in, out) and biases (K, 1, out) of each layer of all members.
    weights = [
        nn.Parameter(torch.stack([layer.weight.detach().T for layer in member_layers])) for member_layers in layers
    ]
    biases = [
        nn.Parameter(torch.stack([layer.bias.detach()[None] for layer in member_layers]))
        for member_layers in layers
        if bias
    ]
    stepper = optimiser([*weights, *biases], lr=learning_rate, weight_decay=weight_decay)
    steps = epochs * math.ceil(len(inputs) / batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(stepper, steps)
    for epoch in range(1, epochs + 1):
        shuffled = torch.stack([torch.randperm(len(inputs), generator=order, device="cpu") for order in orders])
        for rows in torch.split(shuffled, batch_size, dim=1):
            stepper.zero_grad()
            values = inputs[rows]
            for index, weight in enumerate(weights):
                values = functional.relu(values) if index else values
                values = torch.baddbmm(biases[index], values, weight) if bias else torch.bmm(values, weight)
            losses = loss(values.flatten(0, 1), labels[rows].flatten(0, 1)).view(rows.shape).mean(1)
            losses.sum().backward()  # type: ignore[no-untyped-call]
            stepper.step()
            schedule.step()
        if not math.isfinite(float(losses.detach().sum())):
            raise DataError(
                f"expected finite losses, got {losses.tolist()} after epoch {epoch}. Use a learning rate below {learning_rate}."
            )
        on_epoch(epoch)
    with torch.no_grad():
        for index, member_layers in enumerate(layers):
            for member, layer in enumerate(member_layers):
                layer.weight.copy_(weights[index][member].T)
                if bias:
                    layer.bias.copy_(biases[index][member, 0])
    return [network.eval() for network in networks]
