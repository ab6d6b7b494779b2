"""Linear algebra that structures share: bases of output space, eigenbases, packed symmetric matrices.

A packed symmetric matrix is its lower block rows, one after the other in one flat tensor. Block row i holds the rows of
block i up to and with its diagonal block. That is little more than half of the matrix: half of the memory, and half of the
arithmetic where the matrix is a sum of outer products. The flat tensors of two matrices of the same size add up like the
matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from mola.errors import OptionError
from mola.likelihood import Likelihood


def seen_basis(likelihood: Likelihood, outputs: int) -> tuple[Tensor, Tensor]:
    """Orthonormal bases of what the likelihood sees of output space (C, R), and of what it does not (C, C - R)."""
    visible = likelihood.visible(outputs)
    hidden = outputs - visible.shape[1]
    if hidden == 0:
        return visible, visible.new_zeros(outputs, 0)
    if hidden == 1:
        # The complement of the contrasts is the constant vector: written down, not computed.
        return visible, visible.new_full((outputs, 1), outputs**-0.5)
    raise OptionError(f"a likelihood may hide at most one direction of output space, got {hidden}")


def eigensystem(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, clamped at 0, and eigenvectors of a positive semi-definite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return values.clamp_min(0), vectors


def centred_variance(variance: Tensor) -> Tensor:
    """Variances (..., C) of independent outputs less their mean: `v_c (1 - 2/C) + mean(v) / C`."""
    outputs = variance.shape[-1]
    return variance * (1 - 2 / outputs) + variance.mean(-1, keepdim=True) / outputs


def centred_diagonal(variance: Tensor) -> Tensor:
    """Covariance (..., C, C) of independent outputs less their mean, from their variances (..., C)."""
    outputs, mean = variance.shape[-1], variance.mean(-1)[..., None, None]
    return torch.diag_embed(variance) - (variance[..., :, None] + variance[..., None, :] - mean) / outputs


BLOCK = 128
"""Rows of a block: enough for matrix products at full speed, few enough that little is computed twice."""


def packed_size(size: int) -> int:
    """Numbers that a symmetric matrix of `size` rows takes."""
    return sum(min(BLOCK, size - start) * min(start + BLOCK, size) for start in range(0, size, BLOCK))


def size_of(packed: Tensor) -> int:
    """Rows of the matrix in a flat tensor, or of each in several."""
    return _size_of(packed.shape[-1])


@cache
def _size_of(length: int) -> int:
    # Kept for each length: finding it takes longer than adding some rows.
    size = int((2 * length) ** 0.5) + 1
    while packed_size(size) > length:
        size -= 1
    return size


def lower_rows(packed: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """The block rows: from which row, to which, and their numbers (..., rows, end) as a view.

    Args:
        packed: one flat tensor, or several (..., packed size).

    Yields:
        First row, row after the last, view.
    """
    size, offset = size_of(packed), 0
    for start in range(0, size, BLOCK):
        end = min(start + BLOCK, size)
        part = packed[..., offset : offset + (end - start) * end]
        yield start, end, part.view(*packed.shape[:-1], end - start, end)
        offset += (end - start) * end


def add_gram(packed: Tensor, rows: Tensor) -> None:
    """Add `rows' rows` to a matrix, in place and without another of its size.

    Args:
        packed: the matrix.
        rows: (n, size), of the same type.
    """
    for start, end, block in lower_rows(packed):
        block.addmm_(rows[:, start:end].T, rows[:, :end])


def pack(matrix: Tensor) -> Tensor:
    """The flat tensor of a symmetric matrix; what lies above its diagonal blocks is not read."""
    packed = matrix.new_empty(packed_size(len(matrix)))
    for start, end, block in lower_rows(packed):
        block.copy_(matrix[start:end, :end])
    return packed


def unpack(packed: Tensor) -> Tensor:
    """The matrix, symmetric to the last bit."""
    size = size_of(packed)
    matrix = packed.new_empty(size, size)
    for start, end, block in lower_rows(packed):
        matrix[start:end, :end] = block
        matrix[:start, start:end] = block[:, :start].T
        square = torch.tril(block[:, start:])
        matrix[start:end, start:end] = square + torch.tril(square, -1).T
    return matrix


def quadratic_root(vectors: Tensor, values: Tensor) -> Tensor:
    """A root R of `vectors diag(values) vectors' = R R'`, for `quadratic`: lower triangular where that saves arithmetic.

    Args:
        vectors: orthonormal columns (P, P).
        values: (P,), not negative.

    Returns:
        (P, P)
    """
    root = vectors * values.sqrt()
    # Not Cholesky's of the product: that squares the condition, and may fail.
    return root if len(root) <= BLOCK else torch.linalg.qr(root.T, mode="r").R.T.contiguous()


def quadratic(features: Tensor, root: Tensor) -> Tensor:
    """`|phi' R|^2` (n,) for each row: a triangular root has nothing above its diagonal blocks, which is skipped."""
    if root.shape[0] <= BLOCK:
        return (features @ root).square().sum(1)
    total = features.new_zeros(features.shape[0])
    for start in range(0, root.shape[0], BLOCK):
        total = total + (features[:, start:] @ root[start:, start : start + BLOCK]).square().sum(1)
    return total
