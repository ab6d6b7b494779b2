"""The idx format of MNIST and its relatives.

A file is two zero bytes, the type of the numbers (8: unsigned bytes), the number of dimensions, each dimension in four bytes
(most significant first), then the numbers with the last dimension running fastest. It is often compressed by gzip.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import torch
from torch import Tensor

from mola.data.files import FETCH_AGAIN, read_bytes
from mola.data.images import Images
from mola.errors import DataError

__all__ = ["read_idx", "read_idx_pair"]

UNSIGNED_BYTES = 8


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read a file of unsigned bytes.

    Args:
        path: ends in .gz if it is compressed.
        dimensions: how many it must have: 3 for images, 1 for labels.

    Returns:
        The numbers in uint8.

    Raises:
        DataError: if the file is no such idx file, or not as long as it says.
    """
    content = read_bytes(path)
    start = 4 + 4 * dimensions
    expected = bytes([0, 0, UNSIGNED_BYTES, dimensions])
    if content[:4] != expected:
        message = (
            f"{path} is no idx file of unsigned bytes with {dimensions} dimension{'s' * (dimensions > 1)}: expected it to "
            f"begin with {expected.hex(' ')}, got {content[:4].hex(' ') or 'nothing'}. {FETCH_AGAIN}"
        )
        raise DataError(message)
    shape = struct.unpack(f">{dimensions}I", content[4:start]) if len(content) >= start else None
    if shape is None or len(content) != start + math.prod(shape):
        size = f"{start + math.prod(shape):,} bytes for {shape}" if shape else f"at least {start} bytes"
        message = f"{path} holds {len(content):,} bytes where its header says {size}: it was cut off or changed. {FETCH_AGAIN}"
        raise DataError(message)
    if math.prod(shape) == 0:
        return torch.zeros(shape, dtype=torch.uint8)
    # A bytearray, since a tensor over immutable bytes could be written to by mistake.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).view(shape)


def read_idx_pair(images: Path, labels: Path, *, first_label: int = 0, upright: bool = False) -> Images:
    """Images and labels from two files.

    Args:
        images: the file with three dimensions.
        labels: the file with one.
        first_label: the file's name for class 0.
        upright: whether to exchange rows and columns. EMNIST's files are written column by column.

    Returns:
        Grey images, (n, 1, height, width).

    Raises:
        DataError: if the files do not belong together.
    """
    pixels, targets = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(targets):
        message = (
            f"{images} holds {len(pixels)} images but {labels} {len(targets)} labels: they do not belong together."
        )
        raise DataError(message)
    if upright:
        pixels = pixels.transpose(1, 2).contiguous()
    return Images(pixels[:, None], targets.long() - first_label)
