"""The search for the best prior precision.

Every ninth value of the paper's grid is tried first, followed by finer steps around the best value. The grid is extended if the best
value is at either end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
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


def grid_value(index: int) -> float:
    """Return the prior precision at an index of the paper's grid, which continues with 14 values per decade beyond its ends."""
    if index < LOW:
        return float(1e-4 * 10 ** (index / 14))
    return float(10 ** (-4 + 7 * index / HIGH) if index <= HIGH else 1e3 * 10 ** ((index - HIGH) / 14))


class PrecisionSearch:
    """A search over prior precisions that stores the scores of all values tried, by their index in the grid.

    The scores of a prior precision include the prior precision itself, under the name "prior_precision".
    """

    evaluate: Evaluate
    grid: tuple[float, ...] | None
    tried: dict[int, dict[str, float]]

    def __init__(self, evaluate: Evaluate, grid: Sequence[float] | None = None) -> None:
        self.evaluate = evaluate
        self.grid = None if grid is None else _check_grid(grid)
        self.tried = {}
        if self.grid is not None:
            self._score(range(len(self.grid)))

    def minimise(
        self, score: str, *, smooth: bool = True, relative: float = SAME, absolute: float = 0.0
    ) -> dict[str, float]:
        """Return the scores of the prior precision with the smallest score.

        If `smooth` is False, every value of the grid is tried. The grid is extended only as long as this changes the score by more
        than `absolute` and by more than its share `relative`.
        """
        if self.grid is None:
            self._score(range(LOW, HIGH + 1, STEPS[0] if smooth else 1))
            for down in (True, False):
                self._grow(score, down, lambda end: end == self._best(score), relative, absolute)
            for step in STEPS[1:] if smooth else ():
                centre = self._best(score)
                self._score(centre + step * offset for offset in (-2, -1, 1, 2))
        return self.tried[self._best(score)]

    def smallest_meeting(self, meets: Callable[[dict[str, float]], bool], score: str) -> dict[str, float] | None:
        """Return the scores of the smallest prior precision that meets a monotone condition, or None if no value meets it."""
        if self.grid is None:
            self._score(range(LOW, HIGH + 1, STEPS[0]))
            for down in (True, False):
                self._grow(score, down, lambda end, down=down: meets(self.tried[end]) == down)  # type: ignore[misc]
            for step in STEPS[1:]:
                indices = sorted(self.tried)
                first = next((index for index in indices if meets(self.tried[index])), None)
                if first is None:
                    return None
                below = max((index for index in indices if index < first), default=first)
                self._score(range(below, first, step))
        return next((self.tried[index] for index in sorted(self.tried) if meets(self.tried[index])), None)

    def _best(self, score: str) -> int:
        return min(sorted(self.tried), key=lambda index: self.tried[index][score])

    def _score(self, indices: Iterable[int]) -> None:
        # Score the prior precisions at these indices, except those already tried.
        new = sorted(set(indices) - self.tried.keys())
        if new:
            precisions = [grid_value(index) if self.grid is None else self.grid[index] for index in new]
            columns = self.evaluate(precisions)
            for row, index in enumerate(new):
                scores = {name: float(values[row]) for name, values in columns.items()}
                self.tried[index] = {"prior_precision": precisions[row]} | scores

    def _grow(
        self, score: str, down: bool, is_open: Callable[[int], bool], relative: float = SAME, absolute: float = 0.0
    ) -> None:
        # Extend the grid beyond one end, within its limits, as long as `is_open` allows it and the score still changes.
        outermost = min if down else max
        sign = -1 if down else 1
        end = outermost(self.tried)
        while LOWEST < end < HIGHEST and is_open(end):
            before = self.tried[end][score]
            self._score([end + sign * STEPS[0] * step for step in (1, 2)])
            end = outermost(self.tried)
            if abs(self.tried[end][score] - before) <= max(relative * abs(before), absolute):
                break

    def curve(self) -> dict[str, tuple[float, ...]]:
        """Return the scores of all values tried, in order of increasing prior precision."""
        return as_curve(sorted(self.tried.values(), key=itemgetter("prior_precision")))

    def note(self, precision: float) -> tuple[str, ...]:
        """Issue and return a warning if the chosen value is outside the paper's grid."""
        if self.grid is not None or grid_value(LOW) <= precision <= grid_value(HIGH):
            return ()
        meaning = (
            "the prior has almost no influence, and the training data alone determine the covariance"
            if precision < 1
            else "almost no covariance is left, and predictions are close to those of the plain ensemble"
        )
        return (warned(f"the prior precision {precision:.3g} is outside the grid from 1e-4 to 1e3: {meaning}."),)


def as_curve(trials: Sequence[dict[str, float]]) -> dict[str, tuple[float, ...]]:
    """Return the scores of a search by name, each a tuple with one number for each trial."""
    return {name: tuple(scores[name] for scores in trials) for name in trials[0]}


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
    positions = [low + (high - low) * step / (coarse - 1) for step in range(coarse)]
    values = [objective(position) for position in positions]
    best = values.index(max(values))
    left = positions[max(best - 1, 0)]
    right = positions[min(best + 1, coarse - 1)]
    ratio = (math.sqrt(5) - 1) / 2
    lower = right - ratio * (right - left)
    upper = left + ratio * (right - left)
    lower_value = objective(lower)
    upper_value = objective(upper)
    while right - left > 1e-8 * max(1.0, abs(left)):
        if lower_value > upper_value:
            right, upper, upper_value = upper, lower, lower_value
            lower = right - ratio * (right - left)
            lower_value = objective(lower)
        else:
            left, lower, lower_value = lower, upper, upper_value
            upper = left + ratio * (right - left)
            upper_value = objective(upper)
    return (left + right) / 2
