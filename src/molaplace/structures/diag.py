r"""Diagonal curvature, :math:`H_{cp} = \sum_n \Lambda_{n,cc}\, \phi_{np}^2`, without covariances between weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from molaplace.likelihoods.base import OutputCurvature
from molaplace.numerics import Generator, square_root, standard_normals
from molaplace.structures.base import (
    Curvature,
    LayerCurvature,
    Precision,
    Structure,
    as_column,
    centred_diagonal,
    centred_variance,
    hides_shift,
    mahalanobis_weights,
)
from molaplace.sums import Sums


@dataclass(frozen=True)
class Diag(Structure):
    """The diagonal of the Hessian. It needs O(C P) memory."""

    name = "diag"

    def sums(self, phi: Tensor, curvature: OutputCurvature) -> dict[str, Tensor]:
        """Return the Hessian's diagonals (C, P) for coupled and separate curvature, and the sums (P,) of the squared features."""
        squares = phi.square()
        sums = {"squares": squares.sum(0)}
        if curvature.coupling is not None:
            sums["coupled"] = (
                curvature.coupling * (curvature.coupling.sum(1, keepdim=True) - curvature.coupling)
            ).T @ squares
        if curvature.separate is not None:
            sums["separate"] = curvature.separate.T @ squares
        return sums

    def solve(self, sums: Sums) -> Curvature:
        """Build the curvature from the diagonal, without an eigendecomposition."""
        diagonal = torch.stack(
            [sums.tensors[name].cpu() for name in ("coupled", "separate") if name in sums.tensors]
        ).sum(0)
        values = sums.tensors["squares"].cpu() / sums.count
        outputs, features = diagonal.shape
        return DiagCurvature(outputs, features, diagonal, values, hides_shift(sums))

    def nonnegative(self, sums: Sums) -> Sequence[Tensor]:
        """Return all sums."""
        return sums.present("squares", "coupled", "separate")

    def bytes(self, features: int, outputs: int) -> int:
        """Return the memory, in bytes, needed for the sums and one more table of size (C, P)."""
        return 8 * 3 * features * outputs


@dataclass(frozen=True)
class DiagCurvature(LayerCurvature):
    """A curvature given by the Hessian's diagonal (C, P)."""

    diagonal: Tensor
    feature_values: Tensor
    """Mean squared features (P,)."""
    hidden: bool
    """True if adding the same number to all outputs has no effect."""

    def inverse(self, precision: Precision) -> Tensor:
        """Return the posterior variances (..., C, P) of the weights."""
        return 1 / (self.diagonal + as_column(precision, self.diagonal, 2))

    def variance(self, phi: Tensor, precision: Precision, *, centred: bool = False) -> Tensor:
        """Return `sum_p phi_p^2 / (H_cp + lambda)`."""
        variance = phi.square() @ self.inverse(precision).mT
        return centred_variance(variance) if centred and self.hidden else variance

    def covariance(self, phi: Tensor, precision: float, *, centred: bool = False) -> Tensor:
        """Return `diag(v)` or, if `centred` is True and a direction is hidden, its centred part."""
        variance = self.variance(phi, precision)
        return centred_diagonal(variance) if centred and self.hidden else torch.diag_embed(variance)

    def joint_covariance(self, phi: Tensor, precision: float) -> Tensor:
        """Return `sum_p phi_p phi'_p / (H_cp + lambda)` for all pairs of data points; different logits are independent."""
        by_output = torch.einsum("np,cp,mp->nmc", phi, self.inverse(precision), phi)
        return torch.diag_embed(by_output).movedim(1, 2)

    @property
    def noise_size(self) -> int:
        """Number of outputs: one standard normal variable for each logit."""
        return self.outputs

    def perturb(self, phi: Tensor, precision: float, noise: Tensor) -> Tensor:
        """Return `sqrt(v) * noise`."""
        return square_root(self.variance(phi, precision))[:, None, :] * noise

    def sample(self, precision: float, count: int, generator: Generator) -> Tensor:
        """Draw independent normal deviations with the posterior variances."""
        noise = standard_normals((count, self.outputs, self.features), generator).to(self.diagonal.device)
        return noise * self.inverse(precision).sqrt()

    def log_determinant(self, precision: Tensor) -> Tensor:
        """Return `sum_cp log(H_cp + lambda)`."""
        return (self.diagonal + precision).log().sum()

    def mahalanobis(self, phi: Tensor) -> Tensor:
        """Return `sqrt(sum_p phi_p^2 / B_pp)`, which ignores covariances between features."""
        return (phi.square() @ mahalanobis_weights(self.feature_values)).sqrt()

    def class_covariance(self, precision: float, output: int) -> Tensor:
        """Return a diagonal matrix with the variances of the output's weights."""
        return torch.diag(self.inverse(precision)[output])

    def smallest_class_variance(self, precision: float) -> Tensor:
        """Return `1 / (max_p H_cp + lambda)`."""
        return self.inverse(precision).amin(1)

    def divided_by(self, factor: float) -> Self:
        """Return the curvature divided by a factor."""
        return replace(self, diagonal=self.diagonal / factor)
