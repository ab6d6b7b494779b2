"""Frost: pieces of a picture of frost, laid over the image.

The original takes them from five photographs, which are not part of this library. Without them, five pictures of
**synthetic** frost stand in: bluish-white crystals grown from ridges of band-limited noise. Results on them are not
comparable with the published ones; `SYNTHETIC` in the catalogue says so.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from mola.data.corruptions.pixels import Bytes, Floats
from mola.data.corruptions.streams import Streams
from mola.errors import DataError, MissingExtraError

__all__ = ["PICTURES", "frost", "photographs", "synthetic_frost"]

FROST = ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))
"""Weights of the image and of the frost."""
PICTURES = 5
SHRINK = 5
"""Photographs are used at a fifth of their size."""
ENDINGS = (".png", ".jpg", ".jpeg")

GLASS = np.array([0.20, 0.30, 0.42])
ICE = np.array([0.86, 0.94, 1.0])
"""Colours of bare glass and of thick frost."""
OCTAVES = 5


def frost(pixels: Bytes, severity: int, streams: Streams, pictures: tuple[Bytes, ...] | None = None) -> Bytes:
    """The sum a image + b frost, in levels, cut off at 255.

    Args:
        pixels: (n, 3, side, side).
        severity: 1 to 5.
        streams: one per image: which picture, and where its piece is cut out.
        pictures: of frost, (3, height, width); synthetic ones if None.

    Returns:
        The frosted images.

    Raises:
        DataError: if a picture is smaller than the images.
    """
    ours, theirs = FROST[severity - 1]
    side = pixels.shape[-1]
    if pictures is None:
        pictures = tuple(synthetic_frost(index, max(96, 3 * side)) for index in range(PICTURES))
    for picture in pictures:
        if min(picture.shape[1:]) < side:
            height, width = picture.shape[1:]
            message = (
                f"frost photographs must be at least as large as the images ({side} x {side}) at a fifth of their "
                f"size, got {height} x {width}; leave frost_photographs out to use synthetic frost."
            )
            raise DataError(message)
    pieces = np.empty(pixels.shape)
    for index, generator in enumerate(streams):
        picture = pictures[generator.integers(len(pictures))]
        # The last place is never used, as in the original.
        top, left = (int(generator.integers(max(1, length - side))) for length in picture.shape[1:])
        pieces[index] = picture[:, top : top + side, left : left + side]
    return np.clip(ours * pixels + theirs * pieces, 0, 255).astype(np.uint8)


@lru_cache(maxsize=4)
def photographs(folder: Path) -> tuple[Bytes, ...]:
    """The five photographs frost1 to frost5 (PNG or JPEG) of a folder, every fifth pixel of each.

    OpenCV's linear resizing to 20% reads exactly the middle one of five pixels. The original's sixth photograph is
    never drawn.

    Args:
        folder: that holds them.

    Returns:
        Pictures (3, height, width).

    Raises:
        DataError: if one is missing or cannot be read.
        MissingExtraError: if Pillow is not installed.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise MissingExtraError(feature="reading frost photographs", package="pillow", extra="bench") from error
    pictures = []
    for number in range(1, PICTURES + 1):
        found = [path for ending in ENDINGS if (path := folder / f"frost{number}{ending}").is_file()]
        if not found:
            message = (
                f"no frost{number} (.png, .jpg or .jpeg) in {folder}; expected the photographs frost1 to "
                f"frost{PICTURES} of the original corruptions. Leave frost_photographs out to use synthetic frost."
            )
            raise DataError(message)
        try:
            with Image.open(found[0]) as picture:
                pixels = np.asarray(picture.convert("RGB"))
        except (UnidentifiedImageError, OSError) as error:
            message = f"{found[0]} cannot be read as an image ({error}); fetch it again."
            raise DataError(message) from error
        half = SHRINK // 2
        pictures.append(np.ascontiguousarray(np.moveaxis(pixels[half::SHRINK, half::SHRINK], -1, 0)))
    return tuple(pictures)


@lru_cache(maxsize=2 * PICTURES)
def synthetic_frost(index: int, side: int) -> Bytes:
    """A picture of frost (3, side, side) that is none: ridged noise of several octaves, each growing on the one before.

    A ridge is where a smooth random field crosses 0: a thin curve. Fields are stretched along a direction of their own,
    which makes needles. Every octave has twice the frequency, and shows where the octaves before it are bright, as
    crystals branch from crystals.

    Args:
        index: which one; the same index gives the same picture.
        side: height and width.

    Returns:
        The picture.
    """
    generator = np.random.Generator(np.random.Philox(key=index))
    direction = generator.uniform(0, np.pi)
    thick = _field(generator, side, 2.0 / 96, direction, stretch=1.0)
    growth, total = np.ones((side, side)), np.zeros((side, side))
    for octave in range(OCTAVES):
        # A new direction each time, 60 degrees on: ice has six.
        turned = direction + octave * np.pi / 3
        ridges = np.exp(-2.5 * np.abs(_field(generator, side, 3.0 / 96 * 2**octave, turned, stretch=2.5)))
        total += 0.8**octave * growth * ridges
        growth = np.clip(0.25 + 1.5 * growth * ridges, 0, 1)
    ranks = total.ravel().argsort().argsort().reshape(side, side) / (side * side - 1)
    cover = np.clip(0.75 * ranks**1.3 + 0.25 / (1 + np.exp(-1.5 * thick)), 0, 1)
    colour = GLASS + cover[..., None] * (ICE - GLASS)
    return np.ascontiguousarray(np.moveaxis((colour * 255).astype(np.uint8), -1, 0))


def _field(generator: np.random.Generator, side: int, frequency: float, direction: float, stretch: float) -> Floats:
    """A random field with mean 0 and variance 1 whose frequencies lie within about an octave of `frequency`."""
    across = np.fft.rfftfreq(side)
    down = np.fft.fftfreq(side)[:, None]
    along = np.cos(direction) * across + np.sin(direction) * down
    aside = np.cos(direction) * down - np.sin(direction) * across
    radius = np.maximum(np.hypot(along * stretch, aside / stretch), 1e-9)
    passed = np.exp(-2.0 * np.log2(radius / frequency) ** 2)
    field = np.fft.irfft2(np.fft.rfft2(generator.standard_normal((side, side))) * passed, s=(side, side))
    return (field - field.mean()) / field.std()
