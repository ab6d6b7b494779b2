"""What training minimises, by name: negative log-likelihoods of classes, of yes or no, of numbers, of numbers with their variance."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from mola.likelihood import BERNOULLI


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Of class indices (n,) under logits (n, C)."""
    return functional.cross_entropy(outputs, labels, reduction="none")


def binary_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Of labels (n, C) of 0 and 1 under logits (n, C), summed over labels; NaN is a label that is not known."""
    return -BERNOULLI.log_likelihood(outputs, labels)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Half of it, between targets (n, D) and means (n, D): the negative log-likelihood at unit noise, but for a constant."""
    return 0.5 * (outputs - targets).square().sum(1)


def gaussian_nll(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of targets (n, D) under means and log variances (n, 2 D), but for a constant."""
    means, logs = torch.tensor_split(outputs, 2, dim=1)
    return 0.5 * ((targets - means).square() * (-logs).exp() + logs).sum(1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": cross_entropy,
    "binary-cross-entropy": binary_cross_entropy,
    "squared-error": squared_error,
    "gaussian-nll": gaussian_nll,
}
"""From outputs and labels to one number for each datum."""
