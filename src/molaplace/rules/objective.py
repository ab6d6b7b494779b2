"""What a rule knows of a mixture: a function from settings to scores on held-out data, and a few facts.

The rows are processed in chunks, and each chunk is scored for many candidates at once if the link allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from molaplace.likelihoods import Likelihood, Predictive
from molaplace.metrics import bin_sums, calibration_gaps
from molaplace.network import Rows
from molaplace.rules.held_out import HeldOut
from molaplace.rules.scores import ScoreFunction, label_scores
from molaplace.settings import Reference, Settings
from molaplace.structures.distance import ClassDistance


@dataclass(frozen=True)
class Objective:
    """A mixture as a function from settings to scores on held-out data.

    Rules read `settings`, make candidates with `settings.candidates(...)`, and compare them with `scores` or `mean_scores`.
    """

    likelihood: Likelihood
    settings: Settings
    """The prior precision before tuning; all other settings are neutral."""
    held_out: HeldOut | None
    """The validation data, or None for a rule that uses only the training data."""
    predictive: Callable[[Settings], Callable[[Rows], Predictive]]
    """Function that maps candidates to a function from rows to predictive distributions."""
    together: bool
    """True if many candidates can be evaluated at once."""
    row_size: int
    """Number of values that one candidate holds in memory for each datum."""
    log_evidence: Callable[[int, Tensor], Tensor]
    """Log marginal likelihood of the training labels under one network, as a function of the network's index and a prior precision."""
    estimated_noise: bool
    """True if the noise of a regression posterior was estimated, so that rules may change it."""
    with_noise: Callable[[float], Objective]
    """Function that returns the objective after all noise has been multiplied by a factor."""
    read: Callable[[Iterable[Any], str], HeldOut]
    """Function that runs the networks over another loader with the given name, whose labels are ignored."""
    distances: Sequence[ClassDistance]
    """Distances from the training classes of each network; empty if there are none."""
    why_no_distances: str
    """Message that explains why `distances` is empty."""
    reference: Reference | None
    """Typical distances and norms of the validation data, or None without distances."""
    log_distance: Callable[[Rows], Tensor]
    """Function that maps rows to their log distances (n,) from the training classes, relative to the reference."""

    @property
    def data(self) -> HeldOut:
        """The validation data."""
        assert self.held_out is not None  # `as_rule` requires data for rules that use them
        return self.held_out

    @property
    def num_networks(self) -> int:
        """Number of networks in the mixture."""
        return len(self.settings.precisions)

    def scores(
        self, settings: Settings, score: ScoreFunction = label_scores, data: HeldOut | None = None
    ) -> dict[str, Tensor]:
        """Return the scores (L, m) of L candidates, one per datum or, for multi-label data, per known label.

        The scores cover the data of all processes.

        Args:
            settings: the candidates.
            score: function that maps a predictive distribution and labels to named scores (L, m).
            data: other held-out data, instead of the validation data.
        """
        data = self.data if data is None else data
        candidates = settings.candidates() if isinstance(settings.temperature, float) else settings
        at_once = len(candidates) if self.together else 1
        predictives = [self.predictive(part) for part in candidates.split(at_once)]
        chunks = []
        for rows in data.chunks(at_once * self.row_size):
            scores = [score(predictive(rows), rows.labels) for predictive in predictives]
            chunks.append({name: torch.cat([part[name] for part in scores]) for name in scores[0]})
        # A rank without data has no names, so it uses the names from another rank.
        names = next(names for names in data.team.collect(list(chunks[0]) if chunks else None) if names)
        return {
            name: data.gather(torch.cat([chunk[name] for chunk in chunks], 1).T.contiguous() if chunks else None).T
            for name in names
        }

    def mean_scores(
        self, settings: Settings, score: ScoreFunction = label_scores, data: HeldOut | None = None
    ) -> dict[str, Tensor]:
        """Return the mean (L,) of each score and, for classification with labels, the calibration error "ece"."""
        scores = self.scores(settings, score, data)
        means = {name: values.mean(1) for name, values in scores.items()}
        if "correct" in scores:
            means["ece"] = calibration_gaps(bin_sums(scores["confidence"], scores["correct"]))
        return means

    def log_distances(self) -> Tensor:
        """Return the log distances (n,) of the validation data of all processes, relative to their median."""
        chunks = [self.log_distance(rows) for rows in self.data.chunks()]
        return self.data.gather(torch.cat(chunks) if chunks else None)
