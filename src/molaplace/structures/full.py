r"""The exact Hessian of the last layer, :math:`H = \sum_n \Lambda_n \otimes \phi_n \phi_n^\top`, of size CP x CP.

With :math:`\Lambda = \mathrm{diag}(d) + L(u u^\top)`, block (i, j) for i != j is :math:`-Z_i^\top Z_j` with :math:`Z_i =
\mathrm{diag}(u_i)\, \Phi`. The diagonal blocks are the negative sums of the other blocks in their rows, plus :math:`\Phi^\top
\mathrm{diag}(d_i) \Phi`. A direction without curvature therefore lies exactly in the null space. The eigenproblem is restricted to
the R output directions with curvature, so its size is R P. In the hidden direction, the posterior equals the prior.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from molaplace.likelihoods.base import OutputCurvature
from molaplace.numerics import Generator, standard_normals
from molaplace.structures.base import (
    Curvature,
    LayerCurvature,
    Precision,
    Structure,
    as_column,
    eigensystem,
    hides_shift,
    output_bases,
)
from molaplace.structures.factors import FeatureFactor
from molaplace.sums import Sums


@dataclass(frozen=True)
class Full(Structure):
    """The exact Hessian, recommended if C P is at most a few thousand."""

    name = "full"
    smaller = "kron"

    def sums(self, phi: Tensor, curvature: OutputCurvature) -> dict[str, Tensor]:
        """Return `Z_i' Z_j` (C, P, C, P), `Phi' diag(d_i) Phi` (C, P, P), and the sum (P, P) of the features' outer products."""
        sums = {"gram": phi.T @ phi}
        width = phi.shape[1]
        if curvature.coupling is not None:
            outputs = curvature.coupling.shape[1]
            scaled = (curvature.coupling[:, :, None] * phi[:, None]).flatten(1)
            sums["coupling"] = (scaled.T @ scaled).view(outputs, width, outputs, width)
        if curvature.separate is not None:
            sums["separate"] = torch.einsum("nc,np,nq->cpq", curvature.separate, phi, phi)
        return sums

    def solve(self, sums: Sums) -> Curvature:
        """Eigendecompose the Hessian in the visible directions."""
        coupling = sums.tensors.get("coupling")
        separate = sums.tensors.get("separate")
        shape = sums.tensors["separate" if coupling is None else "coupling"].shape
        outputs, width = shape[:2]
        hessian = torch.zeros(outputs, width, outputs, width, dtype=torch.float64, device="cpu")
        blocks = hessian.diagonal(dim1=0, dim2=2)  # a view of shape (P, P, C)
        if coupling is not None:
            hessian -= coupling.cpu()
            blocks.zero_()
            blocks.copy_(-hessian.sum(2).permute(1, 2, 0))
        if separate is not None:
            blocks += separate.cpu().permute(1, 2, 0)
        basis, hidden_basis = output_bases(outputs, hidden=hides_shift(sums))
        size = basis.shape[1] * width
        reduced = torch.einsum("ir,ipjq,js->rpsq", basis, hessian, basis).reshape(size, size)
        values, vectors = eigensystem(reduced)
        rotated = torch.einsum("ir,rpm->ipm", basis, vectors.view(-1, width, size))
        feature_factor = FeatureFactor.from_gram(sums.tensors["gram"], sums.count)
        return FullCurvature(outputs, width, values, rotated, hidden_basis, feature_factor)

    def semidefinite(self, sums: Sums) -> Sequence[Tensor]:
        """Return all sums; the coupled curvature as a matrix (C P, C P)."""
        coupling = [values.flatten(2).flatten(0, 1) for values in sums.present("coupling")]
        return [*coupling, *sums.present("separate", "gram")]

    def bytes(self, features: int, outputs: int) -> int:
        """Return the memory, in bytes, needed for the sums, the Hessian, its eigenvectors and the eigensolver's workspace."""
        return 8 * 6 * (features * outputs) ** 2


@dataclass(frozen=True)
class FullCurvature(LayerCurvature):
    """Eigenvalues (M,) and eigenvectors (C, P, M) of the Hessian in the M = R P visible directions."""

    values: Tensor
    vectors: Tensor
    hidden_basis: Tensor
    """Hidden output directions (C, C - R), which have no curvature."""
    feature_factor: FeatureFactor

    def inverse(self, precision: Precision) -> Tensor:
        """Return the eigenvalues (..., M) of the posterior covariance in the visible directions."""
        return 1 / (self.values + as_column(precision, self.values, 1))

    def coordinates(self, phi: Tensor) -> Tensor:
        """Return the coordinates (n, C, M) of each logit in the eigenbasis."""
        return torch.einsum("np,cpm->ncm", phi, self.vectors)

    def _shift_variance(self, phi: Tensor, precision: Precision) -> Tensor:
        # Return the prior variance (..., n) of the shift common to all logits.
        return phi.square().sum(1) / as_column(precision, phi, 1)

    def variance(self, phi: Tensor, precision: Precision, *, centred: bool = False) -> Tensor:
        """Return `sum_m (phi' Q_cm)^2 / (l_m + lambda)`, plus the prior variance in the hidden direction."""
        inverse = self.inverse(precision)
        variance = self.coordinates(phi).square() @ inverse.reshape(-1, len(self.values)).T  # (n, C, L)
        variance = variance.movedim(-1, 0).reshape(*inverse.shape[:-1], *variance.shape[:2])
        if centred:
            return variance
        return variance + self._shift_variance(phi, precision)[..., None] * self.hidden_basis.square().sum(1)

    def covariance(self, phi: Tensor, precision: float, *, centred: bool = False) -> Tensor:
        """Return `(I x phi)' Sigma (I x phi)`."""
        coordinates = self.coordinates(phi)
        covariance = (coordinates * self.inverse(precision)) @ coordinates.mT
        if centred:
            return covariance
        return covariance + self._shift_variance(phi, precision)[:, None, None] * (
            self.hidden_basis @ self.hidden_basis.T
        )

    def joint_covariance(self, phi: Tensor, precision: float) -> Tensor:
        """Return `(I x phi)' Sigma (I x phi')` for all pairs of data points."""
        coordinates = self.coordinates(phi)
        visible = torch.einsum("ncm,kdm->nckd", coordinates * self.inverse(precision), coordinates)
        hidden = self.hidden_basis @ self.hidden_basis.T
        return visible + torch.einsum("nk,cd->nckd", phi @ phi.mT / precision, hidden)

    @property
    def noise_size(self) -> int:
        """Number of eigenvalues, because the weights are drawn in the eigenbasis."""
        return len(self.values)

    def perturb(self, phi: Tensor, precision: float, noise: Tensor) -> Tensor:
        """Multiply the features by draws of the weights."""
        weights = torch.einsum("cpm,sm->pcs", self.vectors, noise * self.inverse(precision).sqrt())
        return torch.einsum("np,pcs->nsc", phi, weights)

    def sample(self, precision: float, count: int, generator: Generator) -> Tensor:
        """Draw independent normals in the eigenbasis, with the prior variance in the hidden direction, and rotate them back."""
        noise = standard_normals((count, len(self.values)), generator).to(self.values.device)
        visible = torch.einsum("cpm,sm->scp", self.vectors, noise * self.inverse(precision).sqrt())
        hidden = standard_normals((count, self.hidden_basis.shape[1], self.features), generator).to(self.values.device)
        return visible + self.hidden_basis @ hidden / precision**0.5

    def log_determinant(self, precision: Tensor) -> Tensor:
        """Return `sum_m log(l_m + lambda)`, plus `P log(lambda)` for the hidden direction."""
        hidden = self.hidden_basis.shape[1] * self.features
        return (self.values + precision).log().sum() + hidden * precision.log()

    def mahalanobis(self, phi: Tensor) -> Tensor:
        """Return `sqrt(phi' B^-1 phi)`."""
        return self.feature_factor.mahalanobis(phi)

    def class_covariance(self, precision: float, output: int) -> Tensor:
        """Return the diagonal block (P, P) of the covariance for the given output."""
        vectors = self.vectors[output]
        hidden = self.hidden_basis[output].square().sum() / precision
        return (vectors * self.inverse(precision)) @ vectors.T + hidden * torch.eye(
            self.features, dtype=vectors.dtype, device=vectors.device
        )

    def divided_by(self, factor: float) -> Self:
        """Return the curvature divided by a factor."""
        return replace(self, values=self.values / factor)
