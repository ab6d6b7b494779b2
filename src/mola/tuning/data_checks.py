"""Checks of held-out data: whether their labels are in another class order, and whether they are the training data again.

With the classes in another order, a network that is 99 % right looks 5 % right. Whether two loaders yield the same inputs
is seen from a few rows of each batch, remembered by their bytes. Rows that hold the same numbers to the last bit are the
same data, so what is found is never a matter of chance; what is changed on the way, as by augmentation, is not found.
Memory is bounded, and a batch costs the reading of a few of its rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    width = 1 + int(pairs.max())
    codes, counts = torch.unique(pairs[:, 0] * width + pairs[:, 1], return_counts=True)  # many times as fast as rows
    found = torch.stack([codes // width, codes % width], dim=1)
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


ENOUGH_DATA = 50
"""Data from which on columns of labels are compared with columns of answers."""

APART = 0.1
"""Between the share of yes among labels and the mean probability of yes, before anything is said."""

ERRORS = 5.0
"""Standard errors, likewise."""


def other_columns(labels: Tensor, probs: Tensor) -> list[int] | None:
    """Which outputs the columns of labels go with, if they are clearly in another order.

    Args:
        labels: (n, C), 0 or 1, NaN where one is missing.
        probs: (n, C), of yes.

    Returns:
        An output for each column, if correlations are far higher in that order; None if the order is right, or none is.
    """
    known = ~labels.isnan()
    filled, count = labels.nan_to_num(), known.double().sum(0)
    if labels.shape[1] < 2 or float(count.min()) < ENOUGH_DATA:
        return None
    known = known.double()
    # Of each column of labels with each of probabilities, over the data that have the label.
    label_mean = filled.sum(0) / count
    prob_mean = (known.T @ probs) / count[:, None]
    joint = (filled.T @ probs) / count[:, None] - label_mean[:, None] * prob_mean
    label_variance = label_mean * (1 - label_mean)
    prob_variance = ((known.T @ probs.square()) / count[:, None] - prob_mean.square()).clamp_min(0)
    scale = (label_variance[:, None] * prob_variance).sqrt()
    correlation = torch.where(scale > 0, joint / scale.clamp_min(1e-300), 0)
    best = correlation.max(1)
    gain = float((best.values - correlation.diagonal()).mean())
    if gain <= CLEAR or len(set(best.indices.tolist())) < labels.shape[1]:
        return None
    return best.indices.tolist()


def unlike_frequencies(labels: Tensor, probs: Tensor) -> str | None:
    """What to say of networks that say yes far more, or far less, often than it is right.

    Args:
        labels: (n, C), 0 or 1, NaN where one is missing.
        probs: (n, C), of yes.

    Returns:
        Words that name the worst label; None if nothing is amiss.
    """
    known = ~labels.isnan()
    count = known.sum(0).double().clamp_min(1)
    gaps = torch.where(known, probs - labels.nan_to_num(), 0)
    mean = gaps.sum(0) / count
    error = ((gaps.square().sum(0) / count - mean.square()).clamp_min(0) / count).sqrt()
    clear = (mean.abs() > APART) & (mean.abs() > ERRORS * error) & (count >= ENOUGH_DATA)
    if not bool(clear.any()):
        return None
    worst = int(torch.where(clear, mean.abs(), 0).argmax())
    right = float(labels[known[:, worst], worst].mean())
    said = float(probs[known[:, worst], worst].mean())
    which = f" for label {worst}" if labels.shape[1] > 1 else ""
    return (
        f"yes{which} is right for {right:.1%} of the data, and the networks give it a probability of {said:.1%} on average. Were they "
        f"trained with weights for the positive class (pos_weight), on balanced data, or with another loss than binary cross-entropy? "
        f"With pos_weight=w, taking log(w) from the bias of the last layer makes them say what is right."
    )


ROWS = 16
"""Remembered of each batch."""

MOST = 50_000
"""Remembered of a loader."""

ENOUGH = 5
"""Rows that must be shared before anything is said."""

ALIKE = 0.1
"""Share of repeated rows from which on data repeat themselves: categories in a table are the same in any two sets."""

UNSEEN = 4
"""Rows of the training data that may well come up again, although none was seen to."""


class Remembering:
    """A loader that remembers some of the rows that it yields.

    Args:
        loader: any iterable of batches.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.keys: list[int] = []
        self.count = 0

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            rows = _rows(batch)
            if rows is not None:
                self.count += len(rows)
                some = rows[: max(0, min(ROWS, MOST - len(self.keys)))]
                self.keys += [hash(row.tobytes()) for row in some.detach().cpu().contiguous().float().numpy()]
            yield batch


def _rows(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        plain = batch.layout == torch.strided and batch.device.type != "meta" and not batch.is_complex()
        return batch if plain and batch.dim() > 0 else None
    parts: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        parts = (part for name, part in batch.items() if name != "labels")
    elif isinstance(batch, (list, tuple)):
        parts = batch
    return next((found for found in map(_rows, parts) if found is not None), None)


def shared_rows(training: Remembering, validation: Remembering) -> str | None:
    """What to say of validation data that are among the training data.

    Args:
        training: after it was read.
        validation: likewise.

    Returns:
        Words for the user, if most of the validation data are; None if not, or if rows repeat themselves anyway.
    """
    times, looked = Counter(training.keys), set(validation.keys)
    if not times or not looked or len(times) < (1 - ALIKE) * len(training.keys):
        return None
    # What training repeats, as blank pictures, may come up in any data.
    found = sum(times[key] == 1 for key in looked)
    # So many would be found if all were training data: of these, only some were remembered.
    expected = len(looked) * len(training.keys) / training.count
    # And so many are found anyway, of rows that are rare and yet come up again: as often as some come up twice in training.
    twice = sum(count == 2 for count in times.values())
    anyway = (2 * twice + UNSEEN) * len(looked) / len(training.keys)
    if found < ENOUGH or found - anyway < expected / 2:
        return None
    return (
        f"the validation data are among the training data: of {len(looked):,} validation inputs that were looked at, "
        f"{found:,} hold the same numbers as one of {len(training.keys):,} training inputs. Networks look surer and better on these "
        f"than they are. Pass data that they were not trained on."
    )
