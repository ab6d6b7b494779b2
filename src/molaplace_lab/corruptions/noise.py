"""Noise corruptions: Gaussian, shot, impulse and speckle. Each value of each channel is corrupted independently."""

from __future__ import annotations

import numpy as np

from molaplace_lab.corruptions.filters import Bytes, Streams, truncated, unit


def gaussian_noise(pixels: Bytes, streams: Streams, sigma: float) -> Bytes:
    """Replace every value x with x + N(0, sigma^2)."""
    return truncated(unit(pixels) + sigma * streams.normal(pixels.shape[1:]))


def shot_noise(pixels: Bytes, streams: Streams, photons: float) -> Bytes:
    """Replace every value x with Poisson(c x) / c, where c is the number of photons at a white pixel.

    The noise increases as c decreases.
    """
    rates = unit(pixels) * photons
    photon_counts = [generator.poisson(rate) for generator, rate in zip(streams, rates, strict=True)]
    return truncated(np.stack(photon_counts) / photons)


def impulse_noise(pixels: Bytes, streams: Streams, share: float) -> Bytes:
    """Add salt-and-pepper noise: set each value to 0 or to 1, with a probability of `share` / 2 each."""
    chance = streams.draw(lambda generator: generator.random(pixels.shape[1:]))
    # Each value has its own random number: below share / 2, the value becomes 0; from share / 2 to share, it becomes 1.
    return truncated(np.where(chance < share, (chance >= share / 2).astype(np.float64), unit(pixels)))


def speckle_noise(pixels: Bytes, streams: Streams, sigma: float) -> Bytes:
    """Replace every value x with x + x N(0, sigma^2)."""
    values = unit(pixels)
    return truncated(values + sigma * values * streams.normal(pixels.shape[1:]))
