"""Multilayer perceptrons."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

__all__ = ["digits_mlp", "mlp"]


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
