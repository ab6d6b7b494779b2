"""The method that leads by a metric, and whether its lead over every other method is more than chance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mola.measurement import Measurement

CLEAR = 2.0
"""Standard errors of the difference by which a method must lead every other one to be marked as best: about 95 %."""

SAME = 1e-6
"""Metrics whose difference and its error are smaller are equal: rounding may swap two inputs that are almost tied."""

Name = tuple[str, ...]
"""`(method,)` or `(method, score)`."""


@dataclass(frozen=True)
class Lead:
    """The best method by a metric, and whether its lead is more than chance."""

    best: Name
    value: float
    level: tuple[Name, ...]
    """Other methods that equal the best to every digit, such as scores of the same logits."""
    rival: Name | None
    """The next best method; if the lead is not clear, the closest in units of the error of the difference."""
    ahead: float | None
    """Difference between the best and the rival."""
    error: float | None
    """Standard error of that difference."""
    clear: tuple[Name, ...]
    """Names that lead every other method by more than `CLEAR` standard errors of the difference."""


Better = Literal["low", "high"]


def lead(found: Mapping[Name, Measurement], better: Better) -> Lead:
    """Compare methods by a metric on the same data; a method may have several entries, which do not compete with each other."""
    sign = 1 if better == "high" else -1

    def rivals(name: Name) -> dict[Name, tuple[float, float, float | None]]:
        # Lead over each other method: in standard errors, as a difference, and its error. Equal methods are left out.
        behind: dict[Name, tuple[float, float, float | None]] = {}
        for other, theirs in found.items():
            gap = found[name].minus(theirs)
            ahead, error = sign * gap.value, gap.error
            if other[0] == name[0] or (error is not None and max(abs(ahead), error) < SAME):
                continue
            times = 0.0 if error is None else math.copysign(math.inf, ahead) if error == 0 else ahead / error
            behind[other] = (times, ahead, error)
        return behind

    best = max(found, key=lambda name: sign * found[name].value)
    others = rivals(best)
    clear = tuple(
        name for name in found if (behind := rivals(name)) and min(times for times, *_ in behind.values()) > CLEAR
    )
    # The next best; if the lead is not clear, the method that prevents it.
    rival = min(others, key=lambda name: others[name][1] if best in clear else others[name][0], default=None)
    _, ahead, error = (0.0, None, None) if rival is None else others[rival]
    level = tuple(name for name in found if name[0] != best[0] and name not in others)
    return Lead(best, found[best].value, level, rival, ahead, error, clear)
