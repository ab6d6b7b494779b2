"""Checks that the labels use the same class order as the networks' outputs.

If the orders differ, a network that is 99 % accurate may appear to be only 5 % accurate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from molaplace.errors import DataError

CLEAR = 0.25
"""Labels are rejected if a different order raises the accuracy by more than this."""

CHANCE = 1e-4
"""Largest accepted probability of finding a different order by chance when predictions and labels are unrelated."""


def check_class_order(targets: Tensor, predicted: Sequence[Tensor], where: str) -> None:
    """Raise a `DataError` that states the correct order if the labels are clearly in a different order from the outputs.

    Each label is matched with the class most often predicted for it. There are so many possible orders that, with few data, some order
    always fits well. The order found must therefore fit better than the best of all orders would by chance. `predicted` holds the
    classes (n,) predicted by each network.
    """
    agreement = [float((targets == classes).double().mean()) for classes in predicted]
    for index, classes in enumerate(predicted):
        total = len(targets)
        pairs, counts = torch.unique(torch.stack([targets, classes], 1), dim=0, return_counts=True)
        matched: dict[int, int] = {}
        most: dict[int, int] = {}
        for (label, output), count in zip(pairs.tolist(), counts.tolist(), strict=True):
            if count > most.get(label, 0):
                matched[label] = output
                most[label] = count
        reordered = sum(most.values()) / total
        if len(matched) < 2 or len(set(matched.values())) < len(matched) or reordered <= agreement[index] + CLEAR:
            continue
        if total < 2 * len(matched):  # a label that occurs once fits any order
            continue
        share = sum(int((targets == a).sum()) * int((classes == b).sum()) for a, b in matched.items()) / total**2
        outputs = len(torch.unique(classes))
        orders = math.lgamma(outputs + 1) - math.lgamma(outputs - len(matched) + 1)
        # Union bound: multiply the Chernoff bound for one order by the number of orders.
        if reordered > share and orders - total * _divergence(reordered, share) <= math.log(CHANCE):
            order = ", ".join(f"{label} -> {output}" for label, output in list(matched.items())[:20])
            advice = "Label each input with the index of its class among the outputs."
            if max(agreement) > reordered - CLEAR:  # another network agrees with the labels
                advice = (
                    f"Other networks agree with the labels, so leave out networks[{index}], or reorder its outputs."
                )
            raise DataError(
                f"the classes seem to be in a different order from the outputs of networks[{index}]. {agreement[index]:.1%} of the "
                f"labels agree with this network, but {reordered:.1%} would agree in this order (label -> output): "
                f"{order}{', ...' if len(matched) > 20 else ''}. {advice}",
                place=f"the {where}",
            )


def _divergence(share: float, chance: float) -> float:
    rest = 0.0 if share == 1 else (1 - share) * math.log((1 - share) / (1 - chance))
    return share * math.log(share / chance) + rest
