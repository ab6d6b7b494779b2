"""Calibration data for decisions: a few numbers per labelled example, regardless of the number of classes.

A `Calibration` is created from a prediction and its labels, or read from a file. Thresholds for any error rate or coverage can be
computed from a `Calibration` without running a network again. Calibration data must be exchangeable with future data, and the
predictor must not have been trained on the labels of the calibration data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from molaplace.decisions.ranks import as_numbers
from molaplace.decisions.threshold import not_a_prediction
from molaplace.errors import DataError
from molaplace.numerics import SUM_TOLERANCE
from molaplace.prediction import Prediction, RegressionPrediction

COLUMNS = ("confidence", "label", "true_probability", "mass_above", "true_rank")
"""Names of the columns of a `Calibration`."""


def probs_of(prediction: Any) -> Tensor:
    """Convert a `mola.Prediction`, or a tensor or array from any library, to probabilities (n, C) in float64 on the CPU."""
    if isinstance(prediction, RegressionPrediction):
        raise DataError(
            "expected probabilities of classes, got a RegressionPrediction. For regression, use mola.prediction_intervals."
        )
    values = prediction.probs if hasattr(prediction, "probs") else prediction
    try:
        probs = as_numbers(values, "prediction")
    except DataError as error:
        raise not_a_prediction(prediction, "probabilities (n, C)") from error
    if probs.ndim > 2:
        raise DataError(
            f"expected one row of probabilities for each input, got predictions for each position, of shape {tuple(probs.shape)}. "
            f"Positions of an input are not independent, so no guarantee would hold. Decide for whole inputs, with a score for each: "
            f"mola.alarm_threshold(prediction.ood_score.flatten(1).mean(1), 0.05)."
        )
    if probs.ndim != 2 or probs.shape[1] < 2:
        raise DataError(f"expected probabilities (n, C) for at least two classes; got shape {tuple(probs.shape)}.")
    # These comparisons are False for nan, so nan is rejected.
    valid = ((probs >= 0) & (probs <= 1 + SUM_TOLERANCE)).all(1) & ((probs.sum(1) - 1).abs() <= SUM_TOLERANCE)
    if not bool(valid.all()):
        row = int((~valid).nonzero()[0])
        remedy = "If these are logits, pass logits.softmax(1)."
        if bool(((probs >= 0) & (probs <= 1)).all()):
            remedy = (
                "For multi-label data, decide for each label separately: for label 0, pass "
                "torch.stack([1 - probs[:, 0], probs[:, 0]], 1) and labels[:, 0]."
            )
        raise DataError(
            f"expected probabilities whose rows sum to 1, but row {row} sums to {float(probs[row].sum()):g}, with values from "
            f"{float(probs[row].min()):g} to {float(probs[row].max()):g}. {remedy}"
        )
    return probs


def _class_indices(labels: Any) -> Tensor:
    if not isinstance(labels, Tensor):
        array = np.asarray(labels)
        if array.dtype.kind in "OSU" and array.size and isinstance(array.flat[0], str):
            raise DataError(
                f"must be class indices, got names such as {str(array.flat[0])!r}. Number them in the order of the networks' outputs: "
                f"[classes.index(name) for name in labels].",
                argument="labels",
            )
    return as_numbers(labels, "labels")


def ranked(probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each class in probs (n, C), the total probability of the classes ranked above it, and its rank (1 is best).

    Among equally probable classes, the one with the smaller index ranks first.
    """
    ordered, order = probs.sort(dim=1, descending=True, stable=True)
    above = ordered.cumsum(1) - ordered
    ranks = torch.arange(1, probs.shape[1] + 1, device=probs.device).expand_as(order)
    return torch.empty_like(above).scatter_(1, order, above), torch.empty_like(order).scatter_(1, order, ranks)


@dataclass(frozen=True, eq=False)
class Calibration:
    """Calibration data for n labelled examples, as columns of shape (n,) on the CPU."""

    confidence: Tensor
    """Largest probability, in float64."""
    label: Tensor
    """True class."""
    true_probability: Tensor
    """Probability of the true class."""
    mass_above: Tensor
    """Total probability of the classes ranked above the true class."""
    true_rank: Tensor
    """Rank of the true class; the most probable class has rank 1."""
    classes: int
    """Number of classes C."""
    fingerprint: str | None = None
    """Fingerprint of the predictor and its settings, or None if unknown."""

    @classmethod
    def of(cls, prediction: Prediction | Any, labels: Any) -> Calibration:
        """Build calibration data from labels (n,) and a `mola.Prediction` or probabilities (n, C), or return a `Calibration` as is."""
        if isinstance(prediction, Calibration):
            return prediction
        probs = probs_of(prediction)
        count, classes = probs.shape
        values = _class_indices(labels)
        if values.shape != (count,):
            one_hot = " For one-hot labels, pass labels.argmax(1)." if values.shape == probs.shape else ""
            raise DataError(
                f"must be one class index for each of the {count} predictions; got shape {tuple(values.shape)}.{one_hot}",
                argument="labels",
            )
        invalid = ~((values >= 0) & (values < classes) & (values == values.floor()))
        if bool(invalid.any()):
            raise DataError(
                f"must be integers from 0 to {classes - 1}; got {float(values[invalid][0]):g}.", argument="labels"
            )
        true_classes = values.long()
        above, rank = ranked(probs)
        true = true_classes[:, None]
        return cls(
            confidence=probs.amax(1),
            label=true_classes,
            true_probability=probs.gather(1, true)[:, 0],
            mass_above=above.gather(1, true)[:, 0],
            true_rank=rank.gather(1, true)[:, 0],
            classes=classes,
            fingerprint=getattr(prediction, "fingerprint", None),
        )

    @property
    def correct(self) -> Tensor:
        """Mask of the examples whose most probable class is the true class, shape (n,)."""
        return self.true_rank == 1

    def __len__(self) -> int:
        return len(self.label)

    def select(self, rows: Tensor) -> Calibration:
        """Return the subset of the data selected by an index or mask."""
        columns: dict[str, Any] = {name: column[rows] for name, column in self.columns().items()}
        return replace(self, **columns)

    def columns(self) -> dict[str, Tensor]:
        """Return the columns to save, keyed by name."""
        return {name: getattr(self, name) for name in COLUMNS}

    @classmethod
    def of_columns(cls, columns: Mapping[str, Tensor], classes: int) -> Calibration:
        """Rebuild calibration data from `columns`, checking the values because they may come from a file."""
        kinds = {name: torch.int64 if name in ("label", "true_rank") else torch.float64 for name in COLUMNS}
        well_formed = all(
            name in columns and columns[name].dtype == kind and columns[name].ndim == 1 for name, kind in kinds.items()
        )
        if not well_formed or len({len(columns[name]) for name in COLUMNS}) != 1:
            raise DataError(
                f"expected the columns {', '.join(COLUMNS)}, all of equal length; got {', '.join(columns) or 'nothing'}."
            )
        values: dict[str, Any] = {name: columns[name] for name in COLUMNS}
        calibration = cls(**values, classes=classes)
        ranks = calibration.true_rank
        labels = calibration.label
        valid = ((ranks >= 1) & (ranks <= classes) & (labels >= 0) & (labels < classes)).all()
        if not bool(valid) or not all(bool(columns[name].isfinite().all()) for name in COLUMNS):
            raise DataError(f"expected finite values, and labels and ranks that are valid for {classes} classes.")
        return calibration
