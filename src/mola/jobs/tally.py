"""Scores of a method over batches, in bounded memory: sums, and one or two numbers for each input."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mola.distributed import Team
from mola.metrics import bin_confidences, calibration_gap

__all__ = ["Tally"]

BINS = 15
Array = NDArray[np.float64]


@dataclass
class Tally:
    """What a method did so far."""

    count: int = 0
    log_loss: float = 0.0
    brier_sum: float = 0.0
    bins: Tensor = field(default_factory=lambda: torch.zeros(BINS, 3, dtype=torch.float64))
    """For each bin of confidence: count, sum of confidences, correct predictions."""
    confidences: list[Array] = field(default_factory=list)
    scores: list[Array] = field(default_factory=list)

    def add(self, probs: Tensor, labels: Tensor | None = None, score: Tensor | None = None) -> None:
        """Take a batch.

        Args:
            probs: (n, C).
            labels: (n,), where there are any.
            score: (n,), an outlier score other than the largest probability.
        """
        exact = probs.double()
        self.count += len(probs)
        self.confidences.append(exact.max(1).values.numpy())
        if score is not None:
            self.scores.append(score.double().numpy())
        if labels is not None:
            chosen = probs.gather(1, labels[:, None]).squeeze(1)
            self.log_loss -= float(chosen.clamp_min(torch.finfo(probs.dtype).tiny).double().log().sum())
            one_hot = torch.nn.functional.one_hot(labels, probs.shape[1])
            self.brier_sum += float((exact - one_hot).square().sum())
            self.bins += bin_confidences(probs, labels, BINS)

    def together(self, team: Team, *, scored: bool) -> Tally:
        """What all processes counted, on every one. Call it inside `team.work(...)`.

        Args:
            team: the processes.
            scored: whether the method has an outlier score of its own; a process without data does not know.

        Returns:
            The whole.
        """
        if team.size == 1:
            return self
        scalars = torch.tensor([self.count, self.log_loss, self.brier_sum], dtype=torch.float64)
        sums, bins = team.sum([scalars, self.bins])
        count, log_loss, brier_sum = sums.tolist()

        def joined(parts: list[Array]) -> list[Array]:
            return [team.rows(torch.from_numpy(np.concatenate(parts)) if parts else None).numpy()]

        scores = joined(self.scores) if scored else []
        return Tally(int(count), log_loss, brier_sum, bins, joined(self.confidences), scores)

    def labelled(self) -> dict[str, float]:
        """The scores on labelled data, as `mola.metrics` defines them."""
        return {
            "accuracy": float(self.bins[:, 2].sum()) / self.count,
            "nll": self.log_loss / self.count,
            "brier": self.brier_sum / self.count,
            "ece": calibration_gap(self.bins),
            "confidence": float(self.confidence.mean()),
        }

    @property
    def confidence(self) -> Array:
        """Of each input."""
        return np.concatenate(self.confidences)

    @property
    def score(self) -> Array | None:
        """The outlier score of each input, if there is one."""
        return np.concatenate(self.scores) if self.scores else None
