r"""Curvatures in an eigenbasis that mixes outputs and features: the full Hessian of a last layer, and those of whole networks.

With eigenvalues h (D,), the projected features are the coordinates z (n, C, D) of each logit's derivatives in the eigenbasis, and every
formula is a sum over the D directions of terms that depend on :math:`h + \lambda`. The logits minus their mean have the coordinates
:math:`z_c - \bar z`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from molaplace.numerics import Generator, standard_normals
from molaplace.structures.base import EVERY_OUTPUT, Curvature


@dataclass(frozen=True, kw_only=True)
class DenseCurvature(Curvature):
    """Eigenvalues (D,) of a Hessian; its eigenbasis is known to the subclasses."""

    values: Tensor
    hidden: bool
    """True if adding the same number to all outputs has no effect."""

    @property
    def row_size(self) -> int:
        """Number of values of one datum's projected features: D for each logit."""
        return self.outputs * len(self.values)

    def inverse(self, precision: float | Tensor) -> Tensor:
        """Return the eigenvalues (D,) of the posterior covariance."""
        return 1 / (self.scale * self.values + precision)

    def _centred(self, z: Tensor, *, centred: bool) -> Tensor:
        return z - z.mean(-2, keepdim=True) if centred and self.hidden else z

    def variance(self, z: Tensor, precision: float, *, centred: bool = False) -> Tensor:
        """Return `sum_d z_cd^2 / (h_d + lambda)`."""
        return self._centred(z, centred=centred).square() @ self.inverse(precision)

    def cross(
        self,
        z: Tensor,
        other: Tensor,
        precision: float,
        *,
        centred: bool = False,
        outputs: slice = EVERY_OUTPUT,
    ) -> Tensor:
        """Return `sum_d z_cd other_kd / (h_d + lambda)` for all pairs of data and of logits c and k."""
        left = self._centred(z, centred=centred)[..., outputs, :] * self.inverse(precision)
        right = self._centred(other, centred=centred)[..., outputs, :]
        return torch.einsum("...ncd,...mkd->...ncmk", left, right)

    def log_determinant(self, precision: Tensor) -> Tensor:
        """Return `sum_d log(h_d + lambda)`."""
        return -self.inverse(precision).log().sum()

    def offsets(self, precision: float, count: int, generator: Generator) -> Tensor:
        """Draw `e / sqrt(h + lambda)`, of shape (S, D)."""
        scale = self.inverse(precision).sqrt()
        return standard_normals((count, len(scale)), generator).to(scale) * scale

    def deviations(self, z: Tensor, offsets: Tensor) -> Tensor:
        """Return `z offset`."""
        return torch.einsum("ncd,sd->nsc", z, offsets.to(z))
