"""Every file format written small and read back; broken, missing and foreign files; the real sets."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import pickle
import struct
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

import mola
from mola.lab.data.catalogue import DATASETS, data_directory, has_images, load_images
from mola.lab.data.cifar10_c import load_cifar10_c
from mola.lab.data.files import Original, verify
from mola.lab.data.images import NORMALISATIONS, Images, Normalisation, normalisation, split_validation
from mola.lab.data.readers import read_plain_pickle
from mola.lab.data.transforms import flip_and_crop, in_colour, rotate
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


def holds(images, pixels, labels):
    assert images.pixels.dtype == torch.uint8
    assert images.labels.dtype == torch.int64
    np.testing.assert_array_equal(images.pixels.numpy(), pixels)
    assert images.labels.tolist() == list(labels)
    assert images.pixels.is_contiguous()


# --- MNIST and its relatives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("place", ["{}/raw", "{}"])
@pytest.mark.parametrize("name", MNIST_LIKE)
def test_idx_files_are_read_where_torchvision_leaves_them(tmp_path, name, place, packed):
    pixels, labels = grey(7), np.arange(7, dtype=np.uint8)
    write_idx(tmp_path / place.format(MNIST_LIKE[name]), "t10k", pixels, labels, packed)
    holds(load_images(name, "test", tmp_path), pixels[:, None], labels)


def test_each_split_has_its_own_files(tmp_path):
    for prefix, count in (("train", 5), ("t10k", 3)):
        write_idx(tmp_path / "MNIST" / "raw", prefix, grey(count), np.zeros(count, np.uint8))
    assert len(load_images("mnist", "train", tmp_path)) == 5
    assert len(load_images("mnist", "test", tmp_path)) == 3


def test_a_flat_folder_counts_only_if_its_name_or_the_checksums_say_what_it_is(tmp_path, monkeypatch):
    """MNIST and Fashion-MNIST have the same file names: without a folder's name, nobody knows which it is."""
    pixels, labels = grey(4), np.arange(4, dtype=np.uint8)
    write_idx(tmp_path, "t10k", pixels, labels)
    with pytest.raises(mola.DataError, match=r"MNIST \(test\) is not in"):
        load_images("mnist", "test", tmp_path)
    write_idx(tmp_path / "fashion-mnist", "t10k", pixels, labels)
    holds(load_images("fashion-mnist", "test", tmp_path / "fashion-mnist"), pixels[:, None], labels)
    with pytest.raises(mola.DataError, match=r"MNIST \(test\) is not in"):
        load_images("mnist", "test", tmp_path / "fashion-mnist")
    write_idx(tmp_path / "KMNIST" / "raw", "t10k", pixels, labels, packed=False)
    holds(load_images("kmnist", "test", tmp_path / "KMNIST" / "raw"), pixels[:, None], labels)
    known = tuple(
        Original(path.name, hashlib.md5(path.read_bytes()).hexdigest()) for path in sorted(tmp_path.glob("*.gz"))
    )
    monkeypatch.setitem(DATASETS["mnist"].originals, "test", known)
    holds(load_images("mnist", "test", tmp_path), pixels[:, None], labels)


@pytest.mark.parametrize(("part", "first"), [("letters", 1), ("digits", 0)])
def test_emnist_stands_upright_unless_asked_otherwise(tmp_path, part, first):
    pixels, classes = grey(3), [0, 4, 9]
    labels = np.array(classes, np.uint8) + first
    write_idx(tmp_path / "EMNIST" / "raw", f"emnist-{part}-test", pixels, labels)
    holds(load_images(f"emnist-{part}", "test", tmp_path), pixels.transpose(0, 2, 1)[:, None], classes)
    holds(load_images(f"emnist-{part}-untransposed", "test", tmp_path), pixels[:, None], classes)


def test_notmnist_is_read_from_the_published_images_without_the_empty_ones(tmp_path):
    pixels = grey(4)
    for index, name in enumerate(["B/2.png", "A/1.png", "A/0.png", "J/0.png"]):
        path = tmp_path / "notMNIST_small" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[index]).save(path)
    (tmp_path / "notMNIST_small" / "A" / "RGVtb2NyYXRpY2FCb2xkT2xkc3R5bGUgQm9sZC50dGY=.png").touch()
    holds(load_images("notmnist", "test", tmp_path), pixels[[2, 1, 0, 3], None], [0, 0, 1, 9])


def spoil(path, how):
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "flipped":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :])
    elif how == "page":
        path.write_bytes(b"<html><title>404 Not Found</title></html>")


@pytest.mark.parametrize("how", ["cut", "empty", "flipped", "page"])
@pytest.mark.parametrize("which", ["images-idx3", "labels-idx1"])
def test_broken_gzip_files_are_named(tmp_path, which, how):
    write_idx(tmp_path / "MNIST", "t10k", grey(30), RANDOM.integers(0, 10, 30).astype(np.uint8))
    path = tmp_path / "MNIST" / f"t10k-{which}-ubyte.gz"
    spoil(path, how)
    with pytest.raises(mola.DataError, match=rf"(?s){path.name}.*(not a whole gzip|no idx file).*fetch it again"):
        load_images("mnist", "test", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx(grey(5))[:-1], "holds 3,935 bytes where its header says 3,936 bytes for \\(5, 28, 28\\)"),
        (idx(grey(5)) + b"x", "holds 3,937 bytes where its header says 3,936"),
        (idx(grey(5))[:9], "holds 9 bytes where its header says at least 16 bytes"),
        (idx(np.zeros(5, np.uint8)), "begin with 00 00 08 03, got 00 00 08 01"),
        (b"", "got nothing"),
        (idx(grey(4)), "holds 4 images but .* 5 labels"),
        (idx(grey(5, 32)), "5 images of shape \\(1, 32, 32\\), expected some of \\(1, 28, 28\\)"),
    ],
)
def test_idx_files_are_checked(tmp_path, content, message):
    write_idx(tmp_path / "MNIST", "t10k", grey(5), np.zeros(5, np.uint8), packed=False)
    (tmp_path / "MNIST" / "t10k-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(mola.DataError, match=message):
        load_images("mnist", "test", tmp_path)


def test_labels_out_of_range_are_refused(tmp_path):
    write_idx(tmp_path / "MNIST", "t10k", grey(2), np.array([0, 10], np.uint8))
    with pytest.raises(mola.DataError, match="labels from 0 to 10, counted from 0, expected 0 to 9"):
        load_images("mnist", "test", tmp_path)
    write_idx(tmp_path, "emnist-letters-test", grey(2), np.array([0, 26], np.uint8))
    with pytest.raises(mola.DataError, match="labels from -1 to 25, counted from 0, expected 0 to 25"):
        load_images("emnist-letters", "test", tmp_path)


# --- CIFAR -----------------------------------------------------------------------------------------------------------------


def records(labels, pixels):
    return b"".join(bytes(label) + image.tobytes() for label, image in zip(labels, pixels, strict=True))


def test_cifar10_binary(tmp_path):
    pixels, labels = colour(15), RANDOM.integers(0, 10, 15)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for batch in range(5):
        rows = slice(3 * batch, 3 * batch + 3)
        (folder / f"data_batch_{batch + 1}.bin").write_bytes(records([[label] for label in labels[rows]], pixels[rows]))
    holds(load_images("cifar10", "train", tmp_path), pixels, labels)
    holds(load_images("cifar10", "train", folder), pixels, labels)
    with pytest.raises(mola.DataError, match=r"(?s)CIFAR-10 \(test\) is not in.*test_batch.bin.*md5 c32a1d4a"):
        load_images("cifar10", "test", tmp_path)
    (folder / "data_batch_4.bin").write_bytes(b"\x01" * 3000)
    with pytest.raises(mola.DataError, match=r"data_batch_4.bin holds 3,000 bytes, expected a multiple of 3,073"):
        load_images("cifar10", "train", tmp_path)
    (folder / "data_batch_4.bin").unlink()
    with pytest.raises(mola.DataError, match=r"Only .*data_batch_1.bin, .*data_batch_5.bin is there"):
        load_images("cifar10", "train", tmp_path)


def test_cifar100_takes_the_fine_label(tmp_path):
    pixels, fine = colour(4), [0, 99, 50, 7]
    (tmp_path / "cifar-100-binary").mkdir()
    (tmp_path / "cifar-100-binary" / "test.bin").write_bytes(records([[19, label] for label in fine], pixels))
    holds(load_images("cifar100", "test", tmp_path), pixels, fine)


def python2_pickle(items, array):
    """A batch file as Python 2's cPickle wrote CIFAR's: version 2, texts without Unicode."""

    def text(value):
        value = value.encode("latin-1") if isinstance(value, str) else value
        short = len(value) < 256
        return (b"U" + bytes([len(value)]) if short else b"T" + struct.pack("<i", len(value))) + value

    def number(value):
        return b"K" + bytes([value]) if 0 <= value < 256 else b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\nq\x05" + text("u1") + b"K\x00K\x01\x87Rq\x06(K\x03" + text("|") + b"NNN" + number(-1) * 2
    dtype += b"K\x00tb"
    data = b"cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85" + text("b") + b"\x87Rq\x04"
    data += (
        b"(K\x01\x8a\x01"
        + bytes([array.shape[0]])
        + b"M"
        + struct.pack("<H", array.shape[1])
        + b"\x86"
        + dtype
        + b"\x89"
    )
    data += text(array.tobytes()) + b"tb"
    entries = text("data") + data
    for key, value in items.items():
        entries += text(key)
        if isinstance(value, list):
            entries += b"](" + b"".join(number(item) if isinstance(item, int) else text(item) for item in value) + b"e"
        else:
            entries += text(value)
    return b"\x80\x02}q\x01(" + entries + b"u."


@pytest.mark.parametrize(
    ("name", "folder", "file", "key"),
    [
        ("cifar10", "cifar-10-batches-py", "test_batch", "labels"),
        ("cifar100", "cifar-100-python", "test", "fine_labels"),
    ],
)
def test_cifar_python_files_are_read_without_unpickling(tmp_path, name, folder, file, key):
    pixels, labels = colour(5), [0, 3, 9, 1, 1]
    rows = pixels.reshape(5, -1)
    content = python2_pickle({key: labels, "batch_label": "testing batch 1 of 1", "filenames": ["a.png"] * 5}, rows)
    # The standard unpickler agrees that this is such a file.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some releases of NumPy complain of the old form
        standard = pickle.loads(content, encoding="bytes")
    np.testing.assert_array_equal(standard[b"data"], rows)
    assert standard[key.encode()] == labels
    (tmp_path / folder).mkdir()
    (tmp_path / folder / file).write_bytes(content)
    holds(load_images(name, "test", tmp_path), pixels, labels)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_later_pickles_of_the_same_data_are_read_too(tmp_path, protocol):
    batch = {"data": np.asfortranarray(colour(3).reshape(3, -1)), "labels": [1, 2, 300], "names": ["ä", "b"], "x": None}
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps(batch, protocol=protocol))
    if protocol == 2:  # bytes are written as a call of a text's encode
        with pytest.raises(mola.DataError, match=r"it names _codecs.encode, which data do not need"):
            read_plain_pickle(path)
        return
    if protocol == 5:  # another way of rebuilding arrays
        with pytest.raises(mola.DataError, match="not plain pickled data"):
            read_plain_pickle(path)
        return
    read = read_plain_pickle(path)
    np.testing.assert_array_equal(read.pop("data"), batch.pop("data"))
    assert read == batch


class Harmful:
    def __reduce__(self):
        return (os.system, ("touch harmed",))


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_nothing_in_a_pickle_is_run(tmp_path, protocol, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cifar-10-batches-py").mkdir()
    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    path.write_bytes(pickle.dumps({"data": Harmful(), "labels": []}, protocol=protocol))
    with pytest.raises(mola.DataError, match=r"test_batch is not plain pickled data.*binary version"):
        load_images("cifar10", "test", tmp_path)
    assert not (tmp_path / "harmed").exists()


def test_small_pickles_that_claim_to_be_huge_are_refused(tmp_path):
    """Ten bytes that make the standard reader allocate tens of gigabytes: a high number of the memo, a long bytearray."""
    path, huge = tmp_path / "batch", 2**40
    for content in (
        b"\x80\x02]r\xff\xff\xff\x7f",
        b"\x80\x05\x96" + struct.pack("<Q", huge),
        b"\x80\x04\x8e" + b"\xff" * 8,
    ):
        path.write_bytes(content)
        with pytest.raises(mola.DataError, match="not plain pickled data"):
            read_plain_pickle(path)
    state = {"data": np.zeros((1, 4), np.uint8), "labels": [0]}
    path.write_bytes(
        pickle.dumps(state, protocol=4).replace(b"K\x01K\x04\x86", b"J" + b"\xff\xff\xff\x7f" + b"K\x04\x86")
    )
    with pytest.raises(mola.DataError, match=r"an array of shape \(2147483647, 4\) in another number of bytes"):
        read_plain_pickle(path)


def test_damaged_pickles_are_refused_whatever_the_damage(tmp_path):
    """Cut at every length and with any byte changed: an error of ours, or data, but no other error and no crash."""
    content = python2_pickle({"labels": [0, 3]}, RANDOM.integers(0, 256, (2, 3072), dtype=np.uint8))
    path = tmp_path / "batch"
    generator = np.random.default_rng(1)
    places = [*range(150), *range(len(content) - 40, len(content))]
    for place in places:
        path.write_bytes(content[:place])
        with pytest.raises(mola.DataError, match="not plain pickled data"):
            read_plain_pickle(path)
        path.write_bytes(content[:place] + bytes([generator.integers(256)]) + content[place + 1 :])
        with contextlib.suppress(mola.DataError):
            read_plain_pickle(path)


@pytest.mark.parametrize(
    "batch",
    [
        {"data": np.zeros((2, 3072), np.uint8), "labels": [1]},
        {"data": np.zeros((2, 3071), np.uint8), "labels": [1, 2]},
        {"data": np.zeros((2, 3072), np.uint8), "fine_labels": [1, 2]},
        {"data": np.zeros((2, 3072), np.uint8), "labels": [1, None]},
        [1, 2],
    ],
)
def test_pickles_of_something_else_are_refused(tmp_path, batch):
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(pickle.dumps(batch, protocol=4))
    with pytest.raises(mola.DataError, match=r"no batch of this set: expected 'data' of shape \(n, 3072\)"):
        load_images("cifar10", "test", tmp_path)


def test_an_archive_that_was_not_unpacked_is_pointed_out(tmp_path):
    (tmp_path / "cifar-10-binary.tar.gz").touch()
    with pytest.raises(mola.DataError, match=r"cifar-10-binary.tar.gz is there but not unpacked"):
        load_images("cifar10", "test", tmp_path)


# --- SVHN ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def svhn():
    return colour(6), np.array([10, 1, 9, 2, 10, 5], np.uint8), [0, 1, 9, 2, 0, 5]


@pytest.mark.parametrize("packed", [True, False])
def test_svhn_mat(tmp_path, svhn, packed):
    from scipy import io as matlab

    pixels, labels, digits = svhn
    content = io.BytesIO()
    arrays = {"X": pixels.transpose(2, 3, 1, 0), "y": labels[:, None]}
    matlab.savemat(content, arrays, do_compression=True)
    path = tmp_path / ("test_32x32.mat.gz" if packed else "test_32x32.mat")
    path.write_bytes(gzip.compress(content.getvalue()) if packed else content.getvalue())
    holds(load_images("svhn", "test", tmp_path), pixels, digits)


@pytest.mark.parametrize("compressed", [True, False])
def test_svhn_npz(tmp_path, svhn, compressed):
    pixels, labels, digits = svhn
    (tmp_path / "svhn").mkdir()
    save = np.savez_compressed if compressed else np.savez
    save(tmp_path / "svhn" / "train_32x32.npz", images=pixels.transpose(0, 2, 3, 1), labels=labels)
    holds(load_images("svhn", "train", tmp_path), pixels, digits)


@pytest.mark.parametrize("how", ["cut", "empty", "flipped", "page"])
@pytest.mark.parametrize("form", ["mat", "npz"])
def test_broken_svhn_files_are_named(tmp_path, svhn, form, how):
    from scipy import io as matlab

    pixels, labels, _ = svhn
    path = tmp_path / f"test_32x32.{form}"
    if form == "mat":
        matlab.savemat(path, {"X": pixels.transpose(2, 3, 1, 0), "y": labels[:, None]}, do_compression=True)
    else:
        np.savez_compressed(path, images=pixels.transpose(0, 2, 3, 1), labels=labels)
    spoil(path, how)
    with pytest.raises(mola.DataError, match=rf"{path.name} \([\d,]+ bytes\) is not a whole file of SVHN"):
        load_images("svhn", "test", tmp_path)


def test_svhn_files_of_something_else_are_refused(tmp_path):
    np.savez(tmp_path / "test_32x32.npz", images=np.zeros((2, 32, 30, 3), np.uint8), labels=np.zeros(2))
    with pytest.raises(mola.DataError, match="expected as many images of bytes, 3 x 32 x 32"):
        load_images("svhn", "test", tmp_path)
    np.savez(tmp_path / "test_32x32.npz", images=np.array([{}], dtype=object), labels=np.zeros(2))
    with pytest.raises(mola.DataError, match="not a whole file"):
        load_images("svhn", "test", tmp_path)


# --- CIFAR-10-C ------------------------------------------------------------------------------------------------------------


def test_tinyimagenet_is_read_from_an_array(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    (tmp_path / "tinyimagenet").mkdir()
    path = tmp_path / "tinyimagenet" / "val_32x32.npz"
    np.savez(path, images=pixels)
    images = load_images("tinyimagenet", "test", tmp_path)
    assert torch.equal(images.pixels, torch.from_numpy(pixels).permute(0, 3, 1, 2))
    assert images.labels.tolist() == [0] * 5
    for arrays, message in (
        ({"images": pixels[:, :16]}, r"expected `images` of shape \(n, 32, 32, 3\) in bytes, got \(5, 16, 32, 3\)"),
        ({"images": pixels.astype(np.float32)}, "got .* of float32"),
        ({"labels": np.zeros(5)}, "not a whole .npz file with an array `images`: KeyError"),
    ):
        np.savez(path, **arrays)
        with pytest.raises(mola.DataError, match=message):
            load_images("tinyimagenet", "test", tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(mola.DataError, match=r"not a whole \.npz file"):
        load_images("tinyimagenet", "test", tmp_path)


def test_cifar10_c_severities_lie_one_after_the_other(tmp_path):
    pixels, labels = colour(20), np.tile(RANDOM.integers(0, 10, 4), 5)
    (tmp_path / "CIFAR-10-C").mkdir()
    np.save(tmp_path / "CIFAR-10-C" / "fog.npy", pixels.transpose(0, 2, 3, 1))
    np.save(tmp_path / "CIFAR-10-C" / "labels.npy", labels)
    for severity in range(1, 6):
        rows = slice(4 * severity - 4, 4 * severity)
        holds(load_cifar10_c("fog", severity, tmp_path), pixels[rows], labels[rows])
        holds(load_cifar10_c("fog", severity, tmp_path / "CIFAR-10-C"), pixels[rows], labels[rows])
    with pytest.raises(mola.OptionError, match="severity must be 1 to 5, got 0"):
        load_cifar10_c("fog", 0, tmp_path)
    with pytest.raises(
        mola.OptionError, match=r"the corruption of CIFAR-10-C must be one of gaussian_noise.*got 'mist'"
    ):
        load_cifar10_c("mist", 1, tmp_path)
    with pytest.raises(mola.DataError, match=r"(?s)snow is not in.*CIFAR-10-C/snow.npy.*labels.npy.*zenodo.*md5 56bf"):
        load_cifar10_c("snow", 1, tmp_path)


def test_broken_cifar10_c_files_are_named(tmp_path):
    np.save(tmp_path / "labels.npy", np.zeros(10, np.uint8))
    path = tmp_path / "frost.npy"
    np.save(path, colour(10).transpose(0, 2, 3, 1))
    spoil(path, "cut")
    with pytest.raises(mola.DataError, match=r"frost.npy .* is not a whole .npy file"):
        load_cifar10_c("frost", 1, tmp_path)
    np.save(path, colour(11).transpose(0, 2, 3, 1))
    with pytest.raises(mola.DataError, match=r"holds the shape \(11, 32, 32, 3\) and labels.npy \(10,\)"):
        load_cifar10_c("frost", 1, tmp_path)
    np.save(path, np.zeros((10, 3)))
    with pytest.raises(mola.DataError, match="not an array of whole numbers with 4 dimensions"):
        load_cifar10_c("frost", 1, tmp_path)


# --- the data directory ----------------------------------------------------------------------------------------------------


def test_the_data_directory_is_the_given_one_or_the_variables(tmp_path, monkeypatch):
    monkeypatch.delenv("MOLA_DATA", raising=False)
    with pytest.raises(
        mola.DataError, match=r"name the folder that holds the data sets .--data DIR., or set MOLA_DATA"
    ):
        data_directory(None)
    monkeypatch.setenv("MOLA_DATA", str(tmp_path))
    assert data_directory(None) == tmp_path
    assert data_directory(tmp_path.parent) == tmp_path.parent
    monkeypatch.setenv("MOLA_DATA", str(tmp_path / "none"))
    with pytest.raises(mola.DataError, match=r"none \(MOLA_DATA\) is not a folder"):
        load_images("mnist", "test")


def test_unknown_names_list_the_known_ones(tmp_path):
    with pytest.raises(
        mola.OptionError,
        match=r"the data set must be one of mnist, fashion-mnist, kmnist.*got 'minst'. Did you mean 'mnist'",
    ):
        load_images("minst", "test", tmp_path)
    with pytest.raises(mola.OptionError, match="LSUN classrooms has the splits test, got 'train'"):
        load_images("lsun", "train", tmp_path)


@pytest.mark.parametrize(("name", "split"), [(name, split) for name in DATASETS for split in DATASETS[name].splits])
def test_a_missing_set_says_what_to_put_where(tmp_path, name, split):
    with pytest.raises(mola.DataError, match="is not in") as caught:
        load_images(name, split, tmp_path)
    first = DATASETS[name].layouts[split][0]
    for file in first.files:
        assert str(tmp_path / first.folders[0] / file) in str(caught.value)
    assert "http" in str(caught.value)


@pytest.mark.parametrize("missing", ["images-idx3", "labels-idx1"])
def test_a_set_is_there_when_all_its_files_are(tmp_path, missing):
    assert not has_images("mnist", "test", tmp_path)
    write_idx(tmp_path / "MNIST", "t10k", grey(2), np.zeros(2, np.uint8))
    assert has_images("mnist", "test", tmp_path)
    assert not has_images("mnist", "train", tmp_path)
    (tmp_path / "MNIST" / f"t10k-{missing}-ubyte.gz").unlink()
    assert not has_images("mnist", "test", tmp_path)
    with pytest.raises(mola.OptionError, match="the data set must be one of"):
        has_images("minst", "test", tmp_path)


def test_files_are_verified_on_demand(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"content"))
    packed, content = (hashlib.md5(value).hexdigest() for value in (path.read_bytes(), b"content"))
    verify(path, [Original("a.gz", packed)])
    repacked = Original("a.gz", "0" * 32, content_md5=content)
    verify(path, [repacked])  # packed again by somebody else
    (tmp_path / "a").write_bytes(b"content")
    verify(tmp_path / "a", [repacked])  # unpacked
    (tmp_path / "a").write_bytes(b"contents")
    with pytest.raises(
        mola.DataError, match=rf"a \(8 bytes\) is not the original: expected md5 of the content {content}"
    ):
        verify(tmp_path / "a", [repacked])
    with pytest.raises(mola.DataError, match="no checksum of a file of this name is known"):
        verify(path, [Original("b.gz", packed)])
    write_idx(tmp_path / "MNIST", "t10k", grey(2), np.zeros(2, np.uint8))
    with pytest.raises(mola.DataError, match=r"(?s)t10k-images.*is not the original: expected md5 9fb629c4"):
        load_images("mnist", "test", tmp_path, verify=True)


# --- parts, normalisation, augmentation ------------------------------------------------------------------------------------


def some_images(count):
    return Images(torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1), torch.arange(count))


def test_even_parts_reach_from_the_first_to_the_last():
    images = some_images(100)
    assert images.evenly(4).labels.tolist() == [0, 33, 66, 99]
    assert images.evenly(1).labels.tolist() == [0]
    assert images.evenly(100) is images
    for count in range(1, 100):
        places = images.evenly(count).labels
        assert len(places) == count
        assert count < 2 or places.diff().max() - places.diff().min() <= 1
    with pytest.raises(mola.OptionError, match="at least 1, got 0"):
        images.evenly(0)
    assert images.part([3, 1]).pixels.flatten().tolist() == [3, 1]
    assert len(images.part([])) == 0
    assert images.part(slice(2)).labels.tolist() == [0, 1]
    assert images.part(images.labels > 97).labels.tolist() == [98, 99]


def test_images_are_checked():
    with pytest.raises(mola.DataError, match=r"expected pixels \(n, channels, height, width\) in uint8"):
        Images(torch.zeros(2, 1, 4, 4), torch.zeros(2).long())
    with pytest.raises(mola.DataError, match=r"and \(3,\) in torch.int64"):
        Images(torch.zeros(2, 1, 4, 4).byte(), torch.zeros(3).long())


def test_the_validation_split_is_random_splits():
    images = some_images(250)
    tune, report = split_validation(images, 50, seed=7)
    expected = torch.utils.data.random_split(images.labels, [50, 200], generator=torch.Generator().manual_seed(7))
    assert tune.labels.tolist() == [int(label) for label in expected[0]]
    assert report.labels.tolist() == [int(label) for label in expected[1]]
    assert torch.equal(tune.pixels.flatten().long(), tune.labels)
    for bad in (0, 250, 251):
        with pytest.raises(mola.OptionError, match=f"some of 250 images on either side, got {bad}"):
            split_validation(images, bad)


@pytest.mark.parametrize("name", NORMALISATIONS)
def test_normalisation_follows_its_formula(name):
    chosen = normalisation(name)
    pixels = torch.randint(256, (5, 3, 4, 4), dtype=torch.uint8)
    before = pixels.clone()
    inputs = chosen(pixels)
    assert inputs.dtype == torch.float32
    for channel in range(3):
        mean, std = (values[channel % len(values)] for values in (chosen.mean, chosen.std))
        expected = (pixels[:, channel].double() / 255 - mean) / std
        assert_close(inputs[:, channel], expected)
    assert torch.equal(pixels, before)
    assert torch.equal(chosen.inverse(inputs), pixels)


def test_normalisation_refuses_what_does_not_fit():
    with pytest.raises(mola.OptionError, match=r"normalise must be one of none, cifar10.*got 'cifar'"):
        normalisation("cifar")
    with pytest.raises(mola.DataError, match="normalised already"):
        NORMALISATIONS["none"](torch.zeros(1, 1, 2, 2))
    with pytest.raises(mola.DataError, match=r"for 3 channels, got pixels of shape \(1, 1, 2, 2\)"):
        NORMALISATIONS["imagenet"](torch.zeros(1, 1, 2, 2, dtype=torch.uint8))
    with pytest.raises(mola.OptionError, match="positive standard deviations"):
        Normalisation((0.5,), (0.0,))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_flip_and_crop_gives_every_shift_and_both_mirrors_alike(dtype):
    """Against the slow and obvious: each result is exactly one of the 2 x 5 x 5 shifted images, all equally often."""
    image = torch.randint(1, 255, (2, 6, 7), dtype=torch.uint8).to(dtype)
    count, padding = 5000, 2
    results = flip_and_crop(image.expand(count, -1, -1, -1), torch.Generator().manual_seed(3), padding)
    assert results.dtype == dtype
    padded = torch.nn.functional.pad(image, [padding] * 4)
    seen = 0
    for top in range(2 * padding + 1):
        for left in range(2 * padding + 1):
            crop = padded[:, top : top + 6, left : left + 7]
            for candidate in (crop, crop.flip(2)):
                same = int((results == candidate).flatten(1).all(1).sum())
                assert 60 < same < 145  # 100 expected; four and a half standard deviations
                seen += same
    assert seen == count


def test_flip_and_crop_follows_its_generator():
    images = torch.randint(256, (20, 3, 8, 8), dtype=torch.uint8)
    state = torch.get_rng_state()
    first, again, other = (flip_and_crop(images, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(mola.DataError, match=r"expected images \(n, channels"):
        flip_and_crop(images[0], torch.Generator())
    with pytest.raises(mola.OptionError, match="padding must be at least 0"):
        flip_and_crop(images, torch.Generator(), -1)


@pytest.mark.parametrize("angle", [*range(0, 181, 15), 7.3, 200, 270, 359.5, -33])
@pytest.mark.parametrize("shape", [(28, 28), (21, 32)])
def test_nearest_rotation_is_pillows(angle, shape):
    images = torch.randint(256, (3, 1, *shape), dtype=torch.uint8)
    turned = rotate(images, angle, "nearest")
    for image, result in zip(images, turned, strict=True):
        expected = np.array(Image.fromarray(image[0].numpy()).rotate(angle, Image.Resampling.NEAREST))
        np.testing.assert_array_equal(result[0].numpy(), expected)
    torch.testing.assert_close(rotate(images.double(), angle, "nearest"), turned.double(), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 28, 28), (1, 32, 32), (1, 28, 31)])
def test_grey_images_become_what_openood_makes_of_them(shape):
    """Their preparation of MNIST for CIFAR-10: Pillow's `convert("RGB")`, then its bilinear resize to 32 x 32."""
    pixels = torch.randint(0, 256, (20, *shape), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    made = in_colour(pixels, 32)
    assert made.shape == (20, 3, 32, 32)
    for image, found in zip(pixels, made, strict=True):
        mode = Image.fromarray(image[0].numpy() if len(image) == 1 else image.permute(1, 2, 0).numpy())
        expected = np.array(mode.convert("RGB").resize((32, 32), Image.Resampling.BILINEAR))
        gap = np.abs(found.permute(1, 2, 0).numpy().astype(int) - expected)
        # Where weights are no fractions of a power of 2, Pillow's fixed-point numbers round a few pixels otherwise.
        assert gap.max() <= (shape[2] == 31)
    colour = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    assert in_colour(colour, 32) is colour
    with pytest.raises(mola.DataError, match="1 or 3, height, width"):
        in_colour(colour[:, :2], 32)


def test_an_unknown_interpolation_is_refused():
    with pytest.raises(mola.OptionError, match="must be one of bilinear, nearest; got 'cubic'"):
        rotate(torch.zeros(1, 1, 4, 4), 15, "cubic")


# --- the real sets ---------------------------------------------------------------------------------------------------------


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("name", "split", "count", "mean", "std", "first"),
    [
        ("mnist", "train", 60_000, [0.1307], [0.3081], [5, 0, 4, 1, 9]),  # the well-known statistics
        ("mnist", "test", 10_000, [0.1325], [0.3105], [7, 2, 1, 0, 4]),
        ("fashion-mnist", "test", 10_000, [0.2868], [0.3524], [9, 2, 1, 1, 6]),
        ("kmnist", "test", 10_000, [0.1846], None, [2, 9, 3, 8, 3]),
        ("emnist-letters", "test", 20_800, [0.1722], [0.3309], [0, 0, 0, 0, 0]),
        ("notmnist", "test", 10_000, [0.4266], None, None),
        ("cifar10", "train", 50_000, [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616], [6, 9, 9, 4, 1]),
        ("cifar10", "test", 10_000, None, None, [3, 8, 8, 0, 6]),
        ("cifar100", "test", 5_000, None, None, [0, 0, 0, 0, 0]),
        ("svhn", "test", 10_000, None, None, [5, 2, 1, 0, 6]),
        ("tinyimagenet", "test", 5_000, None, None, [0, 0, 0, 0, 0]),
    ],
)
def test_the_real_sets_are_what_they_are_known_to_be(unpacked, name, split, count, mean, std, first):
    parts = ("notmnist", "cifar100", "svhn", "tinyimagenet")  # parts or conversions, without known checksums
    original = name not in parts
    images = load_images(name, split, unpacked, verify=original)
    assert len(images) == count
    assert not original or count == DATASETS[name].counts[split]
    for channel in range(len(mean or ())):
        values = images.pixels[:, channel].float().div(255)
        assert float(values.mean()) == pytest.approx(mean[channel], abs=1e-4)
        if std is not None:
            assert float(values.std()) == pytest.approx(std[channel], abs=1e-4)
    if first is not None:
        assert images.labels[:5].tolist() == first
    assert images.labels.unique().tolist() == list(range(DATASETS[name].classes))
    if name not in ("mnist", "svhn"):
        assert images.labels.bincount().unique().numel() == 1  # balanced


@pytest.mark.real_data
def test_real_letters_stand_upright(unpacked):
    """A V is open above and closed below; lying, it would be open on the left and have as much ink above as below."""
    letters = load_images("emnist-letters", "test", unpacked)
    mean = letters.part(letters.labels == ord("v") - ord("a")).pixels[:, 0].float().mean(0)
    assert 3 * mean[4:10, 12:16].sum() < mean[18:24, 12:16].sum()
    lying = load_images("emnist-letters-untransposed", "test", unpacked)
    assert torch.equal(lying.pixels.transpose(2, 3), letters.pixels)


@pytest.mark.real_data
def test_real_digits_turn_as_pillow_turns_them(unpacked):
    images = load_images("mnist", "test", unpacked).pixels[:100]
    for angle in range(0, 181, 15):
        turned = rotate(images, angle, "nearest")
        expected = [np.array(Image.fromarray(image[0].numpy()).rotate(angle)) for image in images]
        np.testing.assert_array_equal(turned[:, 0].numpy(), np.stack(expected))


def test_arrays_of_a_pickle_are_arrays_wherever_they_are(tmp_path):
    array = np.arange(6, dtype=np.uint8).reshape(2, 3)
    for name, value in {"top": array, "inner": {"one": {"two": array}}}.items():
        path = tmp_path / name
        path.write_bytes(pickle.dumps(value))
        found = read_plain_pickle(path)
        np.testing.assert_array_equal(found if name == "top" else found["one"]["two"], array)


def test_the_shape_of_a_pickled_array_is_made_of_whole_numbers(tmp_path):
    """A text times a number would be memory without measure."""
    content = pickle.dumps(np.zeros((7, 2), np.uint8), protocol=3)
    assert content.count(b"K\x07K\x02\x86") == 1
    (tmp_path / "a").write_bytes(content.replace(b"K\x07K\x02\x86", b"X\x01\x00\x00\x00aJ\xff\xff\xff\x7f\x86"))
    with pytest.raises(mola.DataError, match="array of shape"):
        read_plain_pickle(tmp_path / "a")
