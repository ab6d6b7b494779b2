"""Whether labels and networks mean the same classes: a network of 99 % looks like one of 5 % if the classes are in another order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["OtherOrder", "guessed", "other_order"]

CLEAR = 0.25
"""How much better another order must do to be told."""

CHANCE = 1e-4
"""Probability at most with which answers that have nothing to do with the labels look like another order of them."""


@dataclass(frozen=True)
class OtherOrder:
    """An order of the classes in which labels and answers agree far better.

    Attributes:
        right: share of the labels that agree as they are.
        moved: share that would agree in the other order.
        outputs: which output stands for each label, as far as there are such labels.
    """

    right: float
    moved: float
    outputs: Mapping[int, int]


def other_order(pairs: Tensor) -> OtherOrder | None:
    """The order of the classes that is clearly meant, if it is another one.

    Each label is taken to stand for the answer that it meets most often. There are many orders, and for a few data one of them
    always does well: the order must do better than chance would let the best of all of them do.

    Args:
        pairs: (n, 2), the label of each input and the class that a network says.

    Returns:
        The order; None if the labels are right as they are, or no other order explains them.
    """
    total = len(pairs)
    if total == 0:
        return None
    # Only pairs that occur: a table of counts would be too large for many classes.
    found, counts = torch.unique(pairs, dim=0, return_counts=True)
    favourite: dict[int, int] = {}
    most: dict[int, int] = {}
    labels: dict[int, int] = {}
    answers: dict[int, int] = {}
    for (label, output), count in zip(found.tolist(), counts.tolist(), strict=True):
        labels[label] = labels.get(label, 0) + count
        answers[output] = answers.get(output, 0) + count
        if count > most.get(label, 0):
            favourite[label], most[label] = output, count
    right = int((pairs[:, 0] == pairs[:, 1]).sum()) / total
    moved = sum(most.values()) / total
    if len(favourite) < 2 or len(set(favourite.values())) < len(favourite) or moved <= right + CLEAR:
        return None
    by_chance = sum(labels[label] * answers[output] for label, output in favourite.items()) / total**2
    # Chernoff's bound for one order, times the number of orders.
    orders = math.lgamma(len(answers) + 1) - math.lgamma(len(answers) - len(labels) + 1)
    if moved <= by_chance or orders - total * _divergence(moved, by_chance) > math.log(CHANCE):
        return None
    return OtherOrder(right, moved, favourite)


def _divergence(share: float, chance: float) -> float:
    """Of a coin that shows heads in a share of throws from one that does so by chance, in nats."""
    rest = 0.0 if share == 1 else (1 - share) * math.log((1 - share) / (1 - chance))
    return share * math.log(share / chance) + rest


def guessed(right: float, count: int, outputs: int) -> bool:
    """Whether labels agree with answers hardly more often than guesses would.

    Args:
        right: share of the labels that agree.
        count: of labels.
        outputs: number of classes.

    Returns:
        Whether the share is at most that of guessing, give or take what chance does to so many labels: of a few, at most a quarter
        of the way to all.
    """
    by_chance = 1 / outputs
    return count > 0 and right <= by_chance + min(
        2 * math.sqrt(by_chance * (1 - by_chance) / count), (1 - by_chance) / 4
    )
