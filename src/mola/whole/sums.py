r"""Passes over the training data: the generalised Gauss-Newton matrix in some structure, summed batch by batch.

With the output Hessian of a datum written as :math:`\Lambda = S S^\top`, the rows :math:`S^\top J` of the Jacobian make
:math:`H = \sum_n (S^\top J)^\top (S^\top J)`: its diagonal is a sum of squares, its blocks are products of rows.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from mola.errors import StructureTooLargeError
from mola.float64 import exact
from mola.laplace.memory import free_memory
from mola.likelihood import CATEGORICAL, Likelihood
from mola.network import Inputs
from mola.whole.jacobians import Piece, Product, WeightLayout, jacobian_rows
from mola.whole.kfac import KroneckerFactors
from mola.whole.spectra import Blocks, Dense, LayerSpectrum, WeightSpectrum, dense_rows

__all__ = ["DenseSum", "DiagonalSum", "KroneckerSum", "Sum", "check_dense_size", "roots"]

MATRICES = 4
"""Of the dense matrix's size: the sum, its eigenvectors, and what the eigensolver takes."""


class Sum(Protocol):
    """Curvature of one network, being summed."""

    explicit: int
    """Columns of the rows that are multiplied out."""

    def add(self, inputs: Inputs) -> Tensor:
        """Take one more portion of data; gives the logits (n, C)."""

    def spectrum(self) -> WeightSpectrum:
        """What was summed, in its eigenbasis."""


def roots(logits: Tensor, likelihood: Likelihood = CATEGORICAL) -> Tensor:
    r"""Directions (R, n, C) whose outer products sum to the output Hessian of each datum.

    With :math:`u = s q` and :math:`1^\top q = 1`, the Laplacian of :math:`u u^\top` is :math:`s^2 (\mathrm{diag}(q) - q
    q^\top)`, and a root of that has the rows :math:`s \sqrt{q_r} (e_r - q)`.
    """
    curvature = likelihood.curvature(logits.double())  # in float64: 1 - q of an almost certain class must not cancel
    parts = []
    if curvature.coupling is not None:
        total = curvature.coupling.sum(1, keepdim=True)
        share = curvature.coupling / total
        apart = torch.eye(share.shape[1], dtype=share.dtype, device=share.device)[:, None] - share
        parts.append((total * share.sqrt()).T[:, :, None] * apart)
    if curvature.separate is not None:
        parts.append(torch.diag_embed(curvature.separate.sqrt()).transpose(0, 1))
    return torch.cat(parts)


class DiagonalSum:
    """The diagonal, exactly.

    Args:
        network: in eval mode.
        layout: of the weights.
    """

    explicit = 0

    def __init__(self, network: nn.Module, layout: WeightLayout) -> None:
        """Start from nothing."""
        self.network, self.layout = network, layout
        self.total = torch.zeros(layout.size, dtype=torch.float64, device="cpu")

    def add(self, inputs: Inputs) -> Tensor:
        """Take one more portion of data; gives the logits (n, C)."""
        rows = jacobian_rows(self.network, self.layout, inputs, roots)
        parts = [_squares(piece) for piece in rows.layers]
        if rows.rest is not None:
            parts.append(rows.rest.square().sum((0, 1)))
        self.total += torch.cat([part.flatten() for part in parts]).cpu().double()
        return rows.logits

    def spectrum(self) -> Blocks:
        """The diagonal is its own eigenbasis."""
        *parts, rest = self.layout.pieces(self.total)
        pairs = zip(self.layout.layers, parts, strict=True)
        return Blocks(tuple(LayerSpectrum(part.reshape(layer.rows, -1)) for layer, part in pairs), rest)


def _squares(piece: Piece | Product) -> Tensor:
    """Sum (O, I) over data and rows of the squares of a layer's rows."""
    if isinstance(piece, Piece) and piece.single:
        return piece.gradients.squeeze(3).square().sum(1).T @ piece.inputs.squeeze(2).square()
    return piece.product().square().sum((0, 1))


class KroneckerSum:
    """K-FAC for layers that mix channels, the diagonal for normalisations and all the rest.

    Args:
        network: in eval mode.
        layout: of the weights.
    """

    explicit = 0

    def __init__(self, network: nn.Module, layout: WeightLayout) -> None:
        """Start from nothing."""
        maps = tuple(layer for layer in layout.layers if not layer.scales)
        others = WeightLayout(tuple(layer for layer in layout.layers if layer.scales), layout.rest)
        self.layout = layout
        self.factors = KroneckerFactors(network, maps) if maps else None
        self.others = DiagonalSum(network, others) if others.size else None

    def add(self, inputs: Inputs) -> Tensor:
        """Take one more portion of data; gives the logits (n, C)."""
        logits = [part.add(inputs) for part in (self.others, self.factors) if part is not None]
        return logits[-1]

    def spectrum(self) -> Blocks:
        """Layers in the eigenbases of their factors."""
        maps = iter([] if self.factors is None else self.factors.spectra())
        nothing = torch.zeros(0, dtype=torch.float64, device="cpu")
        others = Blocks((), nothing) if self.others is None else self.others.spectrum()
        scales = iter(others.layers)
        return Blocks(tuple(next(scales if layer.scales else maps) for layer in self.layout.layers), others.rest)


class DenseSum:
    """The whole matrix, of all weights or of chosen ones.

    Args:
        network: in eval mode.
        layout: of the weights.
        chosen: places of some of them, rising; None: all.
    """

    def __init__(self, network: nn.Module, layout: WeightLayout, chosen: Tensor | None = None) -> None:
        """Start from nothing."""
        self.network, self.layout, self.chosen = network, layout, chosen
        self.explicit = layout.size if chosen is None else len(chosen)
        self.total = torch.zeros(self.explicit, self.explicit, dtype=torch.float64, device="cpu")

    def add(self, inputs: Inputs) -> Tensor:
        """Take one more portion of data; gives the logits (n, C)."""
        rows = jacobian_rows(self.network, self.layout, inputs, roots)
        chosen = None if self.chosen is None else self.chosen.to(rows.logits.device)
        flat = dense_rows(rows, self.layout, chosen).flatten(0, 1)
        flat = exact(flat)  # before the product: in float32 its rounding outweighs a small prior precision
        self.total += (flat.T @ flat).cpu()
        return rows.logits

    def spectrum(self) -> Dense:
        """Solve the eigenproblem."""
        values, vectors = torch.linalg.eigh(self.total)
        return Dense(values.clamp_min(0), vectors.contiguous(), self.chosen, self.layout)


def check_dense_size(side: int, networks: int, advice: str) -> None:
    """Refuse a matrix that would not fit in memory.

    Args:
        side: number of weights.
        networks: how many there are.
        advice: what to use instead.

    Raises:
        StructureTooLargeError: saying how large it would be.
    """
    needed = 8 * side**2 * (2 * networks + MATRICES - 2)
    free = free_memory()
    if free is not None and needed > free:
        message = (
            f"the covariance of {side} weights is a {side} x {side} matrix of {8 * side**2 / 1e9:.2f} GB; {networks} network(s) "
            f"need about {needed / 1e9:.2f} GB with the eigensolver, and {free / 1e9:.2f} GB are free. {advice}"
        )
        raise StructureTooLargeError(message)
