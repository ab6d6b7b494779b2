r"""Kronecker factors with the prior added exactly in their joint eigenbasis, as in laplace-torch's `kron`.

The posterior precision has the eigenvalues :math:`N a_i b_j + \lambda` but is not a Kronecker product. The covariance of the
logits is diagonal in A's eigenbasis, and its entries depend on the datum:
:math:`Q_A\, \mathrm{diag}_i\big(\sum_j (Q_B^\top \phi)_j^2 / (N a_i b_j + \lambda)\big)\, Q_A^\top`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from molaplace.numerics import Generator, standard_normals
from molaplace.structures.base import Curvature, Precision, as_column
from molaplace.structures.kron import Kron, KronCurvature, kron_eigensystem
from molaplace.sums import Sums


@dataclass(frozen=True)
class KronExact(Kron):
    """Kronecker factors with the prior added exactly in their joint eigenbasis."""

    name = "kron-exact"

    def solve(self, sums: Sums) -> Curvature:
        """Eigendecompose both factors."""
        return KronExactCurvature(**kron_eigensystem(sums))


class KronExactCurvature(KronCurvature):
    """A curvature for which the posterior precision has the eigenvalues `N a_i b_j + lambda` in the factors' joint eigenbasis."""

    def inverse(self, precision: Precision) -> Tensor:
        """Return the eigenvalues (..., C, P) of the posterior covariance."""
        values = self.count * self.class_values[:, None] * self.feature_values
        return 1 / (values + as_column(precision, values, 2))

    def class_table(self, precision: Precision, *, centred: bool = False) -> Tensor:
        """Return the weights (..., C, P) of the squared coordinates in each logit's variance."""
        count = self.visible if centred else self.outputs
        return self.class_vectors[:, :count].square() @ self.inverse(precision)[..., :count, :]

    def variance(self, phi: Tensor, precision: Precision, *, centred: bool = False) -> Tensor:
        """Return `sum_ij Q_A[c, i]^2 (Q_B' phi)_j^2 / (N a_i b_j + lambda)`."""
        return self.squares(phi) @ self.class_table(precision, centred=centred).mT

    def covariance(self, phi: Tensor, precision: float, *, centred: bool = False) -> Tensor:
        """Return `Q_A diag(s(phi)) Q_A'`."""
        count = self.visible if centred else self.outputs
        spread, vectors = self.squares(phi) @ self.inverse(precision)[:count].T, self.class_vectors[:, :count]
        return (vectors * spread[:, None, :]) @ vectors.T

    def perturb(self, phi: Tensor, precision: float, noise: Tensor) -> Tensor:
        """Return `Q_A (sqrt(s(phi)) * noise)`."""
        spread = (self.squares(phi) @ self.inverse(precision)[: self.visible].T).sqrt()
        return (spread[:, None, :] * noise) @ self.class_vectors[:, : self.visible].T

    def sample(self, precision: float, count: int, generator: Generator) -> Tensor:
        """Draw independent normals in the joint eigenbasis and rotate them back."""
        noise = standard_normals((count, self.outputs, self.features), generator).to(self.class_values.device)
        return self.class_vectors @ (noise * self.inverse(precision).sqrt()) @ self.feature_vectors.T

    def log_determinant(self, precision: Tensor) -> Tensor:
        """Return `sum_ij log(N a_i b_j + lambda)`."""
        return -self.inverse(precision).log().sum()

    def class_covariance(self, precision: float, output: int) -> Tensor:
        """Return `Q_B diag(table_c) Q_B'`."""
        return (self.feature_vectors * self.class_table(precision)[output]) @ self.feature_vectors.T

    def smallest_class_variance(self, precision: float) -> Tensor:
        """Return the smallest value in each output's row of `class_table`: the smallest eigenvalue of that output's covariance."""
        return self.class_table(precision).amin(1)
