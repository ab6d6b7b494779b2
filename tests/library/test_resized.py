"""Networks of one mixture may take images of different sizes."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import mola
from tests.closeness import assert_close


class Fixed(nn.Module):
    """A network that takes images of one size alone."""

    def __init__(self, size, classes=3):
        super().__init__()
        self.size, self.hidden, self.head = size, nn.Linear(3 * size * size, 8), nn.Linear(8, classes)

    def forward(self, images):
        assert images.shape[1:] == (3, self.size, self.size)
        return self.head(self.hidden(images.flatten(1)).tanh())


def images(count=24, side=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 3, side, side, generator=generator), torch.randint(3, (count,), generator=generator)


@pytest.fixture
def networks():
    torch.manual_seed(0)
    return [mola.Resized(Fixed(12), 12, crop=0.8), mola.Resized(Fixed(24), 24), mola.Resized(Fixed(20), 20)]


@pytest.mark.parametrize(
    ("size", "interpolation"), [(12, "bilinear"), (16, "bilinear"), (31, "bilinear"), (12, "bicubic"), (16, "bicubic")]
)
def test_images_are_resized_as_by_pillow(size, interpolation):
    # Grey enough that no overshoot is clipped.
    pixels = np.random.default_rng(0).integers(90, 160, (20, 20, 3), dtype=np.uint8)
    filters = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
    expected = np.asarray(Image.fromarray(pixels[2:18, 2:18]).resize((size, size), filters[interpolation]))
    network = mola.Resized(nn.Identity(), size, crop=0.8, mean=0.25, std=0.5, interpolation=interpolation)
    seen = network.inputs(torch.from_numpy(pixels).permute(2, 0, 1)[None].double() / 255)
    # Pillow rounds to bytes after rows and after columns.
    np.testing.assert_allclose((seen[0].permute(1, 2, 0) * 0.5 + 0.25) * 255, expected, atol=1.5)


def test_a_mixture_of_sizes_is_the_mixture_of_its_networks(networks):
    x, y = images()
    posterior = mola.fit(networks, [(x, y)], progress=False)
    inner = [mola.fit(one.network, [(one.inputs(x), y)], progress=False) for one in networks]
    expected = torch.stack([one(network.inputs(x)) for one, network in zip(inner, networks, strict=True)]).mean(0)
    torch.testing.assert_close(posterior(x), expected)


def test_saved_and_loaded_it_says_the_same(networks, tmp_path):
    x, y = images()
    posterior = mola.fit(networks, [(x, y)], progress=False)
    loaded = mola.load(posterior.save(tmp_path / "posterior"), networks)
    assert_close(loaded(x), posterior(x))


@pytest.mark.slow
def test_exported_it_says_the_same(networks, tmp_path):
    x, y = (one.float() if one.is_floating_point() else one for one in images())
    networks = [one.float() for one in networks[1:]]
    posterior = mola.fit(networks, [(x, y)], progress=False)
    path = mola.export_torch(posterior, tmp_path / "model.pt2", x[:2], outputs=["probabilities"]).path
    assert_close(mola.load_exported(path, trust=True)(x)["probabilities"], posterior(x))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 0}, "size must be at least 1"),
        ({"size": 4, "crop": 1.5}, "crop a share above 0"),
        ({"size": 4, "std": 0.0}, "every std must be above 0"),
        ({"size": 4, "interpolation": "nearest"}, "interpolation must be one of bilinear, bicubic"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options, words):
    with pytest.raises(mola.OptionError, match=words):
        mola.Resized(nn.Identity(), **options)


def test_what_is_no_square_image_is_refused():
    with pytest.raises(mola.DataError, match="expected square images"):
        mola.Resized(nn.Identity(), 4)(torch.rand(2, 3, 5, 6))
