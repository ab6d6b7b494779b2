"""Measures that a suite adds to the common metrics: agreement with human labels, rejection at a threshold, and errors over data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from molaplace.evaluation import PredictionColumns, labelled_result
from molaplace.uncertainty import entropy


@dataclass(frozen=True)
class BatchPrediction:
    """Predictions of a classifier for a batch."""

    probs: Tensor
    """Probabilities, shape (n, C)."""
    scores: Mapping[str, Tensor] = field(default_factory=dict)
    """Outlier scores by name, each of shape (n,)."""


Predictions = Callable[[str, bool], Iterable[tuple[BatchPrediction, Tensor]]]
"""Function that takes a set's name and a flag that requests OOD scores, and yields batches of predictions and labels."""


Measure = Callable[[Predictions], dict[str, float]]
"""Function that computes named values from a method's predictions; it is applied to every method in a suite's main comparison."""


def rank_correlation(first: Tensor, second: Tensor) -> float:
    """Return Spearman's rank correlation between two tensors (n,); ties share their mean rank, and a constant tensor gives 0."""
    from scipy.stats import rankdata

    ranks = [rankdata(values.double().numpy()) for values in (first, second)]
    centred = [values - values.mean() for values in ranks]
    size = float(np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum()))
    return float((centred[0] * centred[1]).sum()) / size if size > 0 else 0.0


def human_labels(counts: Tensor, predictions: Predictions) -> dict[str, float]:
    """Measure the agreement with human labels, which are given as counts (n, C) in the order of the test set.

    The result contains the `cross-entropy` between the distribution of human labels and the predicted probabilities, and the
    `divergence`, which is the cross-entropy minus the entropy of this distribution. For every OOD score, the result also contains the
    rank correlation between the score and this entropy.
    """
    shares = counts.double() / counts.double().sum(1, keepdim=True)
    doubt = entropy(shares)
    parts: list[Tensor] = []
    scores: dict[str, list[Tensor]] = {}
    for prediction, _ in predictions("test", True):
        parts.append(prediction.probs)
        for name, score in prediction.scores.items():
            scores.setdefault(name, []).append(score)
    probs = torch.cat(parts)
    # Probabilities of 0, whose loss is infinite, are replaced by the smallest positive normal number of their type, as in the log
    # loss.
    log_probs = probs.clamp_min(torch.finfo(probs.dtype).tiny).double().log()
    loss = float(-(shares * log_probs).sum(1).mean())
    agreement = {"cross-entropy": loss, "divergence": loss - float(doubt.mean())}
    return agreement | {
        f"correlation, {name}": rank_correlation(torch.cat(batches), doubt) for name, batches in scores.items()
    }


def best_threshold(inside: Tensor, right: Tensor, outside: Tensor) -> float:
    """Return the smallest rejection threshold that gives the most correct decisions; inputs with scores above it are rejected.

    `inside` contains the scores (n,) of in-distribution data, `right` (n,) is True where the class is predicted correctly, and
    `outside` contains the scores (m,) of outliers.
    """
    scores = torch.cat([inside, outside]).double()
    # Inputs whose score is at most the threshold are accepted: each correctly classified input counts as +1, and each outlier as -1.
    gains = torch.cat([right.double(), -torch.ones(len(outside), dtype=torch.float64)])
    values, inverse = np.unique(scores.numpy(), return_inverse=True)
    total = np.bincount(inverse, gains.numpy(), len(values)).cumsum()
    best = int(total.argmax())
    return -np.inf if total[best] < 0 else float(values[best])


def rejection(validation: tuple[str, str], test: tuple[str, str], predictions: Predictions) -> dict[str, float]:
    """Return the in-scope accuracy and the out-of-scope recall with one rejection threshold per score, as in Larson et al. (2019).

    The threshold maximises the accuracy on validation inputs, where out-of-scope inputs form an additional class ("oos-threshold"
    in the paper). `validation` and `test` each contain the name of an in-scope set and the name of an out-of-scope set. The
    `in-scope accuracy` is the fraction of in-scope test data that are accepted and classified correctly.
    """
    known, unknown, inside, outside = (columns_of(predictions(name, True)) for name in (*validation, *test))
    rates: dict[str, float] = {}
    for score in inside.scores.names:
        threshold = best_threshold(known.scores[score], known.data["correct"], unknown.scores[score])
        accepted = inside.scores[score] <= threshold
        rates[f"in-scope accuracy, {score}"] = float((accepted * inside.data["correct"]).double().mean())
        rates[f"out-of-scope recall, {score}"] = float((outside.scores[score] > threshold).double().mean())
    return rates


def standard_errors(sets: Sequence[str], predictions: Predictions) -> dict[str, float]:
    """Return the standard error over the data of every metric on labelled sets, as "metric, set", for suites with a single run."""
    errors: dict[str, float] = {}
    for name in sets:
        result = labelled_result(columns_of(predictions(name, False)), detail=False)
        errors |= {f"{metric}, {name}": error for metric, error in result.errors.items() if error is not None}
    return errors


def columns_of(predictions: Iterable[tuple[BatchPrediction, Tensor]], *, labelled: bool = True) -> PredictionColumns:
    """Return the columns of a set's predictions; `labelled` is False if the labels have no meaning, as for outliers."""
    columns = PredictionColumns()
    for prediction, labels in predictions:
        columns.add_probabilities(prediction.probs, labels if labelled else None, prediction.scores)
    return columns
