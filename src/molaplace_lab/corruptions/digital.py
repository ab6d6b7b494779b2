"""Digital corruptions: contrast, brightness, saturation, JPEG compression, pixelation and elastic distortion.

In the hexcone model (HSV), V is the largest of R, G and B, and S is their range divided by V. Scaling V scales all three channels.
Scaling S moves each channel towards V or away from it. The hue does not change, so it need not be computed.
"""

from __future__ import annotations

import io

import numpy as np

from molaplace.errors import importing
from molaplace_lab.corruptions.filters import Border, Bytes, Floats, Streams, fold, gaussian, rounded, truncated, unit

SIDE = 32
"""Side length, in pixels, of the images to which the lengths in the elastic distortion refer."""


def contrast(pixels: Bytes, streams: Streams, share: float) -> Bytes:
    """Reduce the contrast by moving each value towards the image's mean in the same channel."""
    values = unit(pixels)
    mean = values.mean(axis=(2, 3), keepdims=True)
    return truncated((values - mean) * share + mean)


def brightness(pixels: Bytes, streams: Streams, more: float) -> Bytes:
    """Increase V by a given amount and clip the result at 1; black becomes grey."""
    values = unit(pixels)
    largest = values.max(axis=1, keepdims=True)
    raised = np.clip(largest + more, 0, 1)
    black = largest == 0
    return truncated(np.where(black, raised, values / np.where(black, 1, largest) * raised))


def saturate(pixels: Bytes, streams: Streams, factor: float, summand: float) -> Bytes:
    """Multiply S by a factor, add a constant, and clip the result to [0, 1].

    Grey is treated as red with zero saturation, as in the original code.
    """
    values = unit(pixels)
    largest = values.max(axis=1, keepdims=True)
    depth = largest - values
    spread = depth.max(axis=1, keepdims=True)
    grey = spread == 0
    saturation = spread / np.where(largest == 0, 1, largest)
    red = np.array([0.0, 1.0, 1.0])[:, None, None]
    share = np.where(grey, red, depth / np.where(grey, 1, spread))
    return truncated(largest - share * largest * np.clip(saturation * factor + summand, 0, 1))


def jpeg_compression(pixels: Bytes, streams: Streams, quality: int) -> Bytes:
    """Encode the image as JPEG and decode it again with Pillow, which uses 4:2:0 chroma subsampling."""
    with importing("the corruption jpeg_compression", "pillow", "lab"):
        from PIL import Image
    result = np.empty((len(pixels), *pixels.shape[2:], 3), dtype=np.uint8)
    for index, image in enumerate(np.ascontiguousarray(np.moveaxis(pixels, 1, -1))):
        with io.BytesIO() as file:
            Image.fromarray(image).save(file, "JPEG", quality=quality)
            with Image.open(file) as decoded:
                result[index] = np.asarray(decoded)
    return np.moveaxis(result, -1, 1)


def pixelate(pixels: Bytes, streams: Streams, share: float) -> Bytes:
    """Shrink the image to int(share * side) pixels per side and enlarge it again, both with Pillow's box filter."""
    side = pixels.shape[-1]
    small = int(side * share)
    for matrix in (_box(side, small), _box(small, side)):
        # Resize the rows first and then the columns, and round to whole levels after each step, as Pillow does.
        pixels = rounded(matrix @ rounded(pixels @ matrix.T))
    return pixels


def _box(before: int, after: int) -> Floats:
    # Return the matrix of Pillow's box filter, which averages the old pixels whose centres lie within half a new pixel of the new
    # pixel's centre. When an image is enlarged, the window is one old pixel wide and contains exactly one pixel centre.
    scale = before / after
    width = max(scale, 1.0)
    centres = (np.arange(after)[:, None] + 0.5) * scale
    distance = (np.arange(before) + 0.5 - centres) / width
    inside = ((distance > -0.5) & (distance <= 0.5)).astype(np.float64)
    return inside / inside.sum(axis=1, keepdims=True)


def elastic_transform(pixels: Bytes, streams: Streams, *lengths: float) -> Bytes:
    """Jitter three points around the centre, warp the image accordingly, and then displace each pixel separately.

    All lengths (the size and smoothing scale of the displacements, and the jitter of the affine map) are proportional to the side.
    OpenCV, which produced the published images, rounds the positions computed by the affine map to 1/32 of a pixel. This
    implementation does not round them.
    """
    side = pixels.shape[-1]
    size, smoothness, jitter = (length * side / SIDE for length in lengths)
    drawn = streams.draw(lambda generator: generator.uniform(-1, 1, size=6 + 2 * side * side))
    axis = np.arange(side, dtype=np.float64)
    rows, columns = np.meshgrid(axis, axis, indexing="ij")
    # The affine map moves each of three points p to p + jitter. The result at q is the value of the image at the preimage of q.
    points = side // 2 + side // 3 * np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
    homogeneous = np.broadcast_to(np.concatenate([points, np.ones((3, 1))], axis=1), (len(pixels), 3, 3))
    forward = np.linalg.solve(homogeneous, points + drawn[:, :6].reshape(-1, 3, 2) * jitter)  # rows x, y, 1
    offsets = np.stack([columns, rows], axis=-1) - forward[:, 2][:, None, None]
    source = offsets @ np.linalg.inv(forward[:, :2])[:, None]
    values = _bilinear(unit(pixels), source[..., 1], source[..., 0], "mirror")
    if size > 0:
        fields = drawn[:, 6:].reshape(-1, 2, side, side)
        shift = size * gaussian(fields, smoothness, border="reflect", truncate=3.0)
        values = _bilinear(values, rows + shift[:, 1], columns + shift[:, 0], "reflect")
    return truncated(values)


def _bilinear(images: Floats, rows: Floats, columns: Floats, border: Border) -> Floats:
    # Interpolate images (n, channels, side, side) bilinearly at the given rows and columns (n, side, side).
    side = images.shape[-1]
    top = np.floor(rows).astype(np.int64)
    left = np.floor(columns).astype(np.int64)
    below = (rows - top)[:, None]
    beside = (columns - left)[:, None]
    flat = images.reshape(*images.shape[:2], side * side)

    def at(down: int, right: int) -> Floats:
        indices = fold(top + down, side, border) * side + fold(left + right, side, border)
        index = np.broadcast_to(indices.reshape(len(images), 1, -1), flat.shape)
        return np.take_along_axis(flat, index, axis=2).reshape(images.shape)

    upper = at(0, 0) * (1 - beside) + at(0, 1) * beside
    lower = at(1, 0) * (1 - beside) + at(1, 1) * beside
    return upper * (1 - below) + lower * below
