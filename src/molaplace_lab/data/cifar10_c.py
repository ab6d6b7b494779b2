"""Readers for CIFAR-10-C and CIFAR-10H, which are published as .npy files for the CIFAR-10 test set.

In CIFAR-10-C, each corruption has a file of shape (50000, 32, 32, 3), which contains the 10,000 test images at severities 1 to 5. A
separate file contains the labels. CIFAR-10H (Peterson et al., 2019) is an array of shape (10000, 10): for each image, it contains the
number of people, out of about 50, who chose each label.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from molaplace.errors import DataError
from molaplace.images import Images
from molaplace_lab.corruptions.catalogue import CORRUPTIONS, SEVERITIES
from molaplace_lab.data.catalogue import data_directory
from molaplace_lab.data.download import FETCH_AGAIN, Download
from molaplace_lab.data.readers import open_npy

FOLDERS = ("CIFAR-10-C", "cifar10-c", "cifar-10-c", "")

ARCHIVE = Download(
    ("https://zenodo.org/records/2535967/files/CIFAR-10-C.tar",),
    "56bf5dcef84df0e2308c6dcbcbbd8499",
    {f"CIFAR-10-C/{name}.npy": f"CIFAR-10-C/{name}.npy" for name in (*CORRUPTIONS, "labels")},
)
"""The archive of all corruptions (2.9 GB)."""


def find_cifar10_c(corruptions: Sequence[str], root: Path) -> Path | None:
    """Find the folder in `root` that contains the published files for all given corruptions; return None if there is none."""
    names = [f"{name}.npy" for name in (*corruptions, "labels")]
    return next((root / folder for folder in FOLDERS if all((root / folder / name).is_file() for name in names)), None)


def load_cifar10_c(folder: Path, corruption: str, severity: int) -> Images:
    """Read the CIFAR-10 test images (10000, 3, 32, 32), in their original order, with the given corruption and severity (1 to 5)."""
    pixels = open_npy(folder / f"{corruption}.npy")
    labels = open_npy(folder / "labels.npy")
    count = len(labels) // len(SEVERITIES)
    if pixels.shape != (len(labels), 32, 32, 3) or labels.shape != (count * len(SEVERITIES),):
        raise DataError(
            f"{folder / corruption}.npy has the shape {pixels.shape}, and labels.npy has the shape {labels.shape}. Expected "
            f"(n, 32, 32, 3) and (n,), where n is the number of images at all {len(SEVERITIES)} severities. {FETCH_AGAIN}"
        )
    rows = slice((severity - 1) * count, severity * count)
    chosen = np.ascontiguousarray(pixels[rows].transpose(0, 3, 1, 2))
    return Images(torch.from_numpy(chosen), torch.from_numpy(labels[rows].astype(np.int64)))


COUNTS = tuple(
    f"{folder}/{file}"
    for folder in ("cifar10h", "cifar-10h", "cifar-10h/data")
    for file in ("cifar10h-counts.npy", "counts.npy")
)
LEAST_AGREEMENT = 0.95
"""Minimum share of images whose majority label equals CIFAR-10's label. The share in the published file is 99.2 %."""


def load_cifar10h(labels: Tensor, directory: Path | str | None = None) -> Tensor | None:
    """Read how many people chose each label, as int64 of shape (10000, 10); return None if the file is not in the data directory.

    The labels (10000,) of the CIFAR-10 test set are used to check the order of the images.
    """
    root = data_directory(directory)
    path = next((root / name for name in COUNTS if (root / name).is_file()), None)
    if path is None:
        return None
    counts = torch.from_numpy(open_npy(path).astype(np.int64))
    fits = counts.shape == (len(labels), 10) and bool((counts.sum(1) > 0).all())
    if not fits or float((counts.argmax(1) == labels).double().mean()) < LEAST_AGREEMENT:
        raise DataError(
            f"{path}: expected counts of shape ({len(labels)}, 10) whose majority label equals the test label for 99 % of the "
            f"images; got shape {tuple(counts.shape)}. Download the file from https://github.com/jcpeterson/cifar-10h."
        )
    return counts
