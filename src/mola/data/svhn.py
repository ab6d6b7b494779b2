"""SVHN's cropped digits: the published MATLAB files, or the same arrays in NumPy's .npz.

The MATLAB file has X (32, 32, 3, n) and y (n, 1), in which 10 stands for the digit 0. The .npz has `images` (n, 32, 32, 3)
and `labels` (n,), digit 0 as either 0 or 10.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import torch

from mola.data.files import FETCH_AGAIN, read_bytes
from mola.data.images import Images
from mola.errors import DataError, MissingExtraError

__all__ = ["read_svhn"]

SIDE = 32
BROKEN = (zlib.error, zipfile.BadZipFile)


def read_svhn(path: Path) -> Images:
    """The images of a .mat or .npz file.

    Args:
        path: the file.

    Returns:
        Images (n, 3, 32, 32), labelled by their digit.

    Raises:
        DataError: if the file is not whole, or holds something else.
    """
    arrays = _npz if path.name.removesuffix(".gz").endswith(".npz") else _mat()
    content = BytesIO(read_bytes(path))
    try:
        pixels, labels = arrays(content)
    # What SciPy and NumPy raise for broken files is not documented: these are what cutting and overwriting files gave.
    except (OSError, EOFError, LookupError, ValueError, TypeError, NotImplementedError, *BROKEN) as error:
        message = (
            f"{path} ({path.stat().st_size:,} bytes) is not a whole file of SVHN's cropped digits: "
            f"{type(error).__name__}: {error}. {FETCH_AGAIN}"
        )
        raise DataError(message) from error
    labels = labels.reshape(-1).astype(np.int64)
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), 3, SIDE, SIDE):
        message = (
            f"{path} holds {pixels.dtype} of shape {pixels.shape} (as images, channels, height, width) and {len(labels)} "
            f"labels; expected as many images of bytes, 3 x {SIDE} x {SIDE}. {FETCH_AGAIN}"
        )
        raise DataError(message)
    labels[labels == 10] = 0
    return Images(torch.from_numpy(np.ascontiguousarray(pixels)), torch.from_numpy(labels))


def _mat() -> Callable[[BytesIO], tuple[np.ndarray, np.ndarray]]:
    """A reader of .mat files.

    Raises:
        MissingExtraError: if SciPy is not installed.
    """
    try:
        from scipy import io
    except ImportError as error:
        raise MissingExtraError(feature="reading SVHN's .mat files", package="scipy", extra="bench") from error

    def read(content: BytesIO) -> tuple[np.ndarray, np.ndarray]:
        try:
            arrays = io.loadmat(content, variable_names=["X", "y"])
        except io.matlab.MatReadError as error:  # derives from nothing but Exception
            raise ValueError(error) from error
        return arrays["X"].transpose(3, 2, 0, 1), arrays["y"]

    return read


def _npz(content: BytesIO) -> tuple[np.ndarray, np.ndarray]:
    with np.load(content, allow_pickle=False) as arrays:
        return arrays["images"].transpose(0, 3, 1, 2), arrays["labels"]
