"""Results of the demo: a comparison on digits, confidence far away from them and around two moons. The report reads nothing else.

Dictionaries by method have the keys and the order of `METHODS`, unless stated otherwise.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mola.compare.record import Comparison

DEFAULT = "MoLA (calibrated)"
"""MoLA tuned by the library's default rule."""

METHODS = ("MAP", "DE", "DE-T", "MoLA", DEFAULT)
"""One network, the ensemble, the ensemble with a temperature, MoLA by the paper's rule and by the default rule."""

Array = NDArray[np.float64]

TEST = "test digits"
"""Name of the in-distribution set among the sets of inputs."""


@dataclass(frozen=True)
class DemoSettings:
    """Seed and sizes of the demo."""

    seed: int = 0
    members: int = 5
    """Networks in the ensemble."""
    epochs: int = 60
    outliers: int = 500
    """Inputs in each out-of-distribution set."""
    moons_epochs: int = 150
    map_size: int = 181
    """Points along each side of a confidence map."""


@dataclass(frozen=True)
class DistanceResult:
    """Confidence in inputs that are scaled away from the data."""

    scales: Array
    curves: dict[str, dict[str, Array]]
    """Mean confidence at each scale, by kind of input and method."""
    limits: dict[str, dict[str, float]]
    """Mean of the exact limit, by kind of input and method, for methods with a Laplace approximation."""
    bounds: dict[str, dict[str, float]]
    """Mean of the Theorem's bound, by kind of input and method, for methods without a distance exponent."""
    precisions: Array
    """Prior precisions of MoLA by the paper's rule in the next three curves."""
    test_confidence: Array
    """Mean confidence in the test digits."""
    limit: Array
    """Mean of the exact far-field limit in the directions of noise."""
    bound: Array
    """Mean of the Theorem's bound in the directions of noise."""


@dataclass(frozen=True)
class MoonsResult:
    """Confidence over the plane around two moons."""

    points: Array
    """(n, 2): training data."""
    labels: NDArray[np.int64]
    reach: float
    """The maps cover the square from -reach to reach."""
    maps: dict[str, Array]
    """(size, size) by method; the first axis is y, upwards."""


@dataclass(frozen=True)
class DemoResult:
    """All results of the demo."""

    settings: DemoSettings
    comparison: Comparison
    """On test digits, rotated digits, and inputs that are not digits."""
    distance: DistanceResult
    moons: MoonsResult
    seconds: float
    versions: dict[str, str]
    """Versions of mola, torch and Python."""

    def numbers(self) -> dict[str, Any]:
        """Return settings and results as plain JSON values, without curves and maps: `numbers.json`."""
        return {
            "settings": asdict(self.settings),
            "versions": self.versions,
            "seconds": self.seconds,
            **self.comparison.document(),
            "far_field": {"limit": self.distance.limits, "bound": self.distance.bounds},
        }
