"""Data sets that require no download: scikit-learn's digits, two moons, and inputs that are not digits.

The digits are 1797 greyscale images of 8 x 8 pixels with values between 0 and 1. Inputs that are not digits have the same size and
value range, so neither property distinguishes them from digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from molaplace.errors import importing
from molaplace_lab.training.recipe import Labelled

SIDE = 8
CLASSES = 10
MOONS_CENTRE = (0.5, 0.25)

LEAST_CONTRAST = 0.1
"""Minimum difference in brightness between the lightest and the darkest pixel of a patch. The minimum excludes clear sky, which would
show only camera noise after stretching."""

LARGEST_ZOOM = 8
"""Largest downsampling factor; patches are downsampled by averaging. Before downsampling, patches have sides of 8 to 64 pixels, so
they show textures as well as whole petals and roofs."""


def _sklearn(feature: str) -> Any:
    with importing(feature, "scikit-learn", "bench"):
        from sklearn import datasets
    return datasets


@dataclass(frozen=True)
class Digits:
    """The digits in three parts; inputs are float32 tensors (n, 1, 8, 8) with values between 0 and 1."""

    train: Labelled
    val: Labelled
    test: Labelled


def load_digits(seed: int = 0) -> Digits:
    """Split the digits at random into 1000 training, 297 validation and 500 test images."""
    pixels, target = _sklearn("the handwritten digits").load_digits(return_X_y=True)
    inputs = torch.from_numpy(pixels).float().div(16).reshape(-1, 1, SIDE, SIDE)
    labels = torch.from_numpy(target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return Digits(*(Labelled(inputs[rows], labels[rows]) for rows in order.tensor_split([1000, 1297])))


def two_moons(count: int, *, noise: float = 0.2, seed: int = 0) -> Labelled:
    """Draw float32 points (count, 2) and their classes from two interleaved half circles of radius 1 near the origin.

    `noise` is the standard deviation of the Gaussian noise that is added to each coordinate.
    """
    points, labels = _sklearn("the two moons").make_moons(count, noise=noise, random_state=seed)
    centred = torch.from_numpy(points).float() - torch.tensor(MOONS_CENTRE, dtype=torch.float32)
    return Labelled(centred, torch.from_numpy(labels).long())


def natural_patches(count: int, side: int, *, seed: int = 0) -> Tensor:
    """Draw patches (count, 1, side, side) from scikit-learn's two sample photographs, and stretch each patch's values to [0, 1]."""
    datasets = _sklearn("natural-image patches")
    with importing("natural-image patches", "pillow", "bench"):  # scikit-learn imports Pillow only to load photographs
        photographs = datasets.load_sample_images().images
    grey = [torch.tensor(photograph, dtype=torch.float32).mean(-1) / 255 for photograph in photographs]
    generator = torch.Generator().manual_seed(seed)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    patches: list[Tensor] = []
    while len(patches) < count:
        photograph, zoom = grey[below(len(grey))], 1 + below(LARGEST_ZOOM)
        size = side * zoom
        top, left = below(photograph.shape[0] - size + 1), below(photograph.shape[1] - size + 1)
        patch = functional.avg_pool2d(photograph[None, top : top + size, left : left + size], zoom)
        low, high = patch.min(), patch.max()
        if high - low >= LEAST_CONTRAST:
            patches.append((patch - low) / (high - low))
    return torch.stack(patches)


def uniform_noise(count: int, side: int, *, seed: int = 0) -> Tensor:
    """Draw float32 images (count, 1, side, side) whose pixels are independent and uniformly distributed between 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 1, side, side, generator=generator, dtype=torch.float32)
