r"""What every class factor shares under Algorithm 1: the side of the features, and the logit variance as a product.

The posterior covariance is :math:`U \otimes V` with :math:`V = (\sqrt N B + \sqrt\lambda I)^{-1}`. The variance of logit c is
:math:`(\phi^\top V \phi)\, U_{cc}`: one number for each datum, times one for each class. What U is made of is the matter of
`Kron`, which has the class factor whole, and of `KronDiag`, which has its diagonal.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mola.laplace.base import Posterior, Spectrum, mahalanobis_weights
from mola.laplace.symmetric import quadratic, quadratic_root

__all__ = ["Damped", "DampedFeatures"]


class Damped(Spectrum):
    """B's eigensystem, and U by what it says of each class."""

    count: int
    feature_values: Tensor
    """(P,), of B."""
    feature_vectors: Tensor
    """(P, P), of B."""

    @abstractmethod
    def class_variance(self, precision: float, *, contrast: bool = False) -> Tensor:
        """Diagonal (C,) of U, or of its visible part."""

    @abstractmethod
    def class_log_determinant(self, precision: Tensor) -> Tensor:
        """Log determinant of U's inverse; differentiable in the prior precision."""

    def feature_inverse(self, precision: float | Tensor) -> Tensor:
        """Eigenvalues (P,) of V."""
        return 1 / (self.count**0.5 * self.feature_values + precision**0.5)

    @abstractmethod
    def smallest_visible(self, precision: float) -> float:
        """A lower bound on the eigenvalues of U's visible part."""

    def variance_range(self, precision: float) -> tuple[float, float]:
        """Those of `U x V`, and of V, which is multiplied by the features first."""
        features = float(self.feature_inverse(precision).min())
        return features * min(1.0, self.smallest_visible(precision)), max(1 / precision, precision**-0.5)

    def feature_root(self, precision: float) -> Tensor:
        """A root (P, P) of V."""
        return self.feature_vectors * self.feature_inverse(precision).sqrt()

    def project(self, features: Tensor) -> Tensor:
        """Squared coordinates (n, P) of the features in B's eigenbasis."""
        return (features @ self.feature_vectors).square_()

    def variance(self, projected: Tensor, precision: float, *, contrast: bool = False) -> Tensor:
        """`(phi' V phi) U_cc`."""
        return (projected @ self.feature_inverse(precision))[:, None] * self.class_variance(
            precision, contrast=contrast
        )

    def variances(self, projected: Tensor, precisions: Sequence[float], *, contrast: bool = False) -> Tensor:
        """The same at several precisions, with one product."""
        features = torch.stack([self.feature_inverse(one) for one in precisions]) @ projected.T
        classes = torch.stack([self.class_variance(one, contrast=contrast) for one in precisions])
        return features[:, None, :] * classes[:, :, None]

    def log_determinant(self, precision: Tensor) -> Tensor:
        """`P log det U^-1 + C sum log(sqrt(N) b + sqrt(lambda))`."""
        features = -self.feature_inverse(precision).log().sum()
        return self.features * self.class_log_determinant(precision) + self.outputs * features

    def class_covariance(self, precision: float, output: int) -> Tensor:
        """`U_cc V`."""
        value = (self.feature_vectors * self.feature_inverse(precision)) @ self.feature_vectors.T
        return self.class_variance(precision)[output] * value

    def smallest_class_variance(self, precision: float) -> Tensor:
        """`U_cc / (sqrt(N) b_max + sqrt(lambda))`."""
        return self.class_variance(precision) * self.feature_inverse(precision).min()


class DampedFeatures(Posterior):
    """Logit variance `(phi' V phi) U_cc`: one number for each datum times one for each class."""

    spectrum: Damped
    feature_root: Tensor
    outlier_root: Tensor
    class_variance: Tensor
    contrast_class_variance: Tensor

    def constants(self) -> dict[str, Tensor]:
        """Roots of V and of B's inverse, and the diagonal of U."""
        spectrum, precision = self.spectrum, self.precision
        vectors, known = spectrum.feature_vectors, mahalanobis_weights(spectrum.feature_values)
        return {
            "feature_root": quadratic_root(vectors, spectrum.feature_inverse(precision)),
            "outlier_root": quadratic_root(vectors, known),
            "class_variance": spectrum.class_variance(precision),
            "contrast_class_variance": spectrum.class_variance(precision, contrast=True),
        }

    def scale(self, features: Tensor) -> Tensor:
        """`phi' V phi` (n,)."""
        return quadratic(features, self.feature_root)

    @abstractmethod
    def class_differences(self) -> Tensor:
        """`U_ii + U_jj - 2 U_ij` (C, C)."""

    def difference_variances(self, features: Tensor) -> Callable[[slice, slice, slice], Tensor]:
        """Variances of the differences of logits, by data, first and second logits: a fixed matrix times `phi' V phi`."""
        scale, table = self.scale(features)[:, None, None], self.class_differences()
        return lambda rows, first, second: scale[rows] * table[first, second]

    def mahalanobis(self, features: Tensor) -> Tensor:
        """`sqrt(phi' B^-1 phi)`."""
        return quadratic(features, self.outlier_root).sqrt()

    @abstractmethod
    def class_draws(self, noise: Tensor) -> Tensor:
        """Draws (S, C) with covariance U, up to a common shift, driven by standard normals (S, noise_size)."""

    def perturb(self, features: Tensor, noise: Tensor) -> Tensor:
        """`sqrt(phi' V phi)` times draws of covariance U."""
        return self.scale(features).sqrt()[:, None, None] * self.class_draws(noise)

    def variance(self, features: Tensor) -> Tensor:
        """`(phi' V phi) U_cc`."""
        return self.scale(features)[:, None] * self.class_variance

    def contrast_variance(self, features: Tensor) -> Tensor:
        """The same with the visible part of U."""
        return self.scale(features)[:, None] * self.contrast_class_variance
