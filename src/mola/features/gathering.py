"""Small batches, gathered: copied, checked and used together, and named one by one where a check fails."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mola.errors import DataError, located
from mola.features.room import Room
from mola.features.watching import Features
from mola.heads import Head
from mola.likelihood import Likelihood

__all__ = ["Gathered", "check_finite"]


class Waiting(NamedTuple):
    """One batch that waits."""

    place: str
    """Words for the error message."""
    seen: Sequence[Features]
    """What each network makes of it."""
    labels: Tensor | None
    """As the loader yielded them."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.seen[0].logits)


class Gathered:
    """What K networks make of the batches that wait to be used together.

    Args:
        rows: how many to gather. A batch of so many, or more, is taken as it is.
        heads: the networks' last layers; without one, nothing is gathered.
        likelihood: what the outputs mean; reads the labels.
    """

    def __init__(self, rows: int, heads: Sequence[Head | None], likelihood: Likelihood) -> None:
        """Wait for the first batch."""
        self._rooms = [Room(head, rows) for head in heads if head is not None]
        self.rows, self.likelihood = rows if len(self._rooms) == len(heads) else 1, likelihood
        self.count = 0
        self._waiting: list[Waiting] = []
        self._without_rows = 0

    @property
    def full(self) -> bool:
        """Whether it is time to take what was gathered."""
        return self.count >= self.rows

    @property
    def batches(self) -> int:
        """How many batches wait, those of which nothing was left included."""
        return len(self._waiting) + self._without_rows

    def fits(self, count: int) -> bool:
        """Whether a batch of so many rows may join."""
        return self.count == 0 or self.count + count <= self.rows

    def add(self, place: str, seen: Sequence[Features], labels: Tensor | None) -> None:
        """Take one more batch.

        Args:
            place: words for the error message.
            seen: what each network makes of it.
            labels: as the loader yielded them.

        Raises:
            DataError: if the networks gave different numbers of rows.
        """
        counts = [one.logits.shape[0] for one in seen]
        if len(set(counts)) > 1:
            message = f"{place}: the networks gave {counts} rows; a mixture needs the same data from each."
            raise DataError(message)
        if counts[0] == 0:  # such as a text of which every position is masked
            self._without_rows += 1
            return
        if counts[0] < self.rows:
            # A network or a loader may use its memory again for the next batch, or features be a part of something large.
            try:
                seen = [room.put(one, self.count) for room, one in zip(self._rooms, seen, strict=True)]
            except DataError:
                with located(place):
                    raise
            labels = None if labels is None else labels.clone()
        self._waiting.append(Waiting(place, seen, labels))
        self.count += counts[0]

    @torch.no_grad()
    def take(self) -> tuple[list[Features], Tensor | None]:
        """All that was gathered, checked; the next batch that is added overwrites it."""
        waiting, count = self._waiting, self.count
        self._waiting, self.count, self._without_rows = [], 0, 0
        joined: list[Features] = list(waiting[0].seen)
        if len(waiting) > 1:
            joined = [room.first(count) for room in self._rooms]
        if not all(all_finite(one.logits) for one in joined):  # what is wrong with the features shows in the logits
            self._check_each(waiting)
        return joined, self._labels(waiting, joined[0].logits)

    def _labels(self, waiting: Sequence[Waiting], logits: Tensor) -> Tensor | None:
        parts = [batch.labels for batch in waiting if batch.labels is not None]
        if not parts:
            return None
        kinds = {(labels.dtype, labels.device, labels.shape[1:]) for labels in parts}
        if len(kinds) == 1 and [labels.shape[:1] for labels in parts] == [(len(batch),) for batch in waiting]:
            try:
                return self.likelihood.check_labels(torch.cat(parts), logits, waiting[0].place)
            except DataError:
                pass  # the batch that is to blame is found below
        return torch.cat(self._check_each(waiting))

    def _check_each(self, waiting: Sequence[Waiting]) -> list[Tensor]:
        """Check batch by batch, so that the message names it; gives the labels as the likelihood reads them."""
        read = []
        for place, seen, labels in waiting:
            for position, one in enumerate(seen):
                with located(f"{place}, models[{position}]"):
                    check_finite(one.features, "features")
                    check_finite(one.logits)
            if labels is not None:
                read.append(self.likelihood.check_labels(labels, seen[0].logits, place))
        return read


def all_finite(values: Tensor) -> bool:
    """Whether all are finite, in all but one small operation: NaN and infinity survive in a sum."""
    return math.isfinite(float(values.sum(dtype=torch.promote_types(values.dtype, torch.float32))))


def check_finite(values: Tensor, name: str = "logits") -> None:
    """Refuse activations that are NaN or infinite.

    Args:
        values: (n, ...); not looked at in a trace, which has no numbers.
        name: what they are, for the message.

    Raises:
        DataError: saying how many inputs are affected.
    """
    if torch.compiler.is_compiling() or all_finite(values):
        return
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        rows = int((~finite).any(1).sum())
        message = (
            f"{name} are NaN or infinite for {rows} of {len(values)} inputs. Check the inputs, and the network's weights, for NaN; "
            f"a network in float16 may overflow where bfloat16 or float32 does not."
        )
        raise DataError(message)
