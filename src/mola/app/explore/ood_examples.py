"""Pictures that are none of the classes: noise, a pattern, a photograph. One sees what a confident answer is worth."""

from __future__ import annotations

import torch

from mola.app.explore.sight import Sight
from mola.app.explore.subject import Example

__all__ = ["ood_examples"]

SEED = 0


def ood_examples(sight: Sight) -> tuple[Example, ...]:
    """Noise, checks and, where scikit-learn brings it, a photograph of a flower.

    Args:
        sight: of the networks.

    Returns:
        Examples in the networks' size.
    """
    channels, height, width = sight.shape
    generator = torch.Generator().manual_seed(SEED)
    noise = torch.randint(0, 256, sight.shape, generator=generator).to(torch.uint8)
    side = max(1, min(height, width) // 4)
    rows, columns = torch.arange(height)[:, None] // side, torch.arange(width) // side
    checks = (255 * ((rows + columns) % 2)).to(torch.uint8).expand(channels, height, width).contiguous()
    made = [Example("noise", noise), Example("checks", checks)]
    try:
        from PIL import Image
        from sklearn import datasets

        photograph = Image.fromarray(datasets.load_sample_image("flower.jpg"))
    except ImportError:
        return tuple(made)  # one example less
    return (*made, Example("a flower", sight.fit(photograph)[0]))
