r"""A posterior at one prior precision as constants of a graph: lambda folded in, and as few products as there can be.

The head's input is taken as the network gives it: the constant 1 of the bias trick is folded into the constants too.
Everything that follows from the features through one product is computed once (`project`), and a constant is made when
it is first asked for, so that a graph holds what its link and its outputs need, and nothing else: run it once before it
is traced. Constants are made in float64 and kept in the precision of the posterior.

A diagonal as constants: tables over the squared features.

The exact Hessian as constants: quadratic forms of the features.

Kronecker factors as constants: one product into the eigenbasis of the features, and small tables over its squares.

Posteriors as constants of a graph, one file per structure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor, nn

from mola.laplace import Posterior
from mola.laplace.base import mahalanobis_weights
from mola.laplace.diag import DiagPosterior
from mola.laplace.full import FullPosterior
from mola.laplace.kron import DampedFeatures, DampedPosterior
from mola.laplace.kron_diag import KronDiagPosterior
from mola.laplace.kron_exact import ExactPosterior
from mola.laplace.symmetric import centred_diagonal, centred_variance

__all__ = [
    "Draws",
    "Folded",
    "FoldedAsItIs",
    "FoldedDamped",
    "FoldedDiag",
    "FoldedExact",
    "FoldedFull",
    "FoldedKronDiag",
    "fold",
]


@dataclass(frozen=True)
class Draws:
    """Random numbers that are constants of a graph, made when they are first asked for."""

    name: str
    count: int
    make: Callable[[], Tensor]


class Folded(nn.Module, ABC):
    """What `Posterior` is to features with the constant 1, this is to what `project` makes of a head's input.

    Args:
        posterior: ready to predict, in the precision to compute in.
        bias: whether the constant 1 joins the features.
    """

    def __init__(self, posterior: Any, *, bias: bool) -> None:
        """Bind a posterior."""
        super().__init__()
        # In a list, so that it is no module of the graph: only the constants are.
        self._source = [posterior]
        self._own: dict[str, Tensor] = {}
        self.bias = bias
        self.dtype: torch.dtype = posterior.dtype

    @property
    def posterior(self) -> Any:
        """What is folded."""
        return self._source[0]

    @property
    def width(self) -> int:
        """Number of features P, the constant 1 included."""
        return int(self.posterior.spectrum.features)

    def constant(
        self, name: str, make: Callable[[dict[str, Tensor]], Tensor], dtype: torch.dtype | None = None
    ) -> Tensor:
        """The constant of that name, made from the posterior's own (in float64) when it is first asked for."""
        if name not in self._buffers:
            device = next(self.posterior.buffers()).device
            self._own = self._own or self.posterior.constants()
            # Cloned, where nothing else makes it a tensor of its own: a file holds the whole memory of each.
            self.register_buffer(
                name, make(self._own).clone(memory_format=torch.contiguous_format).to(device, dtype or self.dtype)
            )
        return self.get_buffer(name)

    @abstractmethod
    def project(self, features: Tensor) -> Tensor:
        """What all the rest needs of a head's input (n, P) without the constant 1."""

    @abstractmethod
    def variance(self, projected: Tensor) -> Tensor:
        """Variance (n, C) of each logit."""

    @abstractmethod
    def contrast_variance(self, projected: Tensor) -> Tensor:
        """Variance (n, C) of each centred logit."""

    @abstractmethod
    def contrast_covariance(self, projected: Tensor) -> Tensor:
        """Covariance (n, C, C) of the centred logits."""

    @abstractmethod
    def deviations(self, projected: Tensor, draws: Draws) -> Tensor:
        """Deviations (n, C, S) of the logits, driven by standard normals (S, noise_size)."""

    @abstractmethod
    def length(self, projected: Tensor) -> Tensor:
        """Length (n,) of each feature vector relative to the training features."""

    def weight_deviations(self, features: Tensor, draws: Draws) -> Tensor:
        """Deviations (n, C, S) of the logits under drawn deviations (S, C, P) of the weights."""
        table = self.affine(features, draws.name, lambda _: draws.make().transpose(0, 1).flatten(0, 1).T)
        return table.view(-1, self.posterior.spectrum.outputs, draws.count)

    def affine(self, features: Tensor, name: str, make: Callable[[dict[str, Tensor]], Tensor]) -> Tensor:
        """Features times a table (P, m), whose last row is added where there is a bias: the constant is never made."""
        if not self.bias:
            return features @ self.constant(name, make)
        table = self.constant(name, lambda own: make(own)[:-1])
        return torch.addmm(self.constant(f"{name}_of_bias", lambda own: make(own)[-1]), features, table)


class FoldedAsItIs(Folded):
    """A structure of somebody's own: its posterior goes into the graph as it is."""

    def __init__(self, posterior: Posterior, *, bias: bool) -> None:
        """Bind a posterior, whose buffers become constants of the graph."""
        super().__init__(posterior, bias=bias)
        self.add_module("own", posterior)

    def project(self, features: Tensor) -> Tensor:
        """Features (n, P) with the constant 1."""
        return torch.cat([features, features.new_ones(features.shape[0], 1)], dim=1) if self.bias else features

    def variance(self, projected: Tensor) -> Tensor:
        """The posterior's own."""
        return self.posterior.variance(projected)

    def contrast_variance(self, projected: Tensor) -> Tensor:
        """The posterior's own."""
        return self.posterior.contrast_variance(projected)

    def contrast_covariance(self, projected: Tensor) -> Tensor:
        """The posterior's own."""
        return self.posterior.contrast_covariance(projected)

    def deviations(self, projected: Tensor, draws: Draws) -> Tensor:
        """The posterior's own."""
        return self.posterior.perturb(projected, self.constant(draws.name, lambda _: draws.make())).transpose(1, 2)

    def length(self, projected: Tensor) -> Tensor:
        """The posterior's own."""
        return self.posterior.mahalanobis(projected)


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


@singledispatch
def fold(posterior: Any, *, bias: bool) -> Folded:
    """Constants of a graph for a posterior; `bias`: whether the constant 1 joins the features."""
    return FoldedAsItIs(posterior, bias=bias)


@fold.register
def _(posterior: DampedPosterior, *, bias: bool) -> Folded:
    return FoldedDamped(posterior, bias=bias)


@fold.register
def _(posterior: KronDiagPosterior, *, bias: bool) -> Folded:
    return FoldedKronDiag(posterior, bias=bias)


@fold.register
def _(posterior: ExactPosterior, *, bias: bool) -> Folded:
    return FoldedExact(posterior, bias=bias)


@fold.register
def _(posterior: DiagPosterior, *, bias: bool) -> Folded:
    return FoldedDiag(posterior, bias=bias)


@fold.register
def _(posterior: FullPosterior, *, bias: bool) -> Folded:
    return FoldedFull(posterior, bias=bias)
