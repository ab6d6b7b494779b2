r"""Diagonal curvature: :math:`H_{cp} = \sum_n \Lambda_{n,cc}\, \phi_{np}^2`, all covariances between weights dropped."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from mola.laplace.base import Factors, Posterior, Spectrum, Structure, beside_tables, mahalanobis_weights
from mola.laplace.symmetric import centred_diagonal, centred_variance
from mola.likelihood import CATEGORICAL, Likelihood, OutputCurvature

SQUARED = 128
"""Rows whose squares are held at once: few enough to stay in the processor's cache."""


@dataclass(frozen=True)
class DiagFactors(Factors):
    """Sum of the Hessian's diagonal (C, P), and of the squared features (P,) for the outlier score."""

    diagonal: Tensor
    squares: Tensor


@dataclass(frozen=True)
class Diag(Structure):
    """The Hessian's diagonal alone: the smallest structure, O(C P)."""

    name = "diag"

    def sums(self, features: Tensor, curvature: OutputCurvature, log_likelihood: float | None) -> DiagFactors:
        """Factors of one batch."""
        diagonal, width = curvature.diagonal(), features.shape[1]
        sums = features.new_zeros(diagonal.shape[1], width), features.new_zeros(width)
        _add(*sums, features, diagonal)
        return DiagFactors(len(features), log_likelihood, *sums)

    def absorb(self, total: Any, features: Tensor, curvature: OutputCurvature, log_likelihood: float | None) -> Any:
        """Add the batch to the sums in place."""
        if total is None:
            return self.sums(features, curvature, log_likelihood)
        _add(total.diagonal, total.squares, features, curvature.diagonal())
        return total.grown(len(features), log_likelihood)

    def empty(self, features: int, outputs: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the factors' tensors."""
        return {"diagonal": (outputs, features), "squares": (features,)}

    def restore(self, count: int, log_likelihood: float | None, tensors: dict[str, Tensor]) -> DiagFactors:
        """Factors from their saved parts."""
        return DiagFactors(count, log_likelihood, **tensors)

    def spectrum(self, factors: DiagFactors, likelihood: Likelihood = CATEGORICAL) -> Spectrum:
        """A diagonal matrix is its own spectrum."""
        return DiagSpectrum(factors, likelihood)


def _add(weighted: Tensor, plain: Tensor, features: Tensor, weights: Tensor) -> None:
    # Add the squares of `features` (n, P) to sums, in place: `weights` (n, C) times them (C, P), and as they are (P,).
    parts = max(1, round(len(features) / SQUARED)) if features.device.type == "cpu" else 1
    scratch = features.new_empty(-(-len(features) // parts), features.shape[1])
    for some, own in zip(features.tensor_split(parts), weights.tensor_split(parts), strict=True):
        squares = torch.mul(some, some, out=scratch[: len(some)])
        weighted.addmm_(own.T, squares)
        plain.add_(squares.sum(0))


class DiagSpectrum(Spectrum):
    """The Hessian's diagonal (C, P), and whether a shift common to all outputs is hidden."""

    def __init__(self, factors: DiagFactors, likelihood: Likelihood) -> None:
        self.outputs, self.features = factors.diagonal.shape
        self.diagonal = factors.diagonal
        self.feature_values = factors.squares / factors.count
        self.hidden = likelihood.hides_shift

    def project(self, features: Tensor) -> Tensor:
        """Squared features (n, P)."""
        return features.square()

    def variance(self, projected: Tensor, precision: float, *, contrast: bool = False) -> Tensor:
        """`sum_p phi_p^2 / (H_cp + lambda)`."""
        variance = projected @ (1 / (self.diagonal + precision)).T
        return centred_variance(variance) if contrast and self.hidden else variance

    def variances(self, projected: Tensor, precisions: Sequence[float], *, contrast: bool = False) -> Tensor:
        """The same at several precisions, with one product."""
        tables = 1 / (self.diagonal + beside_tables(precisions))
        variance = (tables.flatten(0, 1) @ projected.T).view(*tables.shape[:2], -1)
        if not (contrast and self.hidden):
            return variance
        return centred_variance(variance.movedim(1, -1)).movedim(-1, 1)

    def log_determinant(self, precision: Tensor) -> Tensor:
        """`sum_cp log(H_cp + lambda)`."""
        return (self.diagonal + precision).log().sum()

    def deviations(self, precision: float, count: int, generator: torch.Generator | None) -> Tensor:
        """Independent normals of the right width."""
        noise = torch.randn(count, self.outputs, self.features, generator=generator, dtype=torch.float64, device="cpu")
        return noise * (self.diagonal + precision).rsqrt()

    def class_covariance(self, precision: float, output: int) -> Tensor:
        """The class's own variances on a diagonal."""
        return torch.diag(1 / (self.diagonal[output] + precision))

    def smallest_class_variance(self, precision: float) -> Tensor:
        """`1 / (max_p H_cp + lambda)`."""
        return 1 / (self.diagonal.max(dim=1).values + precision)

    def variance_range(self, precision: float) -> tuple[float, float]:
        """The smallest variance of a weight, and the prior's."""
        return float(1 / (self.diagonal.max() + precision)), 1 / precision

    def divided(self, by: float) -> Self:
        """The spectrum of the curvature divided by a number."""
        twin = copy.copy(self)
        twin.diagonal = self.diagonal / by
        return twin

    def posterior(self, precision: float) -> Posterior:
        """The posterior at one prior precision."""
        return DiagPosterior(self, precision)


class DiagPosterior(Posterior):
    """Logit covariance `diag(v(phi))`."""

    spectrum: DiagSpectrum
    inverse: Tensor
    outlier_weights: Tensor

    @property
    def noise_size(self) -> int:  # type: ignore[override]
        """One normal for each logit."""
        return self.spectrum.outputs

    def constants(self) -> dict[str, Tensor]:
        """Posterior variances (C, P), and the weights of the outlier score."""
        spectrum = self.spectrum
        return {
            "inverse": 1 / (spectrum.diagonal + self.precision),
            "outlier_weights": mahalanobis_weights(spectrum.feature_values),
        }

    def variance(self, features: Tensor) -> Tensor:
        """`sum_p phi_p^2 / (H_cp + lambda)`."""
        return features.square() @ self.inverse.T

    def contrast_variance(self, features: Tensor) -> Tensor:
        """Diagonal of the projected covariance."""
        variance = self.variance(features)
        return centred_variance(variance) if self.spectrum.hidden else variance

    def covariance(self, features: Tensor) -> Tensor:
        """`diag(v)`."""
        return torch.diag_embed(self.variance(features))

    def contrast_covariance(self, features: Tensor) -> Tensor:
        """`diag(v)`, centred from both sides."""
        return centred_diagonal(self.variance(features)) if self.spectrum.hidden else self.covariance(features)

    def difference_variances(self, features: Tensor) -> Callable[[slice, slice, slice], Tensor]:
        """Variances of the differences of logits, which are independent, by data, first and second logits."""
        variance = self.variance(features)
        return lambda rows, first, second: variance[rows, first, None] + variance[rows, None, second]

    def perturb(self, features: Tensor, noise: Tensor) -> Tensor:
        """`sqrt(v) * noise`."""
        return self.variance(features).sqrt()[:, None, :] * noise

    def mahalanobis(self, features: Tensor) -> Tensor:
        """`sqrt(sum_p phi_p^2 / B_pp)`: feature by feature, as the structure has no covariances."""
        return (features.square() @ self.outlier_weights).sqrt()
