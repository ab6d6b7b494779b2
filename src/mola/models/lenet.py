"""LeNet-5 for 28 x 28 grey images, as the paper uses it: 44,426 parameters, 84 features."""

from __future__ import annotations

from torch import nn

__all__ = ["lenet"]


def lenet(classes: int = 10, *, bias: bool = True) -> nn.Sequential:
    """Two convolutions and three linear layers with ReLU.

    Args:
        classes: number of outputs.
        bias: without, the network is positively homogeneous and the paper's far-field theory holds exactly.

    Returns:
        The network.
    """
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, bias=bias),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5, bias=bias),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 120, bias=bias),
        nn.ReLU(),
        nn.Linear(120, 84, bias=bias),
        nn.ReLU(),
        nn.Linear(84, classes, bias=bias),
    )
