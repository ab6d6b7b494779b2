"""CIFAR-10 and CIFAR-100: the binary files, and the Python ones without unpickling them.

A record of the binary version is one label byte (CIFAR-100: two, the coarse and the fine one), then the red, the green and
the blue plane of 32 x 32 pixels. The Python version holds the same planes and labels in a pickled dictionary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from mola.data.files import FETCH_AGAIN, read_bytes
from mola.data.images import Images
from mola.data.plain_pickle import read_plain_pickle
from mola.errors import DataError

__all__ = ["read_cifar_binary", "read_cifar_python"]

SIDE = 32
PIXELS = 3 * SIDE * SIDE


def read_cifar_binary(paths: Sequence[Path], label_bytes: int) -> Images:
    """Images of some binary files, one after the other.

    Args:
        paths: the files.
        label_bytes: 1 for CIFAR-10, 2 for CIFAR-100, whose second is the fine label.

    Returns:
        Images (n, 3, 32, 32).

    Raises:
        DataError: if a file is not a whole number of records.
    """
    record = label_bytes + PIXELS
    pixels, labels = [], []
    for path in paths:
        content = np.frombuffer(read_bytes(path), np.uint8)
        if len(content) == 0 or len(content) % record:
            message = (
                f"{path} holds {len(content):,} bytes, expected a multiple of {record:,}: {label_bytes} label "
                f"byte{'s' * (label_bytes > 1)} and 3 x {SIDE} x {SIDE} pixels to an image. It was cut off, or is another "
                f"version. {FETCH_AGAIN}"
            )
            raise DataError(message)
        rows = content.reshape(-1, record)
        pixels.append(rows[:, label_bytes:])
        labels.append(rows[:, label_bytes - 1])
    planes = torch.from_numpy(np.concatenate(pixels)).view(-1, 3, SIDE, SIDE)
    return Images(planes, torch.from_numpy(np.concatenate(labels)).long())


def read_cifar_python(paths: Sequence[Path], label_key: str) -> Images:
    """Images of some files of the Python version, one after the other; no code in them is run.

    Args:
        paths: the files.
        label_key: "labels" for CIFAR-10, "fine_labels" for CIFAR-100.

    Returns:
        Images (n, 3, 32, 32).

    Raises:
        DataError: if a file does not hold what it should.
    """
    pixels, labels = [], []
    for path in paths:
        batch = read_plain_pickle(path)
        data, targets = (batch.get("data"), batch.get(label_key)) if isinstance(batch, dict) else (None, None)
        if (
            not isinstance(data, np.ndarray)
            or data.dtype != np.uint8
            or data.ndim != 2
            or data.shape[1] != PIXELS
            or not isinstance(targets, list)
            or len(targets) != len(data)
            or not all(type(label) is int for label in targets)
        ):
            message = (
                f"{path} is no batch of this set: expected 'data' of shape (n, {PIXELS}) in bytes and n whole numbers in "
                f"{label_key!r}. {FETCH_AGAIN}"
            )
            raise DataError(message)
        pixels.append(data)
        labels += targets
    return Images(torch.from_numpy(np.concatenate(pixels)).view(-1, 3, SIDE, SIDE), torch.tensor(labels))
