"""What a watch reads from predictions and labels, and what it knows about the validation data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from molaplace.errors import DataError, located
from molaplace.monitoring.accuracy import STRANGE, ConfidenceThreshold
from molaplace.monitoring.ranks import Array, ScoreCounts
from molaplace.network import IGNORE_INDEX, as_batch, labels_of_logits
from molaplace.options import counted
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
    return array.reshape(len(array), -1)


def scores_of(prediction: Any) -> Array:
    """Return one outlier score for each input (n,); for dense outputs, it is the mean over the positions."""
    return as_rows(prediction.ood_score).mean(1)


def answers_of(prediction: Any) -> Array:
    """Return what labels are compared with: predicted labels (n, q) or, for regression, the ends of intervals (n, 2, q)."""
    if isinstance(prediction, RegressionPrediction):
        return np.stack([as_rows(end) for end in prediction.interval(INTERVAL)], axis=1)
    return as_rows(prediction.label).astype(np.int32)


def correctness(answers: Array, labels: Any) -> Array:
    """Return whether each answer is right, 0 or 1, as an array (n, q); NaN where the label is missing."""
    try:
        truth = as_rows(labels).astype(np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"must be numbers, got a {type(labels).__name__}.", argument="labels") from error
    expected = (len(answers), answers.shape[-1])
    if truth.shape != expected:
        raise DataError(
            f"must have one row for each of {counted(expected[0], 'input')} and {counted(expected[1], 'value')} in each row; got shape "
            f"{tuple(np.shape(labels))}.",
            argument="labels",
        )
    if answers.ndim == 3:
        return np.where(np.isnan(truth), np.nan, (answers[:, 0] <= truth) & (truth <= answers[:, 1]))
    return np.where(np.isnan(truth) | (truth == IGNORE_INDEX), np.nan, answers == truth)


def mean_known(correct: Array) -> Array:
    """Return the mean (n,) over the known values (n, q) of each input; NaN if none is known."""
    known = ~np.isnan(correct)
    sums = np.where(known, correct, 0).sum(1)
    return np.where(known.any(1), sums / np.maximum(known.sum(1), 1), np.nan)


def is_dense(prediction: Any) -> bool:
    """Return True if there are several positions for each input."""
    outputs = prediction.mean if isinstance(prediction, RegressionPrediction) else prediction.probs
    return bool(outputs.dim() > 2)


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
    confidence: ConfidenceThreshold | None = None
    """Threshold on the confidence; None for regression and without labels."""

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
        if confidence is None:
            return replace(baseline, accuracy=float(np.nanmean(correct)))
        threshold = ConfidenceThreshold.fit(confidence, correct, pooled=pooled)
        return replace(baseline, accuracy=threshold.accuracy, confidence=threshold)

    @classmethod
    def read(cls, posterior: Predictor, loader: Iterable[Any]) -> Baseline:
        """Predict the validation data batch by batch, and keep what a watch needs."""
        scores: list[Array] = []
        confidences: list[Array] = []
        corrects: list[Array] = []
        pooled = False
        for index, raw in enumerate(loader):
            batch_name = f"batch {index} of the validation loader"
            batch = as_batch(raw, batch_name)
            prediction = posterior.predict_batch(batch.inputs).cpu()
            answers = answers_of(prediction)
            with located(batch_name):
                missing = np.full((len(answers), answers.shape[-1]), np.nan)
                labels = batch.labels
                if isinstance(prediction, Prediction):
                    labels = labels_of_logits([posterior], batch, prediction.probs.shape, IGNORE_INDEX, batch_name)
                correct = missing if labels is None else correctness(answers, labels)
            positions = np.arange(correct.shape[1])
            if isinstance(prediction, Prediction) and prediction.probs.dim() > 2:
                pooled = True
                positions = np.linspace(0, len(positions) - 1, min(len(positions), MOST_POSITIONS)).astype(int)
            scores.append(scores_of(prediction))
            corrects.append(correct[:, positions])
            if isinstance(prediction, Prediction):
                confidences.append(as_rows(prediction.confidence)[:, positions])
        if not scores:
            raise DataError("the validation loader is empty. Pass at least one batch.")
        columns = np.concatenate(confidences) if confidences else None
        return cls.of_columns(np.concatenate(scores), columns, np.concatenate(corrects), pooled=pooled)
