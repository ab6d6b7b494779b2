"""Scikit-learn's handwritten digits: 1797 grey images of 8 x 8 pixels that come with the package, no download.

Each pixel counts the inked dots of a 4 x 4 block of a scanned digit, 0 to 16; here divided by 16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mola.data.labelled import Labelled
from mola.errors import MissingExtraError, OptionError

__all__ = ["CLASSES", "SIDE", "Digits", "load_digits"]

SIDE = 8
CLASSES = 10


@dataclass(frozen=True)
class Digits:
    """The digits in three parts; inputs are (n, 1, 8, 8) in float32, between 0 and 1."""

    train: Labelled
    val: Labelled
    test: Labelled


def load_digits(seed: int = 0, *, train: int = 1000, val: int = 297) -> Digits:
    """The digits, split at random: what is neither for training nor for validation is for testing.

    Args:
        seed: of the split.
        train: number of training data.
        val: number of validation data.

    Returns:
        The three parts.

    Raises:
        MissingExtraError: if scikit-learn is not installed.
        OptionError: if nothing would be left for testing.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise MissingExtraError(feature="the handwritten digits", package="scikit-learn", extra="bench") from error
    pixels, target = datasets.load_digits(return_X_y=True)
    if train < 1 or val < 1 or train + val >= len(target):
        message = f"train and val must be at least 1 and leave some of {len(target)} digits for testing, got {train} and {val}."
        raise OptionError(message)
    inputs = torch.from_numpy(pixels).float().div(16).reshape(-1, 1, SIDE, SIDE)
    labels = torch.from_numpy(target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    parts = [Labelled(inputs[rows], labels[rows]) for rows in order.tensor_split([train, train + val])]
    return Digits(*parts)
