"""The demo's data: complete, in range, and the same for the same seed."""

from __future__ import annotations

import torch

from mola.lab.data.embedded import load_digits, natural_patches, uniform_noise
from mola.lab.data.transforms import rotate


def test_the_parts_of_the_digits_are_disjoint_and_complete():
    digits = load_digits(seed=3)
    parts = [digits.train, digits.val, digits.test]
    assert [len(part) for part in parts] == [1000, 297, 500]
    everything = torch.cat([part.inputs for part in parts]).flatten(1)
    assert len(everything.unique(dim=0)) == 1797
    assert (everything.min(), everything.max()) == (0, 1)


def test_a_quarter_turn_is_counter_clockwise_and_four_are_none():
    image = torch.zeros(1, 1, 8, 8)
    image[0, 0, :2, 5:] = 1  # top right
    torch.testing.assert_close(rotate(image, 90), torch.rot90(image, 1, (2, 3)))  # to the top left
    turned = image
    for _ in range(4):
        turned = rotate(turned, 90)
    torch.testing.assert_close(turned, image)
    assert rotate(image, 0) is image


def test_patches_fill_the_range_of_the_digits_and_are_not_noise():
    patches = natural_patches(50, 8, seed=1)
    assert patches.shape == (50, 1, 8, 8)
    assert torch.equal(patches.amin((1, 2, 3)), torch.zeros(50, dtype=torch.float32))
    assert torch.equal(patches.amax((1, 2, 3)), torch.ones(50, dtype=torch.float32))
    assert torch.equal(patches, natural_patches(50, 8, seed=1))
    # Neighbouring pixels of a photograph are alike, those of noise are not.
    noise = uniform_noise(50, 8, seed=1)
    assert patches.diff(dim=3).abs().mean() < 0.6 * noise.diff(dim=3).abs().mean()
