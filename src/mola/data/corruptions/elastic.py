"""Elastic distortion: a random affine map, then random displacements that vary smoothly."""

from __future__ import annotations

import numpy as np

from mola.data.corruptions.filters import Border, fold, gaussian
from mola.data.corruptions.pixels import Bytes, Floats, truncated, unit
from mola.data.corruptions.streams import Streams

__all__ = ["bilinear", "elastic_transform"]

ELASTIC = ((0.0, 0.0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96))
"""Size and smoothness of the displacements, and jitter of the affine map, in pixels of an image of 32."""
SIDE = 32


def elastic_transform(pixels: Bytes, severity: int, streams: Streams) -> Bytes:
    """Three points about the centre are jittered, and the image follows; then each pixel is displaced on its own.

    The lengths grow with the side. The OpenCV of the published images rounds the affine map's places to 1/32 of a
    pixel; here they are exact.
    """
    side = pixels.shape[-1]
    size, smoothness, jitter = (length * side / SIDE for length in ELASTIC[severity - 1])
    drawn = streams.draw(lambda generator: generator.uniform(-1, 1, size=6 + 2 * side * side))
    places = np.arange(side, dtype=np.float64)
    rows, columns = np.meshgrid(places, places, indexing="ij")
    across, down = _sources(drawn[:, :6].reshape(-1, 3, 2) * jitter, columns, rows)
    values = bilinear(unit(pixels), down, across, "mirror")
    if size > 0:
        fields = drawn[:, 6:].reshape(-1, 2, side, side)
        shift = size * gaussian(fields, smoothness, border="reflect", truncate=3.0)
        values = bilinear(values, rows + shift[:, 1], columns + shift[:, 0], "reflect")
    return truncated(values)


def _sources(jitter: Floats, columns: Floats, rows: Floats) -> tuple[Floats, Floats]:
    """Where each pixel of the result comes from, (n, side, side) across and down.

    The affine map takes three points p to p + jitter (n, 3, 2); the result at q is the image at its inverse.
    """
    side = rows.shape[-1]
    centre, reach = side // 2, side // 3
    points = centre + reach * np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
    homogeneous = np.concatenate([points, np.ones((3, 1))], axis=1)
    forward = np.linalg.solve(np.broadcast_to(homogeneous, (len(jitter), 3, 3)), points + jitter)  # rows x, y, 1
    inverse = np.linalg.inv(forward[:, :2])
    moved = np.stack([columns, rows], axis=-1) - forward[:, 2][:, None, None]
    source = moved @ inverse[:, None]
    return source[..., 0], source[..., 1]


def bilinear(images: Floats, rows: Floats, columns: Floats, border: Border) -> Floats:
    """Images (n, channels, side, side) read between pixels, at places (n, side, side)."""
    side = images.shape[-1]
    top, left = np.floor(rows).astype(np.int64), np.floor(columns).astype(np.int64)
    below, beside = (rows - top)[:, None], (columns - left)[:, None]
    flat = images.reshape(*images.shape[:2], side * side)

    def at(down: int, right: int) -> Floats:
        places = fold(top + down, side, border) * side + fold(left + right, side, border)
        index = np.broadcast_to(places.reshape(len(images), 1, -1), flat.shape)
        return np.take_along_axis(flat, index, axis=2).reshape(images.shape)

    upper = at(0, 0) * (1 - beside) + at(0, 1) * beside
    lower = at(1, 0) * (1 - beside) + at(1, 1) * beside
    return upper * (1 - below) + lower * below
