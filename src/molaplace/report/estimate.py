"""Means over runs with standard errors, and tests of whether a method's lead is larger than chance would explain.

Runs with separately trained networks are independent. Runs of a cross-fit share networks and data, so their spread understates the
error of their mean. If each of J runs has n test examples and m other examples, the variance s^2 / J of the mean is replaced by
s^2 (1 / J + n / m) (Nadeau and Bengio, Machine Learning 52, 2003).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from molaplace.evaluation.leads import CLEAR

SAME = 1e-9
"""Tolerance for ties: two methods tie if both their difference and its standard error are below this value."""


@dataclass(frozen=True)
class Estimate:
    """A mean over runs with its standard error."""

    mean: float
    error: float | None
    """Standard error of the mean; None if it is unknown, for example after a single run."""
    runs: int
    by_run: Mapping[int, float] = field(default_factory=dict, compare=False, repr=False)
    """Values of the individual runs, needed to compute differences between methods."""
    overlap: float = field(default=0.0, compare=False, repr=False)
    """Correction for runs that share data; see `mola.evaluation.record.Record.overlap`."""

    @classmethod
    def over(cls, values: Mapping[int, float], overlap: float = 0.0) -> Estimate | None:
        """Return the mean m over n runs and its standard error sqrt(sum (x - m)^2 / (n - 1) (1 / n + overlap)), or None if n = 0."""
        if not values:
            return None
        mean = math.fsum(values.values()) / len(values)
        return cls(mean, _error(list(values.values()), overlap), len(values), values, overlap)

    def minus(self, other: Estimate) -> Estimate:
        """Return the mean difference over the shared runs, or the difference of the means if fewer than two runs are shared.

        In the second case, an estimate from a single run is assumed to have the same spread as the other estimate. If both estimates
        come from a single run, the error is unknown.
        """
        shared = [run for run in self.by_run if run in other.by_run]
        if len(shared) > 1:
            gaps = {run: self.by_run[run] - other.by_run[run] for run in shared}
            overlap = max(self.overlap, other.overlap)
            return Estimate(math.fsum(gaps.values()) / len(gaps), _error(list(gaps.values()), overlap), len(gaps), gaps)
        errors = [one for one in (self._error_beside(other), other._error_beside(self)) if one is not None]
        runs = min((one.runs for one in (self, other) if one.error is not None), default=1)
        return Estimate(self.mean - other.mean, math.hypot(*errors) if len(errors) == 2 else None, runs)

    def _error_beside(self, other: Estimate) -> float | None:
        if self.error is not None or other.error is None:
            return self.error
        return other.error * math.sqrt(other.runs / self.runs)

    def scaled(self, factor: float) -> Estimate:
        """Return the estimate multiplied by a factor."""
        error = None if self.error is None else abs(factor) * self.error
        by_run = {run: factor * value for run, value in self.by_run.items()}
        return replace(self, mean=factor * self.mean, error=error, by_run=by_run)

    def text(self, digits: int) -> str:
        """Format the estimate as `98.9 ± 0.1`, or as `98.9` if the error is unknown."""
        mean = f"{self.mean:z.{digits}f}"
        return mean if self.error is None else f"{mean} \N{PLUS-MINUS SIGN} {self.error:.{digits}f}"


def _error(values: Sequence[float], overlap: float) -> float | None:
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) * (1 / count + overlap))


def leaders(found: Mapping[str, Estimate | None], better: Literal["low", "high"]) -> list[str]:
    """Return the best method and all methods that tie with it, if they lead all other methods by more than chance would explain.

    The lead must be at least as significant as a lead of `mola.evaluation.leads.CLEAR` standard errors under a normal distribution. Under
    Student's t-distribution, this requires 2.9 standard errors for five runs and 14 for two runs.
    """
    sign = 1 if better == "high" else -1
    known = {name: one for name, one in found.items() if one is not None}
    if len(known) < 2:
        return []
    first = max(known, key=lambda name: sign * known[name].mean)
    best = [first]
    for name, other in known.items():
        gap = known[first].minus(other)
        if name == first:
            continue
        if gap.error is not None and max(sign * gap.mean, gap.error) < SAME:
            best.append(name)
        elif not is_clear(gap):
            return []
    return best if len(best) < len(known) else []


def is_clear(gap: Estimate) -> bool:
    """Return True if the difference is unlikely to be due to chance alone."""
    if gap.error is None or gap.mean == 0 or gap.runs < 2:
        return False
    from scipy.special import stdtr

    times = math.inf if gap.error == 0 else abs(gap.mean) / gap.error
    return bool(1 - 2 * stdtr(gap.runs - 1, -times) > math.erf(CLEAR / math.sqrt(2)))
