"""What the commands say where labels and networks do not mean the same classes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mola.errors import DataError, warn
from mola.tuning.data_checks import guessed, other_order

__all__ = ["check_order", "warn_of_guessing"]


def check_order(pairs: Tensor, outputs: int, classes: Sequence[str] | None, where: str, index: int = 0) -> None:
    """Refuse labels that agree with the network in another order.

    Args:
        pairs: labels and what a network says, (n, 2).
        outputs: number of classes.
        classes: their names, in the order that is assumed.
        where: what the data are called.
        index: of the network, among several.

    Raises:
        DataError: if another order of the classes is clearly meant, with that order.
    """
    found = other_order(pairs)
    if found is None:
        return
    names = list(classes) if classes is not None else [str(index) for index in range(outputs)]
    order = ["?"] * outputs
    for label, output in found.outputs.items():
        order[output] = names[label]
    remedy = f"--classes {','.join(order)}" if classes is not None and "?" not in order else "labels in that order"
    whose = "the networks'" if index == 0 else f"network {index + 1}'s"
    message = (
        f"the classes of {where} seem to be in another order than {whose} outputs: {found.right:.1%} of the labels agree, "
        f"but {found.moved:.1%} would if the outputs were, in this order, {', '.join(order[:20])}"
        f"{', ...' if outputs > 20 else ''}. Use {remedy}."
    )
    raise DataError(message)


def warn_of_guessing(pairs: Tensor, outputs: int, where: str) -> None:
    """Warn of labels that agree with the network hardly more often than by chance.

    Args:
        pairs: labels and what a network says, (n, 2).
        outputs: number of classes.
        where: what the data are called.
    """
    right = float((pairs[:, 0] == pairs[:, 1]).double().mean()) if len(pairs) else 1.0
    if guessed(right, len(pairs), outputs):
        warn(
            f"only {right:.1%} of the labels of {where} agree with the first network, hardly more than guessing: are the preparation "
            f"(--normalise, --resize, --mode) and the classes (--classes) those it was trained with?"
        )
