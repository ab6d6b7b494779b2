"""Pixels as numbers: bytes in, values from 0 to 1 to work with, bytes out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bytes", "Floats", "rounded", "truncated", "unit"]

Bytes = NDArray[np.uint8]
"""Images (n, channels, side, side) as they are stored."""

Floats = NDArray[np.float64]
"""Images or layers as they are computed with. float64, since a result just below a whole number loses a level."""


def unit(pixels: Bytes) -> Floats:
    """Bytes as values from 0 to 1."""
    return pixels / 255.0


def truncated(values: Floats) -> Bytes:
    """Values from 0 to 1 as bytes, rounded down: the published arrays were made so."""
    return (np.clip(values, 0, 1) * 255).astype(np.uint8)


def rounded(values: Floats) -> Bytes:
    """Values from 0 to 255 as the nearest bytes: what an image program writes."""
    return np.clip(np.floor(values + 0.5), 0, 255).astype(np.uint8)
