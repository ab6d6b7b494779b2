r"""Kronecker factors with the prior added exactly in their joint eigenbasis, as in laplace-torch's `kron`.

With the factors A and B of `kron`, the posterior precision has the eigenvalues :math:`N a_i b_j + \lambda` but is not a Kronecker
product. The covariance of the logits is diagonal in A's eigenbasis, and its entries depend on the datum:
:math:`Q_A\, \mathrm{diag}_i\big(\sum_j (Q_B^\top \phi)_j^2 / (N a_i b_j + \lambda)\big)\, Q_A^\top`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from molaplace.structures.factors import KroneckerStructure


@dataclass(frozen=True)
class KronExact(KroneckerStructure):
    """Kronecker factors with the prior added exactly in their joint eigenbasis."""

    name = "kron-exact"

    def spectrum(self, count: int, outputs: Tensor, features: Tensor) -> Tensor:
        """Return `N a b'`, of shape (C, P)."""
        return count * torch.outer(outputs, features)
