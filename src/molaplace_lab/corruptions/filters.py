"""Building blocks of the corruptions: conversion of pixels to values in [0, 1], random numbers for each image, and linear filters.

The random numbers for an image do not depend on the batch that contains it. Filters treat borders in the same way as the programs that
generated the published images. A filter along one axis is a small matrix (side x side) that accounts for the border. Applying a
separable filter to a whole batch therefore takes only two matrix products and is exact for any number of taps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
"""Images as stored, with shape (n, channels, side, side) and type uint8."""

Floats = NDArray[np.float64]
"""Images, or single layers of images, converted for computations. Their type is float64, because the larger rounding errors of float32
would more often push a result just below a whole number, which lowers the final byte by one level."""


def unit(pixels: Bytes) -> Floats:
    """Convert bytes to values in [0, 1]."""
    return pixels / 255.0


def truncated(values: Floats) -> Bytes:
    """Convert values in [0, 1] to bytes, rounding down, as in the published arrays."""
    return (np.clip(values, 0, 1) * 255).astype(np.uint8)


def rounded(values: Floats) -> Bytes:
    """Round values in [0, 255] to the nearest byte, as image programs do."""
    return np.clip(np.floor(values + 0.5), 0, 255).astype(np.uint8)


Drawn = TypeVar("Drawn", bound=np.generic)


@dataclass(frozen=True)
class Streams:
    """One stream of random numbers for each of `count` images, the first of which has index `first`.

    The generator, Philox, is a function of a key and a counter. The key is derived from `name`, which contains the seed, the
    corruption and the severity. The image's index forms the upper part of the counter. The streams of different images therefore never
    overlap, and no stream depends on how many images are corrupted at once.
    """

    name: str
    first: int
    count: int

    def __iter__(self) -> Iterator[np.random.Generator]:
        key = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:16], "little")
        for index in range(self.first, self.first + self.count):
            yield np.random.Generator(np.random.Philox(key=key, counter=index << 64))

    def draw(self, sample: Callable[[np.random.Generator], NDArray[Drawn]]) -> NDArray[Drawn]:
        """Call `one` with each image's stream and stack the results; each call to `draw` restarts the streams."""
        return np.stack([sample(generator) for generator in self])

    def normal(self, shape: tuple[int, ...]) -> Floats:
        """Draw one array of the given shape for each image, from the standard normal distribution."""
        return self.draw(lambda generator: generator.standard_normal(shape))


Border = Literal["nearest", "reflect", "mirror"]
"""Ways to extend a row of pixels a b c d: `nearest` a a|a b c d|d d, `reflect` b a|a b c d|d c, `mirror` c b|a b c d|c b."""


def fold(positions: NDArray[np.int64], side: int, border: Border) -> NDArray[np.int64]:
    """Map `positions`, which may lie outside the image, to pixels inside it."""
    if border == "nearest":
        return np.clip(positions, 0, side - 1)
    if border == "reflect":
        wrapped = positions % (2 * side)
        return np.minimum(wrapped, 2 * side - 1 - wrapped)
    wrapped = positions % (2 * side - 2)
    return np.minimum(wrapped, 2 * side - 2 - wrapped)


def gaussian_taps(sigma: float, radius: int) -> Floats:
    """Return weights proportional to exp(-k^2 / 2 sigma^2) for k = -radius .. radius, normalised to sum to 1."""
    if radius == 0:
        return np.ones(1)
    taps = np.exp(-(np.arange(-radius, radius + 1) ** 2) / (2 * sigma**2))
    return taps / taps.sum()


def gaussian(images: Floats, sigma: float, *, border: Border = "nearest", truncate: float = 4.0) -> Floats:
    """Apply a Gaussian blur, truncated at `truncate` standard deviations; a sigma of 0 leaves the images unchanged."""
    taps = gaussian_taps(sigma, int(truncate * sigma + 0.5))
    # Build the matrix that maps x to y, where y[i] = sum_k taps[k] x[i + k - r] and 2 r + 1 is the number of taps.
    side = images.shape[-1]
    radius = len(taps) // 2
    matrix = np.zeros((side, side))
    rows = np.arange(side)
    for offset, weight in zip(range(-radius, radius + 1), taps, strict=True):
        np.add.at(matrix, (rows, fold(rows + offset, side, border)), weight)
    return matrix @ images @ matrix.T


def padded(images: Floats, margin: int, border: Border) -> Floats:
    """Pad images (..., side, side) by `margin` pixels on every side."""
    side = images.shape[-1]
    positions = fold(np.arange(-margin, side + margin), side, border)
    return images[..., positions[:, None], positions]


def correlate(images: Floats, kernel: Floats, border: Border) -> Floats:
    """Correlate images with a small square kernel, which is not flipped."""
    side = images.shape[-1]
    radius = len(kernel) // 2
    around = padded(images, radius, border)
    result = np.zeros_like(images)
    for row, column in zip(*np.nonzero(kernel), strict=True):
        result += kernel[row, column] * around[..., row : row + side, column : column + side]
    return result


def zooming(side: int, factor: float) -> Floats:
    """Return the matrix that enlarges the centre of an axis by `factor` to fill the axis, with linear interpolation.

    The middle m = ceil(side / factor) pixels are enlarged to round(m * factor) pixels; the first and last values stay the same. Only
    the middle `side` pixels of the result are kept.
    """
    taken = int(np.ceil(side / factor))
    made = round(taken * factor)
    start = (side - taken) // 2
    cut = (made - side) // 2
    positions = (np.arange(side) + cut) * ((taken - 1) / (made - 1))
    lower = np.minimum(np.floor(positions).astype(np.int64), taken - 2)
    share = positions - lower
    matrix = np.zeros((side, side))
    rows = np.arange(side)
    matrix[rows, start + lower] = 1 - share
    matrix[rows, start + lower + 1] = share
    return matrix
