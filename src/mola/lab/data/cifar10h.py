"""CIFAR-10H (Peterson et al., 2019): about 50 people's labels for each image of the CIFAR-10 test set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mola.errors import DataError
from mola.lab.data.catalogue import data_directory

FILES = ("cifar10h-counts.npy", "counts.npy")
FOLDERS = ("cifar10h", "cifar-10h", "cifar-10h/data")
PAGE = "https://github.com/jcpeterson/cifar-10h"
AGREE = 0.95
"""Share of images that most people must label as CIFAR-10 does; 99.2 % in the published file."""


def load_cifar10h(labels: Tensor, directory: Path | str | None = None) -> Tensor | None:
    """How many people gave each label.

    Args:
        labels: of the CIFAR-10 test set (10000,), to check that images are in the same order.
        directory: the data directory; otherwise `MOLA_DATA` names it.

    Returns:
        (10000, 10) in int64; None if the file is not there.
    """
    root = data_directory(directory)
    places = (root / folder / file for folder in FOLDERS for file in FILES)
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return None
    try:
        counts = torch.from_numpy(np.load(path, allow_pickle=False).astype(np.int64))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): fetch it again from {PAGE}.") from error
    if counts.shape != (len(labels), 10) or not bool((counts.sum(1) > 0).all()) or bool((counts < 0).any()):
        raise DataError(
            f"{path}: expected counts of people ({len(labels)}, 10), some for every image, got {tuple(counts.shape)}."
        )
    agree = float((counts.argmax(1) == labels).double().mean())
    if agree < AGREE:
        raise DataError(
            f"{path}: most people agree with the labels of the test set on {100 * agree:.1f} % of the images, where 99 % are "
            f"expected: are both in the order in which CIFAR-10 was published?"
        )
    return counts
