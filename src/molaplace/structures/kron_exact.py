r"""Kronecker factors with the prior added exactly in their joint eigenbasis, as in laplace-torch's `kron`.

With the factors A and B of `kron`, the posterior precision has the eigenvalues :math:`N a_i b_j + \lambda` but is not a Kronecker
product. The covariance of the logits is diagonal in A's eigenbasis, and its entries depend on the datum:
:math:`Q_A\, \mathrm{diag}_i\big(\sum_j (Q_B^\top \phi)_j^2 / (N a_i b_j + \lambda)\big)\, Q_A^\top`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from molaplace.numerics import Generator, square_root, standard_normals
from molaplace.structures.base import Curvature, LayerCurvature, Precision, as_column
from molaplace.structures.factors import FeatureFactor, KroneckerStructure, OutputFactor
from molaplace.sums import Sums


@dataclass(frozen=True)
class KronExact(KroneckerStructure):
    """Kronecker factors with the prior added exactly in their joint eigenbasis."""

    name = "kron-exact"

    def solve(self, sums: Sums) -> Curvature:
        """Eigendecompose both factors."""
        return KronExactCurvature(*self.solve_factors(sums))


@dataclass(frozen=True)
class KronExactCurvature(LayerCurvature):
    """A curvature for which the posterior precision has the eigenvalues `N a_i b_j + lambda` in the factors' joint eigenbasis."""

    count: int
    feature_factor: FeatureFactor
    output_factor: OutputFactor

    def inverse(self, precision: Precision) -> Tensor:
        """Return the eigenvalues (..., C, P) of the posterior covariance."""
        values = self.count * self.output_factor.values[:, None] * self.feature_factor.values
        return 1 / (values + as_column(precision, values, 2))

    def output_inverse(self, precision: Precision, *, centred: bool = False) -> Tensor:
        """Return the weights (..., C, P) of the squared coordinates of the features in each logit's variance."""
        vectors = self.output_factor.directions(centred=centred)
        return vectors.square() @ self.inverse(precision)[..., : vectors.shape[1], :]

    def variance(self, phi: Tensor, precision: Precision, *, centred: bool = False) -> Tensor:
        """Return `sum_ij Q_A[c, i]^2 (Q_B' phi)_j^2 / (N a_i b_j + lambda)`."""
        return self.feature_factor.squares(phi) @ self.output_inverse(precision, centred=centred).mT

    def _direction_variance(self, phi: Tensor, precision: float, directions: int) -> Tensor:
        # Return the variance (n, R) along each of the first R of A's eigenvectors.
        return self.feature_factor.squares(phi) @ self.inverse(precision)[:directions].T

    def covariance(self, phi: Tensor, precision: float, *, centred: bool = False) -> Tensor:
        """Return `Q_A diag(s(phi)) Q_A'`."""
        vectors = self.output_factor.directions(centred=centred)
        variance = self._direction_variance(phi, precision, vectors.shape[1])
        return (vectors * variance[:, None, :]) @ vectors.T

    def joint_covariance(self, phi: Tensor, precision: float) -> Tensor:
        """Return `sum_i Q_A[c, i] Q_A[d, i] sum_j (Q_B' phi)_j (Q_B' phi')_j / (N a_i b_j + lambda)`."""
        vectors = self.output_factor.vectors
        coordinates = phi @ self.feature_factor.vectors
        along = torch.einsum("np,rp,mp->rnm", coordinates, self.inverse(precision), coordinates)
        return torch.einsum("cr,rnm,dr->ncmd", vectors, along, vectors)

    @property
    def noise_size(self) -> int:
        """Number of visible directions: one standard normal variable for each."""
        return self.output_factor.visible

    def perturb(self, phi: Tensor, precision: float, noise: Tensor) -> Tensor:
        """Return `Q_A (sqrt(s(phi)) * noise)`."""
        vectors = self.output_factor.directions(centred=True)
        deviation = square_root(self._direction_variance(phi, precision, vectors.shape[1]))
        return (deviation[:, None, :] * noise) @ vectors.T

    def sample(self, precision: float, count: int, generator: Generator) -> Tensor:
        """Draw independent normals in the joint eigenbasis and rotate them back."""
        noise = standard_normals((count, self.outputs, self.features), generator).to(self.output_factor.values.device)
        return self.output_factor.vectors @ (noise * self.inverse(precision).sqrt()) @ self.feature_factor.vectors.T

    def log_determinant(self, precision: Tensor) -> Tensor:
        """Return `sum_ij log(N a_i b_j + lambda)`."""
        return -self.inverse(precision).log().sum()

    def mahalanobis(self, phi: Tensor) -> Tensor:
        """Return `sqrt(phi' B^-1 phi)`."""
        return self.feature_factor.mahalanobis(phi)

    def class_covariance(self, precision: float, output: int) -> Tensor:
        """Return `Q_B diag(v) Q_B'`, where v is the output's row of `output_inverse`."""
        return self.feature_factor.matrix(self.output_inverse(precision)[output])

    def smallest_class_variance(self, precision: float) -> Tensor:
        """Return the smallest value in each row of `output_inverse`, the smallest eigenvalue of the output's covariance."""
        return self.output_inverse(precision).amin(1)

    def divided_by(self, factor: float) -> Self:
        """Return the curvature divided by a factor."""
        return replace(self, output_factor=self.output_factor.divided_by(factor))
