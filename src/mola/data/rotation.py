"""Rotated images: a shift that grows by degrees."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional

__all__ = ["rotate"]


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Turn images counter-clockwise about their centre, filling with 0.

    Bilinear rather than nearest interpolation: at 8 x 8 pixels the nearest pixel tears strokes apart, which would test
    tearing rather than turning.

    Args:
        images: (n, channels, height, width).
        degrees: the angle; 0 returns the images themselves.

    Returns:
        Images of the same shape.
    """
    if degrees % 360 == 0:
        return images
    angle = math.radians(degrees)
    # Maps places in the result to places in the source, with y pointing down.
    inverse = images.new_tensor([[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]])
    grid = functional.affine_grid(inverse.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
