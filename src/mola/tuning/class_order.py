"""Detect labels in another class order than the outputs of the networks.

With the classes in another order, a network of 99 % accuracy looks like one of 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mola.errors import DataError

CLEAR = 0.25
"""Improvement by another order from which labels are refused."""

CHANCE = 1e-4
"""Probability with which predictions that are independent of the labels may look like another order of them."""

ENOUGH_DATA = 50
"""Smallest number of data for comparing columns of labels with columns of predictions."""


def check_class_order(targets: Tensor, predicted: Sequence[Tensor], where: str) -> None:
    """Raise `DataError` with the order that is clearly meant, if it is another one.

    Each label is matched with the class that is predicted for it most often. There are many orders, and for a few data one of them
    always fits well: the order must fit better than chance would let the best of all orders fit.

    Args:
        targets: labels (n,).
        predicted: classes (n,) that each network predicts.
        where: name of the loader.
    """
    for index, classes in enumerate(predicted):
        total = len(targets)
        pairs, counts = torch.unique(torch.stack([targets, classes], 1), dim=0, return_counts=True)
        matched: dict[int, int] = {}
        most: dict[int, int] = {}
        for (label, output), count in zip(pairs.tolist(), counts.tolist(), strict=True):
            if count > most.get(label, 0):
                matched[label], most[label] = output, count
        right, moved = float((targets == classes).double().mean()), sum(most.values()) / total
        if len(matched) < 2 or len(set(matched.values())) < len(matched) or moved <= right + CLEAR:
            continue
        share = sum(int((targets == a).sum()) * int((classes == b).sum()) for a, b in matched.items()) / total**2
        outputs = len(torch.unique(classes))
        orders = math.lgamma(outputs + 1) - math.lgamma(outputs - len(matched) + 1)
        # Chernoff's bound for one order, times the number of orders.
        if moved > share and orders - total * _divergence(moved, share) <= math.log(CHANCE):
            order = ", ".join(f"{label} -> {output}" for label, output in list(matched.items())[:20])
            raise DataError(
                f"the {where}: the classes seem to be in another order than the outputs of networks[{index}]. {right:.1%} of the "
                f"labels agree with this network, but {moved:.1%} would in this order: {order}"
                f"{', ...' if len(matched) > 20 else ''}. Label each input with the index of its class's output."
            )


def _divergence(share: float, chance: float) -> float:
    rest = 0.0 if share == 1 else (1 - share) * math.log((1 - share) / (1 - chance))
    return share * math.log(share / chance) + rest


def check_label_order(labels: Tensor, probs: Tensor, where: str) -> None:
    """Raise `DataError` if the columns of multi-label data correlate far better with other outputs.

    Args:
        labels: (n, C), 0 or 1, NaN where missing.
        probs: (n, C), predicted probabilities of yes.
        where: name of the loader.
    """
    known = ~labels.isnan()
    if labels.shape[1] < 2 or int(known.sum(0).min()) < ENOUGH_DATA:
        return
    count, filled, mask = known.double().sum(0)[:, None], labels.nan_to_num(), known.double()
    # Correlation of each column of labels with each of probabilities, over the data that have the label.
    label_mean, prob_mean = filled.sum(0)[:, None] / count, (mask.T @ probs) / count
    joint = (filled.T @ probs) / count - label_mean * prob_mean
    variance = ((mask.T @ probs.square()) / count - prob_mean.square()).clamp_min(0) * label_mean * (1 - label_mean)
    correlation = torch.where(variance > 0, joint / variance.clamp_min(1e-300).sqrt(), 0)
    best = correlation.max(1)
    order = best.indices.tolist()
    if float((best.values - correlation.diagonal()).mean()) > CLEAR and len(set(order)) == labels.shape[1]:
        raise DataError(
            f"the {where}: the labels seem to be in another order than the networks' outputs. Column by column they match outputs "
            f"{order[:20]}{'...' if len(order) > 20 else ''}. Put the columns in the order of the outputs."
        )
