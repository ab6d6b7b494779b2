"""Whether labels and networks mean the same classes: a network of 99 % looks like one of 5 % if the classes are in another order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mola.errors import DataError, warn
from mola.networks import as_batch, call, undisturbed

__all__ = ["check_order", "said", "warn_of_guessing"]

CLEAR = 0.25
"""How much better another order must do to be told."""


def said(network: nn.Module, loader: Iterable[Any]) -> Tensor:
    """The label of each input and what a network says of it; a table of counts would be too large for many classes.

    Args:
        network: a trained classifier.
        loader: labelled batches.

    Returns:
        (n, 2), labels first.
    """
    pairs = [torch.zeros(0, 2, dtype=torch.int64)]
    with undisturbed(network):
        for index, raw in enumerate(loader):
            batch = as_batch(raw, f"batch {index} of the validation data")
            if batch.labels is None:
                continue
            predicted = call(network, batch.inputs).argmax(1).cpu()
            pairs.append(torch.stack([batch.labels.cpu(), predicted], 1))
    return torch.cat(pairs)


def check_order(pairs: Tensor, outputs: int, classes: Sequence[str] | None, where: str) -> None:
    """Refuse labels that agree with the network in another order.

    Args:
        pairs: labels and what a network says, as `said` gives them.
        outputs: number of classes.
        classes: their names, in the order that is assumed.
        where: what the data are called.

    Raises:
        DataError: if another order of the classes is clearly meant, with that order.
    """
    total = len(pairs)
    if total == 0:
        return
    found, counts = torch.unique(pairs, dim=0, return_counts=True)
    favourite: dict[int, int] = {}
    most: dict[int, int] = {}
    for (label, output), count in zip(found.tolist(), counts.tolist(), strict=True):
        if count > most.get(label, 0):
            favourite[label], most[label] = output, count
    right = int((pairs[:, 0] == pairs[:, 1]).sum()) / total
    moved = sum(most.values()) / total
    if len(favourite) > 1 and len(set(favourite.values())) == len(favourite) and moved > right + CLEAR:
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


def warn_of_guessing(pairs: Tensor, outputs: int, where: str) -> None:
    """Warn of labels that agree with the network hardly more often than by chance.

    Args:
        pairs: labels and what a network says, as `said` gives them.
        outputs: number of classes.
        where: what the data are called.
    """
    total = len(pairs)
    right = int((pairs[:, 0] == pairs[:, 1]).sum()) / max(total, 1)
    # Guessing is right once in C times, give or take what chance does to so many labels.
    if total and right <= 1 / outputs + 2 * math.sqrt((1 - 1 / outputs) / (outputs * total)):
        warn(
            f"only {right:.1%} of the labels of {where} agree with the first network, hardly more than guessing: are the preparation "
            f"(--normalise, --resize, --mode) and the classes (--classes) those it was trained with?"
        )
