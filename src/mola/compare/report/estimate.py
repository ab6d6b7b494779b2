"""A number that was measured several times: mean and standard error, and whether one leads another by more than chance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mola.compare.measured import CLEAR

__all__ = ["Estimate", "leaders", "within"]

SAME = 1e-9
"""Means that differ by less, in every run, are of one method under two names."""


@dataclass(frozen=True)
class Estimate:
    """A mean over runs."""

    mean: float
    error: float | None
    """Standard error of the mean; None if there was one run only."""
    runs: int
    by_run: Mapping[int, float] = field(default_factory=dict, compare=False, repr=False)
    """The values by run, where these are known: what two methods have in common in a run cancels in their difference."""

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Estimate | None:
        """Mean m and standard error sqrt(sum (x - m)^2 / (n - 1) / n) of what there is.

        Args:
            values: one for each run; None is left out.

        Returns:
            The estimate, or None if there are no values.
        """
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(math.fsum(known) / len(known), _error(known), len(known))

    @classmethod
    def over(cls, values: Mapping[int, float | None]) -> Estimate | None:
        """The same of values by run, which are kept to be compared run by run."""
        known = {run: value for run, value in values.items() if value is not None}
        found = cls.of(known.values())
        return None if found is None else cls(found.mean, found.error, found.runs, known)

    def minus(self, other: Estimate) -> Estimate:
        """The difference: over the runs that both have, or of the means where there are fewer than two of these.

        A method of one run is then taken to spread as the other does; where both have one run, no error is known.
        """
        shared = [run for run in self.by_run if run in other.by_run]
        if len(shared) > 1:
            gaps = [self.by_run[run] - other.by_run[run] for run in shared]
            return Estimate(math.fsum(gaps) / len(gaps), _error(gaps), len(gaps))
        errors = [self._error_beside(other), other._error_beside(self)]
        known = [error for error in errors if error is not None]
        error = math.hypot(*known) if len(known) == 2 else None
        # So many runs stand behind the error: the fewer of the two, but not the one that has none of its own.
        runs = min((one.runs for one in (self, other) if one.error is not None), default=1)
        return Estimate(self.mean - other.mean, error, runs)

    def _error_beside(self, other: Estimate) -> float | None:
        """The own error; for one run, what the other's would be if it had one run."""
        if self.error is not None or other.error is None:
            return self.error
        return other.error * math.sqrt(other.runs / self.runs)

    def scaled(self, factor: float) -> Estimate:
        """The same in another unit."""
        error = None if self.error is None else abs(factor) * self.error
        return Estimate(
            factor * self.mean, error, self.runs, {run: factor * value for run, value in self.by_run.items()}
        )

    def text(self, digits: int) -> str:
        """Such as `98.9 ± 0.1`, or `98.9` where no error is known."""
        mean = f"{self.mean:z.{digits}f}"
        return mean if self.error is None else f"{mean} \N{PLUS-MINUS SIGN} {self.error:.{digits}f}"


def leaders(found: Mapping[str, float | Estimate | None], better: Literal["low", "high"]) -> list[str]:
    """Who leads by more than chance: as sure of being ahead of every other as `mola.compare.CLEAR` errors are for many data.

    An error that is itself known from a few runs asks for more: 2.9 errors with five runs, 14 with two (Student's t).

    Args:
        found: estimates by name; numbers without an error cannot lead.
        better: which end is best.

    Returns:
        The best, with those that are the same in every run; nobody, if the lead may be chance.
    """
    sign = 1 if better == "high" else -1
    known = {
        name: one if isinstance(one, Estimate) else Estimate(one, None, 1)
        for name, one in found.items()
        if one is not None
    }
    if len(known) < 2:
        return []
    first = max(known, key=lambda name: sign * known[name].mean)
    best = [first]
    for name, other in known.items():
        if name == first:
            continue
        gap = known[first].minus(other)
        if gap.error is not None and max(sign * gap.mean, gap.error) < SAME:
            best.append(name)
        elif gap.error is None or not _clear(sign * gap.mean, gap.error, gap.runs):
            return []
    return best if len(best) < len(known) else []


def _clear(ahead: float, error: float, runs: int) -> bool:
    """Whether Student's t with runs - 1 degrees of freedom exceeds `ahead / error` as rarely as a normal exceeds `CLEAR`."""
    if ahead <= 0 or runs < 2:
        return False
    return within(math.inf if error == 0 else ahead / error, runs - 1) > math.erf(CLEAR / math.sqrt(2))


def within(times: float, freedom: int) -> float:
    """Probability that |t| of Student is below `times`: a finite sum for whole degrees of freedom."""
    angle = math.atan(times / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def _error(values: Sequence[float]) -> float | None:
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)
