"""Folders of images: order, sizes, laziness, broken files."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import molaplace as mola
from molaplace.errors import DataError
from molaplace.images import NORMALISATIONS, Preparation, image_files, open_folder

RANDOM = np.random.default_rng(0)


def picture(width, height, mode="RGB"):
    shape = (height, width) if mode == "L" else (height, width, 3)
    return Image.fromarray(RANDOM.integers(0, 256, shape, dtype=np.uint8))


def save(image, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return np.array(image)


@pytest.fixture
def pets(tmp_path):
    """Eight pictures of 6 x 5 pixels in three classes, saved in no order."""
    names = [
        "cat/b.png",
        "ant/2.PNG",
        "cat/a.png",
        "bee/z/deep.png",
        "ant/1.png",
        "bee/c.png",
        "cat/c.png",
        "ant/3.png",
    ]
    arrays = {name: save(picture(6, 5), tmp_path / name) for name in names}
    (tmp_path / "ant" / "notes.txt").write_text("no image")
    (tmp_path / "ant" / ".hidden.png").write_text("no image")
    (tmp_path / ".cache").mkdir()
    return tmp_path, arrays


def test_classes_and_images_are_in_the_order_of_their_names(pets):
    root, arrays = pets
    opened = open_folder(root)
    names = sorted(arrays)
    assert [str(path.relative_to(root)) for path in opened.paths] == names
    assert opened.classes == ("ant", "bee", "cat")
    assert opened.labels.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    images = opened.load()
    np.testing.assert_array_equal(images.pixels.numpy(), np.stack([arrays[name].transpose(2, 0, 1) for name in names]))
    assert opened.part([7, 0]).labels.tolist() == [2, 0]
    assert torch.equal(opened.part([7, 0]).load().pixels, images.pixels[[7, 0]])
    assert opened.evenly(3).labels.tolist() == [0, 1, 2]
    assert opened.evenly(100) is opened


def test_links_are_followed_and_none_vanishes(pets, tmp_path_factory):
    root, arrays = pets
    linked = tmp_path_factory.mktemp("linked")
    (linked / "ant").symlink_to(root / "ant")
    (linked / "bee").mkdir()
    (linked / "bee" / "z").symlink_to(root / "bee" / "z")
    (linked / "bee" / "all").symlink_to(linked)  # a loop
    (linked / "cat").mkdir()
    (linked / "cat" / "a.png").symlink_to(root / "cat" / "a.png")
    expected = ["ant/1.png", "ant/2.PNG", "ant/3.png", "bee/z/deep.png", "cat/a.png"]
    assert [str(path.relative_to(linked)) for path in image_files(linked)] == expected
    opened = open_folder(linked)
    assert opened.labels.tolist() == [0, 0, 0, 1, 2]
    pixels = np.stack([arrays[name].transpose(2, 0, 1) for name in expected])
    np.testing.assert_array_equal(opened.load().pixels.numpy(), pixels)


@pytest.mark.parametrize("name", ["ant/broken.png", "ant/broken", "ant/moving.gif"])
def test_images_that_cannot_be_read_are_named(pets, name):
    root, _ = pets
    if name.endswith(".gif"):
        picture(6, 5).save(root / name)
    else:
        (root / name).symlink_to(root / "gone")
    assert root / name in image_files(root)
    with pytest.raises(DataError, match=f"{name}.*(does not exist|convert it)"):
        open_folder(root).load()


def test_a_broken_link_to_a_class_is_named(pets):
    (pets[0] / "dog").symlink_to(pets[0] / "gone")
    with pytest.raises(DataError, match=r"dog is a link to .*gone, which does not exist"):
        open_folder(pets[0])


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["RGB", "I;16"])
def test_images_are_turned_as_their_orientation_says(tmp_path, orientation, mode):
    upright = np.arange(30, dtype=np.uint16).reshape(5, 6) * 2000
    image = (
        Image.fromarray(upright) if mode == "I;16" else Image.fromarray((upright >> 8).astype(np.uint8)).convert("RGB")
    )
    stored = {
        1: lambda image: image,
        2: lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: lambda image: image.transpose(Image.Transpose.ROTATE_180),
        4: lambda image: image.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: lambda image: image.transpose(Image.Transpose.TRANSPOSE),
        6: lambda image: image.transpose(Image.Transpose.ROTATE_90),
        7: lambda image: image.transpose(Image.Transpose.TRANSVERSE),
        8: lambda image: image.transpose(Image.Transpose.ROTATE_270),
    }[orientation](image)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "a.png", exif=exif)
    pixels = open_folder(tmp_path, Preparation(mode="L")).load().pixels[0, 0]
    np.testing.assert_array_equal(pixels.numpy(), (upright >> 8).astype(np.uint8))


@pytest.mark.parametrize(("size", "workers"), [(1, 3), (3, 1), (8, 3), (100, 1)])
def test_batches_hold_every_image_once_and_can_be_read_again(pets, size, workers):
    opened = open_folder(pets[0])
    expected = opened.load()
    batches = opened.batches(size, workers=workers)
    for _ in range(2):
        read = list(batches)
        assert len(read) == len(batches) == -(-8 // size)
        assert all(len(labels) <= size for _, labels in read)
        assert torch.equal(torch.cat([pixels for pixels, _ in read]), expected.pixels)
        assert torch.equal(torch.cat([labels for _, labels in read]), expected.labels)
    normalise = NORMALISATIONS["imagenet"]
    inputs = torch.cat([batch for batch, _ in opened.batches(size, normalise, workers)])
    assert torch.equal(inputs, normalise(expected.pixels))


@pytest.mark.parametrize(("width", "height"), [(50, 30), (30, 50), (31, 47), (40, 40), (100, 13), (7, 9), (46, 40)])
def test_resize_and_crop_are_torchvisions(tmp_path, width, height):
    image = picture(width, height)
    save(image, tmp_path / "a" / "x.png")
    result = open_folder(tmp_path, Preparation(resize=20, crop=16)).load().pixels[0]
    size = (20, int(20 * height / width)) if width <= height else (int(20 * width / height), 20)
    resized = image.resize(size, Image.Resampling.BILINEAR)
    left = round((resized.width - 16) / 2)
    top = round((resized.height - 16) / 2)
    expected = np.array(resized)[top : top + 16, left : left + 16].transpose(2, 0, 1)
    np.testing.assert_array_equal(result.numpy(), expected)


@pytest.mark.parametrize("damage", ["cut", "empty", "text"])
def test_broken_images_are_named(tmp_path, damage):
    for index in range(5):
        save(picture(64, 64), tmp_path / "a" / f"{index}.jpg")
    path = tmp_path / "a" / "3.jpg"
    path.write_bytes({"cut": path.read_bytes()[:700], "empty": b"", "text": b"not found"}[damage])
    reader = iter(open_folder(tmp_path).batches(2))
    next(reader)  # what comes before it can be read
    with pytest.raises(mola.errors.DataError, match=r"a/3.jpg: cannot be decoded \([\d,]+ bytes\)"):
        list(reader)


def test_folders_that_hold_nothing_are_refused(tmp_path):
    with pytest.raises(mola.errors.DataError, match="is not a folder"):
        open_folder(tmp_path / "none")
    (tmp_path / "a").mkdir()
    for folder in (tmp_path, tmp_path / "a"):
        with pytest.raises(mola.errors.DataError, match="contains no images"):
            open_folder(folder)
