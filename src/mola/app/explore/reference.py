"""How outlier scores are distributed on validation data: what a single score is held against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from mola.app.jobs.fit import quantiles
from mola.app.jobs.folder import usual_alarm
from mola.errors import DataError, StorageError

__all__ = ["Reference"]


@dataclass(frozen=True)
class Reference:
    """A distribution of scores, by its quantiles; between two of them it is taken to be even.

    Attributes:
        levels: shares, from 0 to 1.
        scores: that these shares stay below, never falling.
        count: how many inputs it was made of.
        name: of the data.
        alarm: the score above which `mola predict` calls an input outlying; None where that is not known.
    """

    levels: tuple[float, ...]
    scores: tuple[float, ...]
    count: int
    name: str
    alarm: float | None = None

    @classmethod
    def of(cls, scores: Tensor, name: str) -> Reference:
        """The distribution of these scores.

        Args:
            scores: (n,).
            name: of the data.

        Returns:
            The distribution.

        Raises:
            DataError: if there are none.
        """
        if not len(scores):
            message = f"{name} holds no input that can be used, so that scores cannot be held against it."
            raise DataError(message)
        values = scores.double().cpu().numpy()
        return cls(*_columns(quantiles(values)), count=len(scores), name=name, alarm=usual_alarm(values)[0])

    @classmethod
    def from_plain(cls, validation: Mapping[str, Any] | None, name: str) -> Reference | None:
        """What `mola fit` wrote; None if it wrote none, as before it kept more than one quantile.

        Args:
            validation: of the results in `job.toml`.
            name: of the data.

        Returns:
            The distribution, or None.

        Raises:
            StorageError: if it is garbled: a file can be damaged.
        """
        pairs = (validation or {}).get("outlier_quantiles")
        if pairs is None or validation is None:
            return None
        try:
            levels, scores = _columns(pairs)
            ordered = all(a < b for a, b in pairwise(levels))
            rising = all(a <= b for a, b in pairwise(scores))
            whole = (levels[0], levels[-1]) == (0.0, 1.0) and bool(np.isfinite(scores).all())
            sound, count = ordered and rising and whole, int(validation["count"])
            limit = validation.get("outlier_threshold")
            alarm = None if limit is None else float(limit)
        except (TypeError, ValueError, KeyError, IndexError):
            sound, count, alarm = False, 0, None
        if not sound or count < 1:
            message = "the saved quantiles of the outlier score are garbled: expected pairs of a share and a score, both rising."
            raise StorageError(message)
        return cls(levels, scores, count, name, alarm)

    def share_below(self, score: float) -> float:
        """Share of the data whose score is lower."""
        return float(np.interp(score, self.scores, self.levels))

    def histogram(self, edges: Sequence[float]) -> list[float]:
        """Shares of the data between one edge and the next; edges rise."""
        return np.diff([self.share_below(edge) for edge in edges]).tolist()

    def words(self, score: float) -> str:
        """How a score compares, in words."""
        share = self.share_below(score)
        if score > self.scores[-1]:
            return f"more outlying than all {self.count:,} validation images"
        if score < self.scores[0]:
            return f"less outlying than all {self.count:,} validation images"
        return f"more outlying than {100 * share:.{1 if share > 0.9 else 0}f} % of the validation data"


def _columns(pairs: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    levels, scores = zip(*pairs, strict=True)
    return tuple(float(one) for one in levels), tuple(float(one) for one in scores)
