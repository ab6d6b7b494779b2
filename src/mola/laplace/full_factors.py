"""Sums of the exact Hessian: the lower half of every block that is not the same as another."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from mola.laplace.base import Factors
from mola.laplace.symmetric import lower_rows, pack, size_of, unpack

__all__ = ["FullFactors", "add_coupling", "add_weighted", "factors_of"]


@dataclass(frozen=True)
class FullFactors(Factors):
    """Sums from which the Hessian follows, and the features' outer products for the outlier score; lower halves."""

    coupling: Tensor
    """`Phi' diag(u_i u_j) Phi`, packed, for each pair i < j of outputs: (C (C - 1) / 2, packed size)."""
    feature_sum: Tensor
    """Of the features' outer products, packed."""
    separate: Tensor | None = None
    """`Phi' diag(d_i) Phi`, packed, for each output (C, packed size)."""

    @property
    def hessian(self) -> Tensor:
        """The Hessian (C, P, C, P)."""
        pairs, width = len(self.coupling), size_of(self.feature_sum)
        outputs = int((1 + (1 + 8 * pairs) ** 0.5) / 2)
        hessian = self.coupling.new_zeros(outputs, width, outputs, width)
        for (first, second), packed in zip(combinations(range(outputs), 2), self.coupling, strict=True):
            block = unpack(packed)
            hessian[first, :, second, :] = hessian[second, :, first, :] = -block
            hessian[first, :, first, :] += block
            hessian[second, :, second, :] += block
        for output, packed in enumerate(() if self.separate is None else self.separate):
            hessian[output, :, output, :] += unpack(packed)
        return hessian

    @property
    def gram(self) -> Tensor:
        """Sum (P, P) of the features' outer products."""
        return unpack(self.feature_sum)

    def saved(self) -> dict[str, Tensor]:
        """The two matrices."""
        return {"hessian": self.hessian, "gram": self.gram}


def add_coupling(sums: Tensor, features: Tensor, coupling: Tensor) -> None:
    """Add `Z_i' Z_j` of one group of rows, for all pairs i < j, to their packed sums in place."""
    outputs = coupling.shape[1]
    scaled = coupling.T[:, :, None] * features
    begin = 0
    for first in range(outputs - 1):
        later = outputs - first - 1
        for start, end, blocks in lower_rows(sums[begin : begin + later]):
            left = scaled[first, :, start:end].T.expand(later, -1, -1)
            blocks.baddbmm_(left, scaled[first + 1 :, :, :end])
        begin += later


def add_weighted(packed: Tensor, weights: Tensor, features: Tensor) -> None:
    """Add `Phi' diag(w) Phi` to a packed sum in place."""
    for start, end, block in lower_rows(packed):
        block.addmm_((weights[:, None] * features[:, start:end]).T, features[:, :end])


def factors_of(count: int, log_likelihood: float | None, hessian: Tensor, gram: Tensor) -> FullFactors:
    """The sums from the matrices that they make.

    Args:
        count: number of data.
        log_likelihood: of their labels.
        hessian: (C, P, C, P)
        gram: (P, P)

    Returns:
        Factors whose Hessian is this one, to the last bit where it was made from factors.
    """
    pairs = combinations(range(len(hessian)), 2)
    blocks = [pack(-hessian[first, :, second, :]) for first, second in pairs]
    products = pack(gram)
    coupling = torch.stack(blocks) if blocks else products.new_zeros(0, len(products))
    coupled = FullFactors(count, log_likelihood, coupling, products)
    # Diagonal blocks are made again, from the same numbers in the same order: what is left, beyond another machine's
    # rounding, is what outputs have for themselves.
    rest = (hessian - coupled.hessian).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    if float(rest.abs().max()) <= 1e-12 * float(hessian.abs().max()):
        return coupled
    own = torch.stack([pack(block) for block in rest])
    return FullFactors(count, log_likelihood, coupling, products, own)
