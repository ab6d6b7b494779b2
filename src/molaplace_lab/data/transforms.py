"""Transformations of images: random flips and crops for training, rotations, and conversion of greyscale images to colour."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from molaplace.demo import rotate as rotate_bilinear
from molaplace.errors import importing
from molaplace.options import one_of

ANGLES = tuple(range(0, 181, 15))
"""Rotation angles, in degrees, for the paper's rotated MNIST."""


def flip_and_crop(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Mirror each image (n, channels, height, width) with probability 1/2, and shift it by up to `padding` pixels along each axis.

    The border is filled with 0. For a black border, as in the paper's recipe, pass uint8 pixels before normalisation.
    """
    count, channels, height, width = images.shape
    device = generator.device
    flipped = torch.randint(2, (count, 1), generator=generator, device=device).bool()
    top, left = torch.randint(2 * padding + 1, (2, count, 1), generator=generator, device=device)
    rows = top + torch.arange(height, device=device)
    columns = left + torch.arange(width, device=device)
    columns = torch.where(flipped, columns.flip(1), columns)
    # Index into each flattened image, because one gather over all channels is many times faster than a loop over images.
    padded = functional.pad(images, [padding] * 4)
    index = rows[:, :, None] * padded.shape[3] + columns[:, None, :]
    index = index.view(count, 1, height * width).expand(-1, channels, -1).to(images.device)
    return padded.flatten(2).gather(2, index).view_as(images)


def rotate(images: Tensor, degrees: float, interpolation: str = "bilinear") -> Tensor:
    """Rotate images (n, channels, height, width) counter-clockwise about their centres, and fill the uncovered corners with 0.

    `"nearest"` reproduces the paper's rotated MNIST: it matches Pillow's rotation, which torchvision uses by default. `"bilinear"` is
    intended for very small images: with only 8 x 8 pixels, taking the nearest pixel would break up the strokes.
    """
    if one_of(interpolation, ("bilinear", "nearest"), "interpolation") == "nearest":
        with importing("rotated images", "pillow", "lab"):
            from PIL import Image
        planes = (Image.fromarray(plane) for plane in images.flatten(0, 1).cpu().numpy())
        turned = np.stack([np.asarray(plane.rotate(degrees, Image.Resampling.NEAREST)) for plane in planes])
        return torch.from_numpy(turned).view_as(images).to(images.device)
    return rotate_bilinear(images, degrees)


def in_colour(pixels: Tensor, side: int) -> Tensor:
    """Convert images to uint8 colour images (n, 3, side, side); grey channels are repeated, and images of other sizes are resized.

    Resizing matches Pillow's bilinear filter, which is applied first along rows and then along columns, with rounding to bytes after
    each step.
    """
    height = pixels.shape[2]
    for size in ((height, side), (side, side)):
        if tuple(pixels.shape[2:]) != size:
            values = functional.interpolate(pixels.float(), size, mode="bilinear", align_corners=False, antialias=True)
            # Round halves up, as Pillow does; `round` would round them to even numbers.
            pixels = (values + 0.5).floor().clamp(0, 255).to(torch.uint8)
    return pixels.expand(-1, 3, -1, -1) if pixels.shape[1] == 1 else pixels
