"""Transformations of images: random flips and shifts for training, rotations as a gradual shift, grey images as colour images."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from mola.options import one_of

ANGLES = tuple(range(0, 181, 15))
"""Degrees of the paper's rotated MNIST."""

FRACTION_BITS = 16
"""Fraction bits of the fixed-point numbers in which Pillow computes coordinates."""


def flip_and_crop(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Mirror each of (n, channels, height, width) images with probability one half, and shift it by up to `padding` pixels each way.

    The border is filled with 0: pass bytes, before normalisation, for a black border as in the paper's recipe.
    """
    count, channels, height, width = images.shape
    device = generator.device
    flipped = torch.randint(2, (count, 1), generator=generator, device=device).bool()
    top, left = torch.randint(2 * padding + 1, (2, count, 1), generator=generator, device=device)
    rows = top + torch.arange(height, device=device)
    columns = left + torch.arange(width, device=device)
    columns = torch.where(flipped, columns.flip(1), columns)
    # One index into each flattened image: a gather over all channels is many times faster than a loop over images.
    padded = functional.pad(images, [padding] * 4)
    index = rows[:, :, None] * padded.shape[3] + columns[:, None, :]
    index = index.view(count, 1, height * width).expand(-1, channels, -1).to(images.device)
    return padded.flatten(2).gather(2, index).view_as(images)


def rotate(images: Tensor, degrees: float, interpolation: str = "bilinear") -> Tensor:
    """Rotate images (n, channels, height, width) counter-clockwise about their centre, filling with 0.

    `"nearest"` is the paper's rotated MNIST: the default of `torchvision.transforms.functional.rotate`, which is Pillow's rotation,
    to the pixel. `"bilinear"` is for very small images: at 8 x 8 pixels the nearest pixel tears strokes apart.
    """
    one_of(interpolation, ("bilinear", "nearest"), "interpolation")
    if degrees % 360 == 0:
        return images
    return _nearest(images, degrees % 360) if interpolation == "nearest" else _bilinear(images, degrees)


def _bilinear(images: Tensor, degrees: float) -> Tensor:
    angle = math.radians(degrees)
    # Maps places in the result to places in the source, with y pointing down.
    inverse = images.new_tensor([[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]])
    grid = functional.affine_grid(inverse.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _nearest(images: Tensor, degrees: float) -> Tensor:
    height, width = images.shape[-2:]
    if degrees == 180 or (degrees in (90, 270) and height == width):
        return torch.rot90(images, int(degrees) // 90, (-2, -1))
    angle = math.radians(degrees)
    # Rounded as Pillow does, so that a quarter turn has exact zeros.
    cosine, sine = round(math.cos(angle), 15), round(math.sin(angle), 15)
    across, down = width / 2, height / 2
    rows, columns = torch.arange(height)[:, None], torch.arange(width)

    def place(along_x: float, along_y: float, centre: float) -> Tensor:
        start = centre - along_x * across - along_y * down + 0.5 * (along_x + along_y)
        fixed = [math.floor(value * 2**FRACTION_BITS + 0.5) for value in (start, along_x, along_y)]
        return (fixed[0] + fixed[1] * columns + fixed[2] * rows) >> FRACTION_BITS

    x, y = place(cosine, -sine, across), place(sine, cosine, down)
    inside = ((x >= 0) & (x < width) & (y >= 0) & (y < height)).to(images.device)
    source = (y.clamp(0, height - 1) * width + x.clamp(0, width - 1)).to(images.device)
    return images.flatten(-2)[..., source] * inside


def in_colour(pixels: Tensor, side: int) -> Tensor:
    """Return square colour images (n, 3, side, side) in uint8: grey channels repeated, other sizes resized.

    Resized as by Pillow's bilinear filter, first along rows and then along columns, rounded to bytes after each.
    """
    height = pixels.shape[2]
    for size in ((height, side), (side, side)):
        if tuple(pixels.shape[2:]) != size:
            values = functional.interpolate(pixels.float(), size, mode="bilinear", align_corners=False, antialias=True)
            # Halves are rounded up, as Pillow does: `round` would round them to even numbers.
            pixels = (values + 0.5).floor().clamp(0, 255).to(torch.uint8)
    return pixels.expand(-1, 3, -1, -1) if pixels.shape[1] == 1 else pixels
