"""CIFAR-10-C as published: one .npy file for each corruption, and one of labels.

A corruption's file has the 10,000 test images five times, (50000, 32, 32, 3), from severity 1 to severity 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from mola.errors import DataError, OptionError
from mola.lab.corruptions.catalogue import CORRUPTIONS, SEVERITIES
from mola.lab.data.catalogue import Archive, data_directory, fetch_archive
from mola.lab.data.files import FETCH_AGAIN, Original
from mola.lab.data.images import Images
from mola.options import one_of

FOLDER = "CIFAR-10-C"
PLACES = (FOLDER, "cifar10-c", "cifar-10-c", "")

ARCHIVE = Archive(
    Original(
        "CIFAR-10-C.tar",
        "56bf5dcef84df0e2308c6dcbcbbd8499",
        ("https://zenodo.org/records/2535967/files/CIFAR-10-C.tar",),
    ),
    {f"{FOLDER}/{name}.npy": f"{FOLDER}/{name}.npy" for name in (*CORRUPTIONS, "labels")},
)


def load_cifar10_c(
    corruption: str, severity: int, directory: Path | str | None = None, *, download: bool = False
) -> Images:
    """The CIFAR-10 test images, in their order, under one corruption.

    Args:
        corruption: one of `mola.lab.corruptions.CORRUPTIONS`.
        severity: 1 to 5.
        directory: the data directory; otherwise `MOLA_DATA` names it.
        download: whether to fetch the archive of all corruptions (2.9 GB) if the file is missing.

    Returns:
        Images (10000, 3, 32, 32); no more than these are read from the file.
    """
    one_of(corruption, CORRUPTIONS, "the corruption of CIFAR-10-C")
    if severity not in SEVERITIES:
        raise OptionError(f"severity must be 1 to {SEVERITIES[-1]}, got {severity}.")
    root = data_directory(directory)
    folder = _folder(root, corruption)
    if folder is None and download:
        fetch_archive(ARCHIVE, root)
        folder = _folder(root, corruption)
    if folder is None:
        original = ARCHIVE.original
        remedy = "Put there:" if download else "Allow the download (download=True), or put there yourself:"
        raise DataError(
            f"CIFAR-10-C's {corruption} is not in {root}. {remedy}\n  {root / FOLDER / corruption}.npy\n"
            f"  {root / FOLDER / 'labels.npy'}\n  from {original.urls[0]} (2.9 GB, md5 {original.md5})"
        )
    pixels, labels = _open(folder / f"{corruption}.npy", 4), _open(folder / "labels.npy", 1)
    if len(pixels) != len(labels) or len(labels) % len(SEVERITIES) or pixels.shape[1:] != (32, 32, 3):
        raise DataError(
            f"{folder / corruption}.npy holds the shape {pixels.shape} and labels.npy {labels.shape}: expected "
            f"(n, 32, 32, 3) and (n,), with n the images of {len(SEVERITIES)} severities. {FETCH_AGAIN}"
        )
    count = len(labels) // len(SEVERITIES)
    rows = slice((severity - 1) * count, severity * count)
    chosen = np.ascontiguousarray(pixels[rows].transpose(0, 3, 1, 2))
    return Images(torch.from_numpy(chosen), torch.from_numpy(labels[rows].astype(np.int64)))


def has_cifar10_c(corruptions: Sequence[str], directory: Path | str | None = None) -> bool:
    """Whether the published files of all these corruptions are in the data directory."""
    root = data_directory(directory)
    return all(_folder(root, corruption) is not None for corruption in corruptions)


def _folder(root: Path, corruption: str) -> Path | None:
    return next(
        (
            root / place
            for place in PLACES
            if all((root / place / f"{name}.npy").is_file() for name in (corruption, "labels"))
        ),
        None,
    )


def _open(path: Path, dimensions: int) -> np.ndarray:
    # An array of bytes, on disk: of 150 MB only the part that is wanted will be read.
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{path} ({path.stat().st_size:,} bytes) is not a whole .npy file: {error}. {FETCH_AGAIN}"
        ) from error
    if not isinstance(array, np.ndarray) or array.ndim != dimensions or array.dtype.kind not in "ui":
        raise DataError(
            f"{path} is not an array of whole numbers with {dimensions} dimension{'s' * (dimensions > 1)}. {FETCH_AGAIN}"
        )
    return array
