"""The paper's split of a test set into images for tuning and images for testing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from molaplace.errors import OptionError
from molaplace.images import Images


def split_validation(images: Images, validation: int = 2000, seed: int = 42) -> tuple[Images, Images]:
    """Split a test set at random into `validation` images for tuning and the remaining images for testing, as in the paper."""
    if not 0 < validation < len(images):
        raise OptionError(
            f"must be between 1 and {len(images) - 1} for a set of {len(images)} images; got {validation}.",
            argument="validation",
        )
    sizes = [validation, len(images) - validation]
    places: Sequence[int] = range(len(images))
    generator = torch.Generator().manual_seed(seed)
    tune, report = torch.utils.data.random_split(places, sizes, generator=generator)  # type: ignore[arg-type, var-annotated]
    return images.part(tune.indices), images.part(report.indices)
