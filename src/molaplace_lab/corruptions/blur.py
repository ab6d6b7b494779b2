"""Blur corruptions: Gaussian, frosted glass, defocus, motion (along a line, as in ImageMagick) and zoom."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from molaplace.errors import importing
from molaplace_lab.corruptions.filters import (
    Bytes,
    Floats,
    Streams,
    correlate,
    gaussian,
    gaussian_taps,
    padded,
    rounded,
    truncated,
    unit,
    zooming,
)

DISK_REACH = 8
"""Half-width of the 17 x 17 pixel grid on which the disk of a defocus blur is drawn."""


def gaussian_blur(pixels: Bytes, streams: Streams, sigma: float) -> Bytes:
    """Apply a Gaussian blur truncated at 4 standard deviations; edge pixels are repeated beyond the border."""
    return truncated(gaussian(unit(pixels), sigma))


def glass_blur(pixels: Bytes, streams: Streams, sigma: float, rounds: int) -> Bytes:
    """Blur the image, replace pixels with randomly chosen neighbours, and blur the result again.

    The published loop runs from the last pixel to the third pixel along each axis. It is meant to swap each pixel with the pixel at
    offset (dy, dx), where dy and dx are each -1 or 0. In fact, it only copies the neighbour, because both sides of the swap are
    views of the same array. Within a round, every pixel is read before it is overwritten, so a round is a single gather.
    """
    side = pixels.shape[-1]
    shifts = streams.draw(lambda generator: generator.integers(-1, 1, size=(rounds, 2, side - 2, side - 2)))
    rows = np.arange(2, side)[:, None]
    columns = np.arange(2, side)
    image_indices = np.arange(len(pixels))[:, None, None]
    current = truncated(gaussian(unit(pixels), sigma))
    for turn in range(rounds):
        down = shifts[:, turn, 0]
        right = shifts[:, turn, 1]
        # In `gathered`, the channels come last, because NumPy puts the axes of index arrays first if a slice separates them.
        gathered = current[image_indices, :, rows + down, columns + right]
        current = current.copy()
        current[:, :, 2:, 2:] = np.moveaxis(gathered, -1, 1)
    return truncated(gaussian(unit(current), sigma))


def defocus_blur(pixels: Bytes, streams: Streams, radius: float, sigma: float) -> Bytes:
    """Blur each point of light into a disk that is smoothed by a 3 x 3 Gaussian.

    In CIFAR-10-C, the disk is a single pixel at severities 1 to 3, so only the Gaussian blurs the image. At severity 4, the disk is
    a plus sign of 5 pixels, and at severity 5, a square of 9 pixels; the Gaussian hardly smooths either. A disk larger than the
    grid, such as that of ImageNet-C at severity 5, is drawn on a larger grid and smoothed by a 5 x 5 Gaussian.
    """
    half, beside = (DISK_REACH, 1) if radius <= DISK_REACH else (int(radius), 2)
    axis = np.arange(-half, half + 1)
    disk = (axis[:, None] ** 2 + axis**2 <= radius**2).astype(np.float64)
    taps = gaussian_taps(sigma, beside)
    kernel = correlate(disk / disk.sum(), np.outer(taps, taps), "mirror")
    reach = int(np.abs(axis[kernel.any(axis=0)]).max())
    inner = slice(half - reach, half + reach + 1)
    return truncated(correlate(unit(pixels), kernel[inner, inner], "mirror"))


def motion_blur(pixels: Bytes, streams: Streams, radius: int, sigma: float) -> Bytes:
    """Blur along a line at a random angle between -45 and 45 degrees. Values are rounded to the nearest level, as in ImageMagick."""
    angles = streams.draw(lambda generator: generator.uniform(-45, 45, size=1))[:, 0]
    return rounded(motion_blurred(pixels.astype(np.float64), radius, sigma, angles))


def motion_blurred(images: Floats, radius: int, sigma: float, degrees: Floats) -> Floats:
    """Blur images (n, channels, side, side) along lines at the given angles, repeating the edge pixels; y points down.

    The result at (y, x) is sum_i k_i image(y + [i sin a], x + [i cos a]), where [.] rounds to the nearest pixel and the weights k_i
    are proportional to exp(-i^2 / 2 sigma^2) for i = 0 .. 2 radius. The blur therefore trails to one side. The result is not
    rounded.
    """
    side = images.shape[-1]
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    weights = weights / weights.sum()
    angles = np.radians(degrees)[:, None]
    margin = len(weights) - 1
    # ceil(v - 1/2) rounds to the nearest whole number, with halves rounded down, as in ImageMagick.
    down = margin + np.ceil(steps * np.sin(angles) - 0.5).astype(np.int64)
    right = margin + np.ceil(steps * np.cos(angles) - 0.5).astype(np.int64)
    result = np.zeros_like(images)
    # Images are processed one by one, because slices of a single image fit in the cache, whereas the arrays gathered for a whole
    # batch would not.
    for image, source, rows, columns in zip(
        result, padded(images, margin, "nearest"), down.tolist(), right.tolist(), strict=True
    ):
        for weight, row, column in zip(weights, rows, columns, strict=True):
            image += weight * source[:, row : row + side, column : column + side]
    return result


def zoom_blur(pixels: Bytes, streams: Streams, end: float) -> Bytes:
    """Average the image with enlargements of its centre by factors of 1.00, 1.01, ...; the image itself therefore counts twice."""
    side = pixels.shape[-1]
    flat = np.ascontiguousarray(unit(pixels).reshape(-1, side * side).T)
    return truncated((_zooms(side, end) @ flat).T.reshape(pixels.shape))


@lru_cache(maxsize=1)
def _zooms(side: int, end: float) -> Any:
    # Return the mean of the identity and all enlargements as one sparse matrix that acts on the side^2 pixels.
    with importing("the corruption zoom_blur", "scipy", "lab"):
        from scipy import sparse
    factors = np.arange(1, end, 0.01)
    total = sparse.eye_array(side * side, format="csr")
    for factor in factors:
        axis = sparse.csr_array(zooming(side, float(factor)))
        total = total + sparse.kron(axis, axis, format="csr")
    return total / (len(factors) + 1)
