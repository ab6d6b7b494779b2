r"""Kronecker factors with the prior added exactly, in their joint eigenbasis.

The posterior precision has eigenvalues :math:`N a_i b_j + \lambda`. It is not a Kronecker product any more; a logit
covariance is diagonal in A's eigenbasis, with entries that depend on the datum:
:math:`Q_A\, \mathrm{diag}_i\big(\sum_j (Q_B^\top \phi)_j^2 / (N a_i b_j + \lambda)\big)\, Q_A^\top`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mola.laplace.base import Posterior, Spectrum, beside_tables, mahalanobis_weights
from mola.laplace.kron import Kron, KronFactors, KronPosterior, KronSpectrum
from mola.likelihood import CATEGORICAL, Likelihood


@dataclass(frozen=True)
class KronExact(Kron):
    """Kronecker factors with the prior added exactly in their joint eigenbasis (laplace-torch's `kron`)."""

    name = "kron-exact"

    def spectrum(self, factors: KronFactors, likelihood: Likelihood = CATEGORICAL) -> Spectrum:
        """Eigendecompose both factors."""
        return ExactSpectrum(factors, likelihood)


class ExactSpectrum(KronSpectrum):
    """The prior added exactly: precision eigenvalues `N a b + lambda`."""

    def inverse(self, precision: float | Tensor) -> Tensor:
        """Eigenvalues (C, P) of the posterior covariance; (L, C, P) for precisions (L, 1, 1)."""
        return 1 / (self.count * self.class_values[:, None] * self.feature_values + precision)

    def class_table(self, precision: float, *, contrast: bool = False) -> Tensor:
        """Weights (C, P) of the squared coordinates in each logit's variance."""
        seen = self.visible if contrast else self.outputs
        return self.class_vectors[:, :seen].square() @ self.inverse(precision)[:seen]

    def variance(self, projected: Tensor, precision: float, *, contrast: bool = False) -> Tensor:
        """`sum_ij Q_A[c, i]^2 (Q_B' phi)_j^2 / (N a_i b_j + lambda)`."""
        return projected @ self.class_table(precision, contrast=contrast).T

    def variances(self, projected: Tensor, precisions: Sequence[float], *, contrast: bool = False) -> Tensor:
        """The same at several precisions, with one product."""
        seen = self.visible if contrast else self.outputs
        tables = self.class_vectors[:, :seen].square() @ self.inverse(beside_tables(precisions))[:, :seen]
        return (tables.flatten(0, 1) @ projected.T).view(*tables.shape[:2], -1)

    def log_determinant(self, precision: Tensor) -> Tensor:
        """`sum_ij log(N a_i b_j + lambda)`."""
        return -self.inverse(precision).log().sum()

    def deviations(self, precision: float, count: int, generator: torch.Generator | None) -> Tensor:
        """Independent normals in the joint eigenbasis, rotated back."""
        noise = torch.randn(count, self.outputs, self.features, generator=generator, dtype=torch.float64, device="cpu")
        return self.class_vectors @ (noise * self.inverse(precision).sqrt()) @ self.feature_vectors.T

    def class_covariance(self, precision: float, output: int) -> Tensor:
        """`Q_B diag(table_c) Q_B'`."""
        return (self.feature_vectors * self.class_table(precision)[output]) @ self.feature_vectors.T

    def smallest_class_variance(self, precision: float) -> Tensor:
        """The smallest entry of each class's table: its covariance is diagonal in B's eigenbasis."""
        return self.class_table(precision).min(dim=1).values

    def variance_range(self, precision: float) -> tuple[float, float]:
        """The extreme eigenvalues of the posterior covariance."""
        return float(self.inverse(precision).min()), 1 / precision

    def posterior(self, precision: float) -> Posterior:
        """The posterior at one prior precision."""
        return ExactPosterior(self, precision)


class ExactPosterior(KronPosterior):
    """Logit covariance `Q_A diag(s(phi)) Q_A'`, diagonal in A's eigenbasis with entries that depend on the datum."""

    spectrum: ExactSpectrum
    feature_vectors: Tensor
    outlier_weights: Tensor
    class_table: Tensor
    contrast_class_table: Tensor
    inverse: Tensor
    class_vectors: Tensor

    def constants(self) -> dict[str, Tensor]:
        """Tables of weights over squared coordinates, and A's eigenvectors with the visible directions first."""
        spectrum, precision = self.spectrum, self.precision
        return {
            "feature_vectors": spectrum.feature_vectors,
            "outlier_weights": mahalanobis_weights(spectrum.feature_values),
            "class_table": spectrum.class_table(precision),
            "contrast_class_table": spectrum.class_table(precision, contrast=True),
            "inverse": spectrum.inverse(precision),
            "class_vectors": spectrum.class_vectors,
        }

    def squares(self, features: Tensor) -> Tensor:
        """Squared coordinates (n, P) of the features in B's eigenbasis."""
        return (features @ self.feature_vectors).square()

    def mahalanobis(self, features: Tensor) -> Tensor:
        """`sqrt(phi' B^-1 phi)`."""
        return (self.squares(features) @ self.outlier_weights).sqrt()

    def variance(self, features: Tensor) -> Tensor:
        """Squared coordinates times the table."""
        return self.squares(features) @ self.class_table.T

    def contrast_variance(self, features: Tensor) -> Tensor:
        """The same with the visible part of the table."""
        return self.squares(features) @ self.contrast_class_table.T

    def _rotated(self, features: Tensor, seen: int) -> Tensor:
        spread = self.squares(features) @ self.inverse[:seen].T
        vectors = self.class_vectors[:, :seen]
        return (vectors * spread[:, None, :]) @ vectors.T

    def covariance(self, features: Tensor) -> Tensor:
        """`Q_A diag(s) Q_A'`."""
        return self._rotated(features, self.spectrum.outputs)

    def contrast_covariance(self, features: Tensor) -> Tensor:
        """The same in the visible directions."""
        return self._rotated(features, self.noise_size)

    def difference_variances(self, features: Tensor) -> Callable[[slice, slice, slice], Tensor]:
        """Variances of the differences of logits, by data, first and second logits: a product for each that is asked for."""
        squares, seen = self.squares(features), self.noise_size
        spread, own = squares @ self.inverse[:seen].T, squares @ self.contrast_class_table.T
        vectors = self.class_vectors[:, :seen]

        def of(rows: slice, first: slice, second: slice) -> Tensor:
            joint = (vectors[first] * spread[rows, None]) @ vectors[second].T
            return (own[rows, first, None] + own[rows, None, second]).sub_(joint, alpha=2).clamp_min_(0)

        return of

    def perturb(self, features: Tensor, noise: Tensor) -> Tensor:
        """`Q_A (sqrt(s) * noise)`."""
        spread = (self.squares(features) @ self.inverse[: self.noise_size].T).sqrt()
        return (spread[:, None, :] * noise) @ self.class_vectors[:, : self.noise_size].T
