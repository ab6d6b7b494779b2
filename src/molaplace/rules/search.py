"""The search for the best prior precision.

Every ninth value of the paper's grid is tried first, followed by finer steps around the best value. The grid is extended if the best
value is at either end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from torch import Tensor

from molaplace.errors import OptionError, warned

Scored = dict[str, Tensor]
Evaluate: TypeAlias = "Callable[[Sequence[float]], Scored]"
"""A function that maps L prior precisions to named scores (L,)."""

LOW, HIGH, STEPS = 0, 99, (9, 3, 1)
"""First and last indices of the paper's grid, which has 100 values from 1e-4 to 1e3, and the step sizes of the search."""

LOWEST, HIGHEST = -279, 225
"""First and last indices of the extended grid, which covers prior precisions from 2e-24 to 8e11. Below this range, the prior has no
influence; above it, no covariance remains."""

SAME = 1e-9
"""Relative difference up to which two scores are considered equal, to allow for rounding."""


def points(share: float, digits: str = "g") -> str:
    """Format a difference between two proportions in percentage points, such as "1 point" or "2.6 points"."""
    text = f"{100 * share:{digits}}"
    return f"{text} point{'' if text == '1' else 's'}"


def grid_value(index: int) -> float:
    """Return the prior precision at an index of the paper's grid, which continues with 14 values per decade beyond its ends."""
    if index < LOW:
        return float(1e-4 * 10 ** (index / 14))
    return float(10 ** (-4 + 7 * index / HIGH) if index <= HIGH else 1e3 * 10 ** ((index - HIGH) / 14))


class PrecisionSearch:
    """A search over prior precisions that stores the scores of all values tried, keyed by their index in the grid."""

    evaluate: Evaluate
    given: tuple[float, ...] | None

    def __init__(self, evaluate: Evaluate, grid: Sequence[float] | None = None) -> None:
        self.evaluate, self.given = evaluate, None if grid is None else _check_grid(grid)
        self.tried: dict[int, dict[str, float]] = {}
        if self.given is not None:
            self.try_at(range(len(self.given)))

    def value(self, index: int) -> float:
        """Return the prior precision at an index."""
        return grid_value(index) if self.given is None else self.given[index]

    def try_at(self, indices: Iterable[int]) -> None:
        """Score the prior precisions at these indices, except those already tried."""
        new = sorted(set(indices) - self.tried.keys())
        if new:
            found = self.evaluate([self.value(index) for index in new])
            for place, index in enumerate(new):
                self.tried[index] = {name: float(values[place]) for name, values in found.items()}

    def minimise(self, score: str, *, smooth: bool = True) -> int:
        """Return the index of the prior precision with the smallest score. If `smooth` is False, every value of the grid is tried."""

        def best() -> int:
            return min(sorted(self.tried), key=lambda index: self.tried[index][score])

        if self.given is not None:
            return best()
        self.try_at(range(LOW, HIGH + 1, STEPS[0] if smooth else 1))
        for down in (True, False):
            self._grow(score, down, lambda end: end == best())
        for step in STEPS[1:] if smooth else ():
            centre = best()
            self.try_at(centre + step * offset for offset in (-2, -1, 1, 2))
        return best()

    def smallest_meeting(self, meets: Callable[[dict[str, float]], bool], score: str) -> int | None:
        """Return the index of the smallest prior precision that meets a monotone condition, or None if no value meets it."""

        def first() -> int | None:
            return next((index for index in sorted(self.tried) if meets(self.tried[index])), None)

        if self.given is not None:
            return first()
        self.try_at(range(LOW, HIGH + 1, STEPS[0]))
        for down in (True, False):
            self._grow(score, down, lambda end, down=down: meets(self.tried[end]) == down)  # type: ignore[misc]
        for step in STEPS[1:]:
            found = first()
            if found is None:
                return None
            below = max((index for index in self.tried if index < found), default=found)
            self.try_at(range(below, found, step))
        return first()

    def _grow(self, score: str, down: bool, is_open: Callable[[int], bool]) -> None:
        # Extend the grid beyond one end, within its limits, as long as `is_open` allows it and the score still changes.
        end, sign = (min, -1) if down else (max, 1)
        while LOWEST < end(self.tried) < HIGHEST and is_open(end(self.tried)):
            before, last = self.tried[end(self.tried)][score], end(self.tried)
            self.try_at([last + sign * STEPS[0] * step for step in (1, 2)])
            if abs(self.tried[end(self.tried)][score] - before) <= SAME * abs(before):
                break

    def curve(self) -> dict[str, tuple[float, ...]]:
        """Return the scores of all values tried, in order of increasing prior precision."""
        order = sorted(self.tried)
        names = self.tried[order[0]]
        table = {name: tuple(self.tried[index][name] for index in order) for name in names}
        return {"prior_precision": tuple(self.value(index) for index in order)} | table

    def note(self, index: int) -> tuple[str, ...]:
        """Issue and return a warning if the chosen value is outside the paper's grid."""
        if self.given is not None or LOW <= index <= HIGH:
            return ()
        meaning = (
            "the prior has almost no influence, and the training data alone determine the covariance"
            if index < LOW
            else "almost no covariance is left, and predictions are close to those of the plain ensemble"
        )
        return (
            warned(f"the prior precision {self.value(index):.3g} is outside the grid from 1e-4 to 1e3: {meaning}."),
        )


def _check_grid(grid: Sequence[float]) -> tuple[float, ...]:
    try:
        values = tuple(sorted(float(value) for value in grid))
    except (TypeError, ValueError, OverflowError):
        values = ()
    if not values or not all(math.isfinite(value) and value > 0 for value in values):
        raise OptionError(f"must contain finite numbers above 0, got {grid!r}.", argument="grid")
    return values


def maximise(objective: Callable[[float], float], low: float, high: float, *, coarse: int = 65) -> float:
    """Maximise a function of one variable on a coarse grid, and then by golden-section search around the best point."""
    places = [low + (high - low) * step / (coarse - 1) for step in range(coarse)]
    best = max(range(coarse), key=[objective(place) for place in places].__getitem__)
    left, right = places[max(best - 1, 0)], places[min(best + 1, coarse - 1)]
    ratio = (math.sqrt(5) - 1) / 2
    one, two = right - ratio * (right - left), left + ratio * (right - left)
    value_one, value_two = objective(one), objective(two)
    while right - left > 1e-8 * max(1.0, abs(left)):
        if value_one > value_two:
            right, two, value_two = two, one, value_one
            one = right - ratio * (right - left)
            value_one = objective(one)
        else:
            left, one, value_one = one, two, value_two
            two = left + ratio * (right - left)
            value_two = objective(two)
    return (left + right) / 2
