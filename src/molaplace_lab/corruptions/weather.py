"""Weather corruptions: fog, snow, frost and spatter.

The frost corruption blends the image with part of a picture of frost. The five photographs used by the original code are not part of
this library. They are replaced by five pictures of **synthetic** frost: bluish-white crystals grown from ridges of band-limited noise.
Results with synthetic frost are not comparable with published results.

Spatter consists of water drops at severities 1 to 3, and of mud at severities 4 and 5. The drops are derived from Canny edges and the
distances to these edges. Both are computed as in OpenCV, but for a whole batch at once.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from molaplace.errors import importing
from molaplace_lab.corruptions.blur import motion_blurred
from molaplace_lab.corruptions.filters import (
    Bytes,
    Floats,
    Streams,
    correlate,
    gaussian,
    rounded,
    truncated,
    unit,
    zooming,
)

SOBEL = np.outer([1.0, 2.0, 1.0], [-1.0, 0.0, 1.0])
TAN_22 = 0.4142135623730950488016887242097
STRAIGHT = 65536
DIAGONAL = 91750
KNIGHT = 143976
"""OpenCV's lengths of the moves (1, 0), (1, 1) and (2, 1), namely 1, 1.4 and 2.1969, in units of 1 / 65536."""
UNREACHED = 1 << 29
MOVES = (
    *((0, -1, STRAIGHT), (-1, -1, DIAGONAL), (-1, 0, STRAIGHT), (-1, 1, DIAGONAL)),
    *((-1, -2, KNIGHT), (-1, 2, KNIGHT), (-2, -1, KNIGHT), (-2, 1, KNIGHT)),
)
"""Row and column offsets of the neighbours that a sweep visits before a pixel, each with the length of the move."""


def canny(layers: Bytes, low: float, high: float) -> NDArray[np.bool_]:
    """Return the edges of layers (n, side, side): ridges of |dx| + |dy| (Sobel) above `low` that are connected to one above `high`.

    The layers are not smoothed beforehand. The direction of the gradient is rounded to a multiple of 45 degrees. Along a row or
    column, the value on a ridge is larger than the preceding value and at least as large as the following value. Along a diagonal, it
    is larger than both neighbouring values.
    """
    with importing("the corruption spatter", "scipy", "lab"):
        from scipy import ndimage
    values = layers.astype(np.float64)
    across = correlate(values, SOBEL, "nearest")
    down = correlate(values, SOBEL.T, "nearest")
    strength = np.abs(across) + np.abs(down)
    side = layers.shape[-1]
    around = np.pad(strength, ((0, 0), (1, 1), (1, 1)))

    def beside(row: int, column: int) -> Floats:
        return around[:, 1 + row : 1 + row + side, 1 + column : 1 + column + side]

    def ridge(row: int, column: int) -> NDArray[np.bool_]:
        return (strength > beside(-row, -column)) & (strength >= beside(row, column))

    level = np.abs(down) < TAN_22 * np.abs(across)
    upright = np.abs(down) > (TAN_22 + 2) * np.abs(across)
    falling = (strength > beside(-1, -1)) & (strength > beside(1, 1))
    rising = (strength > beside(-1, 1)) & (strength > beside(1, -1))
    slanted = np.where((across < 0) != (down < 0), rising, falling)
    crest = np.where(level, ridge(0, 1), np.where(upright, ridge(1, 0), slanted))
    candidates = crest & (strength > low)
    # Pixels that share a side or a corner are connected, but only within the same image.
    touching = np.zeros((3, 3, 3))
    touching[1] = 1
    pieces, count = ndimage.label(candidates, structure=touching)
    strong = np.zeros(count + 1, dtype=np.bool_)
    strong[pieces[candidates & (strength > high)]] = True
    return strong[pieces]


def distance(edges: NDArray[np.bool_]) -> Floats:
    """Return each pixel's distance (n, side, side) to the nearest edge, measured in moves of length 1, 1.4 and 2.1969.

    This is OpenCV's DIST_L2 with a mask of size 5: one forward sweep and one backward sweep, in integer multiples of 1 / 65536. If
    there are no edges, all distances are 8192.
    """
    side = edges.shape[-1]
    margin = 2
    # The batch axis comes last, so that each step of the sweep processes the whole batch.
    field = np.full((side + 2 * margin, side + 2 * margin, len(edges)), UNREACHED, dtype=np.int64)
    inner = slice(margin, margin + side)
    field[inner, inner] = np.where(np.moveaxis(edges, 0, -1), 0, UNREACHED)
    for turned in (field, field[::-1, ::-1]):
        for row in range(margin, margin + side):
            for column in range(margin, margin + side):
                pixel = turned[row, column]
                for down, right, length in MOVES:
                    np.minimum(pixel, turned[row + down, column + right] + length, out=pixel)
    return np.moveaxis(field[inner, inner], -1, 0) / STRAIGHT


ROUGHNESS = 100.0
LUMA = np.array([0.299, 0.587, 0.114])[:, None, None]


def fog(pixels: Bytes, streams: Streams, thickness: float, decay: float) -> Bytes:
    """Add c times a plasma texture and scale by m / (m + c), where m is the image's largest value and c is the thickness."""
    side = pixels.shape[-1]
    values = unit(pixels)
    brightest = values.max(axis=(1, 2, 3), keepdims=True)
    clouds = plasma(streams, 1 << (side - 1).bit_length(), decay)[:, None, :side, :side]
    return truncated((values + thickness * clouds) * brightest / (brightest + thickness))


def plasma(streams: Streams, side: int, decay: float) -> Floats:
    """Draw clouds (n, side, side) with values in [0, 1], using the diamond-square algorithm on a torus; the side must be a power of 2.

    At each level, each new point is the mean of its four neighbours plus w U(-w, w). The centres of the squares are computed first,
    and then the centres of the diamonds between them. The roughness w starts at 100 and is divided by `decay` after each level.
    """
    drawn = streams.draw(lambda generator: generator.uniform(-1, 1, size=side * side - 1))
    grid = np.zeros((streams.count, side, side))
    step = side
    rough = ROUGHNESS
    used = 0

    def jitter(count: int) -> Floats:
        nonlocal used
        part = drawn[:, used : used + count * count].reshape(-1, count, count)
        used += count * count
        return rough**2 * part

    while step >= 2:
        half = step // 2
        count = side // step
        corners = grid[:, ::step, ::step].copy()
        right = np.roll(corners, -1, axis=2)
        below = np.roll(corners, -1, axis=1)
        centres = (corners + right + below + np.roll(right, -1, axis=1)) / 4 + jitter(count)
        grid[:, half::step, half::step] = centres
        grid[:, ::step, half::step] = (corners + right + centres + np.roll(centres, 1, axis=1)) / 4 + jitter(count)
        grid[:, half::step, ::step] = (corners + below + centres + np.roll(centres, 1, axis=2)) / 4 + jitter(count)
        step = half
        rough = rough / decay
    grid -= grid.min(axis=(1, 2), keepdims=True)
    highest: Floats = grid.max(axis=(1, 2), keepdims=True)
    return grid / highest


def snow(pixels: Bytes, streams: Streams, *parameters: float) -> Bytes:
    """Whiten the image, and add motion-blurred snowflakes and a copy of them rotated by 180 degrees.

    The parameters `radius` and `sigma` are those of the motion blur.
    """
    mean, deviation, zoom, threshold, radius, sigma, share = parameters
    side = pixels.shape[-1]
    drawn = streams.draw(
        lambda generator: np.append(generator.standard_normal(side * side), generator.uniform(-135, -45))
    )
    layer = mean + deviation * drawn[:, :-1].reshape(-1, 1, side, side)
    enlarge = zooming(side, zoom)
    layer = enlarge @ layer @ enlarge.T
    layer[layer < threshold] = 0
    fallen = unit(rounded(motion_blurred(truncated(layer).astype(np.float64), int(radius), sigma, drawn[:, -1])))
    values = unit(pixels)
    grey = (values * LUMA).sum(axis=1, keepdims=True)
    whitened = share * values + (1 - share) * np.maximum(values, 1.5 * grey + 0.5)
    return truncated(whitened + fallen + fallen[..., ::-1, ::-1])


PICTURES = 5

GLASS = np.array([0.20, 0.30, 0.42])
ICE = np.array([0.86, 0.94, 1.0])
"""Colours of bare glass and of thick frost."""
OCTAVES = 5


def frost(pixels: Bytes, streams: Streams, image_weight: float, frost_weight: float) -> Bytes:
    """Return `image_weight * image + frost_weight * frost`, clipped to [0, 255]; each image gets a random crop of a frost picture."""
    side = pixels.shape[-1]
    pictures = tuple(synthetic_frost(index, max(96, 3 * side)) for index in range(PICTURES))
    pieces = np.empty(pixels.shape)
    for index, generator in enumerate(streams):
        picture = pictures[generator.integers(len(pictures))]
        # As in the original code, the last possible position is never drawn.
        top, left = (int(generator.integers(max(1, length - side))) for length in picture.shape[1:])
        pieces[index] = picture[:, top : top + side, left : left + side]
    return np.clip(image_weight * pixels + frost_weight * pieces, 0, 255).astype(np.uint8)


@lru_cache(maxsize=2 * PICTURES)
def synthetic_frost(index: int, side: int) -> Bytes:
    """Generate a picture of frost (3, side, side) from several octaves of ridged noise.

    A ridge is a thin curve along which a smooth random field crosses 0. Each field is stretched in one direction, which produces
    needles. Each octave has twice the frequency of the previous one. It is visible mainly where the previous octaves are bright, so
    that crystals branch from other crystals.
    """
    generator = np.random.Generator(np.random.Philox(key=index))
    direction = generator.uniform(0, np.pi)
    thick = _field(generator, side, 2.0 / 96, direction, stretch=1.0)
    growth = np.ones((side, side))
    total = np.zeros((side, side))
    for octave in range(OCTAVES):
        # Each direction differs from the previous one by 60 degrees, because ice crystals have six arms.
        turned = direction + octave * np.pi / 3
        ridges = np.exp(-2.5 * np.abs(_field(generator, side, 3.0 / 96 * 2**octave, turned, stretch=2.5)))
        total += 0.8**octave * growth * ridges
        growth = np.clip(0.25 + 1.5 * growth * ridges, 0, 1)
    ranks = total.ravel().argsort().argsort().reshape(side, side) / (side * side - 1)
    cover = np.clip(0.75 * ranks**1.3 + 0.25 / (1 + np.exp(-1.5 * thick)), 0, 1)
    colour = GLASS + cover[..., None] * (ICE - GLASS)
    return np.ascontiguousarray(np.moveaxis((colour * 255).astype(np.uint8), -1, 0))


def _field(generator: np.random.Generator, side: int, frequency: float, direction: float, stretch: float) -> Floats:
    # Draw a random field with mean 0 and variance 1, whose frequencies lie within about an octave of `frequency`.
    across = np.fft.rfftfreq(side)
    down = np.fft.fftfreq(side)[:, None]
    along = np.cos(direction) * across + np.sin(direction) * down
    aside = np.cos(direction) * down - np.sin(direction) * across
    radius = np.maximum(np.hypot(along * stretch, aside / stretch), 1e-9)
    passed = np.exp(-2.0 * np.log2(radius / frequency) ** 2)
    field = np.fft.irfft2(np.fft.rfft2(generator.standard_normal((side, side))) * passed, s=(side, side))
    return (field - field.mean()) / field.std()


WATER = np.array([175, 238, 238])[:, None, None] / 255
MUD = np.array([63, 42, 20])[:, None, None] / 255
LOW = 50.0
HIGH = 150.0
"""Lower and upper thresholds of the Canny edge detector."""
REACH = 20.0
"""Maximum distance to the rim of a drop, in pixels; larger distances are clipped."""
RELIEF = np.array([[-2.0, -1.0, 0.0], [-1.0, 1.0, 1.0], [0.0, 1.0, 2.0]])
LEAST_MUD = 0.8


def spatter(pixels: Bytes, streams: Streams, *parameters: float) -> Bytes:
    """Turn smooth noise above a threshold into liquid: water drops with bright rims, or dark spots of mud.

    The steps are those of the original code, with values rounded to whole levels wherever OpenCV rounds them. Unlike in
    that code, liquid values above 1 are clipped rather than wrapped around to 0, and an image without drops is returned unchanged,
    which avoids a division by 0.
    """
    mean, deviation, blur, threshold, strength, muddy = parameters
    layer = gaussian(mean + deviation * streams.normal(pixels.shape[2:]), blur)
    layer[layer < threshold] = 0
    values = unit(pixels)
    if muddy:
        cover = gaussian((layer > threshold).astype(np.float64), strength)
        cover = np.where(cover < LEAST_MUD, 0, cover)[:, None]
        return truncated(values * (1 - cover) + MUD * cover)
    return truncated(values + WATER * (strength * _water(truncated(layer)))[:, None])


def _water(liquid: Bytes) -> Floats:
    # Return the brightness (n, side, side) of the drops, scaled to a maximum of 1 in each image.
    mean = np.full((3, 3), 1 / 9)
    near = np.minimum(distance(canny(liquid, LOW, HIGH)), REACH)
    # Add a small number before truncating, because rounding errors can push a mean slightly below a whole number.
    smooth = np.floor(correlate(near, mean, "mirror") + 1e-6).astype(np.uint8)
    relief = rounded(correlate(equalised(smooth).astype(np.float64), RELIEF, "mirror"))
    light = liquid * rounded(correlate(relief.astype(np.float64), mean, "mirror")).astype(np.float64)
    largest = light.max(axis=(1, 2), keepdims=True)
    return light / np.where(largest == 0, 1, largest)


def equalised(layers: Bytes) -> Bytes:
    """Equalise the histogram of each layer (n, side, side): level v becomes 255 times the fraction of pixels at or below level v.

    Pixels at the lowest level of a layer are not counted and become 0. A layer with a single level is returned unchanged.
    """
    total = layers[0].size if len(layers) else 1
    levels = int(layers.max(initial=0)) + 1
    counts = np.stack([(layers == level).sum(axis=(1, 2)) for level in range(levels)], axis=1)
    lowest = layers.min(axis=(1, 2))
    layer_indices = np.arange(len(layers))
    least = counts[layer_indices, lowest]
    flat = least == total
    # OpenCV computes in float32, which affects how halves are rounded.
    scale = np.float32(255) / np.where(flat, 1, total - least).astype(np.float32)
    risen = np.maximum(np.cumsum(counts, axis=1) - least[:, None], 0).astype(np.float32)
    table = np.where(flat[:, None], np.arange(levels), np.rint(risen * scale[:, None])).astype(np.uint8)
    return table[layer_indices[:, None, None], layers]
