"""Canny's edges and the distance to them, as OpenCV computes them, for a whole batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mola.data.corruptions.filters import correlate
from mola.data.corruptions.pixels import Bytes, Floats
from mola.errors import MissingExtraError

__all__ = ["canny", "distance"]

SOBEL = np.outer([1.0, 2.0, 1.0], [-1.0, 0.0, 1.0])
TAN_22 = 0.4142135623730950488016887242097
STRAIGHT, DIAGONAL, KNIGHT = 65536, 91750, 143976
"""OpenCV's lengths of the moves (1, 0), (1, 1) and (2, 1): 1, 1.4 and 2.1969 in units of 1 / 65536."""
FAR = 1 << 29
MOVES = (
    *((0, -1, STRAIGHT), (-1, -1, DIAGONAL), (-1, 0, STRAIGHT), (-1, 1, DIAGONAL)),
    *((-1, -2, KNIGHT), (-1, 2, KNIGHT), (-2, -1, KNIGHT), (-2, 1, KNIGHT)),
)
"""Rows and columns to the neighbours that come before a pixel, and the length of the way."""


def canny(layers: Bytes, low: float, high: float) -> NDArray[np.bool_]:
    """Edges of grey layers (n, side, side): ridges of |dx| + |dy| (Sobel) above `low` that touch one above `high`.

    There is no smoothing. A ridge is larger than its neighbour before and at least as large as the one after, along
    the gradient rounded to one of four directions (on diagonals, larger than both).

    Args:
        layers: bytes (n, side, side).
        low: least strength of an edge.
        high: strength that some pixel of a connected edge must exceed.

    Returns:
        Whether each pixel is on an edge.

    Raises:
        MissingExtraError: if scipy is not installed.
    """
    try:
        from scipy import ndimage
    except ImportError as error:
        raise MissingExtraError(feature="the corruption spatter", package="scipy", extra="bench") from error
    values = layers.astype(np.float64)
    across, down = correlate(values, SOBEL, "nearest"), correlate(values, SOBEL.T, "nearest")
    strength = np.abs(across) + np.abs(down)
    side = layers.shape[-1]
    around = np.pad(strength, ((0, 0), (1, 1), (1, 1)))

    def beside(row: int, column: int) -> Floats:
        return around[:, 1 + row : 1 + row + side, 1 + column : 1 + column + side]

    def ridge(row: int, column: int) -> NDArray[np.bool_]:
        return (strength > beside(-row, -column)) & (strength >= beside(row, column))

    level = np.abs(down) < TAN_22 * np.abs(across)
    upright = np.abs(down) > (TAN_22 + 2) * np.abs(across)
    falling = (strength > beside(-1, -1)) & (strength > beside(1, 1))
    rising = (strength > beside(-1, 1)) & (strength > beside(1, -1))
    slanted = np.where((across < 0) != (down < 0), rising, falling)
    crest = np.where(level, ridge(0, 1), np.where(upright, ridge(1, 0), slanted))
    candidates = crest & (strength > low)
    # Pixels touch within their image only, corners included.
    touching = np.zeros((3, 3, 3))
    touching[1] = 1
    pieces, count = ndimage.label(candidates, structure=touching)
    kept = np.zeros(count + 1, dtype=np.bool_)
    kept[pieces[candidates & (strength > high)]] = True
    return kept[pieces]


def distance(edges: NDArray[np.bool_]) -> Floats:
    """Length (n, side, side) of the shortest way from each pixel to an edge in moves of 1, 1.4 and 2.1969.

    OpenCV's DIST_L2 with a mask of 5: one sweep forwards, one backwards, in whole numbers of 1 / 65536. Without any
    edge all pixels are far (8192).

    Args:
        edges: whether each pixel (n, side, side) is on an edge.

    Returns:
        The distances; 0 on edges.
    """
    side = edges.shape[-1]
    margin = 2
    # Images last: one step of the sweep handles the whole batch at once.
    field = np.full((side + 2 * margin, side + 2 * margin, len(edges)), FAR, dtype=np.int64)
    inner = slice(margin, margin + side)
    field[inner, inner] = np.where(np.moveaxis(edges, 0, -1), 0, FAR)
    for turned in (field, field[::-1, ::-1]):
        for row in range(margin, margin + side):
            for column in range(margin, margin + side):
                here = turned[row, column]
                for down, right, length in MOVES:
                    np.minimum(here, turned[row + down, column + right] + length, out=here)
    return np.moveaxis(field[inner, inner], -1, 0) / STRAIGHT
