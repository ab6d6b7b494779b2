"""Every corruption against a slow and obvious version of itself, image by image, and the laws they share."""

from __future__ import annotations

import colorsys
import io
import math

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from mola.errors import DataError, OptionError
from mola.lab.corruptions.blur import defocus_kernel
from mola.lab.corruptions.catalogue import (
    CORRUPTIONS,
    IMAGENET_PARAMETERS,
    PAPER_CORRUPTIONS,
    SEVERITIES,
    corrupt,
)
from mola.lab.corruptions.digital import JPEG_QUALITY, bilinear
from mola.lab.corruptions.filters import Streams, gaussian
from mola.lab.corruptions.weather import canny, distance, equalised, plasma, synthetic_frost

DETERMINISTIC = {
    *("defocus_blur", "zoom_blur", "gaussian_blur", "brightness", "contrast", "pixelate", "jpeg_compression"),
    "saturate",
}


def scenes(count, side=32, seed=0):
    """Images like photographs: smooth shapes, sharp edges, grey and black parts, a little texture."""
    generator = np.random.default_rng(seed)
    places = np.linspace(-1, 1, side)
    images = np.empty((count, 3, side, side))
    for image in images:
        for channel in image:
            slope, bend, height = generator.normal(size=3)
            channel[:] = 0.5 + 0.2 * (slope * places[:, None] + bend * places * places[:, None] + 0.5 * height)
        centre, radius = generator.uniform(-0.5, 0.5, 2), generator.uniform(0.3, 0.7)
        inside = np.hypot(places[:, None] - centre[0], places - centre[1]) < radius
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


def streams(name, severity, count):
    return Streams.of(0, name, severity, first=0, count=count)


# --- laws of all ------------------------------------------------------------------------------------------------------


def test_the_paper_takes_sixteen_of_nineteen():
    assert len(set(CORRUPTIONS)) == 19
    assert set(CORRUPTIONS) - set(PAPER_CORRUPTIONS) == {"motion_blur", "snow", "jpeg_compression"}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_bytes_in_bytes_out_and_the_input_stays(images, name):
    before = images.clone()
    assert torch.equal(corrupt(images, name, 0), images)
    for severity in SEVERITIES:
        result = corrupt(images, name, severity)
        assert result.dtype == torch.uint8
        assert result.shape == images.shape
        assert torch.equal(images, before)
        assert not torch.equal(result, images), severity


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_pieces_are_the_whole_and_neighbours_do_not_matter(images, name):
    whole = corrupt(images, name, 3, seed=5)
    pieces = [corrupt(images[:1], name, 3, seed=5), corrupt(images[1:], name, 3, seed=5, first=1)]
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_seed_decides(images, name):
    first, again, other = (corrupt(images, name, 4, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert torch.equal(first, other) == (name in DETERMINISTIC)


ORDERED = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "defocus_blur", "gaussian_blur", "zoom_blur"),
    *("fog", "brightness", "contrast", "jpeg_compression"),
)
"""Where every severity lies farther from the image than the one before. The rest change their manner on the way: motion
blur has nearly one kernel at 3 and 4, frost dims the image from 3 on, saturation falls and then rises."""


def squared_errors(name):
    originals = scenes(40, seed=3)
    return [float((levels_apart(corrupt(originals, name, severity), originals) ** 2).mean()) for severity in SEVERITIES]


@pytest.mark.parametrize("name", ORDERED)
def test_severity_moves_images_away(name):
    errors = squared_errors(name)
    assert errors == sorted(errors)
    assert errors[-1] > 1.5 * errors[0]


@pytest.mark.parametrize("side", [8, 27, 48])
def test_other_sides(side):
    small = scenes(2, side=side)
    assert [name for name in CORRUPTIONS if corrupt(small, name, 5).shape != small.shape] == []


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_black_and_white_images_survive(name):
    """No division by 0 (warnings are errors here)."""
    for value in (0, 255):
        for severity in (1, 5):
            corrupt(constant(value, 1), name, severity)


# --- noise ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("severity", SEVERITIES)
def test_noise_from_the_same_draws(images, severity):
    """The moments cannot tell 0.060 from 0.061; the formula on the same normal numbers can."""
    sigma = (0.04, 0.06, 0.08, 0.09, 0.10)[severity - 1]
    share = (0.06, 0.1, 0.12, 0.16, 0.2)[severity - 1]
    for name, formula in (
        ("gaussian_noise", lambda x, normal: x + sigma * normal),
        ("speckle_noise", lambda x, normal: x + x * share * normal),
    ):
        results = corrupt(images, name, severity).numpy()
        for image, result, generator in zip(images.numpy() / 255, results, streams(name, severity, 4), strict=True):
            apart = levels_apart(result, as_bytes(formula(image, generator.standard_normal(image.shape))))
            assert apart.max() <= 1
            assert (apart > 0).mean() < 0.001


@pytest.mark.parametrize("severity", SEVERITIES)
def test_shot_noise_is_poisson(severity):
    """Mean and variance of the photons of a grey pixel, its skewness where levels are fine enough, and only whole photons."""
    photons = (500, 250, 100, 75, 50)[severity - 1]
    values = corrupt(constant(60), "shot_noise", severity).double().numpy().ravel()
    assert set(np.unique(values).astype(int)) <= {int(as_bytes(count / photons)) for count in range(photons + 1)}
    caught = (values + 0.5) * photons / 255  # truncation loses half a level on average
    rate = 60 / 255 * photons
    assert caught.mean() == pytest.approx(rate, abs=0.02 * rate)
    assert caught.var() == pytest.approx(rate, rel=0.06)
    if severity == 5:
        skew = ((caught - caught.mean()) ** 3).mean() / caught.std() ** 3
        assert skew == pytest.approx(1 / math.sqrt(rate), abs=0.06)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_impulse_noise_hits_its_share_evenly(severity):
    share = (0.01, 0.02, 0.03, 0.05, 0.07)[severity - 1]
    values = corrupt(constant(100), "impulse_noise", severity)
    error = 5 * math.sqrt(share / values.numel())
    assert float((values == 0).double().mean()) == pytest.approx(share / 2, abs=error)
    assert float((values == 255).double().mean()) == pytest.approx(share / 2, abs=error)
    assert bool(((values == 0) | (values == 255) | (values == 100)).all())


# --- blur -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("severity", SEVERITIES)
def test_gaussian_blur_is_scipys(images, severity):
    sigma = (0.4, 0.6, 0.7, 0.8, 1)[severity - 1]
    for image, result in zip(images.numpy(), corrupt(images, "gaussian_blur", severity).numpy(), strict=True):
        for channel, blurred in zip(image, result, strict=True):
            expected = as_bytes(ndimage.gaussian_filter(channel / 255, sigma, mode="nearest", truncate=4))
            apart = levels_apart(blurred, expected)
            assert apart.max() <= 1
            assert (apart > 0).mean() < 0.1  # whole numbers, a rounding error below themselves


@pytest.mark.parametrize("border", ["nearest", "reflect", "mirror"])
def test_every_border_is_scipys(border):
    values = np.random.default_rng(0).random((9, 9))
    expected = ndimage.gaussian_filter(values, 5.0, mode=border, truncate=3)  # reaches over the image twice
    np.testing.assert_allclose(gaussian(values, 5.0, border=border, truncate=3), expected, atol=1e-12)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_defocus_has_the_published_kernels(severity):
    def bell(sigma):
        taps = np.array([math.exp(-0.5 / sigma**2), 1, math.exp(-0.5 / sigma**2)])
        return np.outer(taps, taps) / taps.sum() ** 2

    plus = np.array([[0, 1, 0], [1, 1, 1], [0, 1, 0]]) / 5
    expected = (bell(0.4), bell(0.5), bell(0.6), plus, np.full((3, 3), 1 / 9))[severity - 1]
    kernel = defocus_kernel(severity)
    rim = (len(kernel) - 3) // 2
    np.testing.assert_allclose(kernel, np.pad(expected, rim), atol=1e-5)
    assert kernel.sum() == pytest.approx(1)


def test_defocus_mirrors_at_the_edge(images):
    for image, result in zip(images.numpy(), corrupt(images, "defocus_blur", 5).numpy(), strict=True):
        for channel, blurred in zip(image, result, strict=True):
            expected = as_bytes(ndimage.uniform_filter(channel / 255, 3, mode="mirror"))
            assert levels_apart(blurred, expected).max() <= 1


@pytest.mark.parametrize("severity", SEVERITIES)
def test_glass_is_the_loop_of_copies(images, severity):
    sigma, rounds = ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))[severity - 1]
    results = corrupt(images, "glass_blur", severity).numpy()
    for image, result, generator in zip(images.numpy(), results, streams("glass_blur", severity, 4), strict=True):
        shifts = generator.integers(-1, 1, size=(rounds, 2, 30, 30))
        assert set(np.unique(shifts)) == {-1, 0}
        blurred = np.stack([ndimage.gaussian_filter(c / 255, sigma, mode="nearest") for c in image])
        current = np.moveaxis(as_bytes(blurred + 1e-12), 0, -1).copy()
        for shift in shifts:
            for row in range(31, 1, -1):
                for column in range(31, 1, -1):
                    other = row + shift[0, row - 2, column - 2], column + shift[1, row - 2, column - 2]
                    # The published line, swap by its looks and copy by its effect.
                    current[row, column], current[other] = current[other], current[row, column]
        again = [ndimage.gaussian_filter(c / 255, sigma, mode="nearest") for c in np.moveaxis(current, -1, 0)]
        # Truncation happens twice: a level more or less at first may be two at the end.
        assert levels_apart(result, as_bytes(np.stack(again))).max() <= 2


@pytest.mark.parametrize("severity", SEVERITIES)
def test_motion_is_a_one_sided_line(images, severity):
    radius, sigma = ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))[severity - 1]
    results = corrupt(images, "motion_blur", severity).numpy()
    for image, result, generator in zip(images.numpy(), results, streams("motion_blur", severity, 4), strict=True):
        angle = math.radians(float(generator.uniform(-45, 45, size=1)[0]))
        weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(2 * radius + 1)]
        expected = np.zeros((3, 32, 32))
        for row in range(32):
            for column in range(32):
                for i, weight in enumerate(weights):
                    source_row = min(max(row + round(i * math.sin(angle)), 0), 31)
                    source_column = min(max(column + round(i * math.cos(angle)), 0), 31)
                    expected[:, row, column] += weight / sum(weights) * image[:, source_row, source_column]
        np.testing.assert_allclose(result, expected, atol=0.5 + 1e-9)


def enlarged(image, factor):
    """The centre of (height, width, ...) by scipy's own zoom, trimmed."""
    side = len(image)
    taken = int(np.ceil(side / factor))
    start = (side - taken) // 2
    large = ndimage.zoom(image[start : start + taken, start : start + taken], (factor, factor), order=1)
    cut = (len(large) - side) // 2
    return large[cut : cut + side, cut : cut + side]


@pytest.mark.parametrize("severity", SEVERITIES)
def test_zoom_is_the_mean_of_enlargements(images, severity):
    factors = np.arange(1, (1.06, 1.11, 1.16, 1.21, 1.26)[severity - 1], 0.01)
    assert len(factors) == (7, 12, 16, 21, 26)[severity - 1]
    for image, result in zip(images.numpy()[:2], corrupt(images[:2], "zoom_blur", severity).numpy(), strict=True):
        for channel, blurred in zip(image / 255, result, strict=True):
            total = channel + sum(enlarged(channel, factor) for factor in factors)
            assert levels_apart(blurred, as_bytes(total / (len(factors) + 1))).max() <= 1


# --- colour -----------------------------------------------------------------------------------------------------------


def through_hsv(image, change):
    result = np.empty(image.shape)
    for row in range(image.shape[1]):
        for column in range(image.shape[2]):
            hsv = colorsys.rgb_to_hsv(*(image[:, row, column] / 255))
            result[:, row, column] = colorsys.hsv_to_rgb(*change(*hsv))
    return as_bytes(result)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_brightness_raises_the_value(images, severity):
    c = (0.05, 0.1, 0.15, 0.2, 0.3)[severity - 1]
    for image, result in zip(images.numpy(), corrupt(images, "brightness", severity).numpy(), strict=True):
        expected = through_hsv(image, lambda h, s, v: (h, s, min(v + c, 1)))
        assert levels_apart(result, expected).max() <= 1


@pytest.mark.parametrize("severity", SEVERITIES)
def test_saturate_changes_the_saturation(images, severity):
    factor, summand = ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))[severity - 1]
    for image, result in zip(images.numpy(), corrupt(images, "saturate", severity).numpy(), strict=True):
        assert (image[0] == image[1:]).all(axis=0).any(), "some pixels must be grey"
        expected = through_hsv(image, lambda h, s, v: (h, min(s * factor + summand, 1), v))
        assert levels_apart(result, expected).max() <= 1


@pytest.mark.parametrize("severity", SEVERITIES)
def test_contrast_draws_channels_to_their_means(images, severity):
    c = (0.75, 0.5, 0.4, 0.3, 0.15)[severity - 1]
    for image, result in zip(images.numpy(), corrupt(images, "contrast", severity).numpy(), strict=True):
        for channel, flatter in zip(image / 255, result, strict=True):
            np.testing.assert_array_equal(flatter, as_bytes((channel - channel.mean()) * c + channel.mean()))


# --- weather ----------------------------------------------------------------------------------------------------------


def test_plasma_is_diamond_square_on_a_torus():
    side, decay = 8, 1.75
    for generator, clouds in zip(streams("fog", 5, 3), plasma(streams("fog", 5, 3), side, decay), strict=True):
        drawn = iter(generator.uniform(-1, 1, size=side * side - 1))
        grid, step, rough = {(0, 0): 0.0}, side, 100.0
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
            step, rough = half, rough / decay
        field = np.array([[grid[row, column] for column in range(side)] for row in range(side)])
        np.testing.assert_allclose(clouds, (field - field.min()) / (field.max() - field.min()), atol=1e-12)
        assert next(drawn, None) is None


@pytest.mark.parametrize("severity", SEVERITIES)
def test_fog_thickens_with_the_clouds(images, severity):
    c, decay = ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))[severity - 1]
    clouds = plasma(streams("fog", severity, 4), 32, decay)
    for image, cloud, result in zip(
        images.numpy() / 255, clouds, corrupt(images, "fog", severity).numpy(), strict=True
    ):
        np.testing.assert_array_equal(result, as_bytes((image + c * cloud) * image.max() / (image.max() + c)))


@pytest.mark.parametrize("severity", SEVERITIES)
def test_snow_step_by_step(images, severity):
    mean, deviation, zoom, threshold, radius, sigma, share = (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    )[severity - 1]
    results = corrupt(images, "snow", severity).numpy()
    for image, result, generator in zip(images.numpy() / 255, results, streams("snow", severity, 4), strict=True):
        layer = enlarged(mean + deviation * generator.standard_normal(32 * 32).reshape(32, 32), zoom)
        angle = math.radians(generator.uniform(-135, -45))
        layer[layer < threshold] = 0
        flakes = as_bytes(layer).astype(float)
        weights = np.exp(-(np.arange(2 * radius + 1) ** 2) / (2 * sigma**2))
        rows, columns = np.mgrid[:32, :32]
        fallen = np.zeros((32, 32))
        for i, weight in enumerate(weights / weights.sum()):
            row = np.clip(rows + round(i * math.sin(angle)), 0, 31)
            fallen += weight * flakes[row, np.clip(columns + round(i * math.cos(angle)), 0, 31)]
        fallen = np.floor(fallen + 0.5) / 255
        grey = 0.299 * image[0] + 0.587 * image[1] + 0.114 * image[2]
        scene = share * image + (1 - share) * np.maximum(image, grey * 1.5 + 0.5)
        assert levels_apart(result, as_bytes(scene + fallen + np.rot90(fallen, 2))).max() <= 1


@pytest.mark.parametrize("severity", SEVERITIES)
def test_frost_is_a_weighted_sum_with_a_piece_of_a_picture(images, severity):
    ours, theirs = ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))[severity - 1]
    pictures = [synthetic_frost(index, 96) for index in range(5)]
    results = corrupt(images, "frost", severity).numpy()
    for image, result, generator in zip(images.numpy(), results, streams("frost", severity, 4), strict=True):
        picture = pictures[generator.integers(5)]
        top, left = generator.integers(64), generator.integers(64)
        piece = picture[:, top : top + 32, left : left + 32]
        np.testing.assert_array_equal(result, np.uint8(np.clip(ours * image + theirs * piece, 0, 255)))


# --- spatter ----------------------------------------------------------------------------------------------------------


def liquid(count, seed=0):
    noise = np.random.default_rng(seed).normal(0.65, 0.3, (count, 32, 32))
    layers = ndimage.gaussian_filter(noise, (0, 1, 1), mode="nearest")
    return as_bytes(np.where(layers < 0.69, 0, layers))


def slow_canny(layer, low, high):
    """Pixel by pixel, then flooding from strong edges."""
    side = len(layer)

    def value(row, column):
        return int(layer[min(max(row, 0), side - 1), min(max(column, 0), side - 1)])

    across, down = np.zeros((side, side), int), np.zeros((side, side), int)
    for row in range(side):
        for column in range(side):
            for offset, weight in ((-1, 1), (0, 2), (1, 1)):
                across[row, column] += weight * (value(row + offset, column + 1) - value(row + offset, column - 1))
                down[row, column] += weight * (value(row + 1, column + offset) - value(row - 1, column + offset))
    strength = np.pad(abs(across) + abs(down), 1)
    crest = np.zeros((side, side), bool)
    for row in range(side):
        for column in range(side):
            here, dx, dy = strength[row + 1, column + 1], across[row, column], down[row, column]
            steep = math.degrees(math.atan2(abs(dy), abs(dx)))
            if steep < 22.5:
                before, after = strength[row + 1, column], strength[row + 1, column + 2]
                top = here > before and here >= after
            elif steep > 67.5:
                top = here > strength[row, column + 1] and here >= strength[row + 2, column + 1]
            else:
                slant = -1 if (dx < 0) != (dy < 0) else 1
                top = here > strength[row, column + 1 - slant] and here > strength[row + 2, column + 1 + slant]
            crest[row, column] = top and here > low
    edge = np.zeros((side, side), bool)
    todo = [(r, c) for r in range(side) for c in range(side) if crest[r, c] and strength[r + 1, c + 1] > high]
    while todo:
        row, column = todo.pop()
        if 0 <= row < side and 0 <= column < side and crest[row, column] and not edge[row, column]:
            edge[row, column] = True
            todo += [(row + down, column + right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    return edge


def test_canny_is_cannys():
    layers = liquid(6)
    noisy = np.random.default_rng(1).integers(0, 60, (2, 32, 32), dtype=np.uint8)  # many weak edges
    for group in (layers, noisy):
        for layer, edges in zip(group, canny(group, 50, 150), strict=True):
            np.testing.assert_array_equal(edges, slow_canny(layer, 50, 150))
            assert edges.any()


def test_distance_is_the_shortest_way_in_the_published_moves():
    edges = canny(liquid(3), 50, 150)
    edges[0] = False
    edges[0, 3, 30] = True
    for edge, result in zip(edges, distance(edges), strict=True):
        sources = np.argwhere(edge)
        for row in range(32):
            for column in range(32):
                apart = np.abs(sources - (row, column))
                long, short = apart.max(axis=1), apart.min(axis=1)
                flat = (long - 2 * short) + 2.1969 * short
                slanted = 1.4 * (2 * short - long) + 2.1969 * (long - short)
                expected = np.where(long >= 2 * short, flat, slanted).min()
                assert result[row, column] == pytest.approx(expected, abs=1e-3)


def test_equalised_by_counting():
    layers = np.random.default_rng(0).integers(3, 9, (4, 12, 12), dtype=np.uint8)
    layers[3] = 7
    for layer, result in zip(layers[:3], equalised(layers), strict=False):
        low = layer.min()
        rest = (layer > low).sum()
        for level in np.unique(layer):
            expected = 255 * ((layer > low) & (layer <= level)).sum() / rest
            assert (abs(result[layer == level] - expected) <= 0.5 + 1e-4).all()
    np.testing.assert_array_equal(equalised(layers)[3], layers[3])


@pytest.mark.parametrize("severity", [1, 2, 3])
def test_water_step_by_step(images, severity):
    mean, deviation, blur, threshold = ((0.62, 0.1, 0.7, 0.7), (0.65, 0.1, 0.8, 0.7), (0.65, 0.3, 1, 0.69))[
        severity - 1
    ]
    turquoise = np.array([175, 238, 238])[:, None, None] / 255
    relief = [[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]
    results = corrupt(images, "spatter", severity).numpy()
    for image, result, generator in zip(images.numpy() / 255, results, streams("spatter", severity, 4), strict=True):
        noise = mean + deviation * generator.standard_normal((32, 32))
        layer = ndimage.gaussian_filter(noise, blur, mode="nearest", truncate=4)
        drops = as_bytes(np.where(layer < threshold, 0, layer))
        near = np.minimum(distance(slow_canny(drops, 50, 150)[None])[0], 20)
        smooth = np.uint8(ndimage.uniform_filter(near, 3, mode="mirror") + 1e-6)
        even = equalised(smooth[None])[0].astype(float)
        carved = np.clip(ndimage.correlate(even, relief, mode="mirror"), 0, 255)
        light = drops * np.rint(ndimage.uniform_filter(carved, 3, mode="mirror"))
        assert 0 < (light > 0).mean() < 0.6
        expected = as_bytes(image + 0.5 * light / light.max() * turquoise)
        assert levels_apart(result, expected).max() <= 1


@pytest.mark.parametrize("severity", [4, 5])
def test_mud_covers(images, severity):
    blur, threshold = ((0.7, 0.69), (0.5, 0.68))[severity - 4]
    results = corrupt(images, "spatter", severity).numpy()
    for image, result, generator in zip(images.numpy() / 255, results, streams("spatter", severity, 4), strict=True):
        layer = ndimage.gaussian_filter(
            0.65 + 0.1 * generator.standard_normal((32, 32)), blur, mode="nearest", truncate=4
        )
        cover = ndimage.gaussian_filter((layer > threshold).astype(float), 0.6, mode="nearest", truncate=4)
        cover[cover < 0.8] = 0
        assert 0 < (cover > 0).mean() < 0.5
        mud = np.array([63, 42, 20])[:, None, None] / 255
        assert levels_apart(result, as_bytes(image * (1 - cover) + mud * cover)).max() <= 1


# --- digital ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("side", [32, 50])
def test_pixelate_is_pillows_box(severity, side):
    pictures = scenes(3, side=side)
    small = int(side * (0.95, 0.9, 0.85, 0.75, 0.65)[severity - 1])
    for image, result in zip(pictures.numpy(), corrupt(pictures, "pixelate", severity).numpy(), strict=True):
        picture = Image.fromarray(np.ascontiguousarray(np.moveaxis(image, 0, -1)))
        coarse = picture.resize((small, small), Image.Resampling.BOX).resize((side, side), Image.Resampling.BOX)
        np.testing.assert_array_equal(np.moveaxis(result, 0, -1), np.asarray(coarse))


@pytest.mark.parametrize("severity", SEVERITIES)
def test_jpeg_is_pillows(images, severity):
    assert JPEG_QUALITY == (80, 65, 58, 50, 40)
    for image, result in zip(images.numpy(), corrupt(images, "jpeg_compression", severity).numpy(), strict=True):
        file = io.BytesIO()
        picture = Image.fromarray(np.ascontiguousarray(np.moveaxis(image, 0, -1)))
        picture.save(file, "JPEG", quality=(80, 65, 58, 50, 40)[severity - 1], subsampling="4:2:0")
        np.testing.assert_array_equal(np.moveaxis(result, 0, -1), np.asarray(Image.open(file)))


@pytest.mark.parametrize("border", ["reflect", "mirror"])
def test_bilinear_is_scipys(border):
    generator = np.random.default_rng(0)
    values, places = generator.random((2, 3, 9, 9)), generator.uniform(-12, 20, (2, 2, 9, 9))
    results = bilinear(values, places[:, 0], places[:, 1], border)
    for image, place, result in zip(values, places, results, strict=True):
        for channel, moved in zip(image, result, strict=True):
            np.testing.assert_allclose(moved, ndimage.map_coordinates(channel, place, order=1, mode=border), atol=1e-12)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_elastic_step_by_step(images, severity):
    size, smooth, jitter = ((0, 0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96))[
        severity - 1
    ]
    results = corrupt(images, "elastic_transform", severity).numpy()
    rows, columns = np.mgrid[:32, :32].astype(float)
    for image, result, generator in zip(
        images.numpy() / 255, results, streams("elastic_transform", severity, 4), strict=True
    ):
        drawn = generator.uniform(-1, 1, size=6 + 2 * 32 * 32)
        before = np.array([[26.0, 26.0], [26.0, 6.0], [6.0, 6.0]])
        after = before + jitter * drawn[:6].reshape(3, 2)
        # The map back, found from the same three points the other way round.
        back = np.linalg.solve(np.c_[after, np.ones(3)], before)
        across, down = (columns * back[0, k] + rows * back[1, k] + back[2, k] for k in (0, 1))
        bent = np.stack([ndimage.map_coordinates(c, [down, across], order=1, mode="mirror") for c in image])
        if size:
            dx, dy = (
                size * ndimage.gaussian_filter(field, smooth, mode="reflect", truncate=3)
                for field in drawn[6:].reshape(2, 32, 32)
            )
            place = [rows + dy, columns + dx]
            bent = np.stack([ndimage.map_coordinates(c, place, order=1, mode="reflect") for c in bent])
        assert levels_apart(result, as_bytes(bent)).max() <= 1


# --- ImageNet-C -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IMAGENET_PARAMETERS)
def test_imagenets_corruptions_grow_with_severity(name):
    pixels = scenes(1, side=64)
    apart = [
        float((levels_apart(corrupt(pixels, name, level, parameters="imagenet-c"), pixels) ** 2).mean())
        for level in SEVERITIES
    ]
    assert apart[0] > 0
    assert apart[4] > apart[0] or name == "saturate"  # which takes colour away first, and then adds some


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pixels", "words"),
    [
        (torch.zeros(1, 3, 32, 32, dtype=torch.float32), "torch.float32"),
        (torch.zeros(1, 1, 32, 32, dtype=torch.uint8), "colour images"),
        (torch.zeros(1, 3, 32, 31, dtype=torch.uint8), "square.*32 x 31"),
        (torch.zeros(1, 3, 4, 4, dtype=torch.uint8), "at least 8"),
    ],
)
def test_other_pixels_are_refused(pixels, words):
    with pytest.raises(DataError, match=words):
        corrupt(pixels, "fog", 1)


@pytest.mark.parametrize(
    ("name", "severity", "options", "words"),
    [
        ("rain", 1, {}, "got 'rain'"),
        ("fog", 6, {}, "severity"),
        ("fog", 2.5, {}, "severity"),
        ("snow", 1, {"parameters": "imagenet-c"}, "got 'snow'"),
        ("fog", 1, {"parameters": "imagenet"}, "parameters"),
    ],
)
def test_unknown_options_are_refused(images, name, severity, options, words):
    with pytest.raises(OptionError, match=words):
        corrupt(images, name, severity, **options)
