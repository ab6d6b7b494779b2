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
from mola.lab.data.download import FETCH_AGAIN, Download
from mola.lab.data.images import Images
from mola.lab.data.readers import open_npy

FOLDER = "CIFAR-10-C"
PLACES = (FOLDER, "cifar10-c", "cifar-10-c", "")

ARCHIVE = Download(
    ("https://zenodo.org/records/2535967/files/CIFAR-10-C.tar",),
    "56bf5dcef84df0e2308c6dcbcbbd8499",
    {f"{FOLDER}/{name}.npy": f"{FOLDER}/{name}.npy" for name in (*CORRUPTIONS, "labels")},
)
"""The archive of all corruptions, 2.9 GB."""


def find_cifar10_c(corruptions: Sequence[str], root: Path) -> Path | None:
    """Return the folder in the data directory that has the published files of all these corruptions, or None."""
    names = [f"{name}.npy" for name in (*corruptions, "labels")]
    return next((root / place for place in PLACES if all((root / place / name).is_file() for name in names)), None)


def load_cifar10_c(folder: Path, corruption: str, severity: int) -> Images:
    """Read the CIFAR-10 test images (10000, 3, 32, 32), in their order, under one corruption at severity 1 to 5."""
    pixels, labels = open_npy(folder / f"{corruption}.npy"), open_npy(folder / "labels.npy")
    count = len(labels) // len(SEVERITIES)
    if pixels.shape != (len(labels), 32, 32, 3) or labels.shape != (count * len(SEVERITIES),):
        raise DataError(
            f"{folder / corruption}.npy has the shape {pixels.shape} and labels.npy {labels.shape}: expected (n, 32, 32, 3) and (n,), "
            f"with n the images of {len(SEVERITIES)} severities. {FETCH_AGAIN}"
        )
    rows = slice((severity - 1) * count, severity * count)
    chosen = np.ascontiguousarray(pixels[rows].transpose(0, 3, 1, 2))
    return Images(torch.from_numpy(chosen), torch.from_numpy(labels[rows].astype(np.int64)))


PEOPLE = tuple(
    f"{folder}/{file}"
    for folder in ("cifar10h", "cifar-10h", "cifar-10h/data")
    for file in ("cifar10h-counts.npy", "counts.npy")
)
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
    counts = torch.from_numpy(open_npy(path).astype(np.int64))
    fits = counts.shape == (len(labels), 10) and bool((counts.sum(1) > 0).all())
    if not fits or float((counts.argmax(1) == labels).double().mean()) < LEAST_AGREEMENT:
        raise DataError(
            f"{path}: expected counts ({len(labels)}, 10) whose majority agrees with the test labels on 99 % of the images, got the "
            f"shape {tuple(counts.shape)}. Fetch the file from https://github.com/jcpeterson/cifar-10h."
        )
    return counts
