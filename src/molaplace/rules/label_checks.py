"""Checks of held-out labels: their class order, the accuracy that they give the networks, and the units of regression targets."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from molaplace.errors import DataError, warn
from molaplace.options import listed

CLEAR_GAIN = 0.25
"""Labels are rejected if a different order raises the accuracy by more than this."""

CHANCE = 1e-4
"""Largest accepted probability of finding a different order by chance when predictions and labels are unrelated."""

FAR_OFF = 2.0
"""Root mean squared error, in standard deviations of the targets, above which the targets seem to be in the wrong units."""


def check_class_order(targets: Tensor, predicted: Sequence[Tensor], where: str) -> None:
    """Raise a `DataError` that states the correct order if the labels are clearly in a different order from the outputs.

    If the orders differ, a network that is 99 % accurate may appear to be only 5 % accurate. Each label is matched with the class most
    often predicted for it. There are so many possible orders that, with few data, some order always fits well. The order found must
    therefore fit better than the best of all orders would by chance. `predicted` holds the classes (n,) predicted by each network.
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
        if len(matched) < 2 or len(set(matched.values())) < len(matched) or reordered <= agreement[index] + CLEAR_GAIN:
            continue
        if total < 2 * len(matched):  # a label that occurs once fits any order
            continue
        products = [int((targets == label).sum()) * int((classes == output).sum()) for label, output in matched.items()]
        chance = sum(products) / total**2
        outputs = len(torch.unique(classes))
        log_orders = math.lgamma(outputs + 1) - math.lgamma(outputs - len(matched) + 1)
        # Union bound: multiply the Chernoff bound for one order by the number of orders.
        if reordered > chance and log_orders - total * _divergence(reordered, chance) <= math.log(CHANCE):
            order = listed([f"{label} -> {output}" for label, output in matched.items()], 20)
            advice = "Label each input with the index of its class among the outputs."
            if max(agreement) > reordered - CLEAR_GAIN:  # another network agrees with the labels
                advice = (
                    f"Other networks agree with the labels, so leave out networks[{index}], or reorder its outputs."
                )
            raise DataError(
                f"the classes seem to be in a different order from the outputs of networks[{index}]. {agreement[index]:.1%} of the "
                f"labels agree with this network, but {reordered:.1%} would agree in this order (label -> output): "
                f"{order}. {advice}",
                place=f"the {where}",
            )


def _divergence(share: float, chance: float) -> float:
    rest = 0.0 if share == 1 else (1 - share) * math.log((1 - share) / (1 - chance))
    return share * math.log(share / chance) + rest


def check_accuracy(
    targets: Tensor, predicted: Sequence[Tensor], chance: float, independent_share: float, where: str
) -> None:
    """Warn if networks predict the labels no better than chance, or if the labels cannot show this; at least one must be known.

    Args:
        targets: true choices, with -1 for missing labels.
        predicted: choices predicted by each network.
        chance: probability that a guess is correct.
        independent_share: ratio of the number of independent data points to the number of rows.
        where: name of the data in messages.
    """
    known = targets >= 0
    count = int(known.sum())
    if not count:
        raise DataError("every label is missing. At least one label is needed.", place=f"the {where}")
    accuracies = [float(((choices == targets) & known).sum() / count) for choices in predicted]
    error = math.sqrt(chance * (1 - chance) / max(1.0, independent_share * count))
    guessing = [index for index, accuracy in enumerate(accuracies) if accuracy < chance + 2 * error]
    if chance + 2 * error >= 1:
        warn(
            f"the {where} has too few labels ({count}) to distinguish the networks from guessing. Tune on more data, or use "
            "rule='evidence', which needs no validation data."
        )
    elif guessing:
        which = ", ".join(f"networks[{index}]" for index in guessing)
        if len(guessing) == len(predicted):
            which = "the networks"
        warn(
            f"only {max(accuracies[index] for index in guessing):.1%} of the labels in the {where} agree with {which}, whereas "
            f"chance alone would give {chance:.1%}. Check that the networks are trained, that the labels belong to these inputs, "
            f"and that the inputs are preprocessed as in training."
        )
    elif bool((targets[known] == targets[known][0]).all()):
        warn(
            f"every label in the {where} is {int(targets[known][0])}. Settings tuned for one class may not suit the others. Pass "
            "validation data from every class."
        )


def check_units(means: Tensor, targets: Tensor, where: str) -> None:
    """Warn if the means (n, D) predicted by regression networks are so far from the targets that their units seem to differ."""
    error = (means - targets).square().mean(0).sqrt()
    deviation = targets.std(0, correction=0)
    if len(targets) > 1 and bool((error > FAR_OFF * deviation).any()):
        output = int((error / deviation).argmax())
        warn(
            f"the root mean squared error on the {where} is {float(error[output]):.3g}, but the standard deviation of the "
            f"targets is only {float(deviation[output]):.3g}. If the targets were standardised in training, pass "
            "mola.likelihoods.Gaussian(location=..., scale=...)."
        )
