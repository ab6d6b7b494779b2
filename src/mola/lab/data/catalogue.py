"""The published data sets by name: their files, checksums and addresses; where they lie, how they are fetched and read.

Checksums are those of the originals, as torchvision and the sets' own pages list them; that of a compressed file's content
is added where it was computed from a file with the right checksum. A download that arrives damaged is not kept.
"""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO

from mola.errors import DataError, MissingExtraError, OptionError, warn
from mola.lab.data.files import Original, checksum, find
from mola.lab.data.files import verify as verify_file
from mola.lab.data.folder import Preparation, image_files, open_folder
from mola.lab.data.images import Images
from mola.lab.data.readers import (
    read_cifar_binary,
    read_cifar_python,
    read_colour_arrays,
    read_idx_pair,
    read_svhn,
)
from mola.options import one_of


@dataclass(frozen=True)
class FileLayout:
    """One form in which a split may lie on disk.

    Attributes:
        folders: where it may lie, under the data directory; "" is the directory itself.
        files: all that it needs, each as it is or compressed by gzip.
        read: from their paths, in this order, to images.
        ambiguous: whether other sets have files of the same names. The directory itself then counts only if it is named like
            one of the folders, or its files have the right checksums.
    """

    folders: tuple[str, ...]
    files: tuple[str, ...]
    read: Callable[[Sequence[Path]], Images]
    ambiguous: bool = False

    def find(self, directory: Path, originals: Sequence[Original]) -> list[Path | None]:
        """A path for each file, or None for those that are not there. All lie in the same folder."""
        best: list[Path | None] = [None] * len(self.files)
        for folder in self.folders:
            place = directory / folder
            found = [find([place], name) for name in self.files]
            if self.ambiguous and place == directory and not self._named(directory):
                sums = {md5 for original in originals for md5 in (original.md5, original.content_md5)}
                found = [path if path and checksum(path) in sums else None for path in found]
            if sum(path is not None for path in found) > sum(path is not None for path in best):
                best = found
            if None not in best:
                break
        return best

    def _named(self, directory: Path) -> bool:
        # Whether the given directory is itself the set's folder, as in `--data MNIST/raw`.
        names = {folder.lower() for folder in self.folders if folder}
        parts = directory.resolve().parts
        return any("/".join(parts[-count:]).lower() in names for count in (1, 2))


@dataclass(frozen=True)
class FolderLayout:
    """A split that lies on disk as a folder of image files.

    Attributes:
        folders: where it may lie, under the data directory.
        read: from the folder, alone in a sequence, to images.
        files: what to expect in it, for messages.
    """

    folders: tuple[str, ...]
    read: Callable[[Sequence[Path]], Images]
    files: tuple[str, ...]

    def find(self, directory: Path, originals: Sequence[Original]) -> list[Path | None]:
        """The first of the folders that holds images; nothing is known of the originals' checksums."""
        places = (directory / folder for folder in self.folders)
        return [next((place for place in places if place.is_dir() and image_files(place)), None)]


@dataclass(frozen=True)
class Archive:
    """A published archive that holds a split's files.

    Attributes:
        original: the archive.
        members: the names inside it and the names, under the data directory, that they are unpacked to.
    """

    original: Original
    members: Mapping[str, str]


@dataclass(frozen=True)
class Dataset:
    """What is known of a data set.

    Attributes:
        name: what it is called here.
        title: what its authors call it.
        classes: how many.
        shape: channels, height and width.
        counts: for each split, how many images were published; a user may have a part of them.
        layouts: for each split, the forms in which it may lie on disk; the first is the one to recommend.
        originals: for each split, the files to download into the first layout's first folder; also all known checksums.
        archives: for each split, the archive to download instead.
        hint: where to get it, for sets that cannot be downloaded by a program, or anything else worth knowing.
    """

    name: str
    title: str
    classes: int
    shape: tuple[int, int, int]
    counts: Mapping[str, int]
    layouts: Mapping[str, tuple[FileLayout | FolderLayout, ...]]
    originals: Mapping[str, tuple[Original, ...]]
    archives: Mapping[str, Archive]
    hint: str = ""

    @property
    def splits(self) -> tuple[str, ...]:
        """Those that exist."""
        return tuple(self.layouts)

    def find(self, split: str, directory: Path) -> tuple[FileLayout | FolderLayout, list[Path]] | None:
        """The first layout whose files are all there, and their paths."""
        for layout in self.layouts[split]:
            paths = layout.find(directory, self.originals.get(split, ()))
            found = [path for path in paths if path is not None]
            if len(found) == len(paths):
                return layout, found
        return None

    def wanted(self, split: str, directory: Path) -> str:
        """What to put where."""
        first = self.layouts[split][0]
        lines = [f"  {directory / first.folders[0] / name}" for name in first.files]
        sources: list[Original] = [self.archives[split].original] if split in self.archives else []
        sources += [original for original in self.originals.get(split, ()) if original.urls]
        for original in sources:
            lines.append(f"  from {original.urls[0]} (md5 {original.md5})")
        if self.hint:
            lines.append(f"  {self.hint}")
        return "\n".join(lines)


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
    layouts: dict[str, tuple[FileLayout | FolderLayout, ...]] = {}
    originals: dict[str, tuple[Original, ...]] = {}
    for split, prefix in IDX_PREFIX.items():
        files = _idx_names(prefix)
        layouts[split] = (FileLayout(_folders(folder, name), files, _pair, ambiguous=True),)
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
    layouts: dict[str, tuple[FileLayout | FolderLayout, ...]] = {}
    originals: dict[str, tuple[Original, ...]] = {}
    archives: dict[str, Archive] = {}
    for split in IDX_PREFIX:
        files = _idx_names(f"emnist-{part}-{split}")
        layouts[split] = (FileLayout((*_folders("EMNIST", "emnist"), "EMNIST/raw/gzip", "gzip"), files, read),)
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

    def layouts(prefix: str, size: str) -> tuple[FileLayout | FolderLayout, ...]:
        return (
            FileLayout(_folders("notMNIST", "notmnist"), _idx_names(prefix), _pair, ambiguous=True),
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
    layouts: dict[str, tuple[FileLayout | FolderLayout, ...]] = {}
    originals: dict[str, tuple[Original, ...]] = {}
    archives: dict[str, Archive] = {}
    for split, stems in files.items():
        names = tuple(f"{stem}.bin" for stem in stems)
        layouts[split] = (
            FileLayout(
                (binary, name, ""), names, partial(read_cifar_binary, label_bytes=label_bytes), ambiguous=classes == 100
            ),
            FileLayout((python, name, ""), stems, partial(read_cifar_python, label_key=key), ambiguous=True),
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
            split: tuple(FileLayout(("svhn", "SVHN", ""), (f"{split}_32x32.{end}",), read) for end in ("mat", "npz"))
            for split in sums
        },
        originals={
            split: (Original(f"{split}_32x32.mat", md5, (f"{SVHN_PAGE}/{split}_32x32.mat",)),)
            for split, md5 in sums.items()
        },
        archives={},
    )


def tinyimagenet() -> Dataset:
    """TinyImageNet's validation images, shrunk to 32 x 32 pixels, without classes that CIFAR-10 knows: near outliers of it."""

    def read(paths: Sequence[Path]) -> Images:
        return read_colour_arrays(paths[0])

    return Dataset(
        name="tinyimagenet",
        title="TinyImageNet, shrunk to 32 x 32",
        classes=1,
        shape=(3, 32, 32),
        counts={},  # which classes are left out is for who makes the file to say
        layouts={"test": (FileLayout(("tinyimagenet", "TinyImageNet"), ("val_32x32.npz",), read),)},
        originals={},
        archives={},
        hint=(
            "an array `images` (n, 32, 32, 3) of bytes, made from tiny-imagenet-200/val without what CIFAR-10 shows too,\n"
            "  from http://cs231n.stanford.edu/tiny-imagenet-200.zip"
        ),
    )


def fetch(dataset: Dataset, split: str, directory: Path, *, progress: bool = True) -> None:
    """Download what a split needs into the folder where torchvision would have put it.

    Files are written under other names first and renamed when they are whole and right.

    Args:
        dataset: which.
        split: of it.
        directory: the data directory.
        progress: whether to show a bar on stderr.
    """
    archive = dataset.archives.get(split)
    originals = [original for original in dataset.originals.get(split, ()) if original.urls]
    if archive is None and not originals:
        message = f"{dataset.title} ({split}) cannot be downloaded by a program. Put there yourself:\n"
        raise DataError(message + dataset.wanted(split, directory))
    try:
        if archive is not None:
            fetch_archive(archive, directory, progress=progress)
        else:
            folder = directory / dataset.layouts[split][0].folders[0]
            for original in originals:
                # What is there is the user's, and never replaced.
                if find([folder], original.name.removesuffix(".gz")) is None:
                    _fetch_file(original, folder, progress)
    except DataError as error:
        message = f"{dataset.title} ({split}) could not be downloaded: {error} Put there yourself:\n"
        raise DataError(message + dataset.wanted(split, directory)) from error


def _fetch_file(original: Original, folder: Path, progress: bool) -> Path:
    # The file, from the first address that gives the right one; it may be there already.
    try:
        import pooch  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError(feature="downloading data sets", package="pooch", extra="bench") from error
    failures = []
    log = pooch.get_logger()
    level = log.level
    log.setLevel("WARNING")  # the bar says enough
    try:
        for url in original.urls:
            try:
                return Path(
                    pooch.retrieve(
                        url,
                        known_hash=f"md5:{original.md5}",
                        fname=original.name,
                        path=folder,
                        downloader=pooch.HTTPDownloader(progressbar=progress, timeout=30),
                    )
                )
            # requests' errors are OSErrors; a wrong checksum is a ValueError of pooch's.
            except (OSError, ValueError) as error:
                failures.append(f"{url}: {' '.join(str(error).split())}")
    finally:
        log.setLevel(level)
    raise DataError(f"{original.name} (md5 {original.md5}) was not to be had. {'; '.join(failures)}.")


def fetch_archive(archive: Archive, directory: Path, *, progress: bool = True) -> None:
    """Fetch an archive, take the files out that are wanted and not there yet, and forget it."""
    try:
        with tempfile.TemporaryDirectory(prefix=".download-", dir=directory) as folder:
            path = _fetch_file(archive.original, Path(folder), progress)
            for member, target in archive.members.items():
                destination = directory / target
                if destination.exists():
                    continue
                destination.parent.mkdir(parents=True, exist_ok=True)
                whole = Path(folder) / "member"
                _take_out(path, member, whole)
                whole.replace(destination)
    except OSError as error:
        raise DataError(f"{archive.original.name} cannot be unpacked in {directory}: {error}.") from error


def _take_out(archive: Path, member: str, target: Path) -> None:
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as packed, packed.open(member) as source:
                _copy(source, target)
        else:
            with tarfile.open(archive) as tarball:
                inside = tarball.extractfile(member)
                if inside is None:
                    raise DataError(f"{archive.name} has a folder in the place of {member}.")
                _copy(inside, target)
    except (KeyError, EOFError, OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise DataError(f"{archive.name} does not give {member}: {error}.") from error


def _copy(source: IO[bytes], target: Path) -> None:
    with open(target, "wb") as stream:
        shutil.copyfileobj(source, stream)


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
            tinyimagenet(),
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
    """
    chosen = given if given is not None else os.environ.get(VARIABLE) or None
    if chosen is None:
        raise DataError(
            f"no data directory: name the folder that holds the data sets (--data DIR), or set {VARIABLE} to it."
        )
    path = Path(chosen).expanduser()
    if not path.is_dir():
        source = "" if given is not None else f" ({VARIABLE})"
        raise DataError(f"the data directory {path}{source} is not a folder: create it, or name another.")
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
    one_of(name, DATASETS, "the data set")
    if split not in DATASETS[name].splits:
        raise OptionError(f"{DATASETS[name].title} has the splits {', '.join(DATASETS[name].splits)}, got {split!r}.")
    return DATASETS[name]


def _read(dataset: Dataset, split: str, root: Path, verify: bool) -> Images | None:
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
        raise DataError(f"{error} The published {known[0].name} has the md5 checksum {known[0].md5}.") from error


def _missing(dataset: Dataset, split: str, root: Path, download: bool) -> str:
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
    plain = isinstance(first, FileLayout)
    note = "Compressed by gzip or not; the folders that torchvision makes are found too." if plain else ""
    return (
        f"{dataset.title} ({split}) is not in {root}.{some}{unpack}{remedy}\n{dataset.wanted(split, root)}\n{note}"
    ).rstrip()


def _packed(root: Path, folders: Sequence[str], name: str) -> Path | None:
    return next((root / folder / name for folder in ("", *folders) if (root / folder / name).is_file()), None)


def _check(dataset: Dataset, split: str, images: Images, root: Path) -> None:
    shape = tuple(images.pixels.shape[1:])
    if len(images) == 0 or shape != dataset.shape:
        raise DataError(
            f"{dataset.title} ({split}) in {root} holds {len(images)} images of shape {shape}, expected some of "
            f"{dataset.shape} (channels, height, width): is it another data set?"
        )
    low, high = int(images.labels.min()), int(images.labels.max())
    if low < 0 or high >= dataset.classes:
        raise DataError(
            f"{dataset.title} ({split}) in {root} has labels from {low} to {high}, counted from 0, expected 0 to "
            f"{dataset.classes - 1}: is it another data set?"
        )
