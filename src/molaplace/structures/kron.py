r"""Kronecker-factored curvature, :math:`H \approx N\, A \otimes B`, with the prior added as in Algorithm 1 of the paper.

.. math:: A = \tfrac1N \sum_n \Lambda_n \;(C \times C), \qquad B = \tfrac1N \sum_n \phi_n \phi_n^\top \;(P \times P).

With :math:`A = Q_A\, \mathrm{diag}(a)\, Q_A^\top` and :math:`B = Q_B\, \mathrm{diag}(b)\, Q_B^\top`, the posterior precision has the
eigenvalues :math:`(\sqrt N a_i + \sqrt\lambda)(\sqrt N b_j + \sqrt\lambda)`. The covariance is therefore a Kronecker product
:math:`U \otimes V`, and the covariance of the logits is one number per datum times a fixed matrix,
:math:`(\phi^\top V \phi)\, U`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from molaplace.numerics import Generator, standard_normals
from molaplace.structures.base import Curvature, Precision, as_column
from molaplace.structures.factors import KroneckerStructure, OutputFactor, ProductCurvature
from molaplace.sums import Sums


@dataclass(frozen=True)
class Kron(KroneckerStructure):
    """Kronecker factors as in Algorithm 1 of the paper: the prior is split evenly between the two factors.

    Args:
        running_average: the paper's beta in `A <- beta A + (1 - beta) A_batch`, where A starts at 0; by default, the factors
            are exact means over the training data. A running average depends on the order of the batches and cannot be computed by
            several processes.
    """

    name = "kron"

    def solve(self, sums: Sums) -> Curvature:
        """Eigendecompose both factors."""
        return KronCurvature(*self.solve_factors(sums))


@dataclass(frozen=True)
class KronCurvature(ProductCurvature):
    """A product curvature with `U = (sqrt(N) A + sqrt(lambda) I)^-1`, computed from A's eigensystem."""

    output_factor: OutputFactor

    def output_inverse_eigenvalues(self, precision: Precision) -> Tensor:
        """Return the eigenvalues (..., C) of U."""
        values = self.output_factor.values
        return 1 / (self.count**0.5 * values + as_column(precision, values, 1) ** 0.5)

    def output_variance(self, precision: Precision, *, centred: bool = False) -> Tensor:
        """Return the diagonal (..., C) of U or, if `centred` is True, of its centred part."""
        vectors = self.output_factor.directions(centred=centred)
        return self.output_inverse_eigenvalues(precision)[..., : vectors.shape[1]] @ vectors.square().T

    def output_covariance(self, precision: float, *, centred: bool = False) -> Tensor:
        """Return U (C, C) or, if `centred` is True, its centred part."""
        vectors = self.output_factor.directions(centred=centred)
        return (vectors * self.output_inverse_eigenvalues(precision)[: vectors.shape[1]]) @ vectors.T

    @property
    def noise_size(self) -> int:
        """Number of visible directions: one standard normal variable for each."""
        return self.output_factor.visible

    def output_draws(self, precision: float, noise: Tensor) -> Tensor:
        """Return `U^1/2 noise` in the visible directions."""
        vectors = self.output_factor.directions(centred=True)
        return noise @ (vectors * self.output_inverse_eigenvalues(precision)[: vectors.shape[1]].sqrt()).T

    def sample(self, precision: float, count: int, generator: Generator) -> Tensor:
        """Draw standard normals E and return `U^1/2 E V^1/2`."""
        noise = standard_normals((count, self.outputs, self.features), generator)
        left = self.output_factor.vectors * self.output_inverse_eigenvalues(precision).sqrt()
        right = self.feature_factor.vectors * self.feature_inverse(precision).sqrt()
        return left @ noise.to(left.device) @ right.T

    def output_log_determinant(self, precision: Tensor) -> Tensor:
        """Return `sum_i log(sqrt(N) a_i + sqrt(lambda))`."""
        return -self.output_inverse_eigenvalues(precision).log().sum()

    def divided_by(self, factor: float) -> Self:
        """Return the curvature divided by a factor."""
        return replace(self, output_factor=self.output_factor.divided_by(factor))
