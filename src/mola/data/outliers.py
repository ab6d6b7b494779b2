"""Inputs that are no digits, in the digits' size and value range, so that neither gives them away."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mola.errors import MissingExtraError

__all__ = ["natural_patches", "uniform_noise"]

LEAST_CONTRAST = 0.1
"""Patches of clear sky, whose brightness varies less than this, are passed over: stretched, they are camera noise."""

LARGEST_ZOOM = 8
"""Patches are squares of 8 to 64 pixels, averaged down: from texture to whole petals and roofs."""


def natural_patches(count: int, side: int, *, seed: int = 0) -> Tensor:
    """Patches of scikit-learn's two sample photographs, each stretched to fill the range from 0 to 1.

    Args:
        count: number of patches.
        side: height and width.
        seed: of their places and sizes.

    Returns:
        Images (count, 1, side, side) in float32.

    Raises:
        MissingExtraError: if scikit-learn, or pillow which decodes the photographs, is not installed.
    """
    try:
        from sklearn import datasets

        photographs = datasets.load_sample_images().images
    except ImportError as error:
        raise MissingExtraError(
            feature="natural-image patches", package="scikit-learn with pillow", extra="bench"
        ) from error
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
    """Images (count, 1, side, side) in float32 whose pixels are independent and uniform between 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 1, side, side, generator=generator, dtype=torch.float32)
