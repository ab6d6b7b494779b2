"""What a watch reads from predictions and labels, and what it knows about the validation data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from molaplace.errors import DataError, located
from molaplace.monitoring.accuracy import STRANGE, ConfidenceThreshold
from molaplace.monitoring.labelled import VALIDATION_SHARE, lower_bound
from molaplace.monitoring.ranks import Array, ScoreCounts
from molaplace.network import IGNORE_INDEX, labels_of_logits, named_batches
from molaplace.options import counted
from molaplace.outliers import warn_if_training_data
from molaplace.prediction import Prediction, RegressionPrediction
from molaplace.predictor import Predictor

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Quantiles of the scores that are stored for the validation data."""

INTERVAL = 0.9
"""Nominal coverage of the intervals that are checked when the targets of a regression arrive."""

MOST_POSITIONS = 256
"""Number of positions of each validation input that are read if the outputs are dense."""


def as_rows(values: Any) -> Array:
    """Return a tensor (n, ...) as an array (n, q), in float64 if it has a floating-point type."""
    tensor = torch.as_tensor(values, device="cpu").detach()
    array = (tensor.double() if tensor.is_floating_point() else tensor).numpy()
    return array.reshape(len(array), math.prod(array.shape[1:]))


def scores_of(prediction: Any) -> Array:
    """Return one outlier score for each input (n,); for dense outputs, it is the mean over the positions."""
    return as_rows(prediction.ood_score).mean(1)


def predicted_values(prediction: Any) -> Array:
    """Return what labels are compared with: the predicted labels (n, q) or, for regression, the ends of intervals (n, 2, q)."""
    if isinstance(prediction, RegressionPrediction):
        return np.stack([as_rows(end) for end in prediction.interval(INTERVAL)], axis=1)
    return as_rows(prediction.label).astype(np.int32)


def choices_of(prediction: Any) -> int | None:
    """Return the number of values that a label can have; None for regression."""
    if isinstance(prediction, RegressionPrediction):
        return None
    return prediction.likelihood.num_choices(prediction.probs.shape[prediction.axis])


def ignore_index_of(posterior: Predictor | Any) -> int:
    """Return the label that marks positions without a label, as chosen when the posterior was fitted."""
    heads = [component.head for component in getattr(posterior, "components", ())]
    return heads[0].ignore_index if heads and heads[0] is not None else IGNORE_INDEX


def correctness(predicted: Array, labels: Any, choices: int | None, ignore_index: int) -> Array:
    """Return whether each predicted value is right, 0 or 1, as an array (n, q); NaN where the label is missing."""
    try:
        truth = as_rows(labels).astype(np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"must be numbers, got a {type(labels).__name__}.", argument="labels") from error
    expected = (len(predicted), predicted.shape[-1])
    if truth.shape != expected:
        raise DataError(
            f"must have one row for each of {counted(expected[0], 'input')} and {counted(expected[1], 'value')} in each row; got shape "
            f"{tuple(np.shape(labels))}.",
            argument="labels",
        )
    if predicted.ndim == 3:
        return np.where(np.isnan(truth), np.nan, (predicted[:, 0] <= truth) & (truth <= predicted[:, 1]))
    missing = np.isnan(truth) | (truth == ignore_index)
    if choices is not None:
        wrong = truth[~missing & ((truth < 0) | (truth >= choices) | (truth % 1 != 0))]
        if len(wrong):
            raise DataError(
                f"must be whole numbers from 0 to {choices - 1}, or {ignore_index} where a label is missing; got {wrong[0]:g}.",
                argument="labels",
            )
    return np.where(missing, np.nan, predicted == truth)


def shares_correct(correct: Array) -> Array:
    """Return the share (n,) of each input's predicted values (n, q) that are right, among those with a label; NaN without any label."""
    known = ~np.isnan(correct)
    sums = np.where(known, correct, 0).sum(1)
    return np.where(known.any(1), sums / np.maximum(known.sum(1), 1), np.nan)


def is_dense(prediction: Any) -> bool:
    """Return True if there are several positions for each input."""
    outputs = prediction.mean if isinstance(prediction, RegressionPrediction) else prediction.probs
    return bool(outputs.dim() > 2)


def _joined(columns: Sequence[Array]) -> Array:
    # Return the rows (m, q) of all batches, padded with NaN, because the number of positions of dense outputs may differ.
    width = max(column.shape[1] for column in columns)
    pads = [((0, 0), (0, width - column.shape[1])) for column in columns]
    return np.concatenate(
        [np.pad(column, pad, constant_values=np.nan) for column, pad in zip(columns, pads, strict=True)]
    )


@dataclass(frozen=True)
class Baseline:
    """What a watch knows about the validation data."""

    scores: ScoreCounts
    """Counts of the outlier scores."""
    quantiles: tuple[float, ...]
    """Quantiles of the scores, at the levels 0.05, 0.25, 0.5, 0.75 and 0.95."""
    strange: float
    """Score that 99 % of the validation data do not exceed."""
    regression: bool = False
    accuracy: float | None = None
    """Accuracy or, for regression, coverage of intervals; None without labels."""
    labelled: int = 0
    """Number of inputs with labels."""
    confidence: ConfidenceThreshold | None = None
    """Threshold on the confidence; None for regression and without labels."""
    choices: int | None = None
    """Number of values that a label can have; None for regression, or if it is unknown."""
    ignore_index: int = IGNORE_INDEX
    """Label that stands for a missing label."""
    fingerprint: str | None = None
    """Fingerprint of the predictor; None if it is unknown."""

    @classmethod
    def of_columns(
        cls, scores: Array, confidence: Array | None, correct: Array | None, *, pooled: bool = False
    ) -> Baseline:
        """Return the baseline of validation data with scores (m,), confidences (m, q) and correctness (m, q), NaN where unknown."""
        counts, _ = ScoreCounts().add(scores, np.zeros(len(scores)))
        quantiles = tuple(np.quantile(scores, LEVELS).tolist())
        baseline = cls(counts, quantiles, float(np.quantile(scores, STRANGE)), regression=confidence is None)
        if correct is None or np.isnan(correct).all():
            return baseline
        shares = shares_correct(correct)
        labelled = int((~np.isnan(shares)).sum())
        baseline = replace(baseline, accuracy=float(np.nanmean(shares)), labelled=labelled)
        if confidence is None:
            return baseline
        return replace(baseline, confidence=ConfidenceThreshold.fit(confidence, correct, pooled=pooled))

    def least_accuracy(self, alpha: float, tolerance: float) -> float | None:
        """Return the accuracy below which the alarm for late labels is raised: a lower confidence bound minus the tolerance."""
        if self.accuracy is None:
            return None
        return lower_bound(self.accuracy, self.labelled, VALIDATION_SHARE * alpha) - tolerance

    def outcomes(self, predicted: Array, labels: Any) -> Array:
        """Return the share (n,) of each input's predicted values that are right, among those with a label; NaN without any label."""
        return shares_correct(correctness(predicted, labels, self.choices, self.ignore_index))

    @classmethod
    def read(cls, posterior: Predictor | Any, loader: Iterable[Any]) -> Baseline:
        """Predict the validation data batch by batch, and keep what a watch needs."""
        scores: list[Array] = []
        confidences: list[Array] = []
        corrects: list[Array] = []
        pooled = False
        choices = None
        ignore_index = ignore_index_of(posterior)
        networks = [posterior] if isinstance(posterior, Predictor) else []  # an exported file has no modules
        for batch_name, batch in named_batches((), loader, "validation loader"):
            with located(batch_name):
                prediction = posterior.predict_batch(batch.inputs).cpu()
                predicted = predicted_values(prediction)
                choices = choices_of(prediction)
                missing = np.full((len(predicted), predicted.shape[-1]), np.nan)
                labels = batch.labels
                if isinstance(prediction, Prediction):
                    labels = labels_of_logits(networks, batch, prediction.probs.shape, ignore_index, batch_name)
                correct = missing if labels is None else correctness(predicted, labels, choices, ignore_index)
            positions = np.arange(correct.shape[1])
            if is_dense(prediction):
                pooled = True
                positions = np.linspace(0, len(positions) - 1, min(len(positions), MOST_POSITIONS)).astype(int)
            scores.append(scores_of(prediction))
            corrects.append(correct[:, positions])
            if isinstance(prediction, Prediction):
                confidences.append(as_rows(prediction.confidence)[:, positions])
        warn_if_training_data(
            torch.from_numpy(np.concatenate(scores)), prediction.ood_score_name, "the validation loader"
        )
        columns = _joined(confidences) if confidences else None
        baseline = cls.of_columns(np.concatenate(scores), columns, _joined(corrects), pooled=pooled)
        return replace(baseline, choices=choices, ignore_index=ignore_index, fingerprint=posterior.fingerprint)
