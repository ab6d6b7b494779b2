"""Kronecker factors as constants: one product into the eigenbasis of the features, and small tables over its squares."""

from __future__ import annotations

import torch
from torch import Tensor

from mola.export.folding.base import Draws, Folded
from mola.laplace.base import mahalanobis_weights
from mola.laplace.damped import DampedFeatures
from mola.laplace.kron import DampedPosterior
from mola.laplace.kron_diag import KronDiagPosterior
from mola.laplace.kron_exact import ExactPosterior

__all__ = ["FoldedDamped", "FoldedExact", "FoldedKronDiag"]


class FoldedEigenbasis(Folded):
    """Squared coordinates in the features' eigenbasis, by one product with the bias folded in."""

    posterior: DampedFeatures | ExactPosterior

    def coordinates(self, features: Tensor) -> Tensor:
        """Squared coordinates (n, P)."""
        return self.affine(features, "vectors", lambda _: self.posterior.spectrum.feature_vectors).square()


class FoldedVariance(FoldedEigenbasis):
    """Algorithm 1: `phi' V phi` and the squared length, side by side; variances are fixed numbers times the first."""

    posterior: DampedFeatures

    def project(self, features: Tensor) -> Tensor:
        """`phi' V phi` and the squared length (n, 2)."""
        return self.coordinates(features) @ self.constant("table", self._table)

    def _table(self, _: dict[str, Tensor]) -> Tensor:
        spectrum, precision = self.posterior.spectrum, self.posterior.precision
        return torch.stack([spectrum.feature_inverse(precision), mahalanobis_weights(spectrum.feature_values)], dim=1)

    def variance(self, projected: Tensor) -> Tensor:
        """`(phi' V phi) U_cc`."""
        return projected[:, :1] * self.constant("class_variance", lambda own: own["class_variance"])

    def contrast_variance(self, projected: Tensor) -> Tensor:
        """The same with the visible part of U."""
        return projected[:, :1] * self.constant("contrast_class_variance", lambda own: own["contrast_class_variance"])

    def length(self, projected: Tensor) -> Tensor:
        """`sqrt(phi' B^-1 phi)`."""
        return projected[:, 1].sqrt()


class FoldedDamped(FoldedVariance):
    """Algorithm 1 with a whole class factor: covariances are a fixed matrix times `phi' V phi`."""

    posterior: DampedPosterior

    def _root(self, own: dict[str, Tensor]) -> Tensor:
        return own["class_root"][:, : self.posterior.noise_size]

    def contrast_covariance(self, projected: Tensor) -> Tensor:
        """`(phi' V phi) U`, the visible part."""
        matrix = self.constant("class_covariance", lambda own: self._root(own) @ self._root(own).T)
        return projected[:, :1, None] * matrix

    def deviations(self, projected: Tensor, draws: Draws) -> Tensor:
        """`sqrt(phi' V phi)` times fixed draws."""
        return projected[:, :1, None].sqrt() * self.constant(draws.name, lambda own: self._root(own) @ draws.make().T)


class FoldedKronDiag(FoldedVariance):
    """Algorithm 1 with the class factor's diagonal: a C x C matrix only where the link asks for covariances."""

    posterior: KronDiagPosterior

    def contrast_covariance(self, projected: Tensor) -> Tensor:
        """`(phi' V phi) U`, the visible part."""
        matrix = self.constant(
            "class_covariance", lambda _: self.posterior.spectrum.class_matrix(self.posterior.precision)
        )
        return projected[:, :1, None] * matrix

    def deviations(self, projected: Tensor, draws: Draws) -> Tensor:
        """`sqrt(phi' V phi)` times fixed draws."""

        def drawn(own: dict[str, Tensor]) -> Tensor:
            noise = draws.make()
            return (noise[:, :-1] * own["own"].sqrt() + noise[:, -1:] * own["shared"]).T

        return projected[:, :1, None].sqrt() * self.constant(draws.name, drawn)


class FoldedExact(FoldedEigenbasis):
    """The prior added exactly: tables over the squared coordinates."""

    posterior: ExactPosterior

    def project(self, features: Tensor) -> Tensor:
        """Squared coordinates (n, P)."""
        return self.coordinates(features)

    def variance(self, projected: Tensor) -> Tensor:
        """Squared coordinates times the table."""
        return projected @ self.constant("class_table", lambda own: own["class_table"].T)

    def contrast_variance(self, projected: Tensor) -> Tensor:
        """The same with the visible part."""
        return projected @ self.constant("contrast_class_table", lambda own: own["contrast_class_table"].T)

    def _spread(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Variance (n, R) in each visible direction of A's eigenbasis, and the directions (C, R)."""
        seen = self.posterior.noise_size
        spread = projected @ self.constant("inverse", lambda own: own["inverse"][:seen].T)
        return spread, self.constant("class_vectors", lambda own: own["class_vectors"][:, :seen])

    def contrast_covariance(self, projected: Tensor) -> Tensor:
        """`Q_A diag(s) Q_A'`, the visible part."""
        spread, vectors = self._spread(projected)
        return (vectors * spread[:, None, :]) @ vectors.T

    def deviations(self, projected: Tensor, draws: Draws) -> Tensor:
        """`Q_A (sqrt(s) * noise)`."""
        spread, vectors = self._spread(projected)
        return vectors @ (spread.sqrt()[:, :, None] * self.constant(draws.name, lambda _: draws.make().T))

    def length(self, projected: Tensor) -> Tensor:
        """`sqrt(phi' B^-1 phi)`."""
        return (projected @ self.constant("outlier_weights", lambda own: own["outlier_weights"])).sqrt()
