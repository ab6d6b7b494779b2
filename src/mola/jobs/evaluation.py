"""What a comparison of methods on a user's data found: numbers only, the same in memory and in JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mola.jobs.tally import Tally
from mola.metrics import auroc, fpr_at_tpr

__all__ = ["CONFIDENCE_BINS", "Evaluation", "MethodResult", "Outside", "outside"]

CONFIDENCE_BINS = 25
"""Equal-width bins of the confidence histograms, from 0 to 1."""


@dataclass(frozen=True)
class Outside:
    """A method on a set of outliers, told apart from the test data."""

    count: int
    confidence: float
    """Mean of the largest probability (MMC)."""
    auroc: float
    """By the largest probability."""
    fpr95: float
    ood_auroc: float | None
    """By `Prediction.ood_score`, where the method has one of its own."""
    ood_fpr95: float | None
    histogram: list[float]
    """Shares of the inputs in each of `CONFIDENCE_BINS` bins of confidence."""


@dataclass(frozen=True)
class MethodResult:
    """A method on the test data and on the sets of outliers."""

    scores: dict[str, float]
    """accuracy, nll, brier, ece, confidence."""
    reliability: list[list[float]]
    """For each of 15 bins of confidence: count, sum of confidences, correct predictions."""
    histogram: list[float]
    outside: dict[str, Outside] = field(default_factory=dict)
    """By set."""


@dataclass(frozen=True)
class Evaluation:
    """Methods side by side.

    Attributes:
        test: what the test data are called.
        count: how many they are.
        methods: by name, in the order to show them in.
        components: number of networks.
        chosen: what was tuned: prior precisions and temperatures, by method.
        notes: what tuning had to say, and what to know when reading.
        left_out: by set and input, why it was left out.
        noted: by set and input, what is worth a word.
        made: the posterior's folder, versions, seconds.
    """

    test: str
    count: int
    methods: dict[str, MethodResult]
    components: int
    chosen: dict[str, float]
    notes: tuple[str, ...]
    left_out: dict[str, dict[str, str]]
    noted: dict[str, dict[str, str]]
    made: dict[str, Any]

    @property
    def outside(self) -> tuple[str, ...]:
        """The sets of outliers."""
        return tuple(next(iter(self.methods.values())).outside)

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        return {"format": "mola-evaluation", "version": 1, **asdict(self)}


def shares(confidence: NDArray[np.float64]) -> list[float]:
    """Shares of inputs in each bin of confidence."""
    counts, _ = np.histogram(confidence, CONFIDENCE_BINS, (0.0, 1.0))
    found: list[float] = (counts / len(confidence)).tolist()
    return found


def outside(inside: Tally, out: Tally) -> Outside:
    """A method's outliers against its test data.

    Args:
        inside: the test data.
        out: the outliers.

    Returns:
        How well they are told apart.
    """
    near, far = (-torch.from_numpy(one.confidence) for one in (inside, out))
    own_auroc = own_fpr = None
    if inside.score is not None and out.score is not None:
        scores = torch.from_numpy(inside.score), torch.from_numpy(out.score)
        own_auroc, own_fpr = auroc(*scores), fpr_at_tpr(*scores)
    return Outside(
        count=out.count,
        confidence=float(out.confidence.mean()),
        auroc=auroc(near, far),
        fpr95=fpr_at_tpr(near, far),
        ood_auroc=own_auroc,
        ood_fpr95=own_fpr,
        histogram=shares(out.confidence),
    )
