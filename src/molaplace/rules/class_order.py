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
"""Labels are rejected if a different order raises the accuracy or correlation by more than this."""

CHANCE = 1e-4
"""Largest accepted probability of finding a different order by chance when predictions and labels are unrelated."""

ENOUGH_DATA = 50
"""Smallest number of examples for which the columns of labels and predictions are compared."""


def check_class_order(targets: Tensor, predicted: Sequence[Tensor], where: str) -> None:
    """Raise a `DataError` that states the correct order if the labels are clearly in a different order from the outputs.

    Each label is matched with the class most often predicted for it. There are so many possible orders that, with few data, some order
    always fits well. The order found must therefore fit better than the best of all orders would by chance.

    Args:
        targets: labels (n,).
        predicted: the classes (n,) predicted by each network.
        where: name of the loader, for messages.
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


def check_label_order(labels: Tensor, probs: Tensor, where: str) -> None:
    """Raise `DataError` if reordering the columns of multi-label data makes them correlate far better with the outputs.

    Args:
        labels: labels (n, C), each of which is 0, 1, or NaN if missing.
        probs: predicted probabilities (n, C) that each label is 1.
        where: name of the loader, for messages.
    """
    known = ~labels.isnan()
    if labels.shape[1] < 2 or int(known.sum(0).min()) < ENOUGH_DATA:
        return
    mask = known.double()
    count = mask.sum(0)[:, None]
    filled = labels.nan_to_num()
    # Correlate each column of labels with each column of probabilities, over the data for which the label is known.
    label_mean = filled.sum(0)[:, None] / count
    prob_mean = (mask.T @ probs) / count
    joint = (filled.T @ probs) / count - label_mean * prob_mean
    variance = ((mask.T @ probs.square()) / count - prob_mean.square()).clamp_min(0) * label_mean * (1 - label_mean)
    correlation = torch.where(variance > 0, joint / variance.clamp_min(1e-300).sqrt(), 0)
    best = correlation.max(1)
    order = best.indices.tolist()
    if float((best.values - correlation.diagonal()).mean()) > CLEAR and len(set(order)) == labels.shape[1]:
        raise DataError(
            f"the labels seem to be in a different order from the networks' outputs. The columns match the outputs "
            f"{order[:20]}{'...' if len(order) > 20 else ''}. Reorder the columns to match the outputs.",
            place=f"the {where}",
        )
