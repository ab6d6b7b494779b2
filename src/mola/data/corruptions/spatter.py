"""Spatter: drops of water at severities 1 to 3, mud at 4 and 5."""

from __future__ import annotations

import numpy as np

from mola.data.corruptions.edges import canny, distance
from mola.data.corruptions.filters import correlate, gaussian
from mola.data.corruptions.pixels import Bytes, Floats, rounded, truncated, unit
from mola.data.corruptions.streams import Streams

__all__ = ["equalised", "spatter"]

SPATTER = (
    (0.62, 0.1, 0.7, 0.7, 0.5, False),
    (0.65, 0.1, 0.8, 0.7, 0.5, False),
    (0.65, 0.3, 1.0, 0.69, 0.5, False),
    (0.65, 0.1, 0.7, 0.69, 0.6, True),
    (0.65, 0.1, 0.5, 0.68, 0.6, True),
)
"""Mean and deviation of the liquid, its blur, the threshold, the strength, and whether it is mud."""
WATER = np.array([175, 238, 238])[:, None, None] / 255
MUD = np.array([63, 42, 20])[:, None, None] / 255
LOW, HIGH = 50.0, 150.0
"""Canny's thresholds."""
REACH = 20.0
"""Distances to the rim of a drop are cut off here."""
RELIEF = np.array([[-2.0, -1.0, 0.0], [-1.0, 1.0, 1.0], [0.0, 1.0, 2.0]])
LEAST_MUD = 0.8


def spatter(pixels: Bytes, severity: int, streams: Streams) -> Bytes:
    """Smooth noise above a threshold is liquid: light on the rims of drops, or dark spots.

    The steps are OpenCV's, in whole levels where it has whole levels. Two things differ: liquid above 1 is cut off
    instead of starting again at 0, and an image that no drop has hit stays as it is instead of being divided by 0.
    """
    mean, deviation, blur, threshold, strength, muddy = SPATTER[severity - 1]
    side = pixels.shape[-1]
    noise = streams.draw(lambda generator: generator.standard_normal((side, side)))
    layer = gaussian(mean + deviation * noise, blur)
    layer[layer < threshold] = 0
    values = unit(pixels)
    if muddy:
        cover = gaussian((layer > threshold).astype(np.float64), strength)
        cover[cover < LEAST_MUD] = 0
        cover = cover[:, None]
        return truncated(values * (1 - cover) + MUD * cover)
    return truncated(values + WATER * (strength * _water(truncated(layer)))[:, None])


def _water(liquid: Bytes) -> Floats:
    """How strongly the light shows in drops (n, side, side), at most 1 in each image."""
    mean = np.full((3, 3), 1 / 9)
    near = np.minimum(distance(canny(liquid, LOW, HIGH)), REACH)
    # Truncated: a mean that is a whole number must not fall below itself by rounding.
    smooth = np.floor(correlate(near, mean, "mirror") + 1e-6).astype(np.uint8)
    relief = rounded(correlate(equalised(smooth).astype(np.float64), RELIEF, "mirror"))
    light = liquid * rounded(correlate(relief.astype(np.float64), mean, "mirror")).astype(np.float64)
    largest = light.max(axis=(1, 2), keepdims=True)
    return light / np.where(largest == 0, 1, largest)


def equalised(layers: Bytes) -> Bytes:
    """Histogram equalisation of each layer (n, side, side): level v becomes the share of pixels at most v, times 255.

    The lowest level present is left out of the count and becomes 0; a layer of one level stays as it is.
    """
    total = layers[0].size if len(layers) else 1
    levels = int(layers.max(initial=0)) + 1
    counts = np.stack([(layers == level).sum(axis=(1, 2)) for level in range(levels)], axis=1)
    lowest = layers.min(axis=(1, 2))
    everyone = np.arange(len(layers))
    least = counts[everyone, lowest]
    flat = least == total
    # In float32, as OpenCV: it decides which way halves fall.
    scale = np.float32(255) / np.where(flat, 1, total - least).astype(np.float32)
    risen = np.maximum(np.cumsum(counts, axis=1) - least[:, None], 0).astype(np.float32)
    table = np.where(flat[:, None], np.arange(levels), np.rint(risen * scale[:, None])).astype(np.uint8)
    return table[everyone[:, None, None], layers]
