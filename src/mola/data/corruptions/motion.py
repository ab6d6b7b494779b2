"""Blur by motion along a line, as ImageMagick draws it; motion_blur and snow use it."""

from __future__ import annotations

import numpy as np

from mola.data.corruptions.filters import padded
from mola.data.corruptions.pixels import Floats

__all__ = ["half_gaussian", "moved"]


def half_gaussian(radius: int, sigma: float) -> Floats:
    """Weights proportional to exp(-i^2 / 2 sigma^2) for i = 0 .. 2 radius: the blur trails to one side."""
    weights = np.exp(-(np.arange(2 * radius + 1) ** 2) / (2 * sigma**2))
    return weights / weights.sum()


def moved(images: Floats, radius: int, sigma: float, degrees: Floats) -> Floats:
    """Each image (n, channels, side, side) blurred along its own angle, edges repeated.

    The result at (y, x) is sum_i k_i image(y + [i sin a], x + [i cos a]), where [.] rounds to the nearest pixel.

    Args:
        images: (n, channels, side, side).
        radius: reach of the kernel, which has 2 radius + 1 taps.
        sigma: its standard deviation in pixels.
        degrees: angle of each image, y pointing down.

    Returns:
        Images of the same shape, not rounded.
    """
    side = images.shape[-1]
    weights = half_gaussian(radius, sigma)
    steps = np.arange(len(weights))
    angles = np.radians(degrees)[:, None]
    # ceil(v - 1/2) is the nearest whole number, halves down, as in ImageMagick.
    down = np.ceil(steps * np.sin(angles) - 0.5).astype(np.int64)
    right = np.ceil(steps * np.cos(angles) - 0.5).astype(np.int64)
    margin = len(weights) - 1
    around = padded(images, margin, "nearest")
    result = np.zeros_like(images)
    # Image by image: slices of one image stay in the cache, which a gather over the batch does not.
    for image, source, rows, columns in zip(
        result, around, (margin + down).tolist(), (margin + right).tolist(), strict=True
    ):
        for weight, row, column in zip(weights, rows, columns, strict=True):
            image += weight * source[:, row : row + side, column : column + side]
    return result
