r"""Curvature over all weights of a network: the generalised Gauss-Newton matrix in some structure, and its eigenbasis.

With the output curvature of a datum written as :math:`\Lambda = S S^\top`, the rows :math:`S^\top J` of its Jacobian give :math:`H =
\sum_n (S^\top J)^\top (S^\top J)`. K-FAC (Martens and Grosse, 2015; "expand" of Eschenhagen et al., 2023) approximates the block of a
layer with inputs a and gradients g at T positions by

.. math:: B \otimes \tfrac1N A, \qquad A = \sum_n \tfrac1T \sum_t a_{nt} a_{nt}^\top, \qquad B = \sum_n \sum_t g_{nt} g_{nt}^\top.

For one datum and T = 1 it is exact. A `WholeCurvature` is an orthogonal basis of weight space with one eigenvalue for each
direction. With the coordinates z (n, C, D) of the Jacobians in this basis, every formula is a sum over :math:`1 / (h + \lambda)`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from mola.errors import OptionError
from mola.laplace import Curvature, Structure, Sums
from mola.laplace.base import Precision, as_column, contrasts, eigensystem
from mola.likelihoods.base import OutputCurvature
from mola.numerics import Generator, standard_normals
from mola.whole.jacobians import JacobianRows, Layout

JITTER = 1e-9
"""Added to the diagonal of the centred covariance before its root is taken, relative to its mean: a few uncertain weights give a
covariance of low rank."""


class WholeStructure(Structure):
    """A way to approximate the Gauss-Newton matrix of the weights in a layout."""

    layout: Layout
    outputs: int

    @property
    @abstractmethod
    def columns(self) -> int:
        """Columns of the Jacobian rows that `sums` multiplies out."""

    @abstractmethod
    def sums(self, phi: Any, curvature: OutputCurvature | None = None) -> dict[str, Tensor]:
        """Sums over the data of `JacobianRows` along the roots of their output curvature."""

    @abstractmethod
    def solve(self, sums: Sums, scale: Tensor | None = None) -> WholeCurvature:
        """The eigenbasis."""

    def uncertain(self, weights: Tensor) -> Tensor:
        """The uncertain ones among all weights of the layout."""
        return weights

    def replaced(self, weights: Tensor, uncertain: Tensor) -> Tensor:
        """All weights of the layout with new values of the uncertain ones."""
        return uncertain

    def bytes(self, features: int, outputs: int) -> int:
        """Memory of sums and eigenbasis, beside the network's own."""
        return 8 * 4 * (self.layout.size + sum(one.rows**2 + one.columns**2 for one in self.layout.layers))


@dataclass(frozen=True)
class WholeKron(WholeStructure):
    """K-FAC of every linear and convolutional layer, and the diagonal for all other parameters."""

    layout: Layout
    outputs: int
    name = "kron"

    @property
    def columns(self) -> int:
        """None: factors are summed as they are."""
        return 0

    def sums(self, phi: Any, curvature: OutputCurvature | None = None) -> dict[str, Tensor]:
        """B (O, O) and A (I, I) of each layer, and the squares (S,) of the rest."""
        found = {"rest": phi.rest.square().sum((0, 1))}
        for index, (gradients, inputs) in enumerate(phi.layers):
            by_output, by_input = gradients.transpose(0, 2).flatten(1), inputs.transpose(0, 1).flatten(1)
            found[f"gradients.{index}"] = by_output @ by_output.T
            found[f"inputs.{index}"] = by_input @ by_input.T / inputs.shape[2]
        return found

    def solve(self, sums: Sums, scale: Tensor | None = None) -> WholeCurvature:
        """The eigenbases of both factors of each layer."""
        lefts, rights, values = [], [], []
        for index in range(len(self.layout.layers)):
            above, left = eigensystem(sums.tensors[f"gradients.{index}"])
            across, right = eigensystem(sums.tensors[f"inputs.{index}"] / sums.count)
            lefts.append(left)
            rights.append(right)
            values.append(torch.outer(above, across).flatten())
        joined = torch.cat([*values, sums.tensors["rest"].cpu()])
        return LayerwiseCurvature(self.outputs, self.layout.size, joined, tuple(lefts), tuple(rights), self.layout)


@dataclass(frozen=True)
class WholeDiag(WholeStructure):
    """The exact diagonal."""

    layout: Layout
    outputs: int
    name = "diag"

    @property
    def columns(self) -> int:
        """Those of layers with several positions."""
        return max((layer.size for layer in self.layout.layers if layer.positions > 1), default=0)

    def sums(self, phi: Any, curvature: OutputCurvature | None = None) -> dict[str, Tensor]:
        """The squares (D,)."""
        parts = [factors.squares().flatten() for factors in phi.layers]
        return {"diagonal": torch.cat([*parts, phi.rest.square().sum((0, 1))])}

    def solve(self, sums: Sums, scale: Tensor | None = None) -> WholeCurvature:
        """The diagonal is its own eigenbasis."""
        none, diagonal = (None,) * len(self.layout.layers), sums.tensors["diagonal"].cpu()
        return LayerwiseCurvature(self.outputs, self.layout.size, diagonal, none, none, self.layout)


@dataclass(frozen=True)
class WholeFull(WholeStructure):
    """The exact matrix of all weights, or of a subnetwork."""

    layout: Layout
    outputs: int
    chosen: Tensor | None = None
    """Places of the uncertain weights in the vector of all, in increasing order; None: all are uncertain."""

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the structure."""
        return "full" if self.chosen is None else "subnetwork"

    @property
    def columns(self) -> int:
        """The uncertain weights, and the layers from which they are taken."""
        taken = WholeDiag(self.layout, self.outputs).columns
        return self.layout.size if self.chosen is None else len(self.chosen) + taken

    def uncertain(self, weights: Tensor) -> Tensor:
        """The chosen weights."""
        return weights if self.chosen is None else weights[self.chosen.to(weights.device)]

    def replaced(self, weights: Tensor, uncertain: Tensor) -> Tensor:
        """All weights of the layout with new values of the chosen ones."""
        return uncertain if self.chosen is None else weights.index_copy(0, self.chosen.to(weights.device), uncertain)

    def sums(self, phi: Any, curvature: OutputCurvature | None = None) -> dict[str, Tensor]:
        """The matrix."""
        flat = chosen_rows(phi, self.layout, self.chosen).flatten(0, 1)
        return {"matrix": flat.T @ flat}

    def solve(self, sums: Sums, scale: Tensor | None = None) -> WholeCurvature:
        """Its eigenvectors."""
        values, vectors = eigensystem(sums.tensors["matrix"])
        return DenseCurvature(self.outputs, len(values), values, vectors, self.chosen, self.layout)

    def bytes(self, features: int, outputs: int) -> int:
        """The sum, its eigenvectors and the eigensolver's workspace."""
        return 8 * 4 * features**2


def chosen_rows(rows: JacobianRows, layout: Layout, chosen: Tensor | None) -> Tensor:
    """Multiplied rows (n, R, S) of the chosen weights; None is all."""
    if chosen is None:
        return torch.cat([*(factors.product().flatten(2) for factors in rows.layers), rows.rest], 2)
    chosen, parts, start = chosen.to(rows.outputs.device), [], 0
    for factors, layer in zip(rows.layers, layout.layers, strict=True):
        parts.append(factors.columns(chosen[(chosen >= start) & (chosen < start + layer.size)] - start))
        start += layer.size
    return torch.cat([*parts, rows.rest[:, :, chosen[chosen >= start] - start]], 2)


@dataclass(frozen=True)
class WholeCurvature(Curvature):
    """Eigenvalues (D,) of the Gauss-Newton matrix. In its methods phi is an object with `coordinates` (n, C, D)."""

    values: Tensor

    @abstractmethod
    def coordinates(self, rows: JacobianRows) -> Tensor:
        """Jacobian rows (n, R, D) in the eigenbasis."""

    @abstractmethod
    def rotated_back(self, coordinates: Tensor) -> Tensor:
        """The deviation (D,) of the uncertain weights with these coordinates (D,) in the eigenbasis."""

    def to(self, device: torch.device) -> Self:
        """The same curvature on another device."""
        parts = {one.name: getattr(self, one.name) for one in fields(self)}
        return replace(self, **tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, parts))

    @staticmethod
    def _coordinates(phi: Any, *, centred: bool) -> Tensor:
        found: Tensor = phi.coordinates
        return found - found.mean(1, keepdim=True) if centred else found

    def inverse(self, precision: Precision) -> Tensor:
        """Eigenvalues (..., D) of the posterior covariance."""
        return 1 / (self.values + as_column(precision, self.values, 1))

    def variance(self, phi: Any, precision: Precision, *, centred: bool = False) -> Tensor:
        """`sum_d z_cd^2 / (h_d + lambda)`."""
        inverse = self.inverse(precision)
        squares = self._coordinates(phi, centred=centred).square()
        variance = squares @ inverse.reshape(-1, len(self.values)).T  # (n, C, L)
        return variance.movedim(-1, 0).reshape(*inverse.shape[:-1], *variance.shape[:2])

    def covariance(self, phi: Any, precision: float, *, centred: bool = False) -> Tensor:
        """`z diag(1 / (h + lambda)) z'`."""
        coordinates = self._coordinates(phi, centred=centred)
        return (coordinates * self.inverse(precision)) @ coordinates.mT

    @property
    def noise_size(self) -> int:
        """One standard normal for each contrast of the logits."""
        return self.outputs - 1

    def perturb(self, phi: Any, precision: float, noise: Tensor) -> Tensor:
        """Draws from the centred covariance, by its Cholesky root in the contrasts."""
        basis = contrasts(self.outputs).to(self.values)
        seen = basis.T @ self.covariance(phi, precision, centred=True) @ basis
        scale = seen.diagonal(dim1=1, dim2=2).mean(1)[:, None, None].clamp_min(torch.finfo(seen.dtype).tiny)
        root = torch.linalg.cholesky(seen / scale + JITTER * torch.eye(self.noise_size).to(seen)) * scale.sqrt()
        return (noise @ root.mT) @ basis.T

    def sample(self, precision: float, count: int, generator: Generator) -> Tensor:
        """Deviations (count, D) of the uncertain weights from the trained ones."""
        scale = self.inverse(precision).sqrt()
        noise = (standard_normals((len(self.values),), generator).to(scale) for _ in range(count))
        return torch.stack([self.rotated_back(one * scale) for one in noise])

    def log_determinant(self, precision: Tensor) -> Tensor:
        """`sum_d log(h_d + lambda)`."""
        return (self.values + precision).log().sum()

    def divided(self, by: float) -> Self:
        """The curvature divided by a number."""
        return replace(self, values=self.values / by)

    def mahalanobis(self, phi: Any) -> Tensor:
        """Not defined."""
        _refuse("a feature norm")

    def class_covariance(self, precision: float, output: int) -> Tensor:
        """Not defined."""
        _refuse("the covariance of one class's weights")

    def smallest_class_variance(self, precision: float) -> Tensor:
        """Not defined."""
        _refuse("the covariance of one class's weights")


def _refuse(what: str) -> NoReturn:
    raise OptionError(f"{what} belongs to a last layer, and this posterior is over whole networks. Use mola.fit.")


@dataclass(frozen=True)
class LayerwiseCurvature(WholeCurvature):
    """Layers in the eigenbases of their factors, (O, O) and (I, I); None is the identity."""

    lefts: tuple[Tensor | None, ...]
    rights: tuple[Tensor | None, ...]
    layout: Layout

    def coordinates(self, rows: JacobianRows) -> Tensor:
        """Factors are rotated, then multiplied."""
        triples = zip(rows.layers, self.lefts, self.rights, strict=True)
        return torch.cat([*(factors.product(left, right).flatten(2) for factors, left, right in triples), rows.rest], 2)

    def rotated_back(self, coordinates: Tensor) -> Tensor:
        """Each layer's matrix from both sides."""
        *matrices, rest = self.layout.split(coordinates)
        parts = []
        for matrix, left, right in zip(matrices, self.lefts, self.rights, strict=True):
            above = matrix if left is None else left @ matrix
            parts.append((above if right is None else above @ right.T).flatten())
        return torch.cat([*parts, rest])


@dataclass(frozen=True)
class DenseCurvature(WholeCurvature):
    """Eigenvectors (D, D), of all weights or of chosen ones."""

    vectors: Tensor
    chosen: Tensor | None
    layout: Layout

    def coordinates(self, rows: JacobianRows) -> Tensor:
        """Rows times eigenvectors."""
        return chosen_rows(rows, self.layout, self.chosen) @ self.vectors

    def rotated_back(self, coordinates: Tensor) -> Tensor:
        """Eigenvectors times coordinates."""
        return self.vectors @ coordinates
