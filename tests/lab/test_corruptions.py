"""Every corruption against a slow and obvious version of itself, image by image, and the laws they share."""

from __future__ import annotations

import colorsys
import hashlib
import io
import math

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from molaplace.errors import DataError, OptionError
from molaplace_lab.corruptions.catalogue import BY_NAME, CORRUPTIONS, IMAGENET_CORRUPTIONS, SEVERITIES, corrupt
from molaplace_lab.corruptions.filters import Streams
from molaplace_lab.corruptions.weather import synthetic_frost

DETERMINISTIC = {
    *("defocus_blur", "zoom_blur", "gaussian_blur", "brightness", "contrast", "pixelate", "jpeg_compression"),
    "saturate",
}


def scenes(count, side=32, seed=0):
    """Images like photographs: smooth shapes, sharp edges, grey and black parts, a little texture."""
    generator = np.random.default_rng(seed)
    axis = np.linspace(-1, 1, side)
    images = np.empty((count, 3, side, side))
    for image in images:
        for channel in image:
            slope, bend, height = generator.normal(size=3)
            channel[:] = 0.5 + 0.2 * (slope * axis[:, None] + bend * axis * axis[:, None] + 0.5 * height)
        centre = generator.uniform(-0.5, 0.5, 2)
        radius = generator.uniform(0.3, 0.7)
        inside = np.hypot(axis[:, None] - centre[0], axis - centre[1]) < radius
        image[:, inside] = generator.uniform(0, 1, (3, 1))
        image[:, : side // 8] = generator.uniform(0, 1)
        image[:, -2:, :4] = 0
        image += 0.03 * generator.normal(size=image.shape)
        image[:, : side // 16] = image[0, : side // 16]
    return torch.from_numpy((np.clip(images, 0, 1) * 255).astype(np.uint8))


@pytest.fixture(scope="module")
def images():
    return scenes(4)


def as_bytes(values):
    return np.uint8(np.clip(values, 0, 1) * 255)


def constant(value, count=20):
    return torch.full((count, 3, 32, 32), value, dtype=torch.uint8)


def levels_apart(first, second):
    return np.abs(np.asarray(first).astype(int) - np.asarray(second).astype(int))


# --- laws of all ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_laws_of_every_corruption(images, name):
    """Bytes in, bytes out, and the input stays; the seed decides; pieces are the whole, and neighbours do not matter."""
    before = images.clone()
    assert torch.equal(corrupt(images, name, 0), images)
    for severity in SEVERITIES:
        first, again, other = (corrupt(images, name, severity, seed=seed) for seed in (5, 5, 6))
        assert first.dtype == torch.uint8
        assert first.shape == images.shape
        assert torch.equal(images, before)
        assert not torch.equal(first, images), severity
        assert torch.equal(first, again)
        assert torch.equal(first, other) == (name in DETERMINISTIC)
        pieces = [corrupt(images[:1], name, severity, seed=5), corrupt(images[1:], name, severity, seed=5, first=1)]
        assert torch.equal(torch.cat(pieces), first)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_black_and_white_images_and_other_sides_survive(name):
    """No division by 0 (warnings are errors here)."""
    for pixels in (constant(0, 1), constant(255, 1), *(scenes(2, side=side) for side in (8, 27, 48))):
        for severity in (1, 5):
            assert corrupt(pixels, name, severity).shape == pixels.shape


UNORDERED = {"glass_blur", "motion_blur", "snow", "frost", "elastic_transform", "pixelate", "spatter", "saturate"}
"""They change their manner on the way: motion blur has nearly one kernel at 3 and 4, frost dims the image from 3 on, saturation falls
and then rises."""


@pytest.mark.parametrize("name", sorted(set(CORRUPTIONS) - UNORDERED))
@pytest.mark.parametrize("parameters", ["cifar10-c", "imagenet-c"])
def test_severity_moves_images_away(name, parameters):
    if parameters == "imagenet-c" and name not in IMAGENET_CORRUPTIONS:
        return
    pixels = scenes(40, seed=3)
    made = [corrupt(pixels, name, severity, parameters=parameters) for severity in SEVERITIES]
    errors = [float((levels_apart(corrupted, pixels) ** 2).mean()) for corrupted in made]
    assert errors == sorted(errors)
    assert errors[-1] > 1.5 * errors[0]


# --- each against a slow version --------------------------------------------------------------------------------------

REFERENCES = {}
"""By name: a slow version for one image (3, height, width) of bytes, and how many levels a pixel may differ."""


def slow_version(levels):
    def keep(function):
        REFERENCES[function.__name__] = function, levels
        return function

    return keep


@slow_version(1)
def gaussian_noise(image, generator, sigma):
    """The moments cannot tell 0.060 from 0.061; the formula on the same normal numbers can."""
    return as_bytes(image / 255 + sigma * generator.standard_normal(image.shape))


@slow_version(1)
def speckle_noise(image, generator, sigma):
    return as_bytes(image / 255 * (1 + sigma * generator.standard_normal(image.shape)))


def blurred(image, sigma):
    return np.stack([ndimage.gaussian_filter(channel / 255, sigma, mode="nearest", truncate=4) for channel in image])


@slow_version(1)
def gaussian_blur(image, generator, sigma):
    return as_bytes(blurred(image, sigma))


@slow_version(1)
def defocus_blur(image, generator, radius, sigma):
    half, beside = (8, 1) if radius <= 8 else (10, 2)
    rows, columns = np.mgrid[-half : half + 1, -half : half + 1]
    disk = (np.hypot(rows, columns) <= radius) / 1.0
    bell = np.exp(-0.5 * (np.arange(-beside, beside + 1) / sigma) ** 2)
    kernel = ndimage.correlate(disk / disk.sum(), np.outer(bell, bell) / bell.sum() ** 2, mode="mirror")
    return as_bytes(np.stack([ndimage.correlate(channel / 255, kernel, mode="mirror") for channel in image]))


@slow_version(2)  # truncated twice: a level more or less at first may be two at the end
def glass_blur(image, generator, sigma, rounds):
    current = np.moveaxis(as_bytes(blurred(image, sigma) + 1e-12), 0, -1).copy()
    for shift in generator.integers(-1, 1, size=(rounds, 2, 30, 30)):
        for row in range(31, 1, -1):
            for column in range(31, 1, -1):
                other = row + shift[0, row - 2, column - 2], column + shift[1, row - 2, column - 2]
                # The published line, swap by its looks and copy by its effect.
                current[row, column], current[other] = current[other], current[row, column]
    return as_bytes(blurred(np.moveaxis(current, -1, 0), sigma))


def moved(values, angle, radius, sigma):
    """One-sided motion of (..., 32, 32) along a line."""
    weights = np.exp(-(np.arange(2 * radius + 1) ** 2) / (2 * sigma**2))
    rows, columns = np.mgrid[:32, :32]
    result = np.zeros(values.shape)
    for i, weight in enumerate(weights / weights.sum()):
        row = np.clip(rows + round(i * math.sin(angle)), 0, 31)
        result += weight * values[..., row, np.clip(columns + round(i * math.cos(angle)), 0, 31)]
    return np.floor(result + 0.5)


@slow_version(1)
def motion_blur(image, generator, radius, sigma):
    return moved(image, math.radians(float(generator.uniform(-45, 45, size=1)[0])), radius, sigma)


def enlarged(image, factor):
    """The centre of (height, width, ...) by scipy's own zoom, trimmed."""
    side = len(image)
    taken = int(np.ceil(side / factor))
    start = (side - taken) // 2
    large = ndimage.zoom(image[start : start + taken, start : start + taken], (factor, factor), order=1)
    cut = (len(large) - side) // 2
    return large[cut : cut + side, cut : cut + side]


@slow_version(1)
def zoom_blur(image, generator, end):
    factors = np.arange(1, end, 0.01)
    total = [channel + sum(enlarged(channel, factor) for factor in factors) for channel in image / 255]
    return as_bytes(np.stack(total) / (len(factors) + 1))


def through_hsv(image, change):
    result = np.empty(image.shape)
    for row in range(image.shape[1]):
        for column in range(image.shape[2]):
            hsv = colorsys.rgb_to_hsv(*(image[:, row, column] / 255))
            result[:, row, column] = colorsys.hsv_to_rgb(*change(*hsv))
    return as_bytes(result)


@slow_version(1)
def brightness(image, generator, more):
    return through_hsv(image, lambda h, s, v: (h, s, min(v + more, 1)))


@slow_version(1)
def saturate(image, generator, factor, summand):
    assert (image[0] == image[1:]).all(axis=0).any(), "some pixels must be grey"
    return through_hsv(image, lambda h, s, v: (h, min(s * factor + summand, 1), v))


@slow_version(0)
def contrast(image, generator, share):
    mean = np.array([(channel / 255).mean() for channel in image])[:, None, None]
    return as_bytes((image / 255 - mean) * share + mean)


@slow_version(0)
def fog(image, generator, c, decay):
    image = image / 255
    return as_bytes((image + c * diamond_square(generator, 32, decay)) * image.max() / (image.max() + c))


def diamond_square(generator, side, decay):
    """Clouds on a torus, point by point."""
    drawn = iter(generator.uniform(-1, 1, size=side * side - 1))
    grid = {(0, 0): 0.0}
    step = side
    rough = 100.0
    while step > 1:
        half = step // 2
        middles = [(half, half, (-half, -half), (-half, half), (half, -half), (half, half))]
        diamond = ((-half, 0), (half, 0), (0, -half), (0, half))
        middles += [(0, half, *diamond), (half, 0, *diamond)]
        for top, left, *neighbours in middles:
            for row in range(top, side, step):
                for column in range(left, side, step):
                    around = [grid[(row + down) % side, (column + right) % side] for down, right in neighbours]
                    grid[row, column] = sum(around) / 4 + rough * rough * next(drawn)
        step = half
        rough = rough / decay
    assert next(drawn, None) is None
    field = np.array([[grid[row, column] for column in range(side)] for row in range(side)])
    return (field - field.min()) / (field.max() - field.min())


@slow_version(1)
def snow(image, generator, mean, deviation, zoom, threshold, radius, sigma, share):
    layer = enlarged(mean + deviation * generator.standard_normal(32 * 32).reshape(32, 32), zoom)
    angle = math.radians(generator.uniform(-135, -45))
    layer[layer < threshold] = 0
    fallen = moved(as_bytes(layer).astype(float), angle, radius, sigma) / 255
    image = image / 255
    grey = 0.299 * image[0] + 0.587 * image[1] + 0.114 * image[2]
    scene = share * image + (1 - share) * np.maximum(image, grey * 1.5 + 0.5)
    return as_bytes(scene + fallen + np.rot90(fallen, 2))


@slow_version(0)
def frost(image, generator, ours, theirs):
    picture = synthetic_frost(int(generator.integers(5)), 96)
    top = generator.integers(64)
    left = generator.integers(64)
    piece = picture[:, top : top + 32, left : left + 32]
    return np.uint8(np.clip(ours * image + theirs * piece, 0, 255))


@slow_version(1)
def spatter(image, generator, mean, deviation, blur, threshold, strength, muddy):
    noise = mean + deviation * generator.standard_normal((32, 32))
    layer = ndimage.gaussian_filter(noise, blur, mode="nearest", truncate=4)
    if muddy:
        cover = ndimage.gaussian_filter((layer > threshold).astype(float), strength, mode="nearest", truncate=4)
        cover[cover < 0.8] = 0
        assert 0 < (cover > 0).mean() < 0.5
        mud = np.array([63, 42, 20])[:, None, None] / 255
        return as_bytes(image / 255 * (1 - cover) + mud * cover)
    drops = as_bytes(np.where(layer < threshold, 0, layer))
    near = np.minimum(slow_distance(slow_canny(drops, 50, 150)), 20)
    smooth = np.uint8(ndimage.uniform_filter(near, 3, mode="mirror") + 1e-6)
    relief = [[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]
    carved = np.clip(ndimage.correlate(slow_equalised(smooth), relief, mode="mirror"), 0, 255)
    light = drops * np.rint(ndimage.uniform_filter(carved, 3, mode="mirror"))
    assert 0 < (light > 0).mean() < 0.6
    turquoise = np.array([175, 238, 238])[:, None, None] / 255
    return as_bytes(image / 255 + strength * light / light.max() * turquoise)


def slow_canny(layer, low, high):
    """Pixel by pixel, then flooding from strong edges."""
    side = len(layer)

    def value(row, column):
        return int(layer[min(max(row, 0), side - 1), min(max(column, 0), side - 1)])

    across = np.zeros((side, side), int)
    down = np.zeros((side, side), int)
    for row in range(side):
        for column in range(side):
            for offset, weight in ((-1, 1), (0, 2), (1, 1)):
                across[row, column] += weight * (value(row + offset, column + 1) - value(row + offset, column - 1))
                down[row, column] += weight * (value(row + 1, column + offset) - value(row - 1, column + offset))
    strength = np.pad(abs(across) + abs(down), 1)
    crest = np.zeros((side, side), bool)
    for row in range(side):
        for column in range(side):
            value = strength[row + 1, column + 1]
            dx = across[row, column]
            dy = down[row, column]
            steep = math.degrees(math.atan2(abs(dy), abs(dx)))
            if steep < 22.5:
                before = strength[row + 1, column]
                after = strength[row + 1, column + 2]
                top = value > before and value >= after
            elif steep > 67.5:
                top = value > strength[row, column + 1] and value >= strength[row + 2, column + 1]
            else:
                slant = -1 if (dx < 0) != (dy < 0) else 1
                top = value > strength[row, column + 1 - slant] and value > strength[row + 2, column + 1 + slant]
            crest[row, column] = top and value > low
    edge = np.zeros((side, side), bool)
    todo = [(r, c) for r in range(side) for c in range(side) if crest[r, c] and strength[r + 1, c + 1] > high]
    while todo:
        row, column = todo.pop()
        if 0 <= row < side and 0 <= column < side and crest[row, column] and not edge[row, column]:
            edge[row, column] = True
            todo += [(row + down, column + right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    return edge


def slow_distance(edge):
    """The shortest way to an edge in the published moves."""
    result = np.empty(edge.shape)
    sources = np.argwhere(edge)
    for row, column in np.ndindex(edge.shape):
        apart = np.abs(sources - (row, column))
        long = apart.max(axis=1)
        short = apart.min(axis=1)
        flat = (long - 2 * short) + 2.1969 * short
        slanted = 1.4 * (2 * short - long) + 2.1969 * (long - short)
        result[row, column] = np.where(long >= 2 * short, flat, slanted).min()
    return result


def slow_equalised(layer):
    """By counting."""
    low = layer.min()
    rest = (layer > low).sum()
    counts = [((layer > low) & (layer <= level)).sum() for level in range(256)]
    return np.rint(255 * np.array(counts)[layer] / rest)


@slow_version(0)
def pixelate(image, generator, share):
    side = image.shape[1]
    small = int(side * share)
    picture = Image.fromarray(np.ascontiguousarray(np.moveaxis(image, 0, -1)))
    coarse = picture.resize((small, small), Image.Resampling.BOX).resize((side, side), Image.Resampling.BOX)
    return np.moveaxis(np.asarray(coarse), -1, 0)


@slow_version(0)
def jpeg_compression(image, generator, quality):
    file = io.BytesIO()
    picture = Image.fromarray(np.ascontiguousarray(np.moveaxis(image, 0, -1)))
    picture.save(file, "JPEG", quality=quality, subsampling="4:2:0")
    return np.moveaxis(np.asarray(Image.open(file)), -1, 0)


@slow_version(1)
def elastic_transform(image, generator, size, smooth, jitter):
    rows, columns = np.mgrid[:32, :32].astype(float)
    drawn = generator.uniform(-1, 1, size=6 + 2 * 32 * 32)
    before = np.array([[26.0, 26.0], [26.0, 6.0], [6.0, 6.0]])
    after = before + jitter * drawn[:6].reshape(3, 2)
    # The map back, found from the same three points the other way round.
    back = np.linalg.solve(np.c_[after, np.ones(3)], before)
    across, down = (columns * back[0, k] + rows * back[1, k] + back[2, k] for k in (0, 1))
    bent = np.stack([ndimage.map_coordinates(c / 255, [down, across], order=1, mode="mirror") for c in image])
    if size:
        dx, dy = (
            size * ndimage.gaussian_filter(field, smooth, mode="reflect", truncate=3)
            for field in drawn[6:].reshape(2, 32, 32)
        )
        index = [rows + dy, columns + dx]
        bent = np.stack([ndimage.map_coordinates(c, index, order=1, mode="reflect") for c in bent])
    return as_bytes(bent)


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize(
    ("name", "parameters"),
    [(name, "cifar10-c") for name in REFERENCES]
    + [(name, "imagenet-c") for name in IMAGENET_CORRUPTIONS if name in REFERENCES],
)
def test_against_a_slow_version(images, name, parameters, severity):
    reference, levels = REFERENCES[name]
    values = BY_NAME[name][1 if parameters == "cifar10-c" else 2][severity - 1]
    results = corrupt(images, name, severity, parameters=parameters).numpy()
    streams = Streams(f"0/{name}/{severity}", 0, len(images))
    for image, result, generator in zip(images.numpy(), results, streams, strict=True):
        apart = levels_apart(result, reference(image, generator, *(values if isinstance(values, tuple) else (values,))))
        assert apart.max() <= levels
        assert (apart > 0).mean() < 0.1  # whole numbers, a rounding error below themselves


def test_published_parameters_stay():
    """A checksum of both tables, and the numbers of zoom factors, which depend on rounding."""
    tables = repr([(name, cifar10, imagenet) for name, (_, cifar10, imagenet) in BY_NAME.items()])
    assert hashlib.sha256(tables.encode()).hexdigest()[:16] == "59fa0336d1c2e45e"
    assert [len(np.arange(1, end, 0.01)) for end in BY_NAME["zoom_blur"][1]] == [7, 12, 16, 21, 26]


@pytest.mark.parametrize("photons", BY_NAME["shot_noise"][1])
def test_shot_noise_is_poisson(photons):
    """Mean and variance of the photons of a grey pixel, its skewness where levels are fine enough, and only whole photons."""
    values = corrupt(constant(60), "shot_noise", BY_NAME["shot_noise"][1].index(photons) + 1).double().numpy().ravel()
    assert set(np.unique(values).astype(int)) <= {int(as_bytes(count / photons)) for count in range(photons + 1)}
    caught = (values + 0.5) * photons / 255  # truncation loses half a level on average
    rate = 60 / 255 * photons
    assert caught.mean() == pytest.approx(rate, abs=0.02 * rate)
    assert caught.var() == pytest.approx(rate, rel=0.06)
    if photons == 50:
        skew = ((caught - caught.mean()) ** 3).mean() / caught.std() ** 3
        assert skew == pytest.approx(1 / math.sqrt(rate), abs=0.06)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_impulse_noise_hits_its_share_evenly(severity):
    share = BY_NAME["impulse_noise"][1][severity - 1]
    values = corrupt(constant(100), "impulse_noise", severity)
    error = 5 * math.sqrt(share / values.numel())
    assert float((values == 0).double().mean()) == pytest.approx(share / 2, abs=error)
    assert float((values == 255).double().mean()) == pytest.approx(share / 2, abs=error)
    assert bool(((values == 0) | (values == 255) | (values == 100)).all())


# --- refusals ---------------------------------------------------------------------------------------------------------

FINE = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("pixels", "name", "severity", "options", "words"),
    [
        (FINE.float(), "fog", 1, {}, "torch.float32"),
        (FINE[:, :1], "fog", 1, {}, "colour images"),
        (FINE[..., :31], "fog", 1, {}, "square.*32 x 31"),
        (FINE[..., :4, :4], "fog", 1, {}, "at least 8"),
        (FINE, "fog", 6, {}, "severity"),
        (FINE, "fog", 2.5, {}, "severity"),
        (FINE, "snow", 1, {"parameters": "imagenet-c"}, "got 'snow'"),
    ],
)
def test_wrong_pixels_and_options_are_refused(pixels, name, severity, options, words):
    with pytest.raises((DataError, OptionError), match=words):
        corrupt(pixels, name, severity, **options)
