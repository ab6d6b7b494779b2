"""Whether labels and networks mean the same classes: a network of 99 % looks like one of 5 % if the classes are in another order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mola.errors import DataError, warn
from mola.networks import as_batch, call, undisturbed

__all__ = ["check_order", "confusion"]

CLEAR = 0.25
"""How much better another order must do to be told."""


def confusion(network: nn.Module, loader: Iterable[Any], outputs: int) -> Tensor:
    """Counts (C, C): rows are labels, columns what the network says.

    Args:
        network: a trained classifier.
        loader: labelled batches.
        outputs: number of classes.

    Returns:
        The counts.
    """
    counts = torch.zeros(outputs, outputs, dtype=torch.int64)
    with undisturbed(network):
        for index, raw in enumerate(loader):
            batch = as_batch(raw, f"batch {index} of the validation data")
            if batch.labels is None:
                continue
            predicted = call(network, batch.inputs).argmax(1).cpu()
            counts += torch.bincount(batch.labels.cpu() * outputs + predicted, minlength=outputs**2).view(
                outputs, outputs
            )
    return counts


def check_order(counts: Tensor, classes: Sequence[str] | None, where: str) -> None:
    """Refuse labels that agree with the network in another order; warn of labels that agree in none.

    Args:
        counts: as `confusion` gives them.
        classes: their names, in the order that is assumed.
        where: what the data are called.

    Raises:
        DataError: if another order of the classes is clearly meant, with that order.
    """
    total = int(counts.sum())
    if total == 0:
        return
    present = torch.nonzero(counts.sum(1) > 0).flatten().tolist()
    favourite = {label: int(counts[label].argmax()) for label in present}
    right = int(counts.diagonal().sum()) / total
    moved = sum(int(counts[label, output]) for label, output in favourite.items()) / total
    outputs = len(counts)
    if len(present) > 1 and len(set(favourite.values())) == len(present) and moved > right + CLEAR:
        names = list(classes) if classes is not None else [str(index) for index in range(outputs)]
        order = ["?"] * outputs
        for label, output in favourite.items():
            order[output] = names[label]
        remedy = f"--classes {','.join(order)}" if classes is not None and "?" not in order else "labels in that order"
        message = (
            f"the classes of {where} seem to be in another order than the networks' outputs: {right:.1%} of the labels agree, but "
            f"{moved:.1%} would if the outputs were, in this order, {', '.join(order[:20])}"
            f"{', ...' if outputs > 20 else ''}. Use {remedy}."
        )
        raise DataError(message)
    # Guessing is right once in C times, give or take what chance does to so many labels.
    if right <= 1 / outputs + 2 * math.sqrt((1 - 1 / outputs) / (outputs * total)):
        warn(
            f"only {right:.1%} of the labels of {where} agree with the first network, hardly more than guessing: are the preparation "
            f"(--normalise, --resize, --mode) and the classes (--classes) those it was trained with?"
        )
