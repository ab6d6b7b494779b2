"""Every file format written small and read back; broken, missing and foreign files; the real sets."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest
import torch
from PIL import Image

from molaplace.demo import load_digits, natural_patches, uniform_noise
from molaplace.errors import DataError, OptionError
from molaplace.images import NORMALISATIONS, Images, normalisation
from molaplace_lab.data.catalogue import DATASETS, data_directory, has_images, load_images
from molaplace_lab.data.cifar10_c import find_cifar10_c, load_cifar10_c, load_cifar10h
from molaplace_lab.data.transforms import flip_and_crop, in_colour, rotate
from molaplace_lab.suites.image_sources import split_validation
from tests.closeness import assert_close

MNIST_LIKE = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "kmnist": "KMNIST", "notmnist": "notMNIST"}
RANDOM = np.random.default_rng(0)


def idx(array):
    """The format as its description has it."""
    return bytes([0, 0, 8, array.ndim]) + b"".join(struct.pack(">I", side) for side in array.shape) + array.tobytes()


def grey(count, side=28):
    return RANDOM.integers(0, 256, (count, side, side), dtype=np.uint8)


def colour(count):
    return RANDOM.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)


def write_idx(folder, prefix, pixels, labels, packed=True):
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in ((f"{prefix}-images-idx3-ubyte", pixels), (f"{prefix}-labels-idx1-ubyte", labels)):
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / name).write_bytes(idx(array))


def records(labels, pixels):
    """CIFAR's binary format."""
    return b"".join(bytes(label) + image.tobytes() for label, image in zip(labels, pixels, strict=True))


def holds(images, pixels, labels):
    assert images.pixels.dtype == torch.uint8
    assert images.labels.dtype == torch.int64
    np.testing.assert_array_equal(images.pixels.numpy(), pixels)
    assert images.labels.tolist() == list(labels)
    assert images.pixels.is_contiguous()


def spoil(path, how):
    content = path.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes(byte ^ 0xFF for byte in content[middle : middle + 1]) + content[middle + 1 :]
    page = b"<html><title>404 Not Found</title></html>"
    path.write_bytes({"cut": content[:middle], "empty": b"", "flipped": flipped, "page": page}[how])


# --- one format after the other ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pattern", "packed"), [("{}/raw", True), ("{}", False)])
@pytest.mark.parametrize("name", MNIST_LIKE)
def test_idx_files_are_read_where_torchvision_leaves_them(tmp_path, name, pattern, packed):
    pixels = grey(7)
    labels = np.arange(7, dtype=np.uint8)
    write_idx(tmp_path / pattern.format(MNIST_LIKE[name]), "t10k", pixels, labels, packed)
    holds(load_images(name, "test", tmp_path), pixels[:, None], labels)


def test_emnist_is_upright(tmp_path):
    pixels = grey(3)
    classes = [0, 4, 9]
    write_idx(tmp_path / "EMNIST" / "raw", "emnist-letters-test", pixels, np.array(classes, np.uint8) + 1)
    holds(load_images("emnist-letters", "test", tmp_path), pixels.transpose(0, 2, 1)[:, None], classes)


def test_notmnist_is_read_from_the_published_images_without_the_empty_files(tmp_path):
    pixels = grey(4)
    for index, name in enumerate(["B/2.png", "A/1.png", "A/0.png", "J/0.png"]):
        path = tmp_path / "notMNIST_small" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[index]).save(path)
    (tmp_path / "notMNIST_small" / "A" / "RGVtb2NyYXRpY2FCb2xkT2xkc3R5bGUgQm9sZC50dGY=.png").touch()
    holds(load_images("notmnist", "test", tmp_path), pixels[[2, 1, 0, 3], None], [0, 0, 1, 9])


def test_cifar_binary(tmp_path):
    pixels = colour(15)
    labels = RANDOM.integers(0, 10, 15)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for batch in range(5):
        rows = slice(3 * batch, 3 * batch + 3)
        (folder / f"data_batch_{batch + 1}.bin").write_bytes(records([[label] for label in labels[rows]], pixels[rows]))
    holds(load_images("cifar10", "train", tmp_path), pixels, labels)
    holds(load_images("cifar10", "train", folder), pixels, labels)
    (folder / "data_batch_4.bin").write_bytes(b"\x01" * 3000)
    with pytest.raises(DataError, match=r"data_batch_4.bin contains 3,000 bytes.*multiple of 3,073"):
        load_images("cifar10", "train", tmp_path)
    (tmp_path / "cifar-100-binary").mkdir()
    fine = [0, 99, 50, 7]
    content = records([[19, label] for label in fine], pixels[:4])
    (tmp_path / "cifar-100-binary" / "test.bin").write_bytes(content)
    holds(load_images("cifar100", "test", tmp_path), pixels[:4], fine)


def write_svhn(path, pixels, labels):
    from scipy import io as matlab

    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".npz":
        np.savez_compressed(path, images=pixels.transpose(0, 2, 3, 1), labels=labels)
    else:
        matlab.savemat(path, {"X": pixels.transpose(2, 3, 1, 0), "y": labels[:, None]}, do_compression=True)


@pytest.mark.parametrize("form", ["mat", "npz"])
def test_svhn_arrays(tmp_path, form):
    pixels = colour(6)
    labels = np.array([10, 1, 9, 2, 10, 5], np.uint8)
    path = tmp_path / "svhn" / f"test_32x32.{form}"
    write_svhn(path, pixels, labels)
    holds(load_images("svhn", "test", tmp_path), pixels, [0, 1, 9, 2, 0, 5])
    for how in ("cut", "empty", "flipped", "page"):
        write_svhn(path, pixels, labels)
        spoil(path, how)
        with pytest.raises(DataError, match=rf"{path.name} \([\d,]+ bytes\) is not a complete file"):
            load_images("svhn", "test", tmp_path)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"images": np.zeros((5, 16, 32, 3), np.uint8)}, r"got \(5, 16, 32, 3\)"),
        ({"images": np.zeros((5, 32, 32, 3), np.float32)}, "float32"),
        ({"images": np.zeros((5, 32, 32, 3), np.uint8), "labels": np.zeros(4)}, r"expected uint8 images of shape \(4,"),
        ({"labels": np.zeros(5)}, "KeyError"),
    ],
)
def test_arrays_of_something_else_are_refused(tmp_path, arrays, words):
    path = tmp_path / "tinyimagenet" / "val_32x32.npz"
    path.parent.mkdir()
    pixels = colour(5)
    np.savez(path, images=pixels.transpose(0, 2, 3, 1))
    holds(load_images("tinyimagenet", "test", tmp_path), pixels, [0] * 5)
    np.savez(path, **arrays)
    with pytest.raises(DataError, match=words):
        load_images("tinyimagenet", "test", tmp_path)


def test_cifar10_c_has_its_severities_one_after_the_other(tmp_path):
    pixels = colour(20)
    labels = np.tile(RANDOM.integers(0, 10, 4), 5)
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    np.save(folder / "fog.npy", pixels.transpose(0, 2, 3, 1))
    np.save(folder / "labels.npy", labels)
    assert find_cifar10_c(["fog"], tmp_path) == folder
    assert find_cifar10_c(["fog", "snow"], tmp_path) is None
    for severity in range(1, 6):
        rows = slice(4 * severity - 4, 4 * severity)
        holds(load_cifar10_c(folder, "fog", severity), pixels[rows], labels[rows])
    for content, words in ((colour(11).transpose(0, 2, 3, 1), r"\(11, 32, 32, 3\)"), (np.zeros((20, 3)), "integers")):
        np.save(folder / "fog.npy", content)
        with pytest.raises(DataError, match=words):
            load_cifar10_c(folder, "fog", 1)
    spoil(folder / "fog.npy", "cut")
    with pytest.raises(DataError, match=r"not a complete \.npy"):
        load_cifar10_c(folder, "fog", 1)


def test_peoples_labels_must_agree_with_the_test_labels(tmp_path):
    labels = torch.arange(40) % 10
    counts = torch.nn.functional.one_hot(labels, 10).numpy() * 50
    assert load_cifar10h(labels, tmp_path) is None
    (tmp_path / "cifar10h").mkdir()
    np.save(tmp_path / "cifar10h" / "counts.npy", counts)
    assert torch.equal(load_cifar10h(labels, tmp_path).argmax(1), labels)
    for wrong in (counts[::-1], counts[1:], counts * 0):
        np.save(tmp_path / "cifar10h" / "counts.npy", wrong)
        with pytest.raises(DataError, match="counts"):
            load_cifar10h(labels, tmp_path)


# --- damage ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cut", "empty", "flipped", "page"])
def test_broken_gzip_files_are_named(tmp_path, how):
    write_idx(tmp_path / "MNIST", "t10k", grey(30), RANDOM.integers(0, 10, 30).astype(np.uint8))
    path = tmp_path / "MNIST" / "t10k-images-idx3-ubyte.gz"
    spoil(path, how)
    with pytest.raises(DataError, match=rf"(?s){path.name}.*(not a gzip|not an idx file).*download it again"):
        load_images("mnist", "test", tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (idx(grey(5))[:-1], "contains 3,935 bytes.*3,936 bytes for the shape \\(5, 28, 28\\)"),
        (idx(np.zeros(5, np.uint8)), "00 00 08 03, got 00 00 08 01"),
        (idx(grey(4)), "4 images, but .* 5 labels"),
        (idx(grey(5, 32)), "expected shape \\(1, 28, 28\\)"),
    ],
)
def test_idx_files_are_checked(tmp_path, content, words):
    write_idx(tmp_path / "MNIST", "t10k", grey(5), np.zeros(5, np.uint8), packed=False)
    (tmp_path / "MNIST" / "t10k-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(DataError, match=words):
        load_images("mnist", "test", tmp_path)


def test_labels_out_of_range_are_refused(tmp_path):
    write_idx(tmp_path / "mnist", "t10k", grey(2), np.array([0, 10], np.uint8))
    with pytest.raises(DataError, match="from 0 to 10"):
        load_images("mnist", "test", tmp_path)


# --- the data directory ----------------------------------------------------------------------------------------------------


def test_the_data_directory_is_given_or_taken_from_the_variable(tmp_path, monkeypatch):
    monkeypatch.delenv("MOLAPLACE_DATA", raising=False)
    with pytest.raises(DataError, match=r"--data DIR.*MOLAPLACE_DATA"):
        data_directory(None)
    monkeypatch.setenv("MOLAPLACE_DATA", str(tmp_path))
    assert data_directory(None) == tmp_path
    assert data_directory(tmp_path.parent) == tmp_path.parent
    monkeypatch.setenv("MOLAPLACE_DATA", str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"none \(MOLAPLACE_DATA\) is not a folder"):
        load_images("mnist", "test")


@pytest.mark.parametrize(("name", "split"), [(name, split) for name in DATASETS for split in DATASETS[name].splits])
def test_a_missing_set_lists_the_expected_paths(tmp_path, name, split):
    assert not has_images(name, split, tmp_path)
    with pytest.raises(DataError, match="is not in") as caught:
        load_images(name, split, tmp_path)
    wanted = DATASETS[name].splits[split]
    for file in wanted.files[0]:
        assert str(tmp_path / wanted.folders[0] / file) in str(caught.value)
    assert "http" in str(caught.value)


# --- parts, normalisation, augmentation ------------------------------------------------------------------------------------


def some_images(count):
    return Images(torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1), torch.arange(count))


def test_even_parts_reach_from_the_first_to_the_last():
    images = some_images(100)
    assert images.evenly(4).labels.tolist() == [0, 33, 66, 99]
    assert images.evenly(1).labels.tolist() == [0]
    assert images.evenly(100) is images.evenly(None) is images
    for count in range(1, 100):
        indices = images.evenly(count).labels
        assert len(indices) == count
        assert count < 2 or indices.diff().max() - indices.diff().min() <= 1
    assert images.part([3, 1]).pixels.flatten().tolist() == [3, 1]
    assert images.part(slice(2)).labels.tolist() == [0, 1]
    assert images.part(images.labels > 97).labels.tolist() == [98, 99]


def test_the_validation_split_is_random_splits():
    images = some_images(250)
    tune, report = split_validation(images, 50, seed=7)
    expected = torch.utils.data.random_split(images.labels, [50, 200], generator=torch.Generator().manual_seed(7))
    assert tune.labels.tolist() == [int(label) for label in expected[0]]
    assert report.labels.tolist() == [int(label) for label in expected[1]]
    assert torch.equal(tune.pixels.flatten().long(), tune.labels)


@pytest.mark.parametrize("name", NORMALISATIONS)
def test_normalisation_follows_its_formula(name):
    chosen = normalisation(name)
    pixels = torch.randint(256, (5, 3, 4, 4), dtype=torch.uint8)
    before = pixels.clone()
    inputs = chosen(pixels)
    assert inputs.dtype == torch.float32
    for channel in range(3):
        mean, std = (values[channel % len(values)] for values in (chosen.mean, chosen.std))
        assert_close(inputs[:, channel], (pixels[:, channel].double() / 255 - mean) / std)
    assert torch.equal(pixels, before)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_flip_and_crop_gives_every_shift_and_both_mirrors_alike(dtype):
    """Each result is exactly one of the 2 x 5 x 5 shifted images, all equally often; the generator decides."""
    image = torch.randint(1, 255, (2, 6, 7), dtype=torch.uint8).to(dtype)
    many = image.expand(5000, -1, -1, -1)
    results, again = (flip_and_crop(many, torch.Generator().manual_seed(3), 2) for _ in range(2))
    assert torch.equal(results, again)
    assert results.dtype == dtype
    crops = torch.nn.functional.pad(image, [2] * 4).unfold(1, 6, 1).unfold(2, 7, 1).permute(1, 2, 0, 3, 4).flatten(0, 1)
    counts = [int((results == crop).flatten(1).all(1).sum()) for crop in (*crops, *crops.flip(3))]
    assert sum(counts) == 5000
    assert 60 < min(counts) <= max(counts) < 145  # 100 expected; four and a half standard deviations


@pytest.mark.parametrize("angle", [*range(0, 181, 15), 7.3, 200, 270, 359.5, -33])
@pytest.mark.parametrize("shape", [(28, 28), (21, 32)])
def test_nearest_rotation_is_pillows(angle, shape):
    images = torch.randint(256, (3, 1, *shape), dtype=torch.uint8)
    turned = rotate(images, angle, "nearest")
    for image, result in zip(images, turned, strict=True):
        expected = np.array(Image.fromarray(image[0].numpy()).rotate(angle, Image.Resampling.NEAREST))
        np.testing.assert_array_equal(result[0].numpy(), expected)
    assert torch.equal(rotate(images.float(), angle, "nearest"), turned.float())
    with pytest.raises(OptionError, match="got 'cubic'"):
        rotate(images, angle, "cubic")


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 28, 28), (1, 32, 32), (1, 28, 31)])
def test_grey_images_become_what_openood_makes_of_them(shape):
    """Their preparation of MNIST for CIFAR-10: Pillow's `convert("RGB")`, then its bilinear resize to 32 x 32."""
    pixels = torch.randint(0, 256, (20, *shape), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    made = in_colour(pixels, 32)
    assert made.shape == (20, 3, 32, 32)
    for image, result in zip(pixels, made, strict=True):
        mode = Image.fromarray(image[0].numpy() if len(image) == 1 else image.permute(1, 2, 0).numpy())
        expected = np.array(mode.convert("RGB").resize((32, 32), Image.Resampling.BILINEAR))
        gap = np.abs(result.permute(1, 2, 0).numpy().astype(int) - expected)
        # Where weights are no fractions of a power of 2, Pillow's fixed-point numbers round a few pixels otherwise.
        assert gap.max() <= (shape[2] == 31)


# --- the demo's data --------------------------------------------------------------------------------------------------------


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
    wide = torch.rand(1, 2, 4, 8)
    torch.testing.assert_close(rotate(wide, 90)[..., 2:6], torch.rot90(wide[..., 2:6], 1, (2, 3)))


def test_patches_fill_the_range_of_the_digits_and_are_not_noise():
    patches = natural_patches(50, 8, seed=1)
    assert patches.shape == (50, 1, 8, 8)
    assert torch.equal(patches.amin((1, 2, 3)), torch.zeros(50, dtype=torch.float32))
    assert torch.equal(patches.amax((1, 2, 3)), torch.ones(50, dtype=torch.float32))
    assert torch.equal(patches, natural_patches(50, 8, seed=1))
    greys = [len((10_000 * patch).round().unique()) for patch in natural_patches(500, 8)]
    assert (
        min(greys) > 20
    )  # patches of almost one grey, whose few steps would be stretched to the whole range, are left out
    # Neighbouring pixels of a photograph are alike, those of noise are not.
    noise = uniform_noise(50, 8, seed=1)
    assert patches.diff(dim=3).abs().mean() < 0.6 * noise.diff(dim=3).abs().mean()


# --- the real sets ---------------------------------------------------------------------------------------------------------


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("name", "split", "count", "mean", "first"),
    [
        ("mnist", "train", 60_000, [0.1307], [5, 0, 4, 1, 9]),  # the well-known statistics
        ("mnist", "test", 10_000, [0.1325], [7, 2, 1, 0, 4]),
        ("fashion-mnist", "test", 10_000, [0.2868], [9, 2, 1, 1, 6]),
        ("kmnist", "test", 10_000, [0.1846], [2, 9, 3, 8, 3]),
        ("emnist-letters", "test", 20_800, [0.1722], [0, 0, 0, 0, 0]),
        ("notmnist", "test", 10_000, [0.4266], None),
        ("cifar10", "train", 50_000, [0.4914, 0.4822, 0.4465], [6, 9, 9, 4, 1]),
        ("cifar10", "test", 10_000, None, [3, 8, 8, 0, 6]),
        ("cifar100", "test", 5_000, None, [0, 0, 0, 0, 0]),
        ("svhn", "test", 10_000, None, [5, 2, 1, 0, 6]),
        ("tinyimagenet", "test", 5_000, None, [0, 0, 0, 0, 0]),
    ],
)
def test_the_real_sets_are_what_they_are_known_to_be(unpacked, name, split, count, mean, first):
    images = load_images(name, split, unpacked)
    assert len(images) == count
    if mean is not None:
        assert images.pixels.double().mean((0, 2, 3)).div(255).tolist() == pytest.approx(mean, abs=1e-4)
    assert first is None or images.labels[:5].tolist() == first
    assert images.labels.unique().tolist() == list(range(DATASETS[name].classes))
    if name not in ("mnist", "svhn"):
        assert images.labels.bincount().unique().numel() == 1  # balanced


@pytest.mark.real_data
def test_real_letters_are_upright(unpacked):
    """A V is open above and closed below; lying, it would be open on the left and have as much ink above as below."""
    letters = load_images("emnist-letters", "test", unpacked)
    mean = letters.part(letters.labels == ord("v") - ord("a")).pixels[:, 0].float().mean(0)
    assert 3 * mean[4:10, 12:16].sum() < mean[18:24, 12:16].sum()
