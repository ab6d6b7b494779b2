r"""The exact Hessian of the last layer: :math:`H = \sum_n \Lambda_n \otimes \phi_n \phi_n^\top`, of size CP x CP.

With :math:`\Lambda = \mathrm{diag}(d) + L(u u^\top)`, block (i, j) for i != j is
:math:`-\Phi^\top \mathrm{diag}(u_i u_j)\, \Phi = -Z_i^\top Z_j` with :math:`Z_i = \mathrm{diag}(u_i)\, \Phi`: matrix
products for the whole batch at once, with no Jacobian. Each block is symmetric, and (j, i) is the same as (i, j): the lower
half of one of them is all that is summed. The diagonal blocks are the negative sums of their rows (plus
:math:`\Phi^\top \mathrm{diag}(d_i) \Phi`), so what the likelihood cannot see is null exactly.

The eigenproblem is solved in the visible directions only, of size RP with R = C - 1 for a softmax; in the remaining one
the posterior is the prior: :math:`\Sigma = (F \otimes I)(H_F + \lambda I)^{-1}(F \otimes I)^\top + \frac1\lambda\, \frac{1
1^\top}{C} \otimes I`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Self

import torch
from torch import Tensor

from mola.errors import StructureTooLargeError
from mola.laplace.base import Factors, Posterior, Spectrum, Structure, mahalanobis_weights
from mola.laplace.memory import free_memory
from mola.laplace.symmetric import add_gram, eigensystem, lower_rows, pack, packed_size, seen_basis, size_of, unpack
from mola.likelihood import CATEGORICAL, Likelihood, OutputCurvature


@dataclass(frozen=True)
class FullFactors(Factors):
    """Sums from which the Hessian follows, and the features' outer products for the outlier score; lower halves."""

    coupling: Tensor
    """`Phi' diag(u_i u_j) Phi`, packed, for each pair i < j of outputs: (C (C - 1) / 2, packed size)."""
    feature_sum: Tensor
    """Of the features' outer products, packed."""
    separate: Tensor | None = None
    """`Phi' diag(d_i) Phi`, packed, for each output (C, packed size)."""

    @property
    def hessian(self) -> Tensor:
        """The Hessian (C, P, C, P)."""
        pairs, width = len(self.coupling), size_of(self.feature_sum)
        outputs = int((1 + (1 + 8 * pairs) ** 0.5) / 2)
        hessian = self.coupling.new_zeros(outputs, width, outputs, width)
        for (first, second), packed in zip(combinations(range(outputs), 2), self.coupling, strict=True):
            block = unpack(packed)
            hessian[first, :, second, :] = hessian[second, :, first, :] = -block
            hessian[first, :, first, :] += block
            hessian[second, :, second, :] += block
        for output, packed in enumerate(() if self.separate is None else self.separate):
            hessian[output, :, output, :] += unpack(packed)
        return hessian

    @property
    def gram(self) -> Tensor:
        """Sum (P, P) of the features' outer products."""
        return unpack(self.feature_sum)

    def saved(self) -> dict[str, Tensor]:
        """The two matrices."""
        return {"hessian": self.hessian, "gram": self.gram}


def add_coupling(sums: Tensor, features: Tensor, coupling: Tensor) -> None:
    """Add `Z_i' Z_j` of one group of rows, for all pairs i < j, to their packed sums in place."""
    outputs = coupling.shape[1]
    scaled = coupling.T[:, :, None] * features
    begin = 0
    for first in range(outputs - 1):
        later = outputs - first - 1
        for start, end, blocks in lower_rows(sums[begin : begin + later]):
            left = scaled[first, :, start:end].T.expand(later, -1, -1)
            blocks.baddbmm_(left, scaled[first + 1 :, :, :end])
        begin += later


def add_weighted(packed: Tensor, weights: Tensor, features: Tensor) -> None:
    """Add `Phi' diag(w) Phi` to a packed sum in place."""
    for start, end, block in lower_rows(packed):
        block.addmm_((weights[:, None] * features[:, start:end]).T, features[:, :end])


def factors_of(count: int, log_likelihood: float | None, hessian: Tensor, gram: Tensor) -> FullFactors:
    """The sums from the matrices that they make.

    Args:
        count: number of data.
        log_likelihood: of their labels.
        hessian: (C, P, C, P)
        gram: (P, P)

    Returns:
        Factors whose Hessian is this one, to the last bit where it was made from factors.
    """
    pairs = combinations(range(len(hessian)), 2)
    blocks = [pack(-hessian[first, :, second, :]) for first, second in pairs]
    products = pack(gram)
    coupling = torch.stack(blocks) if blocks else products.new_zeros(0, len(products))
    coupled = FullFactors(count, log_likelihood, coupling, products)
    # Diagonal blocks are made again, from the same numbers in the same order: what is left, beyond another machine's
    # rounding, is what outputs have for themselves.
    rest = (hessian - coupled.hessian).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    if float(rest.abs().max()) <= 1e-12 * float(hessian.abs().max()):
        return coupled
    own = torch.stack([pack(block) for block in rest])
    return FullFactors(count, log_likelihood, coupling, products, own)


MANY = 2048
"""Rows that are summed together."""

ROW_BYTES = 64 * 2**20
"""Rows of a batch are taken in blocks whose scaled copies Z stay below this size."""

KEPT, WORKSPACE = 3, 2
"""Matrices of the Hessian's size: kept for each network, and taken by the eigensolver."""


@dataclass(frozen=True)
class Full(Structure):
    """The exact Hessian: best where C P is at most a few thousand.

    Args:
        memory: bytes it may use; None asks the machine how much is free.
    """

    memory: int | None = None
    name = "full"

    def check_size(self, features: Sequence[int], outputs: int) -> None:
        """Refuse Hessians that would not fit.

        Args:
            features: P of each network.
            outputs: C.
        """
        sides = [outputs * width for width in features]
        # Each network keeps its sum, eigenvectors and a root; one of them at a time is decomposed.
        needed = 8 * (KEPT * sum(side**2 for side in sides) + WORKSPACE * max(sides) ** 2)
        free = self.memory if self.memory is not None else free_memory()
        if free is not None and needed > free:
            side, width = max(sides), max(features)
            together = f" for each of {len(sides)} networks" if len(sides) > 1 else ""
            raise StructureTooLargeError(
                f"structure 'full' needs the exact Hessian of {outputs} x {width} weights: a {side} x {side} matrix of "
                f"{8 * side**2 / 1e9:.2f} GB{together}, about {needed / 1e9:.2f} GB with the eigensolver, and "
                f"{free / 1e9:.2f} GB are free. Use structure 'kron' (it needs "
                f"{8 * (width**2 + outputs**2) / 1e9:.3f} GB) or 'diag'."
            )

    def rows(self, features: int, outputs: int) -> int:
        """Many: the sums are large, and reading and writing them costs."""
        return MANY

    def sums(self, features: Tensor, curvature: OutputCurvature, log_likelihood: float | None) -> FullFactors:
        """Factors of one batch, by block matrix products."""
        outputs = next(part.shape[1] for part in (curvature.coupling, curvature.separate) if part is not None)
        size = packed_size(features.shape[1])
        nothing = FullFactors(
            0,
            0.0,
            features.new_zeros(outputs * (outputs - 1) // 2, size),
            features.new_zeros(size),
            None if curvature.separate is None else features.new_zeros(outputs, size),
        )
        return self.absorb(nothing, features, curvature, log_likelihood)

    def absorb(self, total: Any, features: Tensor, curvature: OutputCurvature, log_likelihood: float | None) -> Any:
        """Add the batch to the sums in place."""
        if total is None:
            return self.sums(features, curvature, log_likelihood)
        outputs = next(part.shape[1] for part in (curvature.coupling, curvature.separate) if part is not None)
        rows = max(1, ROW_BYTES // (8 * outputs * features.shape[1]))
        for start in range(0, len(features), rows):
            some = features[start : start + rows]
            if curvature.coupling is not None:
                add_coupling(total.coupling, some, curvature.coupling[start : start + rows])
            if curvature.separate is not None:
                for packed, weights in zip(total.separate, curvature.separate[start : start + rows].T, strict=True):
                    add_weighted(packed, weights, some)
        add_gram(total.feature_sum, features)
        return total.grown(len(features), log_likelihood)

    def empty(self, features: int, outputs: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the saved tensors."""
        return {"hessian": (outputs, features, outputs, features), "gram": (features, features)}

    def restore(self, count: int, log_likelihood: float | None, tensors: dict[str, Tensor]) -> FullFactors:
        """Factors from their saved parts."""
        return factors_of(count, log_likelihood, tensors["hessian"], tensors["gram"])

    def spectrum(self, factors: FullFactors, likelihood: Likelihood = CATEGORICAL) -> Spectrum:
        """Eigendecompose the Hessian in the visible directions."""
        return FullSpectrum(factors, likelihood)


class FullSpectrum(Spectrum):
    """Eigenvalues (M,) and eigenvectors (C, P, M) of the Hessian in the M = R P visible directions."""

    def __init__(self, factors: FullFactors, likelihood: Likelihood) -> None:
        hessian = factors.hessian
        self.outputs, self.features = hessian.shape[:2]
        seen, self.unseen = seen_basis(likelihood, self.outputs)
        size = seen.shape[1] * self.features
        reduced = torch.einsum("ir,ipjq,js->rpsq", seen, hessian, seen).reshape(size, size)
        self.values, vectors = eigensystem(reduced)
        self.seen = seen
        self.vectors = torch.einsum("ir,rpm->ipm", seen, vectors.view(-1, self.features, size))
        self.feature_values, self.feature_vectors = eigensystem(factors.gram / factors.count)
        self.unseen_share = self.unseen.square().sum(1)

    @property
    def projection_size(self) -> int:
        """Each logit has coordinates of its own."""
        return self.outputs * (len(self.values) + 1)

    def project(self, features: Tensor) -> Tensor:
        """Squared coordinates (n, C, M + 1) of each logit in the eigenbasis; the last is the invisible part."""
        coordinates = torch.einsum("np,cpm->ncm", features, self.vectors).square_()
        rest = features.square().sum(1)[:, None] * self.unseen_share
        return torch.cat([coordinates, rest[:, :, None]], dim=2)

    def variance(self, projected: Tensor, precision: float, *, contrast: bool = False) -> Tensor:
        """`sum_m (phi' Q_cm)^2 / (l_m + lambda)`, and the prior's share in the invisible direction."""
        variance = projected[:, :, :-1] @ (1 / (self.values + precision))
        return variance if contrast else variance + projected[:, :, -1] / precision

    def variances(self, projected: Tensor, precisions: Sequence[float], *, contrast: bool = False) -> Tensor:
        """The same at several precisions, with one product: reading what was projected takes most of the time."""
        candidates = torch.tensor(precisions, dtype=torch.float64, device="cpu")
        hidden = torch.zeros_like(candidates) if contrast else 1 / candidates
        weights = torch.cat([1 / (self.values[:, None] + candidates), hidden[None]])
        return (projected @ weights).permute(2, 1, 0).contiguous()

    def log_determinant(self, precision: Tensor) -> Tensor:
        """`sum_m log(l_m + lambda)`, and `log(lambda)` for each invisible direction."""
        hidden = self.unseen.shape[1] * self.features
        return (self.values + precision).log().sum() + hidden * precision.log()

    def deviations(self, precision: float, count: int, generator: torch.Generator | None) -> Tensor:
        """Independent normals in the eigenbasis, rotated back; the prior's own where the data say nothing."""
        noise = torch.randn(count, len(self.values), generator=generator, dtype=torch.float64, device="cpu")
        deviations = torch.einsum("cpm,sm->scp", self.vectors, noise * (self.values + precision).rsqrt())
        hidden = torch.randn(
            count, self.unseen.shape[1], self.features, generator=generator, dtype=torch.float64, device="cpu"
        )
        return deviations + self.unseen @ hidden / precision**0.5

    def class_covariance(self, precision: float, output: int) -> Tensor:
        """Diagonal block of the covariance."""
        vectors = self.vectors[output]
        identity = torch.eye(self.features, dtype=torch.float64, device="cpu")
        return (vectors / (self.values + precision)) @ vectors.T + self.unseen_share[output] / precision * identity

    def smallest_class_variance(self, precision: float) -> Tensor:
        """Smallest eigenvalue of each diagonal block."""
        blocks = [torch.linalg.eigvalsh(self.class_covariance(precision, c))[0] for c in range(self.outputs)]
        return torch.stack(blocks)

    def variance_range(self, precision: float) -> tuple[float, float]:
        """The extreme eigenvalues of the posterior covariance."""
        return float(1 / (self.values.max() + precision)), 1 / precision

    def divided(self, by: float) -> Self:
        """The spectrum of the curvature divided by a number."""
        twin = copy.copy(self)
        twin.values = self.values / by
        return twin

    def posterior(self, precision: float) -> Posterior:
        """The posterior at one prior precision."""
        return FullPosterior(self, precision)


class FullPosterior(Posterior):
    """Logit covariance `(I x phi)' Sigma (I x phi)`, from the covariance's blocks and a root of it."""

    spectrum: FullSpectrum
    blocks: Tensor
    root: Tensor
    seen: Tensor
    unseen: Tensor
    feature_vectors: Tensor
    outlier_weights: Tensor

    @property
    def noise_size(self) -> int:  # type: ignore[override]
        """One normal for each eigenvalue: a draw is a draw of the weights, the same for every datum."""
        return len(self.spectrum.values)

    def constants(self) -> dict[str, Tensor]:
        """Visible diagonal blocks (C, P, P), a root (P, R M) of the visible covariance, and the bases."""
        spectrum = self.spectrum
        scaled = spectrum.vectors * (spectrum.values + self.precision).rsqrt()
        root = torch.einsum("cr,cpm->prm", spectrum.seen, scaled)
        return {
            "blocks": scaled @ scaled.transpose(1, 2),
            "root": root.reshape(spectrum.features, -1),
            "seen": spectrum.seen,
            "unseen": spectrum.unseen,
            "feature_vectors": spectrum.feature_vectors,
            "outlier_weights": mahalanobis_weights(spectrum.feature_values),
        }

    def _set(self, device: torch.device, dtype: torch.dtype) -> None:
        # The covariance has entries of size 1 / lambda that cancel where the data do know: float32 would leave noise.
        super()._set(device, torch.float64)
        self._place = (self._place[0], dtype)  # of what goes in and comes out; in between it is float64

    def exactly(self) -> Posterior:
        """Itself: it computes in float64, and gives what it was given."""
        return self

    def _prior_variance(self, features: Tensor) -> Tensor:
        return features.square().sum(1) / self.precision

    def variance(self, features: Tensor) -> Tensor:
        """`phi' Sigma_cc phi`."""
        share = self.unseen.square().sum(1).to(features.dtype)
        return self.contrast_variance(features) + self._prior_variance(features)[:, None] * share

    def contrast_variance(self, features: Tensor) -> Tensor:
        """The same with the visible part of the covariance."""
        exact = features.double()
        return ((exact @ self.blocks) * exact).sum(2).T.clamp_min(0).to(features.dtype)

    def _roots(self) -> Tensor:
        # The root as (P, R, M).
        return self.root.view(self.root.shape[0], self.seen.shape[1], -1)

    def _visible_covariance(self, features: Tensor) -> Tensor:
        # Covariance (n, R, R) in the basis of the visible directions, in float64.
        root = (features.double() @ self.root).reshape(features.shape[0], *self._roots().shape[1:])
        return root @ root.transpose(1, 2)

    def covariance(self, features: Tensor) -> Tensor:
        """All of it: the visible part and the prior's."""
        hidden = self._prior_variance(features)[:, None, None] * (self.unseen @ self.unseen.T).to(features.dtype)
        return self.contrast_covariance(features) + hidden

    def contrast_covariance(self, features: Tensor) -> Tensor:
        """The visible part."""
        return (self.seen @ self._visible_covariance(features) @ self.seen.T).to(features.dtype)

    def weight_deviations(self, noise: Tensor) -> Tensor:
        """Deviations (P, S, C) of the weights, up to a shift common to all classes, in float64."""
        return (self._roots() @ noise.double().T).transpose(1, 2) @ self.seen.T

    def driver(self, noise: Tensor) -> Tensor:
        """Deviations (P, S, C) of the weights."""
        return self.weight_deviations(noise)

    def driven(self, features: Tensor, driver: Tensor) -> Tensor:
        """Features times deviations of the weights."""
        deviations = features.double() @ driver.flatten(1)
        return deviations.reshape(features.shape[0], *driver.shape[1:]).to(features.dtype)

    def perturb(self, features: Tensor, noise: Tensor) -> Tensor:
        """Features times deviations of the weights."""
        # Not a root of each datum's covariance: that is an eigenproblem for every datum, and signs that nothing fixes.
        return self.driven(features, self.weight_deviations(noise))

    def mahalanobis(self, features: Tensor) -> Tensor:
        """`sqrt(phi' B^-1 phi)`."""
        squares = (features.double() @ self.feature_vectors).square()
        return (squares @ self.outlier_weights).sqrt().to(features.dtype)
