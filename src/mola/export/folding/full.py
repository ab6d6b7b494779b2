"""The exact Hessian as constants: quadratic forms of the features."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mola.export.folding.base import Draws, Folded
from mola.laplace.full import FullPosterior

__all__ = ["FoldedFull"]


class FoldedFull(Folded):
    """The exact Hessian's quadratic forms, in float64 as the posterior's own: what they subtract is large."""

    posterior: FullPosterior

    def project(self, features: Tensor) -> Tensor:
        """Features (n, P) with the constant 1, in float64."""
        exact = features.double()
        return torch.cat([exact, exact.new_ones(exact.shape[0], 1)], dim=1) if self.bias else exact

    def _forms(self, projected: Tensor, name: str, make: Callable[[dict[str, Tensor]], Tensor]) -> Tensor:
        """Quadratic forms (n, m) of matrices (m, P, P)."""
        matrices = self.constant(name, make, torch.float64)
        return ((projected @ matrices) * projected).sum(2).T

    def variance(self, projected: Tensor) -> Tensor:
        """`phi' Sigma_cc phi`, with the prior's share in the direction that nothing sees."""
        share = self.constant(
            "share", lambda own: own["unseen"].square().sum(1) / self.posterior.precision, torch.float64
        )
        hidden = projected.square().sum(1, keepdim=True) * share
        return (self._seen_variance(projected) + hidden).to(self.dtype)

    def _seen_variance(self, projected: Tensor) -> Tensor:
        return self._forms(projected, "blocks", lambda own: own["blocks"]).clamp_min(0)

    def contrast_variance(self, projected: Tensor) -> Tensor:
        """The same with the visible part of the covariance."""
        return self._seen_variance(projected).to(self.dtype)

    def contrast_covariance(self, projected: Tensor) -> Tensor:
        """The visible part: a form for each pair of visible directions, put in its two places."""
        size = self.posterior.seen.shape[1]
        rows, columns = torch.triu_indices(size, size)

        def pairs(own: dict[str, Tensor]) -> Tensor:
            root = own["root"].view(own["root"].shape[0], size, -1)
            return torch.einsum("prm,qrm->rpq", root[:, rows], root[:, columns])

        places = torch.zeros(size, size, dtype=torch.int64)
        places[rows, columns] = places[columns, rows] = torch.arange(len(rows))
        index = self.constant("places", lambda _: places.flatten(), torch.int64)
        covariance = self._forms(projected, "pairs", pairs)[:, index].view(-1, size, size)
        seen = self.constant("seen", lambda own: own["seen"], torch.float64)
        return (seen @ covariance @ seen.T).to(self.dtype)

    def deviations(self, projected: Tensor, draws: Draws) -> Tensor:
        """Features times fixed draws of the weights."""
        weights = self.constant(
            draws.name,
            lambda _: self.posterior.weight_deviations(draws.make()).transpose(1, 2).flatten(1),
            torch.float64,
        )
        return (projected @ weights).view(-1, self.posterior.spectrum.outputs, draws.count).to(self.dtype)

    def length(self, projected: Tensor) -> Tensor:
        """`sqrt(phi' B^-1 phi)`."""
        squares = (projected @ self.constant("vectors", lambda own: own["feature_vectors"], torch.float64)).square()
        weights = self.constant("outlier_weights", lambda own: own["outlier_weights"], torch.float64)
        return (squares @ weights).sqrt().to(self.dtype)
