"""Blur: Gaussian, frosted glass, out of focus, motion (along a line, as ImageMagick draws it), zoom."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from mola.errors import importing
from mola.lab.corruptions.filters import (
    Bytes,
    Floats,
    Streams,
    Table,
    correlate,
    gaussian,
    gaussian_taps,
    padded,
    rounded,
    truncated,
    unit,
    zooming,
)


def half_gaussian(radius: int, sigma: float) -> Floats:
    """Return weights proportional to exp(-i^2 / 2 sigma^2) for i = 0 .. 2 radius: the blur trails to one side."""
    weights = np.exp(-(np.arange(2 * radius + 1) ** 2) / (2 * sigma**2))
    return weights / weights.sum()


def moved(images: Floats, radius: int, sigma: float, degrees: Floats) -> Floats:
    """Blur each image (n, channels, side, side) along its own angle, with edges repeated.

    The result at (y, x) is sum_i k_i image(y + [i sin a], x + [i cos a]), where [.] rounds to the nearest pixel.
    The kernel has 2 radius + 1 taps; degrees hold the angle of each image, y pointing down. The result is not rounded.
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


GAUSSIAN_SIGMA = (0.4, 0.6, 0.7, 0.8, 1.0)
GLASS = ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))
"""Standard deviation of the blur and number of rounds; pixels move by at most 1."""
DEFOCUS = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1))
"""Radius of the disk and standard deviation of its smoothing."""
MOTION = ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5))
"""Radius and standard deviation."""
ZOOM_END = (1.06, 1.11, 1.16, 1.21, 1.26)
"""Zoom factors are np.arange(1, end, 0.01), which gives 7, 12, 16, 21 and 26 of them: the first two ends are included by
rounding, and the last factor is a hair above 1.25. The published images were made so."""

DISK_REACH = 8
"""The disk is drawn on a grid of 17 x 17 pixels."""


def gaussian_blur(pixels: Bytes, severity: int, streams: Streams, table: Table = GAUSSIAN_SIGMA) -> Bytes:
    """Apply a Gaussian blur with edges repeated, cut off at 4 standard deviations."""
    return truncated(gaussian(unit(pixels), table[severity - 1]))


def glass_blur(pixels: Bytes, severity: int, streams: Streams) -> Bytes:
    """Blur, let pixels trade places with a neighbour, blur again.

    The published loop goes from the last pixel to the third of each axis and means to swap it with the one at
    (dy, dx), each -1 or 0; it copies instead, since both names stand for views of one array. Every pixel it reads is
    still untouched in that round, so a round is one gather.
    """
    sigma, rounds = GLASS[severity - 1]
    side = pixels.shape[-1]
    moving = side - 2
    shifts = streams.draw(lambda generator: generator.integers(-1, 1, size=(rounds, 2, moving, moving)))
    rows, columns = np.arange(2, side)[:, None], np.arange(2, side)
    everyone = np.arange(len(pixels))[:, None, None]
    current = truncated(gaussian(unit(pixels), sigma))
    for turn in range(rounds):
        down, right = shifts[:, turn, 0], shifts[:, turn, 1]
        # Channels last: the gather's axes come first when they surround a slice.
        gathered = current[everyone, :, rows + down, columns + right]
        current = current.copy()
        current[:, :, 2:, 2:] = np.moveaxis(gathered, -1, 1)
    return truncated(gaussian(unit(current), sigma))


def defocus_kernel(severity: int, table: Table = DEFOCUS) -> Floats:
    """Return a disk on a grid of 17 x 17 pixels, smoothed by a Gaussian of 3 x 3, without the empty rim.

    CIFAR-10-C: at severities 1 to 3 the disk is one pixel and the smoothing is all there is; at 4 it is a plus of 5 pixels, at 5
    a square of 9, both smoothed by next to nothing. Disks that are larger than the grid, such as ImageNet-C's last, have their own,
    larger grid and are smoothed by a Gaussian of 5 x 5.
    """
    radius, sigma = table[severity - 1]
    half, beside = (DISK_REACH, 1) if radius <= DISK_REACH else (int(radius), 2)
    axis = np.arange(-half, half + 1)
    disk = (axis[:, None] ** 2 + axis**2 <= radius**2).astype(np.float64)
    taps = gaussian_taps(sigma, beside)
    smoothed = correlate(disk / disk.sum(), np.outer(taps, taps), "mirror")
    reach = int(np.abs(axis[smoothed.any(axis=0)]).max())
    return smoothed[half - reach : half + reach + 1, half - reach : half + reach + 1]


def defocus_blur(pixels: Bytes, severity: int, streams: Streams, table: Table = DEFOCUS) -> Bytes:
    """Blur each point of light to a disk."""
    return truncated(correlate(unit(pixels), defocus_kernel(severity, table), "mirror"))


def motion_blur(pixels: Bytes, severity: int, streams: Streams) -> Bytes:
    """Blur along a line between -45 and 45 degrees; values are rounded to the nearest level, as ImageMagick writes it."""
    radius, sigma = MOTION[severity - 1]
    angles = streams.draw(lambda generator: generator.uniform(-45, 45, size=1))[:, 0]
    return rounded(moved(pixels.astype(np.float64), radius, sigma, angles))


def zoom_blur(pixels: Bytes, severity: int, streams: Streams) -> Bytes:
    """Return the mean of the image and of its centre enlarged by 1.00, 1.01, ... (so the image itself counts twice)."""
    side = pixels.shape[-1]
    flat = np.ascontiguousarray(unit(pixels).reshape(-1, side * side).T)
    return truncated((_zooms(side, ZOOM_END[severity - 1]) @ flat).T.reshape(pixels.shape))


@lru_cache(maxsize=1)
def _zooms(side: int, end: float) -> Any:
    # All enlargements together: one linear map of the side^2 pixels, of which few entries are not 0.
    with importing("the corruption zoom_blur", "scipy", "bench"):
        from scipy import sparse
    factors = np.arange(1, end, 0.01)
    total = sparse.eye_array(side * side, format="csr")
    for factor in factors:
        axis = sparse.csr_array(zooming(side, float(factor)))
        total = total + sparse.kron(axis, axis, format="csr")
    return total / (len(factors) + 1)
