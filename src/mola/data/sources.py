"""The published data sets: their files, checksums and addresses.

Checksums are those of the originals, as torchvision and the sets' own pages list them; that of a compressed file's content
is added where it was computed from a file with the right checksum.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mola.data.cifar import read_cifar_binary, read_cifar_python
from mola.data.files import Original
from mola.data.folder import Preparation, open_folder
from mola.data.idx import read_idx_pair
from mola.data.images import Images
from mola.data.layout import Archive, Dataset, FolderLayout, Layout
from mola.data.svhn import read_svhn

__all__ = ["cifar10", "cifar100", "emnist", "lsun", "mnist_like", "notmnist", "svhn"]

CIFAR_PAGE = "https://www.cs.toronto.edu/~kriz"
SVHN_PAGE = "http://ufldl.stanford.edu/housenumbers"
IDX_PREFIX = {"train": "train", "test": "t10k"}
NOTMNIST_BROKEN = frozenset(
    f"{name}.png"
    for name in (
        "RGVtb2NyYXRpY2FCb2xkT2xkc3R5bGUgQm9sZC50dGY=",
        "Q3Jvc3NvdmVyIEJvbGRPYmxpcXVlLnR0Zg==",
        "RnJlaWdodERpc3BCb29rSXRhbGljLnR0Zg==",
        "SG90IE11c3RhcmQgQlROIFBvc3Rlci50dGY=",
        "Um9tYW5hIEJvbGQucGZi",
        "TmlraXNFRi1TZW1pQm9sZEl0YWxpYy5vdGY=",
        "VHJhbnNpdCBCb2xkLnR0Zg==",
    )
)
"""Files that were published empty: two of the small set, five of the large one."""
EMNIST_SUMS = {
    "emnist-letters-train-images-idx3-ubyte": "8795078f199c478165fe18db82625747",
    "emnist-letters-train-labels-idx1-ubyte": "c16de4f1848ddcdddd39ab65d2a7be52",
    "emnist-letters-test-images-idx3-ubyte": "382093a19703f68edac6d01b8dfdfcad",
    "emnist-letters-test-labels-idx1-ubyte": "d4108920cd86601ec7689a97f2de7f59",
    "emnist-digits-train-images-idx3-ubyte": "d2662ecdc47895a6bbfce25de9e9a677",
    "emnist-digits-train-labels-idx1-ubyte": "2223fcfee618ac9c89ef20b6e48bcf9e",
    "emnist-digits-test-images-idx3-ubyte": "a159b8b3bd6ab4ed4793c1cb71a2f5cc",
    "emnist-digits-test-labels-idx1-ubyte": "8afde66ea51d865689083ba6bb779fac",
}
"""Of the compressed files inside the archive."""
EMNIST_CONTENTS = {
    "emnist-letters-test-images-idx3-ubyte": "811ee95d607652077616dbaaea581e1d",
    "emnist-letters-test-labels-idx1-ubyte": "dd1687ca8200da91c0dfd6321518806d",
}


def _pair(paths: Sequence[Path], *, first_label: int = 0, upright: bool = False) -> Images:
    return read_idx_pair(paths[0], paths[1], first_label=first_label, upright=upright)


def _idx_names(prefix: str) -> tuple[str, str]:
    return f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"


def _folders(*names: str) -> tuple[str, ...]:
    """As torchvision names them (`MNIST/raw`), without the last part, and the data directory itself."""
    return (*(f"{name}{end}" for name in names for end in ("/raw", "")), "")


def mnist_like(
    name: str,
    title: str,
    folder: str,
    pages: Sequence[str],
    sums: dict[str, tuple[str, str]],
    contents: dict[str, tuple[str, str]],
) -> Dataset:
    """MNIST and the sets that took over its file names: `sums` and `contents` are for images and labels of each split."""
    layouts: dict[str, tuple[Layout | FolderLayout, ...]] = {}
    originals: dict[str, tuple[Original, ...]] = {}
    for split, prefix in IDX_PREFIX.items():
        files = _idx_names(prefix)
        layouts[split] = (Layout(_folders(folder, name), files, _pair, ambiguous=True),)
        inside = contents.get(split, (None, None))
        originals[split] = tuple(
            Original(f"{file}.gz", md5, tuple(f"{page}/{file}.gz" for page in pages), content)
            for file, md5, content in zip(files, sums[split], inside, strict=True)
        )
    return Dataset(name, title, 10, (1, 28, 28), {"train": 60_000, "test": 10_000}, layouts, originals, {})


def emnist(part: str, *, upright: bool) -> Dataset:
    """A part of EMNIST: `letters` or `digits`."""
    archive = Original(
        "gzip.zip",
        "58c8d27c78d21e728a6bc7b3cc06412e",
        (
            "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
            "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/gzip.zip",
        ),
    )
    letters = part == "letters"
    read = partial(_pair, first_label=1 if letters else 0, upright=upright)
    layouts: dict[str, tuple[Layout | FolderLayout, ...]] = {}
    originals: dict[str, tuple[Original, ...]] = {}
    archives: dict[str, Archive] = {}
    for split in IDX_PREFIX:
        files = _idx_names(f"emnist-{part}-{split}")
        layouts[split] = (Layout((*_folders("EMNIST", "emnist"), "EMNIST/raw/gzip", "gzip"), files, read),)
        originals[split] = tuple(
            Original(f"{file}.gz", EMNIST_SUMS[file], content_md5=EMNIST_CONTENTS.get(file)) for file in files
        )
        archives[split] = Archive(archive, {f"gzip/{file}.gz": f"EMNIST/raw/{file}.gz" for file in files})
    return Dataset(
        name=f"emnist-{part}{'' if upright else '-untransposed'}",
        title=f"EMNIST {part}{'' if upright else ', as the files have it: rows and columns exchanged'}",
        classes=26 if letters else 10,
        shape=(1, 28, 28),
        counts={"train": 124_800, "test": 20_800} if letters else {"train": 240_000, "test": 40_000},
        layouts=layouts,
        originals=originals,
        archives=archives,
    )


def notmnist() -> Dataset:
    """The notMNIST letters A to J: in MNIST's format, as several public conversions have them, or the published images.

    The test set is the smaller of the two that were published, which was cleaned by hand.
    """

    def read(paths: Sequence[Path]) -> Images:
        grey = Preparation(mode="L")
        return open_folder(paths[0], grey, classes="ABCDEFGHIJ", without=NOTMNIST_BROKEN).load()

    def layouts(prefix: str, size: str) -> tuple[Layout | FolderLayout, ...]:
        return (
            Layout(_folders("notMNIST", "notmnist"), _idx_names(prefix), _pair, ambiguous=True),
            FolderLayout((f"notMNIST_{size}", f"notMNIST/notMNIST_{size}"), read, ("A/*.png",)),
        )

    return Dataset(
        name="notmnist",
        title="notMNIST",
        classes=10,
        shape=(1, 28, 28),
        counts={"train": 529_114, "test": 18_724},
        layouts={"train": layouts("train", "large"), "test": layouts("t10k", "small")},
        originals={},
        archives={},
        hint=(
            "or unpack notMNIST_small.tar.gz (test) or notMNIST_large.tar.gz (train) there,\n"
            "  from http://yaroslavvb.com/upload/notMNIST"
        ),
    )


def lsun() -> Dataset:
    """LSUN's classrooms, the 300 of the validation set, shrunk to 32 x 32 pixels without regard to proportions."""

    def read(paths: Sequence[Path]) -> Images:
        images = open_folder(paths[0], Preparation(resize=(32, 32))).load()
        # One class, whatever subfolders an export has made.
        return Images(images.pixels, images.labels * 0)

    places = ("lsun/classroom_val", "LSUN/classroom_val", "classroom_val")
    return Dataset(
        name="lsun",
        title="LSUN classrooms",
        classes=1,
        shape=(3, 32, 32),
        counts={"test": 300},
        layouts={"test": (FolderLayout(places, read, ("*.webp, *.jpg or *.png",)),)},
        originals={},
        archives={},
        hint="exported from the database in http://dl.yf.io/lsun/scenes/classroom_val_lmdb.zip",
    )


def _cifar(
    name: str,
    title: str,
    classes: int,
    folders: tuple[str, str],
    files: dict[str, tuple[str, ...]],
    sums: dict[str, str],
    archive_md5: str,
) -> Dataset:
    binary, python = folders
    label_bytes, key = (1, "labels") if classes == 10 else (2, "fine_labels")
    archive_name = f"{title.lower()}-binary.tar.gz"
    archive = Original(archive_name, archive_md5, (f"{CIFAR_PAGE}/{archive_name}",))
    layouts: dict[str, tuple[Layout | FolderLayout, ...]] = {}
    originals: dict[str, tuple[Original, ...]] = {}
    archives: dict[str, Archive] = {}
    for split, stems in files.items():
        names = tuple(f"{stem}.bin" for stem in stems)
        layouts[split] = (
            Layout(
                (binary, name, ""), names, partial(read_cifar_binary, label_bytes=label_bytes), ambiguous=classes == 100
            ),
            Layout((python, name, ""), stems, partial(read_cifar_python, label_key=key), ambiguous=True),
        )
        originals[split] = tuple(Original(file, sums[file]) for file in (*names, *stems))
        archives[split] = Archive(archive, {f"{binary}/{file}": f"{binary}/{file}" for file in names})
    return Dataset(name, title, classes, (3, 32, 32), {"train": 50_000, "test": 10_000}, layouts, originals, archives)


def cifar10() -> Dataset:
    """CIFAR-10, binary or Python version."""
    return _cifar(
        "cifar10",
        "CIFAR-10",
        10,
        ("cifar-10-batches-bin", "cifar-10-batches-py"),
        {"train": tuple(f"data_batch_{index}" for index in range(1, 6)), "test": ("test_batch",)},
        {
            "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
            "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
            "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
            "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
            "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
            "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            "test_batch": "40351d587109b95175f43aff81a1287e",
        },
        "c32a1d4ab5d03f1284b67883e8d87530",
    )


def cifar100() -> Dataset:
    """CIFAR-100 with its fine labels, binary or Python version."""
    return _cifar(
        "cifar100",
        "CIFAR-100",
        100,
        ("cifar-100-binary", "cifar-100-python"),
        {"train": ("train",), "test": ("test",)},
        {
            "train.bin": "6172c7755cfe09b2fe270c85cebc1b15",
            "test.bin": "4499cfba6c016c1be1438163640a0898",
            "train": "16019d7e3df5f24257cddd939b257f8d",
            "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
        },
        "03b5dce01913d631647c71ecec9e9cb8",
    )


def svhn() -> Dataset:
    """SVHN's cropped digits, from the published .mat or an .npz."""
    sums = {"train": "e26dedcc434d2e4c54c9b2d4a06d8373", "test": "eb5a983be6a315427106f1b164d9cef3"}

    def read(paths: Sequence[Path]) -> Images:
        return read_svhn(paths[0])

    return Dataset(
        name="svhn",
        title="SVHN, cropped digits",
        classes=10,
        shape=(3, 32, 32),
        counts={"train": 73_257, "test": 26_032},
        layouts={
            split: tuple(Layout(("svhn", "SVHN", ""), (f"{split}_32x32.{end}",), read) for end in ("mat", "npz"))
            for split in sums
        },
        originals={
            split: (Original(f"{split}_32x32.mat", md5, (f"{SVHN_PAGE}/{split}_32x32.mat",)),)
            for split, md5 in sums.items()
        },
        archives={},
    )
