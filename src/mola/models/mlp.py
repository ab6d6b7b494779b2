"""Multilayer perceptrons."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

__all__ = ["mlp"]


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
