r"""The curvature of a last layer that is diagonal in a product of two bases: `kron`, `kron-exact` and `diag`.

With orthonormal bases L (C, C) of the outputs and R (P, P) of the features, standard normals E (C, P) and the posterior precision
:math:`\Pi` (C, P) of each pair of basis vectors, the weights are

.. math:: W = L\, (E / \sqrt\Pi)\, R^\top, \qquad z = R^\top \phi, \qquad \mathrm{var}_c = \sum_{rp} L_{cr}^2\, z_p^2 / \Pi_{rp} .

The bases and the precision are data, so three structures share this class:

======================  ======================================================  ==========================
structure               :math:`\Pi`                                             bases
======================  ======================================================  ==========================
``kron-exact``          :math:`N a b^\top + \lambda`                            eigenvectors of A and B
``diag``                :math:`d + \lambda`                                     none: L = R = I
``kron``                :math:`(\sqrt N a + \sqrt\lambda)\,                     eigenvectors of A and B
                        (\sqrt N b + \sqrt\lambda)^\top`
======================  ======================================================  ==========================

For ``kron``, :math:`1 / \Pi` is an outer product, and the covariance is a Kronecker product. Nothing of size C x P is then computed for
each datum, which matters with many classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from molaplace.numerics import Generator, square_root, standard_normals
from molaplace.structures.base import (
    EVERY_OUTPUT,
    FeatureFactor,
    LayerCurvature,
    centred_diagonal,
    centred_variance,
)


@dataclass(frozen=True, kw_only=True)
class EigenCurvature(LayerCurvature):
    """A curvature that is diagonal in the product of a basis of the outputs and a basis of the features."""

    left: Tensor | None
    """Basis L (C, C) of the outputs, the hidden direction last, or None for the outputs themselves."""
    feature_factor: FeatureFactor
    """Basis R of the features."""
    spectrum: Tensor | tuple[Tensor, Tensor]
    """Curvature (C, P) of each pair of basis vectors, to which lambda is added; or, if the prior is split between two factors, the square
    roots of their eigenvalues, (C,) and (P,), to which the square root of lambda is added."""
    hidden: bool
    """True if adding the same number to all outputs has no effect."""

    def inverse(self, precision: float | Tensor) -> tuple[Tensor, Tensor | None]:
        """Return `1 / Pi` as one matrix (C, P) or, if the prior is split, as columns (C, 1) and (P, 1) that are to be multiplied."""
        if isinstance(self.spectrum, Tensor):
            return 1 / (self.scale * self.spectrum + precision), None
        of_outputs, of_features = self.spectrum
        prior = precision**0.5
        return 1 / (self.scale * of_outputs + prior)[:, None], 1 / (of_features + prior)[:, None]

    def _visible(self, *, centred: bool) -> slice:
        # Select the basis vectors of the outputs: all of them or, for centred logits, those with curvature.
        return slice(self.outputs - int(centred and self.hidden and self.left is not None))

    def project(self, phi: Tensor) -> Tensor:
        """Return `R' phi`, of shape (n, P)."""
        return self.feature_factor.project(phi)

    def variance(self, z: Tensor, precision: float, *, centred: bool = False) -> Tensor:
        """Return `sum_rp L_cr^2 z_p^2 / Pi_rp`."""
        rows, columns = self.inverse(precision)
        squares = z.square() if columns is None else z.square() @ columns
        if self.left is None:
            variance = squares @ rows.T
            return centred_variance(variance) if centred and self.hidden else variance
        visible = self._visible(centred=centred)
        return squares @ (self.left[:, visible].square() @ rows[visible]).T

    def cross(
        self,
        z: Tensor,
        other: Tensor,
        precision: float,
        *,
        centred: bool = False,
        outputs: slice = EVERY_OUTPUT,
    ) -> Tensor:
        """Return `sum_r L_cr L_dr sum_p z_p z'_p / Pi_rp`."""
        rows, columns = self.inverse(precision)
        if self.left is None:
            by_output = _weighted_products(z, rows[outputs], other).movedim(-3, -1)
            matrices = centred_diagonal(by_output) if centred and self.hidden else torch.diag_embed(by_output)
            return matrices.movedim(-2, -3)
        visible = self._visible(centred=centred)
        left = self.left[outputs, visible]
        if columns is None:
            along = _weighted_products(z, rows[visible], other)
            return torch.einsum("cr,...rnm,dr->...ncmd", left, along, left)
        return torch.einsum("...nm,cd->...ncmd", (z * columns[:, 0]) @ other.mT, (left * rows[visible, 0]) @ left.T)

    def kronecker_factors(self, z: Tensor, precision: float) -> tuple[Tensor, Tensor] | None:
        """Return `z V z'` (n, n) and U (C, C) if the prior is split between both factors, and None otherwise."""
        rows, columns = self.inverse(precision)
        if columns is None or self.left is None:
            return None
        return (z * columns[:, 0]) @ z.mT, (self.left * rows[:, 0]) @ self.left.T

    def log_determinant(self, precision: Tensor) -> Tensor:
        """Return `sum_rp log Pi_rp`."""
        rows, columns = self.inverse(precision)
        if columns is None:
            return -rows.log().sum()
        return -self.features * rows.log().sum() - self.outputs * columns.log().sum()

    def offsets(self, precision: float, count: int, generator: Generator) -> Tensor:
        """Draw `L (E / sqrt(Pi))`, of shape (S, C, P)."""
        rows, columns = self.inverse(precision)
        deviations = (rows if columns is None else rows @ columns.T).sqrt()
        normals = standard_normals((count, self.outputs, self.features), generator).to(deviations)
        return normals * deviations if self.left is None else self.left @ (normals * deviations)

    @property
    def noise_size(self) -> int:
        """Number of basis vectors of the outputs with curvature."""
        return int(self._visible(centred=True).stop)

    def marginal_deviations(self, z: Tensor, precision: float, noise: Tensor) -> Tensor:
        """Return `sum_r L_cr noise_r sqrt(sum_p z_p^2 / Pi_rp)`."""
        rows, columns = self.inverse(precision)
        rows = rows[: self.noise_size]
        if self.left is None:
            return square_root(z.square() @ rows.T)[:, None] * noise
        left = self.left[:, : self.noise_size]
        if columns is None:
            return (square_root(z.square() @ rows.T)[:, None] * noise) @ left.T
        return square_root(z.square() @ columns)[:, None] * ((noise * rows[:, 0].sqrt()) @ left.T)

    def smallest_class_variance(self, precision: float) -> Tensor:
        """Return the smallest variance (C,) along the basis R, in which each output's block is diagonal."""
        rows, columns = self.inverse(precision)
        weights = rows if self.left is None else self.left.square() @ rows
        return weights.amin(1) if columns is None else weights[:, 0] * columns.min()


def _weighted_products(z: Tensor, weights: Tensor, other: Tensor) -> Tensor:
    # Return `sum_p w_rp z_p z'_p` (..., R, n, m) for all pairs of data. An einsum of three factors would fix the batch size of a trace.
    return (z[..., None, :, :] * weights[:, None]) @ other[..., None, :, :].mT
