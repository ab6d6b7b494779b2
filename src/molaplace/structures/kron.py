r"""Kronecker-factored curvature, :math:`H \approx N\, A \otimes B`, with the prior added as in Algorithm 1 of the paper.

.. math:: A = \tfrac1N \sum_n \Lambda_n \;(C \times C), \qquad B = \tfrac1N \sum_n \phi_n \phi_n^\top \;(P \times P).

With :math:`A = Q_A\, \mathrm{diag}(a)\, Q_A^\top` and :math:`B = Q_B\, \mathrm{diag}(b)\, Q_B^\top`, the posterior precision has the
eigenvalues :math:`(\sqrt N a_i + \sqrt\lambda)(\sqrt N b_j + \sqrt\lambda)`. The covariance is therefore a Kronecker product
:math:`U \otimes V`, and the covariance of the logits is one number per datum times a fixed matrix,
:math:`(\phi^\top V \phi)\, U`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from molaplace.structures.factors import KroneckerStructure


@dataclass(frozen=True)
class Kron(KroneckerStructure):
    """Kronecker factors as in Algorithm 1 of the paper: the prior is split evenly between the two factors.

    Args:
        running_average: the paper's beta in `A <- beta A + (1 - beta) A_batch`, where A starts at 0; by default, the factors
            are exact means over the training data. A running average depends on the order of the batches and cannot be computed by
            several processes.
    """

    name = "kron"

    def spectrum(self, count: int, outputs: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return `sqrt(N) a` and `sqrt(N) b`."""
        return count**0.5 * outputs, count**0.5 * features
