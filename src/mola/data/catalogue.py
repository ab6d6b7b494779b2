"""The known data sets by name, and reading them from a data directory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from mola.choices import one_of
from mola.data.download import fetch
from mola.data.files import verify as verify_file
from mola.data.images import Images, split_validation
from mola.data.layout import Dataset, Layout
from mola.data.sources import cifar10, cifar100, emnist, lsun, mnist_like, notmnist, svhn
from mola.errors import DataError, OptionError, warn

__all__ = ["DATASETS", "VARIABLE", "check_original", "data_directory", "has_images", "load_images", "split_validation"]

VARIABLE = "MOLA_DATA"

_MNIST = mnist_like(
    "mnist",
    "MNIST",
    "MNIST",
    ("https://ossci-datasets.s3.amazonaws.com/mnist", "http://yann.lecun.com/exdb/mnist"),
    {
        "train": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "d53e105ee54ea40749a09fcbcd1e9432"),
        "test": ("9fb629c4189551a2d022fa330f9573f3", "ec29112dd5afa0611ce80d1b7f02629c"),
    },
    {
        "train": ("6bbc9ace898e44ae57da46a324031adb", "a25bea736e30d166cdddb491f175f624"),
        "test": ("2646ac647ad5339dbf082846283269ea", "27ae3e4e09519cfbb04c329615203637"),
    },
)
_FASHION = mnist_like(
    "fashion-mnist",
    "Fashion-MNIST",
    "FashionMNIST",
    ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",),
    {
        "train": ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "25c81989df183df01b3e8a0aad5dffbe"),
        "test": ("bef4ecab320f06d8554ea6380940ec79", "bb300cfdad3c16e7a12a480ee83cd310"),
    },
    {"test": ("8181f5470baa50b63fa0f6fddb340f0a", "15d484375f8d13e6eb1aabb0c3f46965")},
)
_KMNIST = mnist_like(
    "kmnist",
    "KMNIST",
    "KMNIST",
    ("http://codh.rois.ac.jp/kmnist/dataset/kmnist",),
    {
        "train": ("bdb82020997e1d708af4cf47b453dcf7", "e144d726b3acfaa3e44228e80efcd344"),
        "test": ("5c965bf0a639b31b8f53240b1b52f4d7", "7320c461ea6c1c855c0b718fb2a4b134"),
    },
    {"test": ("bf305b8cd328700fbc17f5acbc2856d2", "9f55f451c0988b028eccdf7d5cc265ab")},
)

DATASETS: Mapping[str, Dataset] = MappingProxyType(
    {
        dataset.name: dataset
        for dataset in (
            _MNIST,
            _FASHION,
            _KMNIST,
            *(emnist(part, upright=upright) for upright in (True, False) for part in ("letters", "digits")),
            notmnist(),
            cifar10(),
            cifar100(),
            svhn(),
            lsun(),
        )
    }
)
"""By name. EMNIST's images stand upright; `emnist-digits-untransposed` is what the paper's authors used."""


def data_directory(given: Path | str | None = None) -> Path:
    """The folder that holds the data sets: the one given, else the one that `MOLA_DATA` names.

    Args:
        given: the user's choice, if any.

    Returns:
        A folder that exists.

    Raises:
        DataError: if there is no choice, or no such folder.
    """
    chosen = given if given is not None else os.environ.get(VARIABLE) or None
    if chosen is None:
        message = f"no data directory: name the folder that holds the data sets (--data DIR), or set {VARIABLE} to it."
        raise DataError(message)
    path = Path(chosen).expanduser()
    if not path.is_dir():
        source = "" if given is not None else f" ({VARIABLE})"
        message = f"the data directory {path}{source} is not a folder: create it, or name another."
        raise DataError(message)
    return path


def has_images(name: str, split: str, directory: Path | str | None = None) -> bool:
    """Whether all of a split's files are there; whether they are whole shows when they are read.

    Args:
        name: one of `DATASETS`.
        split: "train" or "test".
        directory: the data directory; otherwise `MOLA_DATA` names it.

    Returns:
        Whether `load_images` would find it without a download.
    """
    return _known(name, split).find(split, data_directory(directory)) is not None


def load_images(
    name: str,
    split: str,
    directory: Path | str | None = None,
    *,
    download: bool = False,
    verify: bool = False,
    progress: bool = True,
) -> Images:
    """A data set's images and labels.

    Args:
        name: one of `DATASETS`.
        split: "train" or "test".
        directory: the data directory; otherwise `MOLA_DATA` names it.
        download: whether to fetch missing files, checked against their checksums.
        verify: whether to check files that are there already against the originals' checksums.
        progress: whether to show a bar on stderr while downloading.

    Returns:
        The images in the order of the files, labelled from 0.

    Raises:
        DataError: if files are missing, not whole, or not the originals.
    """
    dataset = _known(name, split)
    root = data_directory(directory)
    images = _read(dataset, split, root, verify)
    if images is None and download:
        fetch(dataset, split, root, progress=progress)
        images = _read(dataset, split, root, verify)
    if images is None:
        raise DataError(_missing(dataset, split, root, download))
    _check(dataset, split, images, root)
    return images


def check_original(name: str, split: str, images: Images, directory: Path | str | None = None) -> None:
    """Warn if files that were read are not the published ones: others can be meant, but not unknowingly.

    Args:
        name: one of `DATASETS`.
        split: "train" or "test".
        images: what was read.
        directory: the data directory; otherwise `MOLA_DATA` names it.
    """
    dataset = _known(name, split)
    expected = dataset.counts.get(split)
    if expected is not None and len(images) != expected:
        warn(f"{dataset.title} ({split}) has {len(images):,} images here; {expected:,} were published.")
        return  # a part of a set has other checksums, of course
    originals = dataset.originals.get(split, ())
    found = dataset.find(split, data_directory(directory))
    for path in found[1] if found is not None and originals else ():
        try:
            verify_file(path, originals)
        except DataError as error:
            warn(str(error))


def _known(name: str, split: str) -> Dataset:
    """The data set of this name, if it has this split.

    Raises:
        OptionError: if there is none.
    """
    one_of(name, DATASETS, "the data set")
    if split not in DATASETS[name].splits:
        message = f"{DATASETS[name].title} has the splits {', '.join(DATASETS[name].splits)}, got {split!r}."
        raise OptionError(message)
    return DATASETS[name]


def _read(dataset: Dataset, split: str, root: Path, verify: bool) -> Images | None:
    """From the first layout that is complete.

    Raises:
        DataError: if a file is not whole, or not the original; with the checksum that it should have.
    """
    found = dataset.find(split, root)
    if found is None:
        return None
    layout, paths = found
    originals = dataset.originals.get(split, ())
    for path in paths if verify else ():
        verify_file(path, originals)
    try:
        return layout.read(paths)
    except DataError as error:
        known = [original for original in originals if original.name.removesuffix(".gz") in str(error)]
        if not known:
            raise
        message = f"{error} The published {known[0].name} has the md5 checksum {known[0].md5}."
        raise DataError(message) from error


def _missing(dataset: Dataset, split: str, root: Path, download: bool) -> str:
    """What is not there, what to put where, and what lies there that is nearly it."""
    first = dataset.layouts[split][0]
    found = [path for path in first.find(root, dataset.originals.get(split, ())) if path is not None]
    some = f" Only {', '.join(str(path) for path in found)} is there." if found else ""
    archive = dataset.archives.get(split)
    packed = _packed(root, first.folders, archive.original.name) if archive else None
    unpack = f" {packed} is there but not unpacked: unpack it in {root}." if packed else ""
    fetchable = archive is not None or any(original.urls for original in dataset.originals.get(split, ()))
    remedy = (
        " Allow the download (download=True, or --download), or put there yourself:"
        if fetchable and not download
        else " Put there:"
    )
    plain = isinstance(first, Layout)
    note = "Compressed by gzip or not; the folders that torchvision makes are found too." if plain else ""
    return (
        f"{dataset.title} ({split}) is not in {root}.{some}{unpack}{remedy}\n{dataset.wanted(split, root)}\n{note}"
    ).rstrip()


def _packed(root: Path, folders: Sequence[str], name: str) -> Path | None:
    return next((root / folder / name for folder in ("", *folders) if (root / folder / name).is_file()), None)


def _check(dataset: Dataset, split: str, images: Images, root: Path) -> None:
    """Whether these can be images of the set.

    Raises:
        DataError: if they are of another size, or labelled otherwise.
    """
    shape = tuple(images.pixels.shape[1:])
    if len(images) == 0 or shape != dataset.shape:
        message = (
            f"{dataset.title} ({split}) in {root} holds {len(images)} images of shape {shape}, expected some of "
            f"{dataset.shape} (channels, height, width): is it another data set?"
        )
        raise DataError(message)
    low, high = int(images.labels.min()), int(images.labels.max())
    if low < 0 or high >= dataset.classes:
        message = (
            f"{dataset.title} ({split}) in {root} has labels from {low} to {high}, counted from 0, expected 0 to "
            f"{dataset.classes - 1}: is it another data set?"
        )
        raise DataError(message)
