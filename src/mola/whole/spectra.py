r"""Curvature in its eigenbasis: what follows for any prior precision, in closed form.

The posterior precision is :math:`H + \lambda I`, with H the generalised Gauss-Newton matrix summed over the training data
(for a softmax it is the Fisher matrix). With eigenvalues h and rows J in the eigenbasis, the covariance of the linearised
logits is :math:`\sum_e J_e J_e^\top / (h_e + \lambda)`; nothing but the last factor depends on the prior.

`Blocks` knows no correlation between layers: a layer's H is a Kronecker product :math:`B \otimes A`, whose eigenvalues are
the products :math:`b_i a_j` (the exact form: nothing is damped), or a diagonal. A layer that is used once for each datum
never has its rows multiplied out: :math:`\sum_{ij} (g_i a_j)^2 w_{ij} = \sum_i g_i^2 \sum_j a_j^2 w_{ij}`.
`Dense` is any symmetric H over all or some of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self

import torch
from torch import Tensor

from mola.whole.jacobians import NUMBERS_AT_ONCE, JacobianRows, Piece, Product, WeightLayout


class WeightSpectrum(Protocol):
    """Curvature of all weights in its eigenbasis."""

    @property
    def values(self) -> Tensor:
        """Eigenvalues (D,)."""

    def covariance(self, rows: JacobianRows, precision: float) -> Tensor:
        """Covariance (n, R, R) of the linearised logits along the rows' directions."""

    def variances(self, rows: JacobianRows, precisions: Tensor) -> Tensor:
        """Variances (L, n, R) of the same, at several prior precisions."""

    def deviation(self, noise: Tensor, precision: float) -> Tensor:
        """A draw (D,) of the weights less the trained ones, driven by standard normals, one for each eigenvalue."""

    def to(self, like: Tensor) -> Self:
        """The same on a device and in a precision."""


@dataclass(frozen=True)
class LayerSpectrum:
    """One layer's curvature: eigenvalues of `(left x right)`, or a plain diagonal without these."""

    values: Tensor
    """(O, I)"""
    left: Tensor | None = None
    """Eigenvectors (O, O) of the gradients' factor."""
    right: Tensor | None = None
    """Eigenvectors (I, I) of the inputs' factor."""

    def to(self, like: Tensor) -> LayerSpectrum:
        """The same on a device and in a precision."""
        moved = [None if part is None else part.to(like) for part in (self.left, self.right)]
        return LayerSpectrum(self.values.to(like), *moved)

    def _factors(self, piece: Piece) -> tuple[Tensor, Tensor]:
        # Inputs (n, I) and gradients (n, R, O) in the eigenbasis, of a layer that is used once for each datum.
        given, gradients = piece.inputs.squeeze(2), piece.gradients.squeeze(3)
        return (
            given if self.right is None else given @ self.right,
            gradients if self.left is None else gradients @ self.left,
        )

    def _products(self, piece: Piece | Product) -> Tensor:
        # Rows (n, R, O I) in the eigenbasis: each side is rotated before or after the product, whichever is less work.
        left, right = self.left, self.right
        if isinstance(piece, Piece):
            given, gradients = piece.inputs, piece.gradients
            _, directions, outputs, positions = gradients.shape
            if right is not None and positions < directions * outputs:
                given, right = right.T @ given, None
            if left is not None and positions < given.shape[1]:
                gradients, left = left.T @ gradients, None
            piece = Piece(given, gradients)
        rows = piece.product()
        if right is not None:
            rows = rows @ right
        if left is not None:
            rows = left.T @ rows
        return rows.flatten(2)

    def covariance(self, piece: Piece | Product, precision: float) -> Tensor:
        """Covariance (n, R, R)."""
        scale = 1 / (self.values + precision)
        if isinstance(piece, Piece) and piece.single:
            given, gradients = self._factors(piece)
            return torch.bmm(gradients * (given.square() @ scale.T)[:, None], gradients.mT)
        rows = self._products(piece)
        return torch.bmm(rows * scale.flatten(), rows.mT)

    def variances(self, piece: Piece | Product, precisions: Tensor) -> Tensor:
        """Variances (L, n, R)."""
        if not (isinstance(piece, Piece) and piece.single):
            squares = self._products(piece).square()
            return self._by_few(precisions, lambda scales: torch.einsum("nrd,ld->lnr", squares, scales.flatten(1)))
        given, gradients = (factor.square() for factor in self._factors(piece))

        def weighted(scales: Tensor) -> Tensor:
            return torch.einsum("nro,lno->lnr", gradients, given @ scales.mT)

        return self._by_few(precisions, weighted)

    def _by_few(self, precisions: Tensor, weighted: Callable[[Tensor], Tensor]) -> Tensor:
        # What follows from the scales (L, O, I) of all candidates, of which there is never more than a few layers'
        # worth.
        together = max(1, NUMBERS_AT_ONCE // self.values.numel())
        starts = range(0, len(precisions), together)
        few = (precisions[start : start + together, None, None] for start in starts)
        return torch.cat([weighted(1 / (self.values + some)) for some in few])

    def deviation(self, noise: Tensor, precision: float) -> Tensor:
        """A draw (O I,)."""
        drawn = noise.view_as(self.values) * torch.rsqrt(self.values + precision)
        drawn = drawn if self.left is None else self.left @ drawn
        return (drawn if self.right is None else drawn @ self.right.T).flatten()


def _summed(rows: Tensor, scales: Tensor) -> Tensor:
    # Variances (L, n, R) of rows (n, R, D) in the eigenbasis, with scales (L, D).
    return torch.einsum("nrd,ld->lnr", rows.square(), scales)


@dataclass(frozen=True)
class Blocks:
    """Layers that know nothing of each other; the rest of the weights each by itself."""

    layers: tuple[LayerSpectrum, ...]
    rest: Tensor
    """(P,)"""

    @cached_property
    def values(self) -> Tensor:
        """Eigenvalues (D,)."""
        return torch.cat([*(layer.values.flatten() for layer in self.layers), self.rest])

    def covariance(self, rows: JacobianRows, precision: float) -> Tensor:
        """Covariance (n, R, R) of the linearised logits along the rows' directions."""
        parts = [layer.covariance(piece, precision) for layer, piece in zip(self.layers, rows.layers, strict=True)]
        if rows.rest is not None:
            parts.append(torch.bmm(rows.rest / (self.rest + precision), rows.rest.mT))
        return torch.stack(parts).sum(0)

    def variances(self, rows: JacobianRows, precisions: Tensor) -> Tensor:
        """Variances (L, n, R) of the same, at several prior precisions."""
        parts = [layer.variances(piece, precisions) for layer, piece in zip(self.layers, rows.layers, strict=True)]
        if rows.rest is not None:
            parts.append(_summed(rows.rest, 1 / (self.rest + precisions[:, None])))
        return torch.stack(parts).sum(0)

    def deviation(self, noise: Tensor, precision: float) -> Tensor:
        """A draw (D,) of the weights less the trained ones."""
        *parts, rest = torch.split(noise, [*(layer.values.numel() for layer in self.layers), len(self.rest)])
        drawn = [layer.deviation(part, precision) for layer, part in zip(self.layers, parts, strict=True)]
        return torch.cat([*drawn, rest * torch.rsqrt(self.rest + precision)])

    def to(self, like: Tensor) -> Blocks:
        """The same on a device and in a precision."""
        return Blocks(tuple(layer.to(like) for layer in self.layers), self.rest.to(like))


@dataclass(frozen=True)
class Dense:
    """All or some of the weights, with every correlation between them; the others are fixed."""

    values: Tensor
    """(S,)"""
    vectors: Tensor
    """(S, S)"""
    chosen: Tensor | None
    """Places (S,) of the weights in the vector of all, rising; None: all of them."""
    layout: WeightLayout

    def _products(self, rows: JacobianRows) -> Tensor:
        return dense_rows(rows, self.layout, self.chosen) @ self.vectors

    def covariance(self, rows: JacobianRows, precision: float) -> Tensor:
        """Covariance (n, R, R) of the linearised logits along the rows' directions."""
        products = self._products(rows)
        return torch.bmm(products / (self.values + precision), products.mT)

    def variances(self, rows: JacobianRows, precisions: Tensor) -> Tensor:
        """Variances (L, n, R) of the same, at several prior precisions."""
        return _summed(self._products(rows), 1 / (self.values + precisions[:, None]))

    def deviation(self, noise: Tensor, precision: float) -> Tensor:
        """A draw (D,) of the weights less the trained ones; 0 for those that are fixed."""
        drawn = self.vectors @ (noise * torch.rsqrt(self.values + precision))
        if self.chosen is None:
            return drawn
        return drawn.new_zeros(self.layout.size).index_copy(0, self.chosen, drawn)

    def to(self, like: Tensor) -> Dense:
        """The same on a device and in a precision."""
        chosen = None if self.chosen is None else self.chosen.to(like.device)
        return Dense(self.values.to(like), self.vectors.to(like), chosen, self.layout)


def dense_rows(rows: JacobianRows, layout: WeightLayout, chosen: Tensor | None) -> Tensor:
    """Rows (n, R, S) of all weights, or of the chosen ones, multiplied out."""
    parts, start = [], 0
    for piece, layer in zip(rows.layers, layout.layers, strict=True):
        if chosen is None:
            parts.append(piece.product().flatten(2))
        else:
            inside = chosen[(chosen >= start) & (chosen < start + layer.size)] - start
            parts.append(_columns(piece, inside, layer.columns))
        start += layer.size
    if rows.rest is not None:
        parts.append(rows.rest if chosen is None else rows.rest[:, :, chosen[chosen >= start] - start])
    return torch.cat(parts, dim=2)


def _columns(piece: Piece | Product, inside: Tensor, width: int) -> Tensor:
    # Some columns (n, R, s) of a layer's rows.
    if isinstance(piece, Piece) and piece.single:
        above, across = inside // width, inside % width
        return piece.gradients[:, :, above, 0] * piece.inputs[:, None, across, 0]
    return piece.product().flatten(2)[:, :, inside]
