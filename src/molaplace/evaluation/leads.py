"""The best method according to a metric, and a test of whether its lead over the others is larger than chance would explain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from molaplace.evaluation.measurement import Measurement

CLEAR = 2.0
"""Number of standard errors by which a method must lead every other method to be marked as best (about 95 % confidence)."""

SAME = 1e-6
"""Tolerance for ties: two values count as equal if both their difference and its standard error are below this value. Exact equality
would be too strict, because rounding may swap the ranks of two inputs whose scores are almost equal."""

Name = tuple[str, ...]
"""Name of an entry: `(method,)` or `(method, score)`."""


@dataclass(frozen=True)
class Lead:
    """The best method according to a metric, and the evidence that its lead is larger than chance would explain."""

    best: Name
    value: float
    level: tuple[Name, ...]
    """Entries of other methods that tie with the best entry, for example because their scores come from identical logits."""
    rival: Name | None
    """The second-best entry if the lead is clear; otherwise, the best entry that is not clearly behind."""
    ahead: float | None
    """Lead of the best entry over the rival."""
    error: float | None
    """Standard error of `ahead`."""
    clear: tuple[Name, ...]
    """Entries that lead all entries of other methods by more than `CLEAR` standard errors of the difference."""


Better = Literal["low", "high"]


def lead(found: Mapping[Name, Measurement], better: Better) -> Lead:
    """Compare methods by a metric on the same data; entries of the same method are not compared with each other."""
    sign = 1 if better == "high" else -1

    def rivals(name: Name) -> dict[Name, tuple[float, float, float | None]]:
        # Return, for each rival, the lead over it in standard errors, the lead itself, and the standard error of the lead. Rivals that
        # tie are left out.
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
    # If the lead is clear, the rival is the second-best entry; otherwise, it is the best entry that is not clearly behind.
    near = {name: one for name, one in others.items() if best in clear or one[0] <= CLEAR}
    rival = min(near, key=lambda name: near[name][1], default=None)
    _, ahead, error = (0.0, None, None) if rival is None else others[rival]
    level = tuple(name for name in found if name[0] != best[0] and name not in others)
    return Lead(best, found[best].value, level, rival, ahead, error, clear)
