"""Contrast, brightness, saturation.

In the hexcone model (HSV) V is the largest of R, G, B and S the spread over V. Scaling V scales all three channels;
scaling S moves each channel towards V or away from it. The hue keeps its place, so it need not be computed.
"""

from __future__ import annotations

import numpy as np

from mola.data.corruptions.pixels import Bytes, truncated, unit
from mola.data.corruptions.streams import Streams

__all__ = ["brightness", "contrast", "saturate"]

CONTRAST = (0.75, 0.5, 0.4, 0.3, 0.15)
BRIGHTNESS = (0.05, 0.1, 0.15, 0.2, 0.3)
SATURATION = ((0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2))
"""Factor and summand: severities 1 and 2 take colour away, 3 to 5 add some."""


def contrast(pixels: Bytes, severity: int, streams: Streams) -> Bytes:
    """Each channel drawn towards its mean over the image."""
    values = unit(pixels)
    mean = values.mean(axis=(2, 3), keepdims=True)
    return truncated((values - mean) * CONTRAST[severity - 1] + mean)


def brightness(pixels: Bytes, severity: int, streams: Streams) -> Bytes:
    """V + c, at most 1; black becomes grey."""
    values = unit(pixels)
    largest = values.max(axis=1, keepdims=True)
    raised = np.clip(largest + BRIGHTNESS[severity - 1], 0, 1)
    black = largest == 0
    return truncated(np.where(black, raised, values / np.where(black, 1, largest) * raised))


def saturate(pixels: Bytes, severity: int, streams: Streams) -> Bytes:
    """S times a factor plus a summand, from 0 to 1; grey counts as red without saturation, as in the original."""
    factor, summand = SATURATION[severity - 1]
    values = unit(pixels)
    largest = values.max(axis=1, keepdims=True)
    depth = largest - values
    spread = depth.max(axis=1, keepdims=True)
    grey = spread == 0
    saturation = spread / np.where(largest == 0, 1, largest)
    red = np.array([0.0, 1.0, 1.0])[:, None, None]
    share = np.where(grey, red, depth / np.where(grey, 1, spread))
    return truncated(largest - share * largest * np.clip(saturation * factor + summand, 0, 1))
