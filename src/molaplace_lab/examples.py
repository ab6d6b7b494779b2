"""The first few inputs of each set, which the pages of suites show with the confidence of each method."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from molaplace.evaluation import PredictionColumns

NUM_EXAMPLES = 8
"""Number of inputs from each set that a report shows."""


@dataclass(frozen=True)
class Examples:
    """Predictions of a method for the first few inputs of a set, in order."""

    confidence: list[float]
    label: list[int]
    """Predicted classes."""


@dataclass(frozen=True)
class Pictures:
    """The first few images of a set."""

    pixels: NDArray[np.uint8]
    """Pixels, shape (n, height, width, channels), with 1 or 3 channels."""
    labels: tuple[int, ...] | None = None
    """Classes of the images, or None for outliers."""


def examples_of(columns: PredictionColumns) -> Examples:
    """Return the confidences and predicted classes for the first few inputs."""
    confidence = columns.data["confidence"][:NUM_EXAMPLES]
    predicted = columns.data["predicted"][:NUM_EXAMPLES]
    return Examples(confidence.tolist(), predicted.long().tolist())
