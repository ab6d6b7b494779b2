"""Time two ways of doing the same work, in short turns of about a tenth of a second, one right after the other.

Whatever else the machine does then slows both alike, and the ratio stands. The order alternates. A turn is several batches
where batches are short: with a turn for each batch, the two would drive each other out of the processor's caches, which in
a plain loop nobody does. Wall time and the process's own CPU time are kept side by side.

Where a forward pass varies by more than the work added to it, no such comparison shows that work. So it is also measured
alone: all the time of the tested code that is not spent inside the networks.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from torch import nn

Moment = tuple[float, float]
"""Wall and CPU seconds; plain numbers, because reading the clock must cost nothing beside what is measured."""


def now() -> Moment:
    """Wall time and CPU time."""
    return time.perf_counter(), time.process_time()


def since(start: Moment) -> Moment:
    """Wall and CPU time that have passed."""
    return time.perf_counter() - start[0], time.process_time() - start[1]


def timed(work: Callable[[], Any]) -> Moment:
    """Wall and CPU time of one call."""
    start = now()
    work()
    return since(start)


class Inside:
    """Wall and CPU seconds spent inside the networks' forward passes while this context lasts."""

    def __init__(self, networks: list[nn.Module]) -> None:
        self.networks = networks
        self.total = (0.0, 0.0)

    def __enter__(self) -> Self:
        self.handles = []
        for network in self.networks:
            self.handles.append(network.register_forward_pre_hook(self._begin))
            self.handles.append(network.register_forward_hook(self._end))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _begin(self, *_: object) -> None:
        self.start = now()

    def _end(self, *_: object) -> None:
        wall, cpu = since(self.start)
        self.total = (self.total[0] + wall, self.total[1] + cpu)


@dataclass
class PairedBatches:
    """A loader for the code under test that takes turns with the bare work on the same batch.

    Args:
        batch: what is yielded, again and again.
        bare: the work to compare with, on that batch.
        inside: watches the networks.
        turn: batches in a turn.
        seconds: take turns until this much time has passed,
        least: but at least so many,
        most: and at most so many.
    """

    batch: Any
    bare: Callable[[], Any]
    inside: Inside
    turn: int
    seconds: float
    least: int
    most: int
    bare_times: list[Moment] = field(default_factory=list)
    tested_times: list[Moment] = field(default_factory=list)
    inside_times: list[Moment] = field(default_factory=list)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batch; the time until the next is asked for is the tested code's."""
        begin = time.perf_counter()
        for index in range(self.most):
            if index >= self.least and time.perf_counter() - begin > self.seconds:
                return
            if index % 2 == 0:
                self._bare_turn()
            before = self.inside.total
            start = now()
            for _ in range(self.turn):
                yield self.batch
            self.tested_times.append(since(start))
            after = self.inside.total
            self.inside_times.append((after[0] - before[0], after[1] - before[1]))
            if index % 2 == 1:
                self._bare_turn()

    def _bare_turn(self) -> None:
        start = now()
        for _ in range(self.turn):
            self.bare()
        self.bare_times.append(since(start))

    @property
    def batches(self) -> int:
        """How many were yielded."""
        return self.turn * len(self.tested_times)

    def spread_against_bare(self) -> dict[str, float]:
        """Median and quartiles of tested over bare wall time, without the first turn, which holds what is done once."""
        ratios = np.array(self.tested_times[1:])[:, 0] / np.array(self.bare_times[1:])[:, 0]
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        return {"median": float(middle), "quartile_1": float(low), "quartile_3": float(high), "pairs": len(ratios)}
