"""Noise of the sensor: Gaussian, shot, impulse, speckle. Each value of each channel is corrupted independently."""

from __future__ import annotations

import numpy as np

from mola.lab.corruptions.filters import Bytes, Streams, Table, truncated, unit

GAUSSIAN_SIGMA = (0.04, 0.06, 0.08, 0.09, 0.10)
PHOTONS = (500, 250, 100, 75, 50)
IMPULSE_SHARE = (0.01, 0.02, 0.03, 0.05, 0.07)
SPECKLE_SIGMA = (0.06, 0.1, 0.12, 0.16, 0.2)


def gaussian_noise(pixels: Bytes, severity: int, streams: Streams, table: Table = GAUSSIAN_SIGMA) -> Bytes:
    """Replace every value x by x + N(0, sigma^2)."""
    shape = pixels.shape[1:]
    noise = streams.draw(lambda generator: generator.standard_normal(shape))
    return truncated(unit(pixels) + table[severity - 1] * noise)


def shot_noise(pixels: Bytes, severity: int, streams: Streams, table: Table = PHOTONS) -> Bytes:
    """Replace every value x by Poisson(c x) / c: fewer photons c at a white pixel mean more noise."""
    photons = table[severity - 1]
    rates = unit(pixels) * photons
    caught = [generator.poisson(rate) for generator, rate in zip(streams, rates, strict=True)]
    return truncated(np.stack(caught) / photons)


def impulse_noise(pixels: Bytes, severity: int, streams: Streams, table: Table = IMPULSE_SHARE) -> Bytes:
    """Add salt and pepper: set a share of the values to 0 or 1, with equal probability."""
    shape = pixels.shape[1:]
    share = table[severity - 1]
    chance = streams.draw(lambda generator: generator.random(shape))
    # One number decides both: below the share a value is hit, and below half of it, by pepper.
    values = np.where(chance < share, (chance >= share / 2).astype(np.float64), unit(pixels))
    return truncated(values)


def speckle_noise(pixels: Bytes, severity: int, streams: Streams, table: Table = SPECKLE_SIGMA) -> Bytes:
    """Replace every value x by x + x N(0, sigma^2)."""
    shape = pixels.shape[1:]
    noise = streams.draw(lambda generator: generator.standard_normal(shape))
    values = unit(pixels)
    return truncated(values + table[severity - 1] * values * noise)
