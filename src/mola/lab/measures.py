"""Numbers of a suite beyond the common metrics: agreement with people, and rejection at a threshold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mola.compare.answers import Answer, outlier_columns, tally_set
from mola.tally import Tally
from mola.uncertainty import entropy

Answers = Callable[[str, bool], Iterable[tuple[Answer, Tensor]]]
"""Predictions of a method for a set, by the set's name, with outlier scores or without: batch by batch, with the labels."""


class Measure(Protocol):
    """Numbers that a suite computes for every method of its main comparison."""

    @property
    def name(self) -> str:
        """Key of the numbers in a record; unique within the suite."""

    def __call__(self, answers: Answers, /) -> dict[str, float]:
        """Return the numbers of one method, by name."""


def rank_correlation(first: Tensor, second: Tensor) -> float:
    """Return Spearman's rank correlation of two tensors (n,); ties share their mean rank, and a constant tensor gives 0."""
    ranks = [_ranks(one.double().numpy()) for one in (first, second)]
    centred = [one - one.mean() for one in ranks]
    size = float(np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum()))
    return float((centred[0] * centred[1]).sum()) / size if size > 0 else 0.0


def _ranks(values: NDArray[Any]) -> NDArray[Any]:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]  # ties share the mean of their ranks


@dataclass(frozen=True, eq=False)
class HumanLabels:
    """Agreement with many people's labels of the test data.

    Returns the `cross-entropy` of the probabilities to the people's shares, the `divergence` (cross-entropy minus the entropy of the
    shares), and for every score of the method its rank correlation with that entropy.
    """

    counts: Tensor
    """(n, C), in the order of the test set: number of people who gave each label."""
    name: str = "people"

    def __call__(self, answers: Answers) -> dict[str, float]:
        """Return the numbers of one method."""
        shares = self.counts.double() / self.counts.double().sum(1, keepdim=True)
        doubt = entropy(shares)
        parts: list[Tensor] = []
        scores: dict[str, list[Tensor]] = {}
        for answer, _ in answers("test", True):
            parts.append(answer.probs)
            for name, score in answer.scores.items():
                scores.setdefault(name, []).append(score)
        probs = torch.cat(parts)
        # The smallest number of the probabilities' own type, as for the log loss: 0 would cost infinitely much.
        log_probs = probs.clamp_min(torch.finfo(probs.dtype).tiny).double().log()
        loss = float(-(shares * log_probs).sum(1).mean())
        found = {"cross-entropy": loss, "divergence": loss - float(doubt.mean())}
        return found | {f"correlation, {name}": rank_correlation(torch.cat(one), doubt) for name, one in scores.items()}


def best_threshold(inside: Tensor, right: Tensor, outside: Tensor) -> float:
    """Return the threshold with the most correct decisions, above which inputs are rejected; the smallest of several.

    Args:
        inside: (n,) scores of in-distribution data.
        right: (n,) whether their class is predicted.
        outside: (m,) scores of outliers.
    """
    scores = torch.cat([inside, outside]).double()
    # Inputs below the threshold are accepted: +1 for each correct class, -1 for each outlier.
    gains = torch.cat([right.double(), -torch.ones(len(outside), dtype=torch.float64)])
    values, places = np.unique(scores.numpy(), return_inverse=True)
    total = np.bincount(places, gains.numpy(), len(values)).cumsum()
    best = int(total.argmax())
    return -np.inf if total[best] < 0 else float(values[best])


@dataclass(frozen=True)
class Rejection:
    """In-scope accuracy and out-of-scope recall with one threshold on a score, as Larson et al. (2019) report them.

    The threshold maximises the accuracy on validation inputs, with out of scope as an additional class (their "oos-threshold").
    Returns for every score the `in-scope accuracy` (share of test data accepted with the right class) and the
    `out-of-scope recall`.
    """

    validation: tuple[str, str]
    """Names of the sets to choose the threshold on: in scope, and out of scope."""
    test: tuple[str, str]
    name: str = "rejection"

    def __call__(self, answers: Answers) -> dict[str, float]:
        """Return the numbers of one method."""
        known, unknown, test, outside = (_tally(answers, name) for name in (*self.validation, *self.test))
        found: dict[str, float] = {}
        for score in outlier_columns(test):
            threshold = best_threshold(known[score], known["correct"], unknown[score])
            answered = test[score] <= threshold
            found[f"in-scope accuracy, {score}"] = float((answered * test["correct"]).double().mean())
            found[f"out-of-scope recall, {score}"] = float((outside[score] > threshold).double().mean())
        return found


def _tally(answers: Answers, name: str) -> Tally:
    return tally_set(({"": answer}, labels) for answer, labels in answers(name, True))[""]
