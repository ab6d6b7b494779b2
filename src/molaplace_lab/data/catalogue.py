"""The published data sets, keyed by name, with the paths and URLs of their files.

Paths are relative to the data directory and include the folders that torchvision creates. Checksums are taken from torchvision and
from the data sets' web pages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from molaplace.errors import DataError, OptionError
from molaplace.images import Images, Preparation, image_files, open_folder
from molaplace.options import one_of
from molaplace_lab.data.download import Download, fetch
from molaplace_lab.data.readers import read_arrays, read_cifar_binary, read_idx_pair

VARIABLE = "MOLAPLACE_DATA"

Reader = Callable[[Sequence[Path]], Images]


@dataclass(frozen=True)
class Split:
    """One split of a data set: where its files may be and how they are read."""

    folders: tuple[str, ...]
    """Folders that may contain the files, with the recommended folder first."""
    files: tuple[tuple[str, ...], ...]
    """Alternative lists of names. Each list contains either the names of files, which may be compressed with gzip, or the name of a
    folder of images."""
    read: Reader
    """Function that reads images from a list of paths."""
    count: int | None = None
    """Number of published images; None if unknown."""
    downloads: tuple[Download, ...] = ()

    def find(self, directory: Path) -> list[Path] | None:
        """Return the paths of the first list whose files are all in one folder, or None if no list is complete."""
        for names in self.files:
            for folder in self.folders:
                paths = [path for name in names if (path := _find(directory / folder / name)) is not None]
                if len(paths) == len(names):
                    return paths
        return None


def _find(path: Path) -> Path | None:
    if path.is_dir():
        return path if image_files(path) else None
    return next((file for file in (path, path.with_name(f"{path.name}.gz")) if file.is_file()), None)


@dataclass(frozen=True)
class Dataset:
    """A published data set."""

    name: str
    """Name in this catalogue."""
    title: str
    """Name given to the data set by its authors."""
    classes: int
    shape: tuple[int, int, int]
    """Channels, height and width."""
    splits: Mapping[str, Split]
    """Splits, keyed by name: "train", "test" or both."""
    hint: str = ""
    """Instructions for obtaining a data set that cannot be downloaded automatically."""

    def expected(self, split: str, directory: Path) -> str:
        """Describe where the files are expected and where they can be obtained."""
        wanted = self.splits[split]
        lines = [f"  {directory / wanted.folders[0] / name}" for name in wanted.files[0]]
        lines += [f"  from {download}" for download in wanted.downloads]
        return "\n".join([*lines, *([f"  {self.hint}"] if self.hint else [])])


GREY = (1, 28, 28)
COLOUR = (3, 32, 32)


def _idx(prefix: str) -> tuple[str, str]:
    return f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"


def _mnist_like(title: str, pages: str, sums: str) -> Dataset:
    # Return the entry for a data set with MNIST's file names, given its URLs and the checksums of its training and test files.
    name = title.lower()
    folder = title.replace("-", "")
    md5 = iter(sums.split())
    splits = {}
    for split, prefix, count in (("train", "train", 60_000), ("test", "t10k", 10_000)):
        downloads = tuple(
            Download(tuple(f"{page}/{file}.gz" for page in pages.split()), next(md5), {"": f"{folder}/raw/{file}.gz"})
            for file in _idx(prefix)
        )
        folders = (f"{folder}/raw", folder, f"{name}/raw", name)
        splits[split] = Split(folders, (_idx(prefix),), read_idx_pair, count, downloads)
    return Dataset(name, title, 10, GREY, splits)


def _emnist(split: str, count: int) -> Split:
    files = _idx(f"emnist-letters-{split}")
    urls = ("https://biometrics.nist.gov/cs_links/EMNIST", "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST")
    members = {f"gzip/{file}.gz": f"EMNIST/raw/{file}.gz" for file in files}
    download = Download(tuple(f"{url}/gzip.zip" for url in urls), "58c8d27c78d21e728a6bc7b3cc06412e", members)
    folders = ("EMNIST/raw", "EMNIST", "emnist/raw", "emnist", "EMNIST/raw/gzip", "gzip", "")
    # Images are stored transposed, and the labels of the letters start at 1.
    return Split(folders, (files,), partial(read_idx_pair, first_label=1, transposed=True), count, (download,))


def _notmnist(paths: Sequence[Path]) -> Images:
    # Publicly available conversions use MNIST's file format. The published folder contains image files, some of which are empty.
    if len(paths) == 2:
        return read_idx_pair(paths)
    folder = open_folder(paths[0], Preparation(mode="L"), classes="ABCDEFGHIJ")
    return folder.part([index for index, path in enumerate(folder.paths) if path.stat().st_size]).load()


def _notmnist_split(prefix: str, size: str, count: int) -> Split:
    folders = ("notMNIST/raw", "notMNIST", "notmnist/raw", "notmnist", "")
    return Split(folders, (_idx(prefix), (f"notMNIST_{size}",)), _notmnist, count)


def _cifar(title: str, classes: int, folder: str, files: Mapping[str, tuple[str, ...]], md5: str) -> Dataset:
    name = title.lower().replace("-", "")
    archive = f"{title.lower()}-binary.tar.gz"
    read = partial(read_cifar_binary, label_bytes=1 if classes == 10 else 2)
    splits = {}
    for split, names in files.items():
        flat = (
            ("",) if classes == 10 else ()
        )  # outside a CIFAR folder, train.bin and test.bin could belong to any data set
        members = {f"{folder}/{file}": f"{folder}/{file}" for file in names}
        download = Download((f"https://www.cs.toronto.edu/~kriz/{archive}",), md5, members)
        count = 50_000 if split == "train" else 10_000
        splits[split] = Split((folder, name, *flat), (names,), read, count, (download,))
    return Dataset(name, title, classes, COLOUR, splits)


def _svhn(split: str, count: int, md5: str) -> Split:
    file = f"{split}_32x32"
    downloads = (Download((f"http://ufldl.stanford.edu/housenumbers/{file}.mat",), md5, {"": f"svhn/{file}.mat"}),)
    return Split(("svhn", "SVHN", ""), ((f"{file}.mat",), (f"{file}.npz",)), read_arrays, count, downloads)


def _lsun(paths: Sequence[Path]) -> Images:
    # Images are resized without preserving their aspect ratio. All images form a single class, even if the export created subfolders.
    images = open_folder(paths[0], Preparation(resize=(32, 32))).load()
    return Images(images.pixels, images.labels * 0)


_ALL = (
    _mnist_like(
        "MNIST",
        "https://ossci-datasets.s3.amazonaws.com/mnist http://yann.lecun.com/exdb/mnist",
        "f68b3c2dcbeaaa9fbdd348bbdeb94873 d53e105ee54ea40749a09fcbcd1e9432 "
        "9fb629c4189551a2d022fa330f9573f3 ec29112dd5afa0611ce80d1b7f02629c",
    ),
    _mnist_like(
        "Fashion-MNIST",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d 25c81989df183df01b3e8a0aad5dffbe "
        "bef4ecab320f06d8554ea6380940ec79 bb300cfdad3c16e7a12a480ee83cd310",
    ),
    _mnist_like(
        "KMNIST",
        "http://codh.rois.ac.jp/kmnist/dataset/kmnist",
        "bdb82020997e1d708af4cf47b453dcf7 e144d726b3acfaa3e44228e80efcd344 "
        "5c965bf0a639b31b8f53240b1b52f4d7 7320c461ea6c1c855c0b718fb2a4b134",
    ),
    Dataset(
        "emnist-letters",
        "EMNIST letters",
        26,
        GREY,
        {"train": _emnist("train", 124_800), "test": _emnist("test", 20_800)},
    ),
    Dataset(
        "notmnist",
        "notMNIST",
        10,
        GREY,
        # The small set, which was cleaned manually, is used for testing.
        {
            "train": _notmnist_split("train", "large", 529_114),
            "test": _notmnist_split("t10k", "small", 18_724),
        },
        "or unpack notMNIST_small.tar.gz (test) or notMNIST_large.tar.gz (train)\n"
        "  from http://yaroslavvb.com/upload/notMNIST into the data directory",
    ),
    _cifar(
        "CIFAR-10",
        10,
        "cifar-10-batches-bin",
        {"train": tuple(f"data_batch_{index}.bin" for index in range(1, 6)), "test": ("test_batch.bin",)},
        "c32a1d4ab5d03f1284b67883e8d87530",
    ),
    _cifar(
        "CIFAR-100",
        100,
        "cifar-100-binary",
        {"train": ("train.bin",), "test": ("test.bin",)},
        "03b5dce01913d631647c71ecec9e9cb8",
    ),
    Dataset(
        "svhn",
        "SVHN, cropped digits",
        10,
        COLOUR,
        {
            "train": _svhn("train", 73_257, "e26dedcc434d2e4c54c9b2d4a06d8373"),
            "test": _svhn("test", 26_032, "eb5a983be6a315427106f1b164d9cef3"),
        },
    ),
    Dataset(
        "lsun",
        "LSUN classrooms",
        1,
        COLOUR,
        {"test": Split(("lsun", "LSUN", ""), (("classroom_val",),), _lsun, 300)},
        "a folder of images exported from the database in http://dl.yf.io/lsun/scenes/classroom_val_lmdb.zip",
    ),
    Dataset(
        "tinyimagenet",
        "TinyImageNet, shrunk to 32 x 32",
        1,
        COLOUR,
        {"test": Split(("tinyimagenet", "TinyImageNet"), (("val_32x32.npz",),), read_arrays)},
        "with a uint8 array `images` of shape (n, 32, 32, 3), made from http://cs231n.stanford.edu/tiny-imagenet-200.zip:\n"
        "  the images in tiny-imagenet-200/val, except those of CIFAR-10's classes",
    ),
)

DATASETS: Mapping[str, Dataset] = MappingProxyType({dataset.name: dataset for dataset in _ALL})
"""Data sets, keyed by name. EMNIST's images, which are stored transposed, are transposed back when they are read."""


def data_directory(directory: Path | str | None = None) -> Path:
    """Return the folder with the data sets: the given folder or, by default, the value of the environment variable `MOLAPLACE_DATA`."""
    chosen = directory if directory is not None else os.environ.get(VARIABLE) or None
    if chosen is None:
        raise DataError(
            "no data directory is given. Pass the folder that contains the data sets (--data DIR), "
            f"or set the environment variable {VARIABLE}."
        )
    path = Path(chosen).expanduser()
    if not path.is_dir():
        source = "" if directory is not None else f" ({VARIABLE})"
        raise DataError(f"the data directory {path}{source} is not a folder. Create it, or choose another folder.")
    return path


def find_split(name: str, split: str) -> Split:
    """Return a split of a data set; raise `OptionError` for an unknown name or split."""
    dataset = DATASETS[one_of(name, DATASETS, "the data set")]
    if split not in dataset.splits:
        raise OptionError(f"{dataset.title} has the splits {', '.join(dataset.splits)}, got {split!r}.")
    return dataset.splits[split]


def has_images(name: str, split: str, directory: Path | str | None = None) -> bool:
    """Return True if all files of a split are in the data directory."""
    return find_split(name, split).find(data_directory(directory)) is not None


def load_images(
    name: str, split: str, directory: Path | str | None = None, *, download: bool = False, progress: bool = True
) -> Images:
    """Read a split ("train" or "test") of one of `DATASETS`. If `download` is True, missing files are downloaded.

    Images are in the order in which they are stored, and labels start at 0. If files are missing, the error message lists the expected
    paths and the download URLs.
    """
    wanted = find_split(name, split)
    dataset = DATASETS[name]
    root = data_directory(directory)
    paths = wanted.find(root)
    where = f"{dataset.title} ({split})"
    if paths is None and download:
        try:
            if not wanted.downloads:
                raise DataError("no URL is known.")
            for item in wanted.downloads:
                fetch(item, root, progress=progress)
        except DataError as error:
            raise DataError(
                f"{where} could not be downloaded: {error} Expected files:\n{dataset.expected(split, root)}"
            ) from error
        paths = wanted.find(root)
    if paths is None:
        remedy = "Pass download=True (--download), or provide" if wanted.downloads else "Provide"
        raise DataError(f"{where} is not in {root}. {remedy}:\n{dataset.expected(split, root)}")
    images = wanted.read(paths)
    shape = tuple(images.pixels.shape[1:])
    labels = images.labels.tolist()
    if shape != dataset.shape or not labels or min(labels) < 0 or max(labels) >= dataset.classes:
        raise DataError(
            f"{where} in {root} contains {len(images)} images of shape {shape} with labels from {min(labels, default=0)} to "
            f"{max(labels, default=0)}; expected shape {dataset.shape} (channels, height, width) and labels from 0 to "
            f"{dataset.classes - 1}. Check that these files belong to this data set."
        )
    return images
