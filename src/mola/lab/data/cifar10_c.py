"""CIFAR-10-C and CIFAR-10H, which go with the CIFAR-10 test set: .npy files as published.

CIFAR-10-C: a corruption's file has the 10,000 test images five times, (50000, 32, 32, 3), from severity 1 to severity 5, and one
file has their labels. CIFAR-10H (Peterson et al., 2019): how many of about 50 people gave each label, (10000, 10).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mola.errors import DataError
from mola.lab.corruptions.catalogue import CORRUPTIONS, SEVERITIES
from mola.lab.data.catalogue import data_directory
from mola.lab.data.download import FETCH_AGAIN, Download, fetch
from mola.lab.data.images import Images

FOLDER = "CIFAR-10-C"
PLACES = (FOLDER, "cifar10-c", "cifar-10-c", "")

ARCHIVE = Download(
    ("https://zenodo.org/records/2535967/files/CIFAR-10-C.tar",),
    "56bf5dcef84df0e2308c6dcbcbbd8499",
    {f"{FOLDER}/{name}.npy": f"{FOLDER}/{name}.npy" for name in (*CORRUPTIONS, "labels")},
)


def load_cifar10_c(
    corruption: str, severity: int, directory: Path | str | None = None, *, download: bool = False
) -> Images:
    """Read the CIFAR-10 test images (10000, 3, 32, 32), in their order, under one corruption at severity 1 to 5.

    The archive of all corruptions has 2.9 GB.
    """
    root = data_directory(directory)
    folder = _folder(root, corruption)
    if folder is None and download:
        fetch(ARCHIVE, root)
        folder = _folder(root, corruption)
    if folder is None:
        raise DataError(
            f"CIFAR-10-C's {corruption} is not in {root}. Pass download=True, or provide:\n  {root / FOLDER / corruption}.npy\n"
            f"  {root / FOLDER / 'labels.npy'}\n  from {ARCHIVE}, 2.9 GB"
        )
    pixels, labels = _open(folder / f"{corruption}.npy"), _open(folder / "labels.npy")
    count = len(labels) // len(SEVERITIES)
    if pixels.shape != (len(labels), 32, 32, 3) or labels.shape != (count * len(SEVERITIES),):
        raise DataError(
            f"{folder / corruption}.npy has the shape {pixels.shape} and labels.npy {labels.shape}: expected (n, 32, 32, 3) and (n,), "
            f"with n the images of {len(SEVERITIES)} severities. {FETCH_AGAIN}"
        )
    rows = slice((severity - 1) * count, severity * count)
    chosen = np.ascontiguousarray(pixels[rows].transpose(0, 3, 1, 2))
    return Images(torch.from_numpy(chosen), torch.from_numpy(labels[rows].astype(np.int64)))


def has_cifar10_c(corruptions: Sequence[str], directory: Path | str | None = None) -> bool:
    """Return whether the published files of all these corruptions are in the data directory."""
    root = data_directory(directory)
    return all(_folder(root, corruption) is not None for corruption in corruptions)


def _folder(root: Path, corruption: str) -> Path | None:
    names = (f"{corruption}.npy", "labels.npy")
    return next((root / place for place in PLACES if all((root / place / name).is_file() for name in names)), None)


def _open(path: Path) -> np.ndarray:
    # On disk: of 150 MB only the required part is read.
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{path} ({path.stat().st_size:,} bytes) is not a complete .npy file: {error}. {FETCH_AGAIN}"
        ) from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "ui":
        raise DataError(f"{path} is not an array of integers. {FETCH_AGAIN}")
    return array


PEOPLE = tuple(
    f"{folder}/{file}"
    for folder in ("cifar10h", "cifar-10h", "cifar-10h/data")
    for file in ("cifar10h-counts.npy", "counts.npy")
)
PEOPLE_PAGE = "https://github.com/jcpeterson/cifar-10h"
LEAST_AGREEMENT = 0.95
"""Share of images on which the majority must agree with CIFAR-10's label; 99.2 % in the published file."""


def load_cifar10h(labels: Tensor, directory: Path | str | None = None) -> Tensor | None:
    """Read how many people gave each label, (10000, 10) in int64; None if the file is not in the data directory.

    The labels (10000,) of the CIFAR-10 test set show whether the images are in the same order.
    """
    root = data_directory(directory)
    path = next((root / place for place in PEOPLE if (root / place).is_file()), None)
    if path is None:
        return None
    counts = torch.from_numpy(_open(path).astype(np.int64))
    if counts.shape != (len(labels), 10) or not bool((counts.sum(1) > 0).all()) or bool((counts < 0).any()):
        raise DataError(
            f"{path}: expected counts ({len(labels)}, 10), some for every image, got {tuple(counts.shape)}. Fetch it from "
            f"{PEOPLE_PAGE}."
        )
    agreement = float((counts.argmax(1) == labels).double().mean())
    if agreement < LEAST_AGREEMENT:
        raise DataError(
            f"{path}: the majority agrees with the test labels on {100 * agreement:.1f} % of the images, expected 99 %: are "
            f"both in the published order?"
        )
    return counts
