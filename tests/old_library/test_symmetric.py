"""Symmetric matrices in half the memory."""

import pytest
import torch

from mola.laplace.symmetric import (
    BLOCK,
    add_gram,
    lower_rows,
    pack,
    packed_size,
    quadratic,
    quadratic_root,
    size_of,
    unpack,
)

SIZES = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 37, 5 * BLOCK - 1)


def symmetric(size):
    matrix = torch.randn(size, size, generator=torch.Generator().manual_seed(size))
    return matrix + matrix.T


@pytest.mark.parametrize("size", SIZES)
def test_a_matrix_comes_back_bit_for_bit(size):
    matrix = symmetric(size)
    packed = pack(matrix)
    assert packed.shape == (packed_size(size),)
    assert torch.equal(unpack(packed), matrix)
    assert size_of(packed) == size


@pytest.mark.parametrize("size", SIZES)
def test_sums_of_outer_products_are_symmetric_to_the_last_bit(size):
    rows = torch.randn(50, size, generator=torch.Generator().manual_seed(1))
    packed = pack(symmetric(size))
    add_gram(packed, rows[:20])
    add_gram(packed, rows[20:])
    found = unpack(packed)
    assert torch.equal(found, found.T)
    torch.testing.assert_close(found, symmetric(size) + rows.T @ rows, rtol=1e-12, atol=1e-12)


def test_flat_tensors_add_up_like_their_matrices():
    first, second = symmetric(300), symmetric(300).square()
    assert torch.equal(unpack(pack(first) + pack(second)), first + second)


def test_what_lies_above_the_diagonal_is_not_read():
    matrix = symmetric(300)
    spoilt = matrix.clone()
    spoilt[0, BLOCK:] = torch.nan
    assert torch.equal(unpack(pack(spoilt)), matrix)


def test_it_takes_little_more_than_half():
    assert packed_size(2048) < 0.54 * 2048**2
    assert all(block.data_ptr() for _, _, block in lower_rows(pack(symmetric(300))))


def test_sizes_are_told_from_lengths():
    assert [size_of(torch.empty(packed_size(size))) for size in range(1, 700)] == list(range(1, 700))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("smallest", [1e-1, 1e-12, 0.0])
def test_quadratic_forms_by_a_triangular_root(size, smallest):
    """Against the eigenbasis, also where the matrix is nearly or wholly singular."""
    vectors = torch.linalg.qr(symmetric(size)).Q
    values = torch.linspace(smallest, 3, size) if size > 1 else torch.tensor([2.0])
    root = quadratic_root(vectors, values)
    rows = torch.randn(40, size, generator=torch.Generator().manual_seed(2))
    expected = (rows @ vectors).square() @ values
    torch.testing.assert_close(quadratic(rows, root), expected, rtol=1e-11, atol=0)
    if size > BLOCK:
        assert torch.equal(root, torch.tril(root))
    # A direction of variance zero has none, to rounding.
    if smallest == 0 and size > 1:
        assert float(quadratic(vectors[:, :1].T, root)) < 1e-28 * size
