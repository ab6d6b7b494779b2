"""Searching over one positive number: a grid that grows past an end that wins, or a smooth maximum to convergence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mola.errors import OptionError, warn

__all__ = ["PAPER_GRID", "Search", "log_grid", "maximise"]

SMALLEST, LARGEST = 1e-24, 1e12
"""How far a grid may grow. Below, the prior says nothing any more; above, no spread is left around the trained weights."""

STEPS = round(99 / 7)
"""Candidates in a decade: the density of the paper's grid of 100 values from 1e-4 to 1e3."""


def log_grid(low: float, high: float, count: int) -> tuple[float, ...]:
    """`count` values from `low` to `high`, evenly spaced in the logarithm."""
    return tuple(torch.logspace(math.log10(low), math.log10(high), count, dtype=torch.float64, device="cpu").tolist())


PAPER_GRID = log_grid(1e-4, 1e3, 100)


def check_grid(grid: Sequence[float]) -> tuple[float, ...]:
    try:
        values = tuple(sorted(float(value) for value in grid))
    except (TypeError, ValueError, OverflowError) as error:
        message = f"grid must hold finite numbers above 0, got {grid!r}."
        raise OptionError(message) from error
    if not values or not all(math.isfinite(value) and value > 0 for value in values):
        message = f"grid must hold finite numbers above 0, got {list(grid)!r}."
        raise OptionError(message)
    return values


class Search:
    """Candidates and their curve, growing by a decade past an end that wins."""

    def __init__(self, evaluate: Callable[[Sequence[float]], dict[str, Tensor]], grid: Sequence[float] | None) -> None:
        self.evaluate = evaluate
        self.grid = list(PAPER_GRID if grid is None else check_grid(grid))
        self.first_grid = (self.grid[0], self.grid[-1])
        self.curve = evaluate(self.grid)

    def grow(self, *, down: bool) -> bool:
        """Add a decade below or above; False where the grid may not grow further."""
        end, factor = (self.grid[0], 0.1) if down else (self.grid[-1], 10.0)
        if not SMALLEST < end < LARGEST:
            return False
        added = [end * factor ** (step / STEPS) for step in range(1, STEPS + 1)]
        scores = self.evaluate(added)
        if down:
            self.grid = added[::-1] + self.grid
            self.curve = {name: torch.cat([scores[name].flip(0), self.curve[name]]) for name in scores}
        else:
            self.grid += added
            self.curve = {name: torch.cat([self.curve[name], scores[name]]) for name in scores}
        return True

    def flat(self, score: str, *, down: bool) -> bool:
        """Whether the last candidates towards an end score alike: growing further would change nothing."""
        values = self.curve[score][:STEPS] if down else self.curve[score][-STEPS:]
        return len(values) > 1 and float(values.max() - values.min()) <= 1e-9 * float(values.abs().max())

    def notes(self, chosen: float, rule: str) -> tuple[str, ...]:
        """Say whether the grid grew, what that means for the value that was chosen, and what can be done.

        Args:
            chosen: the value.
            rule: or score by which it was chosen: no use to advise it.

        Returns:
            The notes, which were warned of.
        """
        if (self.grid[0], self.grid[-1]) == self.first_grid:
            return ()
        low, high = self.first_grid
        note = (
            f"the search for the prior precision reached the end of its grid [{low:.3g}, {high:.3g}] and went on to "
            f"[{self.grid[0]:.3g}, {self.grid[-1]:.3g}]. Took {chosen:.3g}"
        )
        other = "'nll'" if rule != "nll" else "'threshold'"
        if chosen < low:
            note += (
                f": the prior says next to nothing, and the training data alone set the covariance. If confidence outside the data "
                f"is then too low, use another rule, such as {other}, or set the prior precision yourself."
            )
        elif chosen > high:
            note += (
                f": little covariance is left, and predictions are close to the plain ensemble's. For more caution, use another rule, "
                f"such as {other}, or set the prior precision yourself."
            )
        else:
            note += ", inside the first grid: nothing needs to be done."
        warn(note)
        return (note,)

    def table(self) -> dict[str, tuple[float, ...]]:
        """The curve as plain numbers."""
        return {"prior_precision": tuple(self.grid)} | {
            name: tuple(values.tolist()) for name, values in self.curve.items()
        }


def maximise(objective: Callable[[Tensor], Tensor]) -> float:
    """Where a smooth function of a positive number is largest: a wide grid, then bisection of the slope."""

    def slope(log_precision: float) -> float:
        with torch.enable_grad():
            position = torch.tensor(log_precision, dtype=torch.float64, device="cpu", requires_grad=True)
            (gradient,) = torch.autograd.grad(objective(position.exp()), position)
        return float(gradient)

    positions = torch.linspace(math.log(1e-16), math.log(1e16), 257, dtype=torch.float64, device="cpu").tolist()
    with torch.no_grad():
        values = [
            float(objective(torch.tensor(position, dtype=torch.float64, device="cpu").exp())) for position in positions
        ]
    peak = max(range(len(values)), key=values.__getitem__)
    low, high = positions[max(peak - 1, 0)], positions[min(peak + 1, len(positions) - 1)]
    if slope(low) <= 0 or slope(high) >= 0:
        note = f"the log evidence has no interior maximum in the prior precision; took {math.exp(positions[peak]):.3g}."
        warn(note)
        return math.exp(positions[peak])
    while high - low > 1e-12 * max(1.0, abs(low)):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
        if middle in (low, high) and high - low < 1e-13:
            break
    return math.exp((low + high) / 2)
