r"""The alarm: has the stream left the validation data?

If the stream is exchangeable with the validation data, the p-values of its scores (`mola.monitoring.ranks`) are independent and
uniform, and any function f of mean 1 under the uniform distribution is a fair bet. The bets are

- :math:`1 - a + a\, \varepsilon p^{\varepsilon - 1}`, which wins if scores are high: with a = 1 for a shift of all inputs, from small
    (:math:`\varepsilon` near 1) to large, and with a small a for outliers mixed into inputs that are otherwise as before;
- the same with 1 - p, which wins if scores are low: inputs that are too typical, such as copies;
- :math:`1/2 + 5 \cdot 1[p \in \text{decile}]`, which wins if scores concentrate anywhere, such as those of a stuck camera.

Their capital, mixed over bets and over times of change (`mola.monitoring.evidence`), exceeds :math:`1 / \alpha` with a probability of
at most :math:`\alpha` over the whole life of the stream. For m streams, each with its own ranks, the largest capital is compared with
:math:`m / \alpha`. By the union bound the guarantee still holds, whatever the dependence between the streams, which share the
validation data.

After a change, the new scores enter the ranks, and the evidence stops growing when they outnumber the old ones: n validation scores and
calm inputs allow for evidence of order n. This is no loss of alarms: an alarm once raised stays.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from molaplace.monitoring.ranks import Array

SHIFTS = ((1.0, 0.9), (1.0, 0.7), (1.0, 0.45), (1.0, 0.2))
"""Share a and exponent epsilon of the bets on high or low scores of all inputs."""

OUTLIERS = ((0.3, 0.2), (0.1, 0.15), (0.03, 0.1), (0.01, 0.1))
"""Share and exponent of the bets on high scores of a few inputs."""

DECILES = 10
BETS = 2 * len(SHIFTS) + len(OUTLIERS) + DECILES

SMALLEST = 2.0**-53
"""Smallest p-value on which bets are settled. Larger factors would be possible, so the rounding is conservative."""


def log_factors(p_values: Array) -> Array:
    """Return the logarithms (B, n) of the bets' factors at p-values (n,)."""
    rows = []
    for bets, values in ((SHIFTS + OUTLIERS, p_values), (SHIFTS, 1 - p_values)):
        logs = np.log(np.maximum(values, SMALLEST))
        for share, exponent in bets:
            log_density = np.log(exponent) + (exponent - 1) * logs
            rows.append(log_density if share == 1 else np.log1p(share * np.expm1(log_density)))
    deciles = np.minimum((p_values * DECILES).astype(int), DECILES - 1)
    concentrated = np.full((DECILES, len(p_values)), np.log(0.5))
    concentrated[deciles, np.arange(len(p_values))] = np.log(0.5 + DECILES / 2)
    return np.concatenate([np.stack(rows), concentrated])


@dataclass(frozen=True)
class Contribution:
    """An input that contributed to the evidence."""

    position: int
    """Position of the input in its stream, counted from 0."""
    score: float
    """Outlier score of the input."""
    gain: float
    """Logarithm of the factor by which the input multiplied the capital of the leading bet."""
    stream: str = ""
    """Name of the stream."""


@dataclass(frozen=True)
class Alarm:
    """Whether a stream has left the validation data; true in conditions if the alarm is raised."""

    raised: bool
    """Whether the evidence has ever reached the threshold. If nothing changed, the probability that it ever does is at most alpha."""
    evidence: float
    """Largest capital so far of bets that began with a capital of 1, as a natural logarithm."""
    threshold: float
    """Logarithm of the capital at which the alarm is raised."""
    now: float
    """Logarithm of the present capital."""
    count: int
    """Number of inputs of the stream with the largest evidence."""
    began: int | None
    """Position in this stream at which the change began, if the alarm is raised."""
    contributions: tuple[Contribution, ...] = field(repr=False)
    """The inputs since then that contributed most, strongest first; empty if the alarm is not raised."""
    stream: str = ""
    """Name of the stream with the largest evidence."""

    def __bool__(self) -> bool:
        return self.raised
