"""The layouts of ImageNet, ImageNet-C and LSUN: folders of images."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

import molaplace as mola
from molaplace_lab.data.catalogue import load_images
from molaplace_lab.data.folder import CENTRE_224, imagenet_c_folder, open_imagenet

RANDOM = np.random.default_rng(0)


def picture(width, height, mode="RGB"):
    shape = (height, width) if mode == "L" else (height, width, 3)
    return Image.fromarray(RANDOM.integers(0, 256, shape, dtype=np.uint8))


def save(image, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return np.array(image)


# --- ImageNet ------------------------------------------------------------------------------------------------------------


def test_all_synsets_are_numbered_by_name(tmp_path):
    for number in range(1000):
        (tmp_path / "imagenet" / "val" / f"n{7 * number:08}").mkdir(parents=True)
    for number in (3, 500, 999):
        save(picture(3, 3), tmp_path / "imagenet" / "val" / f"n{7 * number:08}" / "x.png")
    opened = open_imagenet(tmp_path)
    assert opened.labels.tolist() == [3, 500, 999]
    assert opened.prepare == CENTRE_224
    (tmp_path / "imagenet" / "val" / "n00000007").rmdir()
    with pytest.raises(mola.errors.DataError, match=r"has 999 subfolders.*synsets.txt"):
        open_imagenet(tmp_path)


def test_a_file_of_synsets_numbers_a_part_of_them(tmp_path):
    for split in ("val", "train"):
        for synset in ("n05", "n20"):
            save(picture(300, 260), tmp_path / "ImageNet" / split / synset / "x.png")
    lines = "".join(f"n{number:02} some words\n" for number in range(30))
    (tmp_path / "ImageNet" / "synsets.txt").write_text(lines)
    for split in ("val", "train"):
        opened = open_imagenet(tmp_path, split)
        assert opened.labels.tolist() == [5, 20]
        assert len(opened.classes) == 30
    assert opened.load().pixels.shape == (2, 3, 224, 224)
    (tmp_path / "ImageNet" / "synsets.txt").write_text("n05\nn20\nn05\n")
    with pytest.raises(mola.errors.DataError, match="lists a synset more than once"):
        open_imagenet(tmp_path)


@pytest.mark.parametrize("between", ["", "weather"])
def test_imagenet_c_is_found_by_corruption_and_severity(tmp_path, between):
    folder = tmp_path / "imagenet-c" / between / "fog" / "5"
    folder.mkdir(parents=True)
    assert imagenet_c_folder("fog", 5, tmp_path) == folder
    assert imagenet_c_folder("fog", 2, tmp_path) is None


# --- LSUN ----------------------------------------------------------------------------------------------------------------


def test_lsun_is_shrunk_without_regard_to_proportions(tmp_path):
    image = picture(70, 40)
    save(image, tmp_path / "lsun" / "classroom_val" / "b.png")
    save(picture(40, 90), tmp_path / "lsun" / "classroom_val" / "c.png")
    images = load_images("lsun", "test", tmp_path)
    expected = np.array(image.resize((32, 32), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    np.testing.assert_array_equal(images.pixels[0].numpy(), expected)
    assert images.labels.tolist() == [0, 0]
