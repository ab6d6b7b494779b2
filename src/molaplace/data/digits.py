"""scikit-learn's handwritten digits, and the network for them.

The digits are 1797 greyscale images of 8 x 8 pixels with values between 0 and 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from molaplace.errors import importing
from molaplace.perceptrons import mlp

SIDE = 8
CLASSES = 10

HIDDEN = (256, 256)
"""Widths of the hidden layers of the networks for the digits."""


@dataclass(frozen=True)
class LabelledData:
    """Inputs (n, ...) and class indices (n,)."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, size: int = 256) -> list[tuple[Tensor, Tensor]]:
        """Return a loader for the data in their original order: a list of batches (inputs, labels)."""
        return list(zip(torch.split(self.inputs, size), torch.split(self.labels, size), strict=True))


@dataclass(frozen=True)
class Digits:
    """The digits in three parts; inputs are float32 tensors (n, 1, 8, 8) with values between 0 and 1."""

    train: LabelledData
    val: LabelledData
    test: LabelledData


def load_digits(seed: int = 0) -> Digits:
    """Split the digits at random into 1000 training, 297 validation and 500 test images."""
    with importing("the handwritten digits", "scikit-learn", "cli"):
        from sklearn import datasets
    pixels, target = datasets.load_digits(return_X_y=True)
    inputs = torch.from_numpy(pixels).float().div(16).reshape(-1, 1, SIDE, SIDE)
    labels = torch.from_numpy(target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed), device="cpu")
    return Digits(*(LabelledData(inputs[rows], labels[rows]) for rows in order.tensor_split([1000, 1297])))


def digits_network(classes: int = CLASSES) -> nn.Sequential:
    """Build the network for the digits: two hidden layers of width 256 without biases, so that the far-field theory is exact."""
    return mlp(SIDE * SIDE, HIDDEN, classes, bias=False)
