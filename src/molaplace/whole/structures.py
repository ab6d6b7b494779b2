r"""Structures of the generalised Gauss-Newton matrix over all weights of a network, and their eigenbases.

Let :math:`\Lambda = S S^\top` be the output curvature of a datum and J its Jacobian. Then :math:`H = \sum_n (S^\top J)^\top
(S^\top J)`. K-FAC (Martens and Grosse, 2015; the "expand" variant of Eschenhagen et al., 2023) approximates the block of a layer
with inputs a and gradients g at T positions by

.. math:: B \otimes \tfrac1N A, \qquad A = \sum_n \tfrac1T \sum_t a_{nt} a_{nt}^\top, \qquad B = \sum_n \sum_t g_{nt} g_{nt}^\top.

This approximation is exact for a single datum with T = 1. The exact H over all weights is the special case of a single layer whose
gradients are the Jacobian rows and whose input is the constant 1. The diagonal is the special case without any layers. A
`WholeCurvature` holds an orthogonal basis of the weight space and an eigenvalue h for each direction. With the Jacobians' coordinates
z (n, C, D) in this basis, every formula is a sum over the D directions of terms that depend on :math:`h + \lambda`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from molaplace.errors import DataError
from molaplace.network import Inputs
from molaplace.structures import Structure
from molaplace.structures.base import contrasts, eigensystem
from molaplace.structures.dense import DenseCurvature
from molaplace.sums import Sums
from molaplace.whole.jacobians import Directions, Factors, WeightLayout, jacobians, layer_factors

NAMES = ("kron", "diag", "full", "subnetwork")

JITTER = 1e-9
"""Jitter added to the diagonal of the centred covariance before its Cholesky decomposition, relative to the mean diagonal entry. The
covariance has low rank if only a few weights are uncertain."""


class JacobianRows(NamedTuple):
    """Jacobian rows along R directions: the factors for each layer, and the rows (n, R, S) for the S remaining weights."""

    layers: list[Factors]
    rest: Tensor


@dataclass(frozen=True)
class WholeStructure(Structure):
    """An approximation to the Gauss-Newton matrix for the weights in a layout.

    Args:
        layout: the weights that the matrix covers, and their order.
        outputs: number of classes.
        name: "kron" (K-FAC for the layout's layers, the diagonal for all other parameters), "diag" (the exact diagonal), "full" (the
            exact matrix) or "subnetwork" (the exact matrix of some weights).
    """

    layout: WeightLayout
    outputs: int
    name: str

    def rows(self, network: nn.Module, inputs: Inputs, directions: Directions) -> tuple[Tensor, JacobianRows]:
        """Return the logits (n, C) and the Jacobian rows along the given directions, for a few data points."""
        layers = [block.layer for block in self.layout.blocks if block.layer is not None]
        if layers:
            return self._factored_rows(network, layers, inputs, directions)
        names = [name for block in self.layout.blocks for name in block.names]
        outputs, derivatives = jacobians(network, names, inputs, directions)
        flat = self.layout.flat(derivatives, 2)
        if self.name in ("kron", "diag"):
            return outputs, JacobianRows([], flat)
        return outputs, JacobianRows([Factors(flat[..., None], flat.new_ones(len(flat), 1, 1))], flat[..., :0])

    def _factored_rows(
        self, network: nn.Module, layers: list[str], inputs: Inputs, directions: Directions
    ) -> tuple[Tensor, JacobianRows]:
        others = WeightLayout(self.layout.blocks[len(layers) :])
        outputs, factors = layer_factors(network, layers, inputs, directions)
        rest = outputs.new_zeros(len(outputs), outputs.shape[1], 0)
        if others.blocks:
            names = [block.names[0] for block in others.blocks]
            rest = others.flat(jacobians(network, names, inputs, directions)[1], 2)
        known = [layer_factors for layer_factors in factors if layer_factors is not None]
        if len(known) < len(layers):
            raise DataError(
                f"layer {layers[factors.index(None)]!r} was called exactly once per pass during fitting, but not in this pass. "
                f"If the number of calls varies, fit with structure='diag'."
            )
        return outputs, JacobianRows(known, rest)

    def sums(self, phi: Any, curvature: Any = None) -> dict[str, Tensor]:
        """Return B (O, O) and A (I, I) for each layer, and the sum of squares for each of the S remaining weights.

        The rows must be taken along the directions from `curvature_roots`.
        """
        sums = {"rest": phi.rest.square().sum((0, 1))}
        for index, (gradients, inputs) in enumerate(phi.layers):
            by_output = gradients.transpose(0, 2).flatten(1)
            by_input = inputs.transpose(0, 1).flatten(1)
            sums[f"gradients.{index}"] = by_output @ by_output.T
            sums[f"inputs.{index}"] = by_input @ by_input.T / inputs.shape[2]
        return sums

    def solve(self, sums: Sums) -> WholeCurvature:
        """Return the eigenvalues, and the eigenbases of both factors of each layer."""
        bases = []
        values = []
        for index in range(len(sums.tensors) // 2):
            output_values, left = eigensystem(sums.tensors[f"gradients.{index}"])
            input_values, right = eigensystem(sums.tensors[f"inputs.{index}"] / sums.count)
            bases.append((left, right))
            values.append(torch.outer(output_values, input_values).flatten())
        values.append(sums.tensors["rest"].cpu())
        return WholeCurvature(
            outputs=self.outputs,
            features=self.layout.size,
            values=torch.cat(values),
            hidden=True,
            bases=tuple(bases),
        )

    def bytes(self, features: int, outputs: int) -> int:
        """Return the number of bytes that the sums and eigenbases occupy."""
        squares = sum(block.rows**2 + block.columns**2 for block in self.layout.blocks if block.layer is not None)
        return 8 * 4 * (features + squares + (features**2 if self.name in ("full", "subnetwork") else 0))


@dataclass(frozen=True, kw_only=True)
class WholeCurvature(DenseCurvature):
    """Eigenvalues (D,) of the Gauss-Newton matrix, and eigenbases (O, O) and (I, I) of each layer's factors.

    The eigenbasis of all other weights is the identity. Jacobians are too large to store, so `coordinates` projects their factors as
    they are computed, and the features (n, C, D) that predictions see are projected already.
    """

    bases: tuple[tuple[Tensor, Tensor], ...]

    def coordinates(self, rows: JacobianRows) -> Tensor:
        """Return the Jacobian rows (n, R, D) in the eigenbasis. The factors are rotated before they are multiplied."""
        pairs = zip(rows.layers, self.bases, strict=True)
        rotated = [factors.product(left, right).flatten(2) for factors, (left, right) in pairs]
        return torch.cat([*rotated, rows.rest], 2)

    def project(self, phi: Tensor) -> Tensor:
        """Return the coordinates (n, C, D), unchanged."""
        return phi

    def in_weights(self, offsets: Tensor) -> Tensor:
        """Return the offsets (S, D) of the uncertain weights."""
        sizes = [len(left) * len(right) for left, right in self.bases]
        *parts, rest = torch.split(offsets, [*sizes, offsets.shape[1] - sum(sizes)], dim=1)
        pairs = zip(self.bases, parts, strict=True)
        rotated = [
            (left @ part.view(len(part), len(left), len(right)) @ right.T).flatten(1) for (left, right), part in pairs
        ]
        return torch.cat([*rotated, rest], 1)

    @property
    def noise_size(self) -> int:
        """Number of contrasts of the logits."""
        return self.outputs - 1

    def marginal_deviations(self, z: Tensor, precision: float, noise: Tensor) -> Tensor:
        """Return draws with the centred covariance, computed from its Cholesky root in the basis of contrasts."""
        basis = contrasts(self.outputs).to(self.values)
        covariance = basis.T @ self.covariance(z, precision, centred=True) @ basis
        scale = covariance.diagonal(dim1=1, dim2=2).mean(1)[:, None, None].clamp_min(torch.finfo(covariance.dtype).tiny)
        jitter = JITTER * torch.eye(self.noise_size, dtype=covariance.dtype, device=covariance.device)
        lower = torch.linalg.cholesky(covariance / scale + jitter) * scale.sqrt()
        return (noise @ lower.mT) @ basis.T
