"""What decisions need of labelled data: a few numbers for each datum, whatever the number of classes.

A `Calibration` is made of a prediction and its labels, or read from a file that kept these numbers: thresholds for any error rate
or coverage follow from it, and no network runs again. Calibration data must be exchangeable with the data to come, and the
predictor must not have learnt their labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from heart.decisions.ranks import as_numbers
from heart.errors import DataError
from heart.prediction import Prediction
from heart.uncertainty import entropy

SUM = 1e-3
"""How far the probabilities of a row may be from adding up to 1, as they do in half precision."""


def probs_of(prediction: Any) -> Tensor:
    """Probabilities (n, C) in float64.

    Args:
        prediction: a `mola.Prediction`, or probabilities of any library: a tensor or an array.

    Returns:
        The probabilities, in main memory.
    """
    given = prediction.probs if hasattr(prediction, "probs") else prediction
    probs = as_numbers(given, "expected a mola.Prediction or probabilities (n, C)")
    if probs.ndim != 2 or probs.shape[1] < 2:
        raise DataError(f"expected probabilities (n, C) of at least two classes, got shape {tuple(probs.shape)}.")
    # Written so that nan is refused.
    sound = ((probs >= 0) & (probs <= 1 + SUM)).all(1) & ((probs.sum(1) - 1).abs() <= SUM)
    if not bool(sound.all()):
        row = int((~sound).nonzero()[0])
        raise DataError(
            f"expected probabilities of which each row adds up to 1, got row {row} with the sum {float(probs[row].sum()):g} and "
            f"numbers from {float(probs[row].min()):g} to {float(probs[row].max()):g}. Labels that do not exclude each other need a "
            f"decision of their own each."
        )
    return probs


def labels_of(labels: Any, count: int, classes: int) -> Tensor:
    """Labels (n,) as whole numbers.

    Args:
        labels: a tensor, an array or a list.
        count: n.
        classes: C.

    Returns:
        The labels, in main memory.
    """
    given = as_numbers(labels, "labels must hold one class for each datum")
    if given.shape != (count,):
        raise DataError(
            f"labels must hold one class for each of the {count} predictions, got shape {tuple(given.shape)}."
        )
    wrong = ~((given >= 0) & (given < classes) & (given == given.floor()))
    if bool(wrong.any()):
        raise DataError(f"labels must be whole numbers from 0 to {classes - 1}, got {float(given[wrong][0]):g}.")
    return given.long()


def ranked(probs: Tensor) -> tuple[Tensor, Tensor]:
    """For each class, how probable the more probable ones are together, and its rank.

    Args:
        probs: (n, C). Of classes that are equally probable, the one with the smaller index comes first.

    Returns:
        Both (n, C): the mass above, 0 for the most probable class, and the rank, from 1.
    """
    ordered, order = probs.sort(dim=1, descending=True, stable=True)
    above = ordered.cumsum(1) - ordered
    places = torch.arange(1, probs.shape[1] + 1).expand_as(order)
    return torch.empty_like(above).scatter_(1, order, above), torch.empty_like(order).scatter_(1, order, places)


@dataclass(frozen=True)
class Calibration:
    """Numbers of n labelled data, each (n,) in main memory."""

    confidence: Tensor
    """Largest probability, in float64."""
    entropy: Tensor
    """Of the prediction, in nats."""
    label: Tensor
    """The true class."""
    true_probability: Tensor
    """Probability of the true class."""
    mass_above: Tensor
    """Probability of all classes that come before the true one, most probable first."""
    true_rank: Tensor
    """Rank of the true class, from 1."""
    classes: int
    """C."""

    @classmethod
    def of(cls, prediction: Prediction | Any, labels: Any) -> Calibration:
        """The numbers of a labelled prediction; `DataError` if prediction and labels do not fit together.

        Args:
            prediction: a `mola.Prediction`, or probabilities (n, C).
            labels: (n,).

        Returns:
            The numbers.
        """
        probs = probs_of(prediction)
        known = labels_of(labels, *probs.shape)
        above, rank = ranked(probs)
        true = known[:, None]
        return cls(
            confidence=probs.amax(1),
            entropy=entropy(probs),
            label=known,
            true_probability=probs.gather(1, true)[:, 0],
            mass_above=above.gather(1, true)[:, 0],
            true_rank=rank.gather(1, true)[:, 0],
            classes=probs.shape[1],
        )

    @property
    def correct(self) -> Tensor:
        """Whether the most probable class is the true one."""
        return self.true_rank == 1

    def __len__(self) -> int:
        return len(self.label)

    def rows(self, chosen: Tensor) -> Calibration:
        """Of some of the data alone, by index or mask."""
        return Calibration(**{name: column[chosen] for name, column in self.columns().items()}, classes=self.classes)

    def columns(self) -> dict[str, Tensor]:
        """The numbers by name, as a file keeps them."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "classes"}

    @classmethod
    def of_columns(cls, columns: Mapping[str, Tensor], classes: int) -> Calibration:
        """What `columns` gave, checked.

        Args:
            columns: by name.
            classes: C.

        Returns:
            The numbers.
        """
        names = [one.name for one in fields(cls) if one.name != "classes"]
        whole = ("label", "true_rank")
        kinds = {name: torch.int64 if name in whole else torch.float64 for name in names}
        missing = [name for name in names if name not in columns or columns[name].dtype != kinds[name]]
        shapes = {tuple(columns[name].shape) for name in names if name in columns}
        if missing or len(shapes) != 1 or len(next(iter(shapes))) != 1:
            raise DataError(
                f"expected {', '.join(names)}, one number for each datum; got {', '.join(columns) or 'nothing'}."
            )
        made = cls(**{name: columns[name] for name in names}, classes=classes)
        ranks, labels = made.true_rank, made.label
        sound = ((ranks >= 1) & (ranks <= classes) & (labels >= 0) & (labels < classes)).all()
        if not bool(sound & torch.stack([columns[name].isfinite().all() for name in names]).all()):
            raise DataError(f"expected labels and ranks of {classes} classes and finite numbers.")
        return made
