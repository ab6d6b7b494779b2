"""The published data sets by name: where their files may be on disk, their checksums and their addresses.

Checksums are those of torchvision and of the sets' own pages. Paths are relative to the data directory, and the folders that
torchvision makes are among them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from mola.errors import DataError, OptionError, warn
from mola.lab.data.download import Archive, fetch_archive, fetch_file
from mola.lab.data.files import Original, find, verify
from mola.lab.data.folder import Preparation, image_files, open_folder
from mola.lab.data.images import Images
from mola.lab.data.readers import read_arrays, read_cifar_binary, read_idx_pair
from mola.options import one_of

VARIABLE = "MOLA_DATA"

Reader = Callable[[Sequence[Path]], Images]


@dataclass(frozen=True)
class Layout:
    """A form in which a split may be on disk.

    Attributes:
        folders: possible folders; downloads go to the first.
        files: file names, each plain or compressed by gzip; none for a folder of images.
        read: reads the images from the paths of the files, or from the path of the folder.
    """

    folders: tuple[str, ...]
    files: tuple[str, ...]
    read: Reader

    def find(self, directory: Path) -> list[Path] | None:
        """Return the paths of all files in one of the folders, or None."""
        for place in (directory / folder for folder in self.folders):
            if not self.files and place.is_dir() and image_files(place):
                return [place]
            paths = [path for name in self.files if (path := find(place, name)) is not None]
            if self.files and len(paths) == len(self.files):
                return paths
        return None


@dataclass(frozen=True)
class Split:
    """A split of a data set.

    Attributes:
        layouts: forms in which the split may be on disk; the first is recommended.
        count: number of published images; users may have a part of them.
        originals: published files with their checksums; those with addresses can be downloaded.
        archive: an archive to download instead.
    """

    layouts: tuple[Layout, ...]
    count: int | None = None
    originals: tuple[Original, ...] = ()
    archive: Archive | None = None

    def find(self, directory: Path) -> tuple[Reader, list[Path]] | None:
        """Return the reader and the paths of the first complete layout, or None."""
        found = ((layout.read, layout.find(directory)) for layout in self.layouts)
        return next(((read, paths) for read, paths in found if paths is not None), None)

    @property
    def sources(self) -> list[Original]:
        """Files to download."""
        return [self.archive.original] if self.archive else [original for original in self.originals if original.urls]


@dataclass(frozen=True)
class Dataset:
    """A published data set.

    Attributes:
        name: name in this catalogue.
        title: its authors' name.
        classes: number of classes.
        shape: channels, height and width.
        splits: by name, "train" and "test".
        hint: how to obtain a set that cannot be downloaded automatically.
    """

    name: str
    title: str
    classes: int
    shape: tuple[int, int, int]
    splits: Mapping[str, Split]
    hint: str = ""

    def expected(self, split: str, directory: Path) -> str:
        """Return the paths that are expected, and where the files come from."""
        wanted = self.splits[split]
        first = wanted.layouts[0]
        lines = [f"  {directory / first.folders[0] / name}" for name in first.files or ("*.png, *.jpg or *.webp",)]
        lines += [f"  from {source.urls[0]} (md5 {source.md5})" for source in wanted.sources]
        return "\n".join([*lines, *([f"  {self.hint}"] if self.hint else [])])


def _idx_names(prefix: str) -> tuple[str, str]:
    return f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"


def _folders(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}{end}" for name in names for end in ("/raw", ""))


def _originals(
    files: Iterable[str], sums: str, contents: str = "", *, pages: Sequence[str] = ()
) -> tuple[Original, ...]:
    # Checksums of the compressed files, and of their contents where known, separated by spaces.
    inside: Sequence[str | None] = contents.split() or [None] * len(sums.split())
    return tuple(
        Original(f"{file}.gz", md5, tuple(f"{page}/{file}.gz" for page in pages), content)
        for file, md5, content in zip(files, sums.split(), inside, strict=True)
    )


def _mnist_like(name: str, title: str, folder: str, page: str, train: Sequence[str], test: Sequence[str]) -> Dataset:
    # MNIST and the sets with its file names: checksums of images and labels, of each split.
    splits = {}
    for split, prefix, count, sums in (("train", "train", 60_000, train), ("test", "t10k", 10_000, test)):
        layout = Layout(_folders(folder, name), _idx_names(prefix), read_idx_pair)
        splits[split] = Split((layout,), count, _originals(layout.files, *sums, pages=page.split()))
    return Dataset(name, title, 10, (1, 28, 28), splits)


EMNIST = Original(
    "gzip.zip",
    "58c8d27c78d21e728a6bc7b3cc06412e",
    (
        "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
        "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/gzip.zip",
    ),
)


def _emnist(part: str, sums: Mapping[str, Sequence[str]], *, upright: bool) -> Dataset:
    letters = part == "letters"
    counts = {"train": 124_800, "test": 20_800} if letters else {"train": 240_000, "test": 40_000}
    read = partial(read_idx_pair, first_label=1 if letters else 0, transposed=upright)
    splits = {}
    for split, count in counts.items():
        files = _idx_names(f"emnist-{part}-{split}")
        layout = Layout((*_folders("EMNIST", "emnist"), "EMNIST/raw/gzip", "gzip", ""), files, read)
        members = {f"gzip/{file}.gz": f"EMNIST/raw/{file}.gz" for file in files}
        splits[split] = Split((layout,), count, _originals(files, *sums[split]), Archive(EMNIST, members))
    return Dataset(
        f"emnist-{part}{'' if upright else '-untransposed'}",
        f"EMNIST {part}{'' if upright else ', as the files have it: rows and columns exchanged'}",
        26 if letters else 10,
        (1, 28, 28),
        splits,
    )


EMNIST_SUMS: dict[str, dict[str, Sequence[str]]] = {
    "letters": {
        "train": ("8795078f199c478165fe18db82625747 c16de4f1848ddcdddd39ab65d2a7be52",),
        "test": (
            "382093a19703f68edac6d01b8dfdfcad d4108920cd86601ec7689a97f2de7f59",
            "811ee95d607652077616dbaaea581e1d dd1687ca8200da91c0dfd6321518806d",
        ),
    },
    "digits": {
        "train": ("d2662ecdc47895a6bbfce25de9e9a677 2223fcfee618ac9c89ef20b6e48bcf9e",),
        "test": ("a159b8b3bd6ab4ed4793c1cb71a2f5cc 8afde66ea51d865689083ba6bb779fac",),
    },
}

NOTMNIST_EMPTY = frozenset(
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
"""Files that were published empty: two in the small set, five in the large set."""


def _notmnist() -> Dataset:
    # In MNIST's format, as public conversions have it, or the published images. The test set is the small set, cleaned by hand.
    def read(paths: Sequence[Path]) -> Images:
        return open_folder(paths[0], Preparation(mode="L"), classes="ABCDEFGHIJ", without=NOTMNIST_EMPTY).load()

    def split(prefix: str, size: str, count: int) -> Split:
        images = Layout((f"notMNIST_{size}", f"notMNIST/notMNIST_{size}"), (), read)
        return Split((Layout(_folders("notMNIST", "notmnist"), _idx_names(prefix), read_idx_pair), images), count)

    hint = (
        "or unpack notMNIST_small.tar.gz (test) or notMNIST_large.tar.gz (train) there,\n"
        "  from http://yaroslavvb.com/upload/notMNIST"
    )
    splits = {"train": split("train", "large", 529_114), "test": split("t10k", "small", 18_724)}
    return Dataset("notmnist", "notMNIST", 10, (1, 28, 28), splits, hint)


def _cifar(
    title: str, classes: int, folder: str, files: Mapping[str, Mapping[str, str]], archive: tuple[str, str]
) -> Dataset:
    # Files and their checksums, of each split; name and checksum of the archive.
    name, (packed, md5) = title.lower().replace("-", ""), archive
    original = Original(packed, md5, (f"https://www.cs.toronto.edu/~kriz/{packed}",))
    read = partial(read_cifar_binary, label_bytes=1 if classes == 10 else 2)
    splits = {}
    for split, sums in files.items():
        flat = ("",) if classes == 10 else ()  # train.bin and test.bin could be anything
        layout = Layout((folder, name, *flat), tuple(sums), read)
        members = {f"{folder}/{file}": f"{folder}/{file}" for file in sums}
        originals = tuple(Original(file, one) for file, one in sums.items())
        splits[split] = Split((layout,), 50_000 if split == "train" else 10_000, originals, Archive(original, members))
    return Dataset(name, title, classes, (3, 32, 32), splits)


def _svhn() -> Dataset:
    def split(name: str, count: int, md5: str) -> Split:
        file, folders = f"{name}_32x32", ("svhn", "SVHN", "")
        layouts = tuple(Layout(folders, (f"{file}.{end}",), read_arrays) for end in ("mat", "npz"))
        url = f"http://ufldl.stanford.edu/housenumbers/{file}.mat"
        return Split(layouts, count, (Original(f"{file}.mat", md5, (url,)),))

    splits = {
        "train": split("train", 73_257, "e26dedcc434d2e4c54c9b2d4a06d8373"),
        "test": split("test", 26_032, "eb5a983be6a315427106f1b164d9cef3"),
    }
    return Dataset("svhn", "SVHN, cropped digits", 10, (3, 32, 32), splits)


def _lsun() -> Dataset:
    # The 300 classrooms of the validation set, resized to 32 x 32 pixels without regard to proportions.
    def read(paths: Sequence[Path]) -> Images:
        images = open_folder(paths[0], Preparation(resize=(32, 32))).load()
        return Images(images.pixels, images.labels * 0)  # one class, whatever subfolders an export has made

    places = ("lsun/classroom_val", "LSUN/classroom_val", "classroom_val")
    hint = "exported from the database in http://dl.yf.io/lsun/scenes/classroom_val_lmdb.zip"
    return Dataset("lsun", "LSUN classrooms", 1, (3, 32, 32), {"test": Split((Layout(places, (), read),), 300)}, hint)


def _tinyimagenet() -> Dataset:
    # Near outliers of CIFAR-10: the validation images, resized to 32 x 32 pixels, without the classes of CIFAR-10.
    layout = Layout(("tinyimagenet", "TinyImageNet"), ("val_32x32.npz",), read_arrays)
    hint = (
        "an array `images` (n, 32, 32, 3) of bytes, made from tiny-imagenet-200/val without the classes of CIFAR-10,\n"
        "  from http://cs231n.stanford.edu/tiny-imagenet-200.zip"
    )
    title = "TinyImageNet, shrunk to 32 x 32"
    return Dataset("tinyimagenet", title, 1, (3, 32, 32), {"test": Split((layout,))}, hint)


DATASETS: Mapping[str, Dataset] = MappingProxyType(
    {
        dataset.name: dataset
        for dataset in (
            _mnist_like(
                "mnist",
                "MNIST",
                "MNIST",
                "https://ossci-datasets.s3.amazonaws.com/mnist http://yann.lecun.com/exdb/mnist",
                (
                    "f68b3c2dcbeaaa9fbdd348bbdeb94873 d53e105ee54ea40749a09fcbcd1e9432",
                    "6bbc9ace898e44ae57da46a324031adb a25bea736e30d166cdddb491f175f624",
                ),
                (
                    "9fb629c4189551a2d022fa330f9573f3 ec29112dd5afa0611ce80d1b7f02629c",
                    "2646ac647ad5339dbf082846283269ea 27ae3e4e09519cfbb04c329615203637",
                ),
            ),
            _mnist_like(
                "fashion-mnist",
                "Fashion-MNIST",
                "FashionMNIST",
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
                ("8d4fb7e6c68d591d4c3dfef9ec88bf0d 25c81989df183df01b3e8a0aad5dffbe",),
                (
                    "bef4ecab320f06d8554ea6380940ec79 bb300cfdad3c16e7a12a480ee83cd310",
                    "8181f5470baa50b63fa0f6fddb340f0a 15d484375f8d13e6eb1aabb0c3f46965",
                ),
            ),
            _mnist_like(
                "kmnist",
                "KMNIST",
                "KMNIST",
                "http://codh.rois.ac.jp/kmnist/dataset/kmnist",
                ("bdb82020997e1d708af4cf47b453dcf7 e144d726b3acfaa3e44228e80efcd344",),
                (
                    "5c965bf0a639b31b8f53240b1b52f4d7 7320c461ea6c1c855c0b718fb2a4b134",
                    "bf305b8cd328700fbc17f5acbc2856d2 9f55f451c0988b028eccdf7d5cc265ab",
                ),
            ),
            *(_emnist(part, sums, upright=upright) for upright in (True, False) for part, sums in EMNIST_SUMS.items()),
            _notmnist(),
            _cifar(
                "CIFAR-10",
                10,
                "cifar-10-batches-bin",
                {
                    "train": {
                        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
                        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
                        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
                        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
                        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
                    },
                    "test": {"test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d"},
                },
                ("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
            ),
            _cifar(
                "CIFAR-100",
                100,
                "cifar-100-binary",
                {
                    "train": {"train.bin": "6172c7755cfe09b2fe270c85cebc1b15"},
                    "test": {"test.bin": "4499cfba6c016c1be1438163640a0898"},
                },
                ("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),
            ),
            _svhn(),
            _lsun(),
            _tinyimagenet(),
        )
    }
)
"""By name. EMNIST's images are upright; the authors of the paper used `emnist-digits-untransposed`."""


def data_directory(given: Path | str | None = None) -> Path:
    """Return the folder of the data sets: the given folder, or the value of `MOLA_DATA`.

    Raises:
        DataError: neither is given, or the folder does not exist.
    """
    chosen = given if given is not None else os.environ.get(VARIABLE) or None
    if chosen is None:
        raise DataError(f"no data directory: pass the folder of the data sets (--data DIR), or set {VARIABLE} to it.")
    path = Path(chosen).expanduser()
    if not path.is_dir():
        source = "" if given is not None else f" ({VARIABLE})"
        raise DataError(f"the data directory {path}{source} is not a folder: create it, or choose another folder.")
    return path


def find_split(name: str, split: str) -> Split:
    """Return a split of a data set; `OptionError` for an unknown name or split."""
    dataset = DATASETS[one_of(name, DATASETS, "the data set")]
    if split not in dataset.splits:
        raise OptionError(f"{dataset.title} has the splits {', '.join(dataset.splits)}, got {split!r}.")
    return dataset.splits[split]


def has_images(name: str, split: str, directory: Path | str | None = None) -> bool:
    """Return whether all files of a split are in the data directory."""
    return find_split(name, split).find(data_directory(directory)) is not None


def load_images(
    name: str, split: str, directory: Path | str | None = None, *, download: bool = False, progress: bool = True
) -> Images:
    """Read a split of a data set.

    Args:
        name: one of `DATASETS`.
        split: "train" or "test".
        directory: the data directory; None uses `MOLA_DATA`.
        download: whether to download missing files.
        progress: whether to show a progress bar on stderr while downloading.

    Returns:
        The images in the order of the files, labelled from 0.

    Raises:
        DataError: files are missing or damaged; the message lists the expected paths and addresses.
    """
    wanted, dataset, root = find_split(name, split), DATASETS[name], data_directory(directory)
    found = wanted.find(root)
    if found is None and download:
        try:
            _fetch(wanted, root, progress)
        except DataError as error:
            raise DataError(
                f"{dataset.title} ({split}) could not be downloaded: {error} Expected files:\n{dataset.expected(split, root)}"
            ) from error
        found = wanted.find(root)
    if found is None:
        remedy = " Pass download=True (--download), or provide" if wanted.sources else " Provide"
        raise DataError(f"{dataset.title} ({split}) is not in {root}.{remedy}:\n{dataset.expected(split, root)}")
    read, paths = found
    try:
        images = read(paths)
    except DataError as error:
        known = [original for original in wanted.originals if original.name.removesuffix(".gz") in str(error)]
        if not known:
            raise
        raise DataError(f"{error} The published {known[0].name} has the md5 checksum {known[0].md5}.") from error
    _check(dataset, f"{dataset.title} ({split}) in {root}", images)
    return images


def _fetch(split: Split, root: Path, progress: bool) -> None:
    if split.archive is not None:
        fetch_archive(split.archive, root, progress=progress)
        return
    if not split.sources:
        raise DataError("no address is known.")
    folder = root / split.layouts[0].folders[0]
    for original in split.sources:
        if find(folder, original.name.removesuffix(".gz")) is None:  # never replace a user's file
            fetch_file(original, folder, progress=progress)


def _check(dataset: Dataset, where: str, images: Images) -> None:
    shape = tuple(images.pixels.shape[1:])
    if len(images) == 0 or shape != dataset.shape:
        raise DataError(
            f"{where} holds {len(images)} images of shape {shape}, expected shape {dataset.shape} (channels, height, width): is it "
            f"another data set?"
        )
    low, high = int(images.labels.min()), int(images.labels.max())
    if low < 0 or high >= dataset.classes:
        raise DataError(
            f"{where} has labels from {low} to {high}, expected 0 to {dataset.classes - 1}: is it another data set?"
        )


def check_original(name: str, split: str, images: Images, directory: Path | str | None = None) -> None:
    """Warn if the files of a split are not the published files, or only a part of them."""
    wanted, title = find_split(name, split), DATASETS[name].title
    if wanted.count is not None and len(images) != wanted.count:
        warn(f"{title} ({split}) has {len(images):,} images here; {wanted.count:,} were published.")
        return  # the checksums of a part differ
    found = wanted.find(data_directory(directory))
    for path in found[1] if found is not None and wanted.originals else ():
        try:
            verify(path, wanted.originals)
        except DataError as error:
            warn(str(error))
