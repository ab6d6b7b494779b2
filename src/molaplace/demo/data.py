"""Data sets that require no download, and networks for them: scikit-learn's digits, two moons, and inputs that are not digits.

The digits are 1797 greyscale images of 8 x 8 pixels with values between 0 and 1. Inputs that are not digits have the same size and
value range, so neither property distinguishes them from digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from molaplace.data.digits import CLASSES, HIDDEN, SIDE, LabelledData
from molaplace.errors import importing
from molaplace.perceptrons import train_mlps

MOONS_CENTRE = (0.5, 0.25)

LEAST_CONTRAST = 0.1
"""Minimum difference in brightness between the lightest and the darkest pixel of a patch. The minimum excludes clear sky, which would
show only camera noise after stretching."""

LARGEST_ZOOM = 8
"""Largest downsampling factor; patches are downsampled by averaging. Before downsampling, patches have sides of 8 to 64 pixels, so
they show textures as well as whole petals and roofs."""

WEIGHT_DECAY = 1e-2

LOSS = partial(functional.cross_entropy, reduction="none")


def _sklearn(feature: str) -> Any:
    with importing(feature, "scikit-learn", "cli"):
        from sklearn import datasets
    return datasets


def train_digits(
    data: LabelledData,
    *,
    members: int = 5,
    seed: int = 0,
    epochs: int = 60,
    on_epoch: Callable[[int], None] = lambda epoch: None,
) -> list[nn.Sequential]:
    """Train networks like `digits_network`, which differ only in their seeds, with little regularisation."""
    return train_mlps(
        data.inputs.flatten(1),
        data.labels,
        CLASSES,
        LOSS,
        hidden=HIDDEN,
        members=members,
        seed=seed,
        epochs=epochs,
        batch_size=64,
        learning_rate=3e-3,
        weight_decay=WEIGHT_DECAY,
        bias=False,
        on_epoch=on_epoch,
    )


def two_moons(count: int, *, seed: int = 0) -> LabelledData:
    """Draw float32 points (count, 2) and their classes from two interleaved half circles of radius 1 near the origin.

    Gaussian noise with a standard deviation of 0.2 is added to each coordinate.
    """
    points, labels = _sklearn("the two moons").make_moons(count, noise=0.2, random_state=seed)
    centred = torch.from_numpy(points).float() - torch.tensor(MOONS_CENTRE, dtype=torch.float32, device="cpu")
    return LabelledData(centred, torch.from_numpy(labels).long())


def natural_patches(count: int, side: int = SIDE, *, seed: int = 0) -> Tensor:
    """Draw patches (count, 1, side, side) from scikit-learn's two sample photographs, and stretch each patch's values to [0, 1]."""
    datasets = _sklearn("natural-image patches")
    with importing("natural-image patches", "pillow", "cli"):  # scikit-learn imports Pillow only to load photographs
        photographs = datasets.load_sample_images().images
    grey = [torch.tensor(photograph, dtype=torch.float32, device="cpu").mean(-1) / 255 for photograph in photographs]
    generator = torch.Generator().manual_seed(seed)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator, device="cpu"))

    patches: list[Tensor] = []
    while len(patches) < count:
        photograph = grey[below(len(grey))]
        zoom = 1 + below(LARGEST_ZOOM)
        size = side * zoom
        top = below(photograph.shape[0] - size + 1)
        left = below(photograph.shape[1] - size + 1)
        patch = functional.avg_pool2d(photograph[None, top : top + size, left : left + size], zoom)
        low, high = patch.min(), patch.max()
        if high - low >= LEAST_CONTRAST:
            patches.append((patch - low) / (high - low))
    return torch.stack(patches)


def uniform_noise(count: int, side: int = SIDE, *, seed: int = 0) -> Tensor:
    """Draw float32 images (count, 1, side, side) whose pixels are independent and uniformly distributed between 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 1, side, side, generator=generator, dtype=torch.float32, device="cpu")


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Rotate images (n, channels, height, width) counter-clockwise about their centres by bilinear interpolation.

    The uncovered corners are filled with 0.
    """
    if degrees % 360 == 0:
        return images
    angle = math.radians(degrees)
    ratio = images.shape[2] / images.shape[3]
    # The matrix maps positions in the result to positions in the source, in units of half a side, with y pointing down.
    inverse = images.new_tensor(
        [[math.cos(angle), -math.sin(angle) * ratio, 0.0], [math.sin(angle) / ratio, math.cos(angle), 0.0]]
    )
    grid = functional.affine_grid(inverse.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
