"""Choosing the prior precision lambda.

Each rule reads its data once. Whatever the number of candidates, the networks are not run again: a candidate costs one
small product in the eigenbasis of the curvature.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from mola.errors import MolaWarning, OptionError
from mola.tuning import HeldOut, Problem, Tuning

__all__ = [
    "ConfidenceThreshold",
    "Evidence",
    "OutlierExposure",
    "Rule",
    "ValidationScore",
    "log_grid",
]

SMALLEST, LARGEST = 1e-24, 1e12
"""How far a grid may grow. Beyond them the posterior is the prior, or the trained weights."""

PER_DECADE = 99 / 7
"""Density of the paper's grid: 100 values from 1e-4 to 1e3."""


class Rule(Protocol):
    """A way to choose the prior precision."""

    def choose(self, problem: Problem, val_loader: Iterable[Any] | None) -> Tuning:
        """Read the data once, and choose."""


def log_grid(low: float, high: float, count: int) -> tuple[float, ...]:
    """`count` values from `low` to `high`, evenly spaced in the logarithm."""
    return tuple(torch.logspace(math.log10(low), math.log10(high), count, dtype=torch.float64).tolist())


PAPER_GRID = log_grid(1e-4, 1e3, 100)


def _check_grid(grid: Sequence[float]) -> tuple[float, ...]:
    values = tuple(sorted(float(value) for value in grid))
    if not values or not all(math.isfinite(value) and value > 0 for value in values):
        message = f"grid must hold finite numbers above 0, got {list(grid)!r}."
        raise OptionError(message)
    return values


class _Search:
    """Candidates and their curve, growing by a decade past an end that wins."""

    def __init__(self, evaluate: Callable[[Sequence[float]], dict[str, Tensor]], grid: Sequence[float]) -> None:
        self.evaluate = evaluate
        self.grid = list(_check_grid(grid))
        self.first_grid = (self.grid[0], self.grid[-1])
        self.curve = evaluate(self.grid)

    def grow(self, *, down: bool) -> bool:
        """Add a decade below or above; False where the grid may not grow further."""
        steps = max(1, round(PER_DECADE))
        end, factor = (self.grid[0], 0.1) if down else (self.grid[-1], 10.0)
        if not SMALLEST < end < LARGEST:
            return False
        added = [end * factor ** (step / steps) for step in range(1, steps + 1)]
        scores = self.evaluate(added)
        if down:
            self.grid = added[::-1] + self.grid
            self.curve = {name: torch.cat([scores[name].flip(0), self.curve[name]]) for name in scores}
        else:
            self.grid += added
            self.curve = {name: torch.cat([self.curve[name], scores[name]]) for name in scores}
        return True

    def notes(self) -> tuple[str, ...]:
        """Say whether the grid grew."""
        if (self.grid[0], self.grid[-1]) == self.first_grid:
            return ()
        low, high = self.first_grid
        note = (
            f"the search for the prior precision reached the end of its grid [{low:.3g}, {high:.3g}] and went on to "
            f"[{self.grid[0]:.3g}, {self.grid[-1]:.3g}]."
        )
        warnings.warn(note, MolaWarning, stacklevel=4)
        return (note,)

    def table(self) -> dict[str, tuple[float, ...]]:
        """The curve as plain numbers."""
        return {"prior_precision": tuple(self.grid)} | {
            name: tuple(values.tolist()) for name, values in self.curve.items()
        }


def _require(val_loader: Iterable[Any] | None, rule: object) -> Iterable[Any]:
    if val_loader is None:
        message = f"{type(rule).__name__} needs validation data: posterior.tune(val_loader, rule=...)."
        raise OptionError(message)
    return val_loader


@dataclass(frozen=True)
class ConfidenceThreshold:
    """The paper's rule: the smallest prior precision whose mean confidence on validation data meets a threshold.

    Args:
        confidence: threshold on the mean confidence; None sets it `margin` below the networks' own mean accuracy on the
            validation data, as the paper does (0.98 for a network of 99.2 %, 0.94 for one of 94.8 %).
        brier: threshold on the Brier score, to be met as well; None asks nothing.
        margin: how far below the accuracy the default threshold lies.
        grid: candidates; it grows past an end that wins.
    """

    confidence: float | None = None
    brier: float | None = None
    margin: float = 0.01
    grid: Sequence[float] = field(default=PAPER_GRID, repr=False)

    def choose(self, problem: Problem, val_loader: Iterable[Any] | None) -> Tuning:
        """Read the validation data once, and choose."""
        needs_labels = self.confidence is None or self.brier is not None
        data = problem.read(_require(val_loader, self), "validation loader", needs_labels)
        threshold = data.mean_accuracy() - self.margin if self.confidence is None else self.confidence

        def passing(curve: dict[str, Tensor]) -> Tensor:
            meets = curve["confidence"] >= threshold
            return meets if self.brier is None else meets & (curve["brier"] <= self.brier)

        search = _Search(lambda grid: problem.curve(data, grid), self.grid)
        while bool(passing(search.curve)[0]) and search.grow(down=True):
            pass
        while not bool(passing(search.curve).any()) and search.grow(down=False):
            pass
        meets = passing(search.curve)
        notes = search.notes()
        if bool(meets.any()):
            chosen = search.grid[int(meets.nonzero()[0])]
        else:
            chosen = search.grid[-1]
            aims = f"mean confidence of at least {threshold:.4f}" + (
                "" if self.brier is None else f" and Brier score of at most {self.brier:.4f}"
            )
            note = (
                f"no prior precision gives a {aims} on the validation data: the trained networks without any covariance "
                f"reach {float(search.curve['confidence'][-1]):.4f}. Took the largest tried, {chosen:.3g}, which is all but the "
                f"plain ensemble. Lower the threshold, or use rule=mola.ValidationScore('nll')."
            )
            warnings.warn(note, MolaWarning, stacklevel=3)
            notes = (*notes, note)
        rule = f"ConfidenceThreshold(confidence={threshold:.6g}, brier={self.brier})"
        return Tuning(rule, (chosen,) * len(problem.spectra), search.table(), notes)


def _smallest(problem: Problem, search: _Search, score: str, rule: str) -> Tuning:
    """The candidate with the smallest score, the grid growing while an end wins by more than rounding."""

    def best() -> int:
        return int(search.curve[score].argmin())

    while True:
        index, value = best(), float(search.curve[score].min())
        at_end = index in (0, len(search.grid) - 1)
        if not at_end or not search.grow(down=index == 0):
            break
        if value - float(search.curve[score].min()) <= 1e-9 * abs(value):
            break
    index = best()
    notes = search.notes()
    if index in (0, len(search.grid) - 1):
        what = "the prior alone" if index == 0 else "no covariance at all: the plain ensemble"
        note = f"{rule}: no interior optimum; the best is {what} (prior precision {search.grid[index]:.3g})."
        warnings.warn(note, MolaWarning, stacklevel=4)
        notes = (*notes, note)
    return Tuning(rule, (search.grid[index],) * len(problem.spectra), search.table(), notes)


@dataclass(frozen=True)
class ValidationScore:
    """The prior precision that does best on validation data.

    Args:
        score: "nll", "brier" or "ece".
        grid: candidates; it grows past an end that wins.

    Raises:
        OptionError: if the score is unknown.
    """

    score: Literal["nll", "brier", "ece"] = "nll"
    grid: Sequence[float] = field(default=PAPER_GRID, repr=False)

    def __post_init__(self) -> None:
        """Check the score.

        Raises:
            OptionError: if it is unknown.
        """
        if self.score not in ("nll", "brier", "ece"):
            message = f"score must be 'nll', 'brier' or 'ece', got {self.score!r}."
            raise OptionError(message)

    def choose(self, problem: Problem, val_loader: Iterable[Any] | None) -> Tuning:
        """Read the validation data once, and choose."""
        data = problem.read(_require(val_loader, self), "validation loader", True)
        search = _Search(lambda grid: problem.curve(data, grid), self.grid)
        return _smallest(problem, search, self.score, f"ValidationScore({self.score!r})")


@dataclass(frozen=True)
class OutlierExposure:
    """Validation log-loss plus a penalty for confidence on outliers: their cross-entropy to the uniform distribution.

    Args:
        loader: batches of outliers; labels are not read.
        weight: of the penalty.
        grid: candidates; it grows past an end that wins.
    """

    loader: Iterable[Any] = field(repr=False)
    weight: float = 0.25
    grid: Sequence[float] = field(default=PAPER_GRID, repr=False)

    def choose(self, problem: Problem, val_loader: Iterable[Any] | None) -> Tuning:
        """Read both loaders once, and choose."""
        data = problem.read(_require(val_loader, self), "validation loader", True)
        outliers = problem.read(self.loader, "outlier loader", False)
        unlabelled = HeldOut(outliers.features, outliers.logits, None)

        def evaluate(grid: Sequence[float]) -> dict[str, Tensor]:
            curve, outside = problem.curve(data, grid), problem.curve(unlabelled, grid)
            curve["outlier_confidence"] = outside["confidence"]
            curve["objective"] = curve["nll"] + self.weight * outside["uniform"]
            return curve

        return _smallest(problem, _Search(evaluate, self.grid), "objective", f"OutlierExposure(weight={self.weight})")


@dataclass(frozen=True)
class Evidence:
    """The prior precision that makes the training labels most probable: no validation data needed.

    Args:
        shared: one prior precision for all components, which maximises the sum of their log evidences; False gives
            each component its own.
    """

    shared: bool = True

    def choose(self, problem: Problem, val_loader: Iterable[Any] | None = None) -> Tuning:
        """Maximise the log evidence to convergence.

        Args:
            problem: the mixture.
            val_loader: must be None: nothing but the training data is used.

        Returns:
            The choice.

        Raises:
            OptionError: if validation data are given.
        """
        if val_loader is not None:
            message = (
                "Evidence uses the training data alone: call posterior.tune(rule=mola.Evidence()) without a loader."
            )
            raise OptionError(message)
        components = range(len(problem.spectra))
        if self.shared:
            best = maximise(
                lambda precision: sum((problem.log_evidence(k, precision) for k in components), torch.zeros(()))
            )
            return Tuning("Evidence(shared=True)", (best,) * len(problem.spectra))
        chosen = tuple(maximise(lambda precision, k=k: problem.log_evidence(k, precision)) for k in components)  # type: ignore[misc]
        return Tuning("Evidence(shared=False)", chosen)


def maximise(objective: Callable[[Tensor], Tensor]) -> float:
    """Where a smooth function of a positive number is largest: a wide grid, then bisection of the slope."""

    def slope(log_precision: float) -> float:
        with torch.enable_grad():
            position = torch.tensor(log_precision, dtype=torch.float64, requires_grad=True)
            (gradient,) = torch.autograd.grad(objective(position.exp()), position)
        return float(gradient)

    positions = torch.linspace(math.log(1e-16), math.log(1e16), 257, dtype=torch.float64).tolist()
    with torch.no_grad():
        values = [float(objective(torch.tensor(position, dtype=torch.float64).exp())) for position in positions]
    peak = max(range(len(values)), key=values.__getitem__)
    low, high = positions[max(peak - 1, 0)], positions[min(peak + 1, len(positions) - 1)]
    if slope(low) <= 0 or slope(high) >= 0:
        note = f"the log evidence has no interior maximum in the prior precision; took {math.exp(positions[peak]):.3g}."
        warnings.warn(note, MolaWarning, stacklevel=4)
        return math.exp(positions[peak])
    while high - low > 1e-12 * max(1.0, abs(low)):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
        if middle in (low, high) and high - low < 1e-13:
            break
    return math.exp((low + high) / 2)
