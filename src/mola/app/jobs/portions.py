"""A set predicted in portions, by one process or by several in turns: the rows come out in the order of the data.

Process r of R takes batches r, r + R, r + 2R, ...; after each round what was found travels to rank 0, which writes it while the
others are at their next batch. So nobody holds more than a batch, and no file system needs to be shared.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mola.app.jobs.rows import Rows, Set
from mola.distributed import Team
from mola.errors import DataError
from mola.posterior import MoLA
from mola.prediction import Prediction

__all__ = ["COLUMNS", "Portion", "in_order", "portions"]

COLUMNS = ("label", "confidence", "entropy", "epistemic", "ood_score")
"""Numbers of each input, before its probabilities."""


@dataclass(frozen=True)
class Portion:
    """What is known of a batch.

    Attributes:
        names: of all inputs.
        errors: for each, why it was left out, or None.
        notes: on inputs that were used.
        numbers: for each that was used (m, 5), or (m, 5 + C) with probabilities.
    """

    names: list[str]
    errors: list[str | None]
    notes: tuple[tuple[str, str], ...]
    numbers: NDArray[np.float64]

    def plain(self) -> dict[str, Any]:
        """As JSON, the numbers to the last bit."""
        numbers = np.ascontiguousarray(self.numbers)
        return {
            "names": self.names,
            "errors": self.errors,
            "notes": self.notes,
            "shape": numbers.shape,
            "numbers": base64.b64encode(numbers.tobytes()).decode("ascii"),
        }

    @classmethod
    def of_plain(cls, document: dict[str, Any]) -> Portion:
        """From what `plain` gave."""
        numbers = np.frombuffer(base64.b64decode(document["numbers"]), np.float64).reshape(document["shape"])
        notes = tuple((name, words) for name, words in document["notes"])
        return cls(document["names"], document["errors"], notes, numbers)

    def rows(self) -> Rows:
        """Names, errors and notes, for an account."""
        return Rows(self.names, self.errors, None, None, self.notes)


def _portion(rows: Rows, prediction: Prediction | None, outputs: int) -> Portion:
    """A batch with its prediction, if any input of it could be used; `outputs`: how many probabilities to keep."""
    numbers = np.zeros((0, len(COLUMNS) + outputs))
    if prediction is not None:
        parts = [getattr(prediction, name).double()[:, None] for name in COLUMNS]
        numbers = torch.cat([*parts, *([prediction.probs.double()] if outputs else [])], dim=1).numpy()
    return Portion(rows.names, rows.errors, rows.notes, numbers)


def portions(
    posterior: MoLA,
    source: Set,
    *,
    strict: bool,
    outputs: int,
    seed: int | None,
    tell: Callable[[float], None] = lambda share: None,
) -> Iterator[Portion]:
    """Predict a set batch by batch.

    Args:
        posterior: that predicts.
        source: the set, or this process's part.
        strict: whether an input that cannot be used is an error.
        outputs: how many probabilities to keep of each input: all or none.
        seed: of links that draw; None uses the link's own.
        tell: told which share of the set has been read, where its size is known.

    Yields:
        A portion for each batch, in order; `DataError` for an input that cannot be used, if this is strict.
    """
    pending = deque[Rows]()

    def feed() -> Iterator[Any]:
        seen = 0
        for rows in source:
            bad = next(((name, error) for name, error in zip(rows.names, rows.errors, strict=True) if error), None)
            if strict and bad is not None:
                message = f"{bad[0]}: {bad[1]} (and --strict leaves nothing out)."
                raise DataError(message)
            pending.append(rows)
            seen += len(rows.names)
            tell(min(1.0, seen / (source.count or 2 * seen)))
            if rows.inputs is not None:
                yield rows.inputs if isinstance(rows.inputs, Mapping) else (rows.inputs,)

    batches = feed()
    first = next(batches, None)
    if first is not None:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        for prediction in posterior.predict_batches(chain([first], batches), generator=generator):
            while pending:
                rows = pending.popleft()
                used = rows.inputs is not None
                yield _portion(rows, prediction if used else None, outputs)
                if used:
                    break
    for rows in pending:
        yield _portion(rows, None, outputs)


def in_order(own: Iterator[Portion], team: Team) -> Iterator[Portion]:
    """On rank 0 the portions of all processes, in the order of the data; on the others nothing. Call it inside `team.work(...)`.

    Args:
        own: those of this process, whose set is divided by `in_turns`.
        team: the processes.

    Yields:
        One portion after the other.
    """
    if team.size == 1:
        yield from own
        return
    more = True
    while more:
        portion = next(own, None)
        everyone = team.collect(None if portion is None else portion.plain())
        # Batches are dealt in turns: once a process has none, the others have had their last.
        more = team.share(None if everyone is None else None not in everyone)
        for document in everyone or ():
            if document is not None:
                yield Portion.of_plain(document)
