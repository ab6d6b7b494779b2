"""Results of the demo: a comparison on digits, the confidence far from the digits, and confidence maps for the two-moons data.

The demo's report is written from these results alone. Unless stated otherwise, dictionaries of results are keyed by the names in
`METHODS`, in the same order.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from molaplace.evaluation.record import Comparison

PAPER, DEFAULT = "MoLA (threshold)", "MoLA (calibrated)"
"""Names of MoLA when tuned by the paper's rule and by the library's default rule."""

METHODS = ("MAP", "DE", "DE-T", PAPER, DEFAULT)
"""Names of the methods: a single network, an ensemble, the same ensemble with a temperature, and MoLA tuned by the paper's rule and by
the default rule."""

Array = NDArray[np.float64]

TEST = "test digits"
"""Name of the in-distribution set."""


@dataclass(frozen=True)
class DemoSettings:
    """Random seed and sizes used in the demo."""

    seed: int = 0
    members: int = 5
    """Number of networks in the ensemble."""
    epochs: int = 60
    outliers: int = 500
    """Number of inputs in each out-of-distribution set."""
    moons_epochs: int = 150
    map_size: int = 181
    """Number of grid points along each side of a confidence map."""


@dataclass(frozen=True)
class DistanceResult:
    """Confidence on inputs that are multiplied by increasing factors to move them away from the data."""

    scales: Array
    curves: dict[str, dict[str, Array]]
    """Mean confidence at each scale, by type of input and method."""
    limits: dict[str, dict[str, float]]
    """Mean of the exact far-field limit, by type of input and method, for methods with a Laplace approximation."""
    bounds: dict[str, dict[str, float]]
    """Mean of the theorem's bound, by type of input and method, for methods without a distance exponent."""
    precisions: Array
    """Prior precisions for which the three MoLA curves below are computed."""
    test_confidence: Array
    """Mean confidence on the test digits for each prior precision."""
    limit: Array
    """Mean of the exact far-field limit in the directions of noise inputs, for each prior precision."""
    bound: Array
    """Mean of the theorem's bound in the directions of noise inputs, for each prior precision."""


@dataclass(frozen=True)
class MoonsResult:
    """Confidence maps of the plane around the two moons."""

    points: Array
    """Training inputs, shape (n, 2)."""
    labels: NDArray[np.int64]
    reach: float
    """Half the side length of the square that the maps cover: both axes run from -reach to reach."""
    maps: dict[str, Array]
    """Confidence maps by method, each of shape (size, size); the first axis is y, from bottom to top."""


@dataclass(frozen=True)
class DemoResult:
    """All results of the demo."""

    settings: DemoSettings
    comparison: Comparison
    """Comparison of the methods on test digits, rotated digits, and inputs that are not digits."""
    distance: DistanceResult
    moons: MoonsResult
    seconds: float
    versions: dict[str, str]
    """Versions of molaplace, torch and Python."""

    def numbers(self) -> dict[str, Any]:
        """Return the settings and results, except the curves and maps, as plain JSON values for `numbers.json`."""
        return {
            "settings": asdict(self.settings),
            "versions": self.versions,
            "seconds": self.seconds,
            **self.comparison.document(),
            "far_field": {"limit": self.distance.limits, "bound": self.distance.bounds},
        }
