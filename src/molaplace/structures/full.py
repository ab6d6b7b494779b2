r"""The exact Hessian of the last layer, :math:`H = \sum_n \Lambda_n \otimes \phi_n \phi_n^\top`, of size CP x CP.

With :math:`\Lambda = \mathrm{diag}(d) + L(u u^\top)`, block (i, j) for i != j is :math:`-Z_i^\top Z_j` with :math:`Z_i =
\mathrm{diag}(u_i)\, \Phi`. The diagonal blocks are the negative sums of the other blocks in their rows, plus :math:`\Phi^\top
\mathrm{diag}(d_i) \Phi`. A direction without curvature therefore lies exactly in the null space. The eigenproblem is restricted to
the R output directions with curvature, so its size is R P. In the hidden direction, the posterior equals the prior.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molaplace.likelihoods.base import OutputCurvature
from molaplace.structures.base import (
    FeatureFactor,
    LayerCurvature,
    Structure,
    eigensystem,
    hides_shift,
    output_bases,
)
from molaplace.structures.dense import DenseCurvature
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

    def solve(self, sums: Sums) -> FullCurvature:
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
        visible = torch.einsum("ir,rpm->ipm", basis, vectors.view(-1, width, size))
        identity = torch.eye(width, dtype=torch.float64, device="cpu")
        shifts = torch.einsum("ih,pm->iphm", hidden_basis, identity).flatten(2)
        return FullCurvature(
            outputs=outputs,
            features=width,
            values=torch.cat([values, values.new_zeros(shifts.shape[2])]),
            hidden=hides_shift(sums),
            vectors=torch.cat([visible, shifts], 2),
            feature_factor=FeatureFactor.from_gram(sums.tensors["gram"], sums.count),
        )

    def semidefinite(self, sums: Sums) -> Sequence[Tensor]:
        """Return all sums; the coupled curvature as a matrix (C P, C P)."""
        coupling = [values.flatten(2).flatten(0, 1) for values in sums.present("coupling")]
        return [*coupling, *sums.present("separate", "gram")]

    def bytes(self, features: int, outputs: int) -> int:
        """Return the memory, in bytes, needed for the sums, the Hessian, its eigenvectors and the eigensolver's workspace."""
        return 8 * 6 * (features * outputs) ** 2


@dataclass(frozen=True, kw_only=True)
class FullCurvature(DenseCurvature, LayerCurvature):
    """Eigenvalues (C P,) and eigenvectors of the Hessian of a last layer; the directions without curvature come last."""

    vectors: Tensor
    """Eigenvectors (C, P, C P)."""
    feature_factor: FeatureFactor

    def project(self, phi: Tensor) -> Tensor:
        """Return the coordinates (n, C, C P) of each logit's derivatives `e_c x phi`."""
        return torch.einsum("np,cpm->ncm", phi, self.vectors)

    def in_weights(self, offsets: Tensor) -> Tensor:
        """Return the offsets (S, C, P) of the weights."""
        return torch.einsum("cpm,sm->scp", self.vectors, offsets.to(self.vectors))

    @property
    def noise_size(self) -> int:
        """Number of directions with curvature."""
        return len(self.values) - self.features * int(self.hidden)

    def marginal_deviations(self, z: Tensor, precision: float, noise: Tensor) -> Tensor:
        """Return `z e / sqrt(h + lambda)`, the deviations that one draw of the weights causes at all data."""
        visible = slice(self.noise_size)
        return self.deviations(z[..., visible], noise * self.inverse(precision)[visible].sqrt())
