"""What a rule knows of a mixture: a function from settings to scores on held-out data, and a few facts.

The rows are projected in chunks, once if they fit into memory, and the candidates are scored one after the other. Scores are functions of
predictive distributions, with or without labels; `paired` compares the scores of two candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from molaplace.distributed import Team
from molaplace.likelihoods import ClassificationPredictive, Likelihood, Predictive
from molaplace.links import Link
from molaplace.metrics import bin_sums, calibration_gaps
from molaplace.network import Rows
from molaplace.rules.held_out import HeldOut, joined
from molaplace.settings import Reference, Settings
from molaplace.structures.distance import ClassDistance

ScoreFunction = Callable[[Predictive, Tensor | None], dict[str, Tensor]]
"""A function that maps a predictive distribution and labels to named scores (m,)."""

MOST_PROJECTED = 2**29
"""Largest number of bytes for projected rows that a search keeps; more are projected again for each group of candidates."""


def label_scores(predictive: Predictive, labels: Tensor | None) -> dict[str, Tensor]:
    """Return named scores of predictions, given the labels: the log loss, and other scores that depend on the likelihood."""
    assert labels is not None
    return predictive.scores(labels)


def scores_without_labels(predictive: Predictive, _: Tensor | None) -> dict[str, Tensor]:
    """Return scores of classifications that need no labels: the confidence, and the cross-entropy with the uniform distribution."""
    assert isinstance(predictive, ClassificationPredictive)
    choices = predictive.choices  # (n, C), or (n, C, 2) for multi-label data
    uniformity = -choices.clamp_min(torch.finfo(torch.float64).tiny).log().mean(-1)
    return {"confidence": choices.amax(-1).flatten(), "uniformity": uniformity.flatten()}


def paired(first: Tensor, second: Tensor, data: HeldOut) -> tuple[float, float]:
    """Return the mean difference between two scores (m,) on the same data, and its standard error over inputs."""
    gap = first - second
    group = data.score_groups()
    mean = gap.mean()
    # The labels of one row are not independent, so the differences are first summed within each row. Nor are the positions of one
    # input, which `independent_share` accounts for.
    total = gap.new_zeros(int(group.max()) + 1).index_add_(0, group, gap - mean)
    if len(total) == 1:
        return float(mean), math.inf  # a standard error needs more than one input
    return float(mean), float(total.square().sum().sqrt()) / len(gap) / math.sqrt(data.independent_share)


class TunableMixture(Protocol):
    """What rules use of a mixture."""

    @property
    def likelihood(self) -> Likelihood:
        """Likelihood of the labels given the outputs."""

    @property
    def settings(self) -> Settings:
        """The prior precision before tuning; all other settings are neutral."""

    @property
    def link(self) -> Link:
        """Map from logits to probabilities."""

    @property
    def distances(self) -> Sequence[ClassDistance]:
        """Each network's distances from the training classes; empty if there are none."""

    @property
    def reference(self) -> Reference | None:
        """Typical distances and norms of the validation data, or None if there are no distances."""

    def project(self, rows: Rows, *, distances: bool | None = None) -> Any:
        """Return rows with what every setting needs of them."""

    def scores_at(self, candidates: Sequence[Settings], rows: Any, score: ScoreFunction) -> list[dict[str, Tensor]]:
        """Return the scores (m,) of each candidate's predictions for projected rows, keyed by name."""

    @property
    def row_size(self) -> int:
        """Number of values that a search holds for each row and network."""

    def log_distance(self, rows: Rows) -> Tensor:
        """Return the mixture's log distance (n,), relative to the reference."""

    def log_evidence_at(self, settings: Settings, networks: Sequence[int] | None = None) -> Tensor:
        """Return the log marginal likelihood of the training labels under each network, or under those with the given indices."""

    def read(self, loader: Iterable[Any], where: str, *, labelled: bool | None, **options: Any) -> HeldOut:
        """Run the networks over a loader and keep the data."""


class Objective:
    """Mixtures of the same form as one function from settings to scores, each on held-out data of its own.

    Usually, there is one mixture. Cross-fitting has several, each fitted to all data but a part, and scores every candidate theta on each
    datum by the mixture that has not seen it,

        L(theta) = 1/n sum_f sum_{i in part f} -log p_f(y_i | x_i, theta).

    The chosen settings are then applied to a mixture that was fitted to all data. They are slightly cautious for it, because each of the
    mixtures has seen fewer data.

    Rules read `settings`, make candidates with `settings.at_precision` or `dataclasses.replace`, and compare them with `scores` or
    `mean_scores`.

    Args:
        parts: each mixture with its held-out data, or None for a rule that uses only the training data.
        team: processes that share the reading of further data, such as outliers.
    """

    def __init__(self, parts: Sequence[tuple[TunableMixture, HeldOut | None]], team: Team | None = None) -> None:
        self.parts = parts
        self.team: Team | None = team
        first = parts[0][0]
        self.mixture: TunableMixture = first
        """The first mixture, from which the others differ only in their training data."""
        self.likelihood: Likelihood = first.likelihood
        self.settings: Settings = first.settings
        """The prior precision before tuning; all other settings are neutral."""
        self.num_networks: int = len(first.settings.prior_precision)
        """Number of networks in the mixture."""
        self.data: Any = None if parts[0][1] is None else joined([data for _, data in parts if data is not None])
        """The validation data, or None for a rule that uses only the training data."""
        self._kept: dict[tuple[int, bool], list[Any] | None] = {}
        self._kept_bytes: int = 0

    @property
    def has_distances(self) -> bool:
        """True if the mixture computes distances from the training classes."""
        return len(self.mixture.distances) > 0

    def relative_log_distances(self) -> Tensor:
        """Return the log distances (n,) of the validation data, relative to their median."""
        pairs = [(mixture, data) for mixture, data in self.parts if data is not None]
        return torch.cat([data.by_rows(mixture.log_distance) for mixture, data in pairs])

    def log_evidence(self, settings: Settings, networks: Sequence[int] | None = None) -> Tensor:
        """Return the log marginal likelihood of the training labels under each network, or under those with the given indices."""
        return torch.stack([mixture.log_evidence_at(settings, networks) for mixture, _ in self.parts]).sum(0)

    def read(self, loader: Iterable[Any], where: str) -> list[HeldOut]:
        """Run the networks of every mixture over another loader, whose labels are ignored."""
        return [mixture.read(loader, where, labelled=False, team=self.team) for mixture, _ in self.parts]

    def scores(
        self,
        candidates: Sequence[Settings],
        score: ScoreFunction = label_scores,
        data: Sequence[HeldOut] | None = None,
    ) -> dict[str, Tensor]:
        """Return the scores (L, m) of L candidates, one per datum or, for multi-label data, per known label.

        The scores cover the data of all mixtures.

        Args:
            candidates: the settings to compare.
            score: function that maps a predictive distribution and labels to named scores (m,).
            data: other held-out data for each mixture, instead of the validation data.
        """
        columns: dict[str, list[Tensor]] = {}
        distances = any(settings.uses_distance for settings in candidates)
        for index, (mixture, own_data) in enumerate(self.parts):
            held_out = own_data if data is None else data[index]
            assert held_out is not None  # `as_rule` requires data for rules that use them
            chunks = (
                self._chunks(index, distances=distances)
                if data is None
                else _projected(mixture, held_out, distances=distances)
            )
            tables = []
            for rows in chunks:
                scores = mixture.scores_at(candidates, rows, score)
                tables.append({name: torch.stack([column[name] for column in scores], 1) for name in scores[0]})
            for name in tables[0]:
                columns.setdefault(name, []).append(torch.cat([table[name] for table in tables]).T)
        return {name: torch.cat(parts, 1) for name, parts in columns.items()}

    def _chunks(self, index: int, *, distances: bool) -> Iterable[Any]:
        # Return the projected rows of a mixture's validation data. They are kept if those of all mixtures fit into memory; otherwise,
        # they are projected again in each call.
        key = (index, distances)
        mixture, data = self.parts[index]
        if key not in self._kept:
            kept = []
            for rows in _projected(mixture, data, distances=distances):
                self._kept_bytes += rows.bytes
                if self._kept_bytes > MOST_PROJECTED:
                    break
                kept.append(rows)
            self._kept[key] = kept if self._kept_bytes <= MOST_PROJECTED else None
        return self._kept[key] or _projected(mixture, data, distances=distances)

    def mean_scores(
        self,
        candidates: Sequence[Settings],
        score: ScoreFunction = label_scores,
        data: Sequence[HeldOut] | None = None,
    ) -> dict[str, Tensor]:
        """Return the mean (L,) of each score and, for classification with labels, the calibration error "ece"."""
        scores = self.scores(candidates, score, data)
        means = {name: values.mean(1) for name, values in scores.items()}
        if "correct" in scores:
            means["ece"] = calibration_gaps(bin_sums(scores["confidence"], scores["correct"]))
        return means


def _projected(mixture: TunableMixture, data: Any, *, distances: bool) -> Iterator[Any]:
    for rows in data.chunks(mixture.row_size):
        yield mixture.project(rows, distances=distances)
