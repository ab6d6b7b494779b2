"""What storing and showing does: JPEG and coarse pixels."""

from __future__ import annotations

import io

import numpy as np

from mola.data.corruptions.pixels import Bytes, Floats, rounded
from mola.data.corruptions.streams import Streams
from mola.errors import MissingExtraError

__all__ = ["jpeg_compression", "pixelate"]

JPEG_QUALITY = (80, 65, 58, 50, 40)
PIXELATE_SHARE = (0.95, 0.9, 0.85, 0.75, 0.65)


def jpeg_compression(pixels: Bytes, severity: int, streams: Streams) -> Bytes:
    """Through JPEG and back, by Pillow, with its chroma subsampling of 4:2:0.

    Raises:
        MissingExtraError: if Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError(feature="the corruption jpeg_compression", package="pillow", extra="bench") from error
    result = np.empty((len(pixels), *pixels.shape[2:], 3), dtype=np.uint8)
    for index, image in enumerate(np.ascontiguousarray(np.moveaxis(pixels, 1, -1))):
        with io.BytesIO() as file:
            Image.fromarray(image).save(file, "JPEG", quality=JPEG_QUALITY[severity - 1])
            with Image.open(file) as decoded:
                result[index] = np.asarray(decoded)
    return np.moveaxis(result, -1, 1)


def pixelate(pixels: Bytes, severity: int, streams: Streams) -> Bytes:
    """Down to int(c side) pixels and up again, by Pillow's box filter."""
    side = pixels.shape[-1]
    small = int(side * PIXELATE_SHARE[severity - 1])
    return _resized(_resized(pixels, _box(side, small)), _box(small, side))


def _resized(pixels: Bytes, matrix: Floats) -> Bytes:
    """First along the rows, then along the columns, in whole levels after each, as Pillow does."""
    return rounded(matrix @ rounded(pixels @ matrix.T))


def _box(before: int, after: int) -> Floats:
    """The matrix of Pillow's box filter: means of the pixels whose centre lies within half a new pixel.

    When enlarging, the window is one old pixel wide and takes exactly one.
    """
    scale = before / after
    width = max(scale, 1.0)
    centres = (np.arange(after)[:, None] + 0.5) * scale
    distance = (np.arange(before) + 0.5 - centres) / width
    inside = ((distance > -0.5) & (distance <= 0.5)).astype(np.float64)
    return inside / inside.sum(axis=1, keepdims=True)
