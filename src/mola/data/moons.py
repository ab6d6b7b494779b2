"""Two interleaved half circles in the plane: small enough to see what a classifier believes everywhere."""

from __future__ import annotations

import torch

from mola.data.labelled import Labelled
from mola.errors import MissingExtraError

__all__ = ["two_moons"]

CENTRE = (0.5, 0.25)


def two_moons(count: int, *, noise: float = 0.2, seed: int = 0) -> Labelled:
    """Draw points of two half circles around the origin.

    Args:
        count: number of points, half of each class.
        noise: standard deviation of the scatter about the circles, whose radius is 1.
        seed: of the draw.

    Returns:
        Points (count, 2) in float32 and their classes.

    Raises:
        MissingExtraError: if scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import make_moons
    except ImportError as error:
        raise MissingExtraError(feature="the two moons", package="scikit-learn", extra="bench") from error
    points, labels = make_moons(count, noise=noise, random_state=seed)
    centred = torch.from_numpy(points).float() - torch.tensor(CENTRE, dtype=torch.float32)
    return Labelled(centred, torch.from_numpy(labels).long())
