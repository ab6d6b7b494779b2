"""One stream of inputs: the counts of its scores, the capital of the bets on it, and a window of recent inputs."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from molaplace.errors import OptionError
from molaplace.monitoring.alarm import BETS, Contribution, log_factors
from molaplace.monitoring.baseline import Baseline, as_rows, is_dense, predicted_values, scores_of
from molaplace.monitoring.evidence import Evidence
from molaplace.monitoring.labelled import SHARES, log_fall_factors
from molaplace.monitoring.ranks import Array, ScoreCounts, uniform_draws
from molaplace.options import check_share, whole_number

MOST_CONTRIBUTIONS = 10

NO_ID = -1
"""Stands for the id of an input without one."""


@dataclass(frozen=True)
class WatchOptions:
    """The options of a watch."""

    alpha: float = 0.01
    """Largest probability of a false alarm over the whole life of the stream, for each of the two alarms."""
    tolerance: float = 0.05
    """Fall in accuracy, from 0 to 1, that the alarm of `labelled` tolerates."""
    recent: int = 1000
    """Number of inputs for which `accuracy` is estimated."""
    window: int = 10_000
    """Number of recent inputs that are kept, and whose labels may still arrive."""
    seed: int = 0
    """Seed of the draws that break ties."""

    def __post_init__(self) -> None:
        check_share(self.alpha, "alpha", "1 % is 0.01.")
        check_share(self.tolerance, "tolerance", "5 points are 0.05.")
        whole_number(self.recent, "recent")
        whole_number(self.window, "window")
        whole_number(self.seed, "seed", 0)
        if self.recent > self.window:
            raise OptionError(f"must be at most window = {self.window}, got {self.recent}.", argument="recent")


def columns_of(prediction: Any, baseline: Baseline) -> dict[str, Array]:
    """Return what a watch keeps of predictions: scores, shares of confident predictions and, unless outputs are dense, values."""
    scores = scores_of(prediction)
    shares = np.zeros(len(scores))
    if baseline.confidence is not None:
        shares = baseline.confidence.shares(as_rows(prediction.confidence))
    columns = {"score": scores, "share": shares}
    if not is_dense(prediction):
        columns["predicted"] = predicted_values(prediction)
    return columns


def digests_of(ids: Any) -> Array:
    """Return one whole number (n,) for each id: the id itself, or a digest of 63 bits of a string."""
    digests = []
    for value in ids.tolist() if hasattr(ids, "tolist") else ids:
        if isinstance(value, str):
            digests.append(int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8).digest()) >> 1)
        elif isinstance(value, int) and 0 <= value < 2**63:
            digests.append(value)
        else:
            raise OptionError(f"must be strings or non-negative whole numbers, got {value!r}.", argument="ids")
    return np.array(digests, dtype=np.int64)


@dataclass(frozen=True)
class Stream:
    """What is known about one stream of inputs."""

    name: str
    scores: ScoreCounts
    """Counts of all scores so far, including those of the validation data."""
    evidence: Evidence = field(default_factory=lambda: Evidence.none(BETS))
    """Evidence that the stream has left the validation data."""
    fall: Evidence = field(default_factory=lambda: Evidence.none(len(SHARES)))
    """Evidence that accuracy has fallen."""
    correct: float = 0.0
    """Sum of the correctness of the inputs with labels."""
    labelled: int = 0
    """Number of inputs with labels."""
    window: Mapping[str, Array] = field(default_factory=dict)
    """Columns of the most recent inputs: "score", "p_value", "share" of confident predictions, "correct" (NaN without a label),
    "predicted" and, if inputs have ids, "id"."""
    source: str = ""
    """Random name, chosen with the first inputs, by which copies of a stream are recognised; empty if there are no inputs."""

    @property
    def count(self) -> int:
        """Number of inputs."""
        return self.evidence.count

    @property
    def first(self) -> int:
        """Position of the first input in the window."""
        return self.count - len(self.window.get("score", ()))

    def add(
        self, columns: Mapping[str, Array], outcomes: Array | None, baseline: Baseline, options: WatchOptions
    ) -> Stream:
        """Return the stream after further inputs, given what `columns_of` returns for them, and their correctness (n,) if known."""
        scores = columns["score"]
        known_ids = self.window.get("id", np.full(self.count - self.first, NO_ID))
        if "id" in columns or "id" in self.window:
            ids = columns.get("id", np.full(len(scores), NO_ID))
            given = ids[ids != NO_ID]
            if len(np.unique(given)) < len(given) or np.isin(given, known_ids).any():
                raise OptionError("contain an id twice, or the id of an earlier input in the window.", argument="ids")
            columns = {**columns, "id": ids}
        draws = uniform_draws(options.seed, self.count, len(scores))
        counts, p_values = self.scores.add(scores, draws)
        columns = {**columns, "p_value": p_values, "correct": np.full(len(scores), np.nan)}
        earlier = {"id": known_ids, **self.window}
        window = {
            name: np.concatenate([earlier.get(name, values[:0]), values])[-options.window :]
            for name, values in columns.items()
        }
        evidence = self.evidence.add(log_factors(p_values))
        stream = replace(self, scores=counts, evidence=evidence, window=window, source=self.source or uuid.uuid4().hex)
        if outcomes is None:
            return stream
        return stream.with_outcomes(self.count + np.arange(len(outcomes)), outcomes, baseline, options)

    def with_outcomes(self, positions: Array, outcomes: Array, baseline: Baseline, options: WatchOptions) -> Stream:
        """Return the stream with the correctness (n,) of the inputs at some positions; NaN where the label is missing."""
        known = ~np.isnan(outcomes)
        if not known.any():
            return self
        correct = self.window["correct"].copy()
        inside = known & (positions >= self.first)
        correct[positions[inside] - self.first] = outcomes[inside]
        fall = self.fall
        least = baseline.least_accuracy(options.alpha, options.tolerance)
        if least is not None:
            fall = fall.add(log_fall_factors(outcomes[known], least))
        return replace(
            self,
            window={**self.window, "correct": correct},
            fall=fall,
            correct=self.correct + float(outcomes[known].sum()),
            labelled=self.labelled + int(known.sum()),
        )

    def contributions(self, since: int = 0) -> tuple[Contribution, ...]:
        """Return the inputs in the window that contributed most since the change began, or since a later position, strongest first."""
        since = max(self.evidence.began, since, self.first) - self.first
        gains = log_factors(self.window["p_value"][since:])[self.evidence.leader]
        strongest = np.argsort(-gains, kind="stable")[:MOST_CONTRIBUTIONS]
        scores = self.window["score"][since:]
        return tuple(
            Contribution(int(index) + since + self.first, float(scores[index]), float(gains[index]), self.name)
            for index in strongest
            if gains[index] > 0
        )
