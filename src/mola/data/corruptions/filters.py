"""Linear filters with the borders of the image programs they come from.

A filter along one axis is a small matrix (side x side) with its border folded in; a separable filter is then two matrix
products for a whole batch, exact for any number of taps.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mola.data.corruptions.pixels import Floats

__all__ = ["Border", "band", "correlate", "fold", "gaussian", "gaussian_taps", "padded", "separable", "zooming"]

Border = Literal["nearest", "reflect", "mirror"]
"""What lies outside a b c d: `nearest` a a|a b c d|d d, `reflect` b a|a b c d|d c, `mirror` c b|a b c d|c b."""


def fold(positions: NDArray[np.int64], side: int, border: Border) -> NDArray[np.int64]:
    """The places inside the image that stand for `positions`, which may lie outside."""
    if border == "nearest":
        return np.clip(positions, 0, side - 1)
    if border == "reflect":
        wrapped = positions % (2 * side)
        return np.minimum(wrapped, 2 * side - 1 - wrapped)
    wrapped = positions % (2 * side - 2)
    return np.minimum(wrapped, 2 * side - 2 - wrapped)


def band(side: int, taps: Floats, border: Border) -> Floats:
    """The matrix of sum_k taps[k] x[i + k - r], for 2 r + 1 taps."""
    radius = len(taps) // 2
    matrix = np.zeros((side, side))
    rows = np.arange(side)
    for offset, weight in zip(range(-radius, radius + 1), taps, strict=True):
        np.add.at(matrix, (rows, fold(rows + offset, side, border)), weight)
    return matrix


def gaussian_taps(sigma: float, radius: int) -> Floats:
    """Weights proportional to exp(-k^2 / 2 sigma^2) for k = -radius .. radius, with sum 1."""
    if radius == 0:
        return np.ones(1)
    taps = np.exp(-(np.arange(-radius, radius + 1) ** 2) / (2 * sigma**2))
    return taps / taps.sum()


def separable(images: Floats, matrix: Floats) -> Floats:
    """The same filter along the rows and along the columns of images (..., side, side)."""
    return matrix @ images @ matrix.T


def gaussian(images: Floats, sigma: float, *, border: Border = "nearest", truncate: float = 4.0) -> Floats:
    """Gaussian blur, cut off at `truncate` standard deviations; sigma 0 leaves the images as they are."""
    taps = gaussian_taps(sigma, int(truncate * sigma + 0.5))
    return separable(images, band(images.shape[-1], taps, border))


def padded(images: Floats, margin: int, border: Border) -> Floats:
    """Images (..., side, side) with `margin` more pixels on every side."""
    side = images.shape[-1]
    places = fold(np.arange(-margin, side + margin), side, border)
    return images[..., places[:, None], places]


def correlate(images: Floats, kernel: Floats, border: Border) -> Floats:
    """Sum of the neighbours weighted by a small square kernel, which is not turned round."""
    side, radius = images.shape[-1], len(kernel) // 2
    around = padded(images, radius, border)
    result = np.zeros_like(images)
    for row, column in zip(*np.nonzero(kernel), strict=True):
        result += kernel[row, column] * around[..., row : row + side, column : column + side]
    return result


def zooming(side: int, factor: float) -> Floats:
    """The matrix that enlarges the centre of one axis by `factor`, linearly, to fill the axis.

    The middle ceil(side / factor) pixels become round(that * factor), whose first and last are the first and last
    pixels taken, and of which the middle `side` are kept.
    """
    taken = int(np.ceil(side / factor))
    made = round(taken * factor)
    start, cut = (side - taken) // 2, (made - side) // 2
    places = (np.arange(side) + cut) * ((taken - 1) / (made - 1))
    lower = np.minimum(np.floor(places).astype(np.int64), taken - 2)
    share = places - lower
    matrix = np.zeros((side, side))
    rows = np.arange(side)
    matrix[rows, start + lower] = 1 - share
    matrix[rows, start + lower + 1] = share
    return matrix
