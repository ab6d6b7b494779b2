"""A diagonal as constants: tables over the squared features."""

from __future__ import annotations

import torch
from torch import Tensor

from mola.export.folding.base import Draws, Folded
from mola.laplace.basis import centred_diagonal, centred_variance
from mola.laplace.diag import DiagPosterior

__all__ = ["FoldedDiag"]


class FoldedDiag(Folded):
    """Squared features times tables; the constant's share is added."""

    posterior: DiagPosterior

    def project(self, features: Tensor) -> Tensor:
        """Squared features (n, P)."""
        return features.square()

    def variance(self, projected: Tensor) -> Tensor:
        """`sum_p phi_p^2 / (H_cp + lambda)`."""
        return self.affine(projected, "inverse", lambda own: own["inverse"].T)

    def contrast_variance(self, projected: Tensor) -> Tensor:
        """Variances of the centred logits, which are linear in those of the logits."""
        centred = centred_variance if self.posterior.spectrum.hidden else Tensor.clone
        return self.affine(projected, "contrast_inverse", lambda own: centred(own["inverse"].T))

    def contrast_covariance(self, projected: Tensor) -> Tensor:
        """`diag(v)`, centred from both sides."""
        variance = self.variance(projected)
        return centred_diagonal(variance) if self.posterior.spectrum.hidden else torch.diag_embed(variance)

    def deviations(self, projected: Tensor, draws: Draws) -> Tensor:
        """`sqrt(v) * noise`."""
        return self.variance(projected).sqrt()[:, :, None] * self.constant(draws.name, lambda _: draws.make().T)

    def length(self, projected: Tensor) -> Tensor:
        """`sqrt(sum_p phi_p^2 / B_pp)`."""
        return self.affine(projected, "outlier_weights", lambda own: own["outlier_weights"][:, None])[:, 0].sqrt()
