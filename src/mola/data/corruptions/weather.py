"""Fog and snow."""

from __future__ import annotations

import numpy as np

from mola.data.corruptions.filters import separable, zooming
from mola.data.corruptions.motion import moved
from mola.data.corruptions.pixels import Bytes, Floats, rounded, truncated, unit
from mola.data.corruptions.streams import Streams

__all__ = ["fog", "plasma", "snow"]

FOG = ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))
"""Thickness, and how fast the roughness decays from one level to the next."""
ROUGHNESS = 100.0
SNOW = (
    (0.1, 0.2, 1.0, 0.6, 8, 3.0, 0.95),
    (0.1, 0.2, 1.0, 0.5, 10, 4.0, 0.9),
    (0.15, 0.3, 1.75, 0.55, 10, 4.0, 0.9),
    (0.25, 0.3, 2.25, 0.6, 12, 6.0, 0.85),
    (0.3, 0.3, 1.25, 0.65, 14, 12.0, 0.8),
)
"""Mean and deviation of the flakes, their zoom, the threshold, radius and deviation of the fall, share of the image."""
LUMA = np.array([0.299, 0.587, 0.114])[:, None, None]


def fog(pixels: Bytes, severity: int, streams: Streams) -> Bytes:
    """Adds c times plasma, then scales by m / (m + c), where m is the largest value of the image."""
    thickness, decay = FOG[severity - 1]
    side = pixels.shape[-1]
    values = unit(pixels)
    brightest = values.max(axis=(1, 2, 3), keepdims=True)
    clouds = plasma(streams, 1 << (side - 1).bit_length(), decay)[:, None, :side, :side]
    return truncated((values + thickness * clouds) * brightest / (brightest + thickness))


def plasma(streams: Streams, side: int, decay: float) -> Floats:
    """Clouds (n, side, side) from 0 to 1 by the diamond-square scheme on a torus, for a side that is a power of 2.

    At each level a new point is the mean of its four neighbours plus w U(-w, w): first the centres of the squares, then
    the centres of the diamonds between them; w starts at 100 and is divided by `decay` after each level.
    """
    drawn = streams.draw(lambda generator: generator.uniform(-1, 1, size=side * side - 1))
    grid = np.zeros((streams.count, side, side))
    step, rough, used = side, ROUGHNESS, 0

    def jitter(count: int) -> Floats:
        nonlocal used
        part = drawn[:, used : used + count * count].reshape(-1, count, count)
        used += count * count
        return rough**2 * part

    while step >= 2:
        half, count = step // 2, side // step
        corners = grid[:, ::step, ::step].copy()
        right, below = np.roll(corners, -1, axis=2), np.roll(corners, -1, axis=1)
        centres = (corners + right + below + np.roll(right, -1, axis=1)) / 4 + jitter(count)
        grid[:, half::step, half::step] = centres
        grid[:, ::step, half::step] = (corners + right + centres + np.roll(centres, 1, axis=1)) / 4 + jitter(count)
        grid[:, half::step, ::step] = (corners + below + centres + np.roll(centres, 1, axis=2)) / 4 + jitter(count)
        step, rough = half, rough / decay
    grid -= grid.min(axis=(1, 2), keepdims=True)
    highest: Floats = grid.max(axis=(1, 2), keepdims=True)
    return grid / highest


def snow(pixels: Bytes, severity: int, streams: Streams) -> Bytes:
    """Flakes falling, and falling upside down, on a scene that whitens."""
    mean, deviation, zoom, threshold, radius, sigma, share = SNOW[severity - 1]
    side = pixels.shape[-1]
    drawn = streams.draw(
        lambda generator: np.append(generator.standard_normal(side * side), generator.uniform(-135, -45))
    )
    layer = mean + deviation * drawn[:, :-1].reshape(-1, 1, side, side)
    layer = separable(layer, zooming(side, zoom))
    layer[layer < threshold] = 0
    fallen = unit(rounded(moved(truncated(layer).astype(np.float64), int(radius), sigma, drawn[:, -1])))
    values = unit(pixels)
    grey = (values * LUMA).sum(axis=1, keepdims=True)
    whitened = share * values + (1 - share) * np.maximum(values, 1.5 * grey + 0.5)
    return truncated(whitened + fallen + fallen[..., ::-1, ::-1])
