"""Digital corruptions: contrast, brightness, saturation, JPEG, coarse pixels, elastic distortion.

In the hexcone model (HSV) V is the largest of R, G, B and S the spread over V. Scaling V scales all three channels;
scaling S moves each channel towards V or away from it. The hue does not change, so it need not be computed.
"""

from __future__ import annotations

import io

import numpy as np

from mola.errors import importing
from mola.lab.corruptions.filters import Border, Bytes, Floats, Streams, Table, fold, gaussian, rounded, truncated, unit

CONTRAST = (0.75, 0.5, 0.4, 0.3, 0.15)
BRIGHTNESS = (0.05, 0.1, 0.15, 0.2, 0.3)
SATURATION = ((0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2))
"""Factor and summand: severities 1 and 2 take colour away, 3 to 5 add some."""


def contrast(pixels: Bytes, severity: int, streams: Streams, table: Table = CONTRAST) -> Bytes:
    """Draw each channel towards its mean over the image."""
    values = unit(pixels)
    mean = values.mean(axis=(2, 3), keepdims=True)
    return truncated((values - mean) * table[severity - 1] + mean)


def brightness(pixels: Bytes, severity: int, streams: Streams, table: Table = BRIGHTNESS) -> Bytes:
    """Add c to V, up to 1; black becomes grey."""
    values = unit(pixels)
    largest = values.max(axis=1, keepdims=True)
    raised = np.clip(largest + table[severity - 1], 0, 1)
    black = largest == 0
    return truncated(np.where(black, raised, values / np.where(black, 1, largest) * raised))


def saturate(pixels: Bytes, severity: int, streams: Streams, table: Table = SATURATION) -> Bytes:
    """Multiply S by a factor and add a summand, within 0 and 1; grey counts as red without saturation, as in the original."""
    factor, summand = table[severity - 1]
    values = unit(pixels)
    largest = values.max(axis=1, keepdims=True)
    depth = largest - values
    spread = depth.max(axis=1, keepdims=True)
    grey = spread == 0
    saturation = spread / np.where(largest == 0, 1, largest)
    red = np.array([0.0, 1.0, 1.0])[:, None, None]
    share = np.where(grey, red, depth / np.where(grey, 1, spread))
    return truncated(largest - share * largest * np.clip(saturation * factor + summand, 0, 1))


JPEG_QUALITY = (80, 65, 58, 50, 40)
PIXELATE_SHARE = (0.95, 0.9, 0.85, 0.75, 0.65)


def jpeg_compression(pixels: Bytes, severity: int, streams: Streams, table: Table = JPEG_QUALITY) -> Bytes:
    """Convert to JPEG and back with Pillow, with its chroma subsampling of 4:2:0."""
    with importing("the corruption jpeg_compression", "pillow", "bench"):
        from PIL import Image
    result = np.empty((len(pixels), *pixels.shape[2:], 3), dtype=np.uint8)
    for index, image in enumerate(np.ascontiguousarray(np.moveaxis(pixels, 1, -1))):
        with io.BytesIO() as file:
            Image.fromarray(image).save(file, "JPEG", quality=table[severity - 1])
            with Image.open(file) as decoded:
                result[index] = np.asarray(decoded)
    return np.moveaxis(result, -1, 1)


def pixelate(pixels: Bytes, severity: int, streams: Streams, table: Table = PIXELATE_SHARE) -> Bytes:
    """Shrink to int(c side) pixels and enlarge again, with Pillow's box filter."""
    side = pixels.shape[-1]
    small = int(side * table[severity - 1])
    return _resized(_resized(pixels, _box(side, small)), _box(small, side))


def _resized(pixels: Bytes, matrix: Floats) -> Bytes:
    # First along the rows, then along the columns, in whole levels after each, as Pillow does.
    return rounded(matrix @ rounded(pixels @ matrix.T))


def _box(before: int, after: int) -> Floats:
    # The matrix of Pillow's box filter: means of the pixels whose centre lies within half a new pixel. When enlarging,
    # the window is one old pixel wide and takes exactly one.
    scale = before / after
    width = max(scale, 1.0)
    centres = (np.arange(after)[:, None] + 0.5) * scale
    distance = (np.arange(before) + 0.5 - centres) / width
    inside = ((distance > -0.5) & (distance <= 0.5)).astype(np.float64)
    return inside / inside.sum(axis=1, keepdims=True)


ELASTIC = ((0.0, 0.0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96))
"""Size and smoothness of the displacements, and jitter of the affine map, in pixels of an image of 32."""
SIDE = 32


def elastic_transform(pixels: Bytes, severity: int, streams: Streams) -> Bytes:
    """Jitter three points about the centre and warp the image to match; then displace each pixel separately.

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
    # Source of each pixel of the result, (n, side, side) across and down. The affine map takes three points p to
    # p + jitter (n, 3, 2); the result at q is the image at its inverse.
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
    """Interpolate images (n, channels, side, side) at positions (n, side, side) between pixels."""
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
