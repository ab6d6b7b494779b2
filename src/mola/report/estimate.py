"""A number that was measured several times: mean and standard error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Estimate"]


@dataclass(frozen=True)
class Estimate:
    """A mean over runs."""

    mean: float
    error: float | None
    """Standard error of the mean; None if there was one run only."""
    runs: int

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

    def scaled(self, factor: float) -> Estimate:
        """The same in another unit."""
        return Estimate(factor * self.mean, None if self.error is None else abs(factor) * self.error, self.runs)

    def text(self, digits: int) -> str:
        """Such as `98.9 ± 0.1`, or `98.9` where no error is known."""
        mean = f"{self.mean:z.{digits}f}"
        return mean if self.error is None else f"{mean} \N{PLUS-MINUS SIGN} {self.error:.{digits}f}"


def _error(values: Sequence[float]) -> float | None:
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)
