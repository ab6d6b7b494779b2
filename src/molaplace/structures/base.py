r"""The interface of curvature structures and the linear algebra they share.

A `Structure` accumulates sums over batches and then solves a single eigenproblem. The result is a `Curvature`, which excludes the
prior. Everything that depends on the prior precision :math:`\lambda` follows from the curvature in closed form, for one value of
:math:`\lambda` or for many at once.

In all tensor shapes, n is the number of data points, P is the number of features (including the constant 1), and C is the number of
outputs. For each datum, the curvature of the negative log-likelihood with respect to the outputs is :math:`\Lambda = \mathrm{diag}(d)
+ L(u u^\top)` (`mola.likelihoods.base`). Without the separate part d, as for a softmax, adding the same number to all outputs has no
effect; the direction of this shift is called *hidden*. The hidden direction is handled exactly; no code relies on a computed
eigenvalue being zero. *Centred* variances and covariances exclude the hidden direction: they describe the logits minus their mean.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from molaplace.errors import StructureTooLargeError
from molaplace.likelihoods.base import OutputCurvature
from molaplace.numerics import Generator
from molaplace.sums import Sums

OUTLIER_RIDGE = 1e-10
"""Ridge that `FeatureFactor.mahalanobis` adds to the feature covariance, relative to the covariance's largest eigenvalue. It leaves
lengths almost unchanged in directions that the training data span; in all other directions, it makes lengths very large instead of
infinite."""

WEIGHTS_AT_ONCE = 2**19
"""Largest number of drawn weights in memory at once (4 MB in float64)."""

EVERY_OUTPUT = slice(None)
"""All outputs, in `Curvature.cross`."""


class Structure(ABC):
    """An approximation of the Hessian of the last layer."""

    name: str
    smaller: str | None = None
    """Name of the structure that error messages recommend if this one needs too much memory. If None, the recommendation depends on
    the numbers of features and outputs."""
    additive = True
    """True if the sums over the whole training set can be obtained by adding sums over its parts in any order."""

    @abstractmethod
    def sums(self, phi: Tensor, curvature: OutputCurvature) -> dict[str, Tensor]:
        """Return the float64 sums over one batch, given its output curvature and its features (n, P), including the constant 1.

        The names of the sums are arbitrary, with one exception: the tensor "separate" holds the sums that contain the outputs'
        separate curvature (`OutputCurvature`), with the outputs as the first axis. This tensor is present only if the likelihood has
        separate curvature. If it is absent, adding the same number to all outputs has no effect, as for a softmax (`hides_shift`). For
        regression, this tensor is divided by the noise variance.
        """

    @abstractmethod
    def solve(self, sums: Sums) -> Curvature:
        """Compute the curvature from the sums."""

    def accumulate(self, total: Sums, batch: Sums) -> Sums:
        """Add the sums of a batch to the total, in place."""
        total += batch
        return total

    def semidefinite(self, sums: Sums) -> Sequence[Tensor]:
        """Return the sums that are positive semi-definite for any data, as matrices (..., M, M)."""
        return []

    def nonnegative(self, sums: Sums) -> Sequence[Tensor]:
        """Return the sums whose entries are not negative for any data."""
        return []

    @abstractmethod
    def bytes(self, features: int, outputs: int) -> int:
        """Return the peak memory, in bytes, needed to fit one network."""

    def settings(self) -> dict[str, Any]:
        """Return the structure's constructor arguments as a JSON-serialisable dictionary."""
        return {}


def check_size(structure: Structure, features: Sequence[int], outputs: int) -> None:
    """Raise `StructureTooLargeError` if fitting networks with these numbers of features would need more memory than is free."""
    needed = sum(structure.bytes(width, outputs) for width in features)
    free = free_memory()
    if free is not None and needed > free:
        smaller = structure.smaller or ("kron-diag" if outputs >= max(features) else "diag")
        raise StructureTooLargeError(
            f"structure {structure.name!r} takes about {needed / 1e9:.1f} GB to fit ({len(features)} x {outputs:,} outputs x "
            f"{max(features):,} features), but only {free / 1e9:.1f} GB is free. Use structure "
            f"{smaller!r}."
        )


def free_memory() -> int | None:
    """Return the available memory in bytes on Linux, the total memory on other systems, or None if it is unknown."""
    with suppress(OSError):
        match = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text(encoding="ascii"))
        if match is not None:
            return 1024 * int(match[1])
    with suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


@dataclass(frozen=True, kw_only=True)
class Curvature(ABC):
    """A Gaussian over the uncertain weights, given by its curvature in an eigenbasis, in float64 and without the prior.

    Every question about the logits is asked of *projected* features `z = project(phi)`, which are the features' coordinates in the
    basis. They depend neither on the prior precision nor on the noise, so a search projects its rows once.
    """

    outputs: int
    features: int
    scale: float = 1.0
    """Factor of the curvature: 1 or, after the noise has been multiplied by a factor, the inverse square of this factor."""

    def to(self, device: torch.device) -> Self:
        """Return the same curvature on another device."""
        return replace(self, **tree_map(lambda value: value.to(device) if hasattr(value, "to") else value, vars(self)))

    @abstractmethod
    def project(self, phi: Tensor) -> Tensor:
        """Return the coordinates z (n, ...) of features (n, P)."""

    @property
    def row_size(self) -> int:
        """Number of values of one datum's projected features."""
        return self.features

    @abstractmethod
    def variance(self, z: Tensor, precision: float, *, centred: bool = False) -> Tensor:
        """Return the variances (n, C) of the logits."""

    @abstractmethod
    def cross(
        self,
        z: Tensor,
        other: Tensor,
        precision: float,
        *,
        centred: bool = False,
        outputs: slice = EVERY_OUTPUT,
    ) -> Tensor:
        """Return the covariances (..., n, c, m, c) between some logits of n data and of m others, with leading batch dimensions."""

    @abstractmethod
    def log_determinant(self, precision: Tensor) -> Tensor:
        """Return the log determinant of the posterior precision matrix, differentiable in the prior precision."""

    @abstractmethod
    def offsets(self, precision: float, count: int, generator: Generator) -> Tensor:
        """Draw random offsets (S, ...) of the weights from their trained values, in the coordinates of projected features."""

    @abstractmethod
    def in_weights(self, offsets: Tensor) -> Tensor:
        """Return offsets (S, ...) as offsets of the weights: (S, C, P) or, for a whole network, (S, D)."""

    @abstractmethod
    def deviations(self, z: Tensor, offsets: Tensor) -> Tensor:
        """Return the deviations (n, S, C) of the logits that offsets of the weights cause."""

    @property
    @abstractmethod
    def noise_size(self) -> int:
        """Number of standard normal variables in one draw of `marginal_deviations`."""

    @abstractmethod
    def marginal_deviations(self, z: Tensor, precision: float, noise: Tensor) -> Tensor:
        """Turn standard normals (S, noise_size) into deviations (n, S, C) of the logits, up to a common shift.

        Each datum's deviations have the covariance of its logits. All data share the normals, so deviations of different data are not
        those of one function, but they take C instead of C P normals.
        """

    # --- what follows ---------------------------------------------------------------------------------------------------

    def covariance(self, z: Tensor, precision: float, *, centred: bool = False) -> Tensor:
        """Return the covariance (n, C, C) of each datum's logits."""
        rows = z[:, None]
        return self.cross(rows, rows, precision, centred=centred)[:, 0, :, 0]

    def kronecker_factors(self, z: Tensor, precision: float) -> tuple[Tensor, Tensor] | None:
        """Return matrices (n, n) and (C, C) whose Kronecker product are the covariances of all logits, or None if there are none."""
        return None


class LayerCurvature(Curvature):
    """The curvature of a last layer, whose weights (C, P) multiply the features."""

    feature_factor: FeatureFactor

    def in_weights(self, offsets: Tensor) -> Tensor:
        """Return the offsets (S, C, P) of the weights."""
        return self.feature_factor.restore(offsets)

    def deviations(self, z: Tensor, offsets: Tensor) -> Tensor:
        """Return `z offset'`."""
        return torch.einsum("np,scp->nsc", z, offsets.to(z))

    def class_covariance(self, precision: float, output: int) -> Tensor:
        """Return the marginal covariance (P, P) of one output's weights."""
        units = self.project(torch.eye(self.features, dtype=torch.float64, device=self.feature_factor.values.device))
        return self.cross(units, units, precision, outputs=slice(output, output + 1))[:, 0, :, 0]

    def smallest_class_variance(self, precision: float) -> Tensor:
        """Return the smallest eigenvalue (C,) of each output's marginal covariance."""
        blocks = (self.class_covariance(precision, output) for output in range(self.outputs))
        return torch.stack([torch.linalg.eigvalsh(block)[0] for block in blocks])


@dataclass(frozen=True)
class Spread:
    """Covariance of the logits for n data points; links combine it with the mean. Variances are computed once, when they are read."""

    curvature: Curvature
    z: Tensor
    """Projected features (n, ...)."""
    precision: float

    @cached_property
    def variances(self) -> Tensor:
        """Variance (n, C) of each logit."""
        return self.curvature.variance(self.z, self.precision)

    @cached_property
    def centred_variances(self) -> Tensor:
        """Variance (n, C) of each logit minus the mean of the logits."""
        return self.curvature.variance(self.z, self.precision, centred=True)

    def variance(self, *, centred: bool = False) -> Tensor:
        """Return the variance (n, C) of each logit."""
        return self.centred_variances if centred else self.variances

    def covariance(self, *, centred: bool = False) -> Tensor:
        """Return the covariance (n, C, C) of the logits."""
        return self.curvature.covariance(self.z, self.precision, centred=centred)

    @property
    def noise_size(self) -> int:
        """Number of standard normal variables in one draw of `marginal_deviations`."""
        return self.curvature.noise_size

    def marginal_deviations(self, noise: Tensor) -> Tensor:
        """Return deviations (n, S, C) of the logits, up to a common shift, given normals (S, noise_size) that all data share."""
        return self.curvature.marginal_deviations(self.z, self.precision, noise)

    def deviations(self, count: int, generator: Generator) -> Tensor:
        """Return deviations (n, count, C) of the logits under draws of the weights."""
        curvature = self.curvature
        most = max(1, WEIGHTS_AT_ONCE // (curvature.outputs * curvature.features))
        counts = [min(most, count - start) for start in range(0, count, most)]
        parts = [curvature.deviations(self.z, curvature.offsets(self.precision, part, generator)) for part in counts]
        return torch.cat(parts, 1)

    def with_divided_logits(self, divisor: Tensor) -> DividedSpread:
        """Return the spread after dividing each datum's logits by its entry in `divisor` (n, 1) or (1, 1)."""
        return DividedSpread(self, divisor)


@dataclass(frozen=True)
class DividedSpread:
    """Covariance of the logits `phi' w / s`."""

    undivided: Spread
    divisor: Tensor
    """Divisor s of the logits, (n, 1) or (1, 1)."""

    @property
    def noise_size(self) -> int:
        """Number of standard normal variables in one draw of `marginal_deviations`."""
        return self.undivided.noise_size

    def variance(self, *, centred: bool = False) -> Tensor:
        """Return the variance (n, C) of each logit."""
        variances = self.undivided.centred_variances if centred else self.undivided.variances
        return variances / self.divisor**2

    def covariance(self, *, centred: bool = False) -> Tensor:
        """Return the covariance (n, C, C) of the logits."""
        return self.undivided.covariance(centred=centred) / self.divisor[..., None] ** 2

    def marginal_deviations(self, noise: Tensor) -> Tensor:
        """Return deviations (n, S, C) of the logits, up to a common shift, given normals (S, noise_size) that all data share."""
        return self.undivided.marginal_deviations(noise) / self.divisor[..., None]

    def deviations(self, count: int, generator: Generator) -> Tensor:
        """Return deviations (n, count, C) of the logits under draws of the weights."""
        return self.undivided.deviations(count, generator) / self.divisor[..., None]

    def with_divided_logits(self, divisor: Tensor) -> DividedSpread:
        """Return the spread after another division."""
        return DividedSpread(self.undivided, self.divisor * divisor)


# --- linear algebra ---------------------------------------------------------------------------------------------------


def hides_shift(sums: Sums) -> bool:
    """Return True if no output has separate curvature, so that adding the same number to all outputs has no effect."""
    return "separate" not in sums.tensors


def contrasts(outputs: int) -> Tensor:
    """Return Helmert's orthonormal basis (C, C - 1) of the vectors that sum to zero."""
    size = torch.arange(1, outputs, dtype=torch.float64, device="cpu")
    upper = torch.triu(torch.ones(outputs, outputs - 1, dtype=torch.float64, device="cpu")) / (size * (size + 1)).sqrt()
    upper[1:].diagonal().copy_(-(size / (size + 1)).sqrt())
    return upper


def output_bases(outputs: int, *, hidden: bool) -> tuple[Tensor, Tensor]:
    """Return orthonormal bases of the output directions with curvature, (C, R), and of the hidden directions, (C, C - R)."""
    if not hidden:
        return torch.eye(outputs, dtype=torch.float64, device="cpu"), torch.zeros(
            outputs, 0, dtype=torch.float64, device="cpu"
        )
    return contrasts(outputs), torch.full((outputs, 1), outputs**-0.5, dtype=torch.float64, device="cpu")


def laplacian(weights: Tensor) -> Tensor:
    """Return the graph Laplacian `diag(W 1) - W` of symmetric weights (C, C). Self-loops cancel out, so they are ignored."""
    off_diagonal = weights - torch.diag(weights.diagonal())
    return torch.diag(off_diagonal.sum(1)) - off_diagonal


def eigensystem(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues (clamped to be non-negative) and eigenvectors of a positive semi-definite matrix, both on the CPU."""
    values, vectors = torch.linalg.eigh(matrix.cpu())
    return values.clamp_min(0), vectors


def centred_variance(variance: Tensor) -> Tensor:
    """Return `v_c (1 - 2/C) + mean(v) / C`, the variances (..., C) of independent outputs after their mean is subtracted."""
    outputs = variance.shape[-1]
    return variance * (1 - 2 / outputs) + variance.mean(-1, keepdim=True) / outputs


def centred_diagonal(variance: Tensor) -> Tensor:
    """Return the covariance (..., C, C) of independent outputs with variances (..., C) after their mean is subtracted."""
    outputs = variance.shape[-1]
    mean = variance.mean(-1)[..., None, None]
    return torch.diag_embed(variance) - (variance[..., :, None] + variance[..., None, :] - mean) / outputs


@dataclass(frozen=True)
class FeatureFactor:
    """The mean outer product B of the training features in an orthonormal basis, in which features are projected."""

    values: Tensor
    """Eigenvalues b (P,) or, in the basis of the features themselves, the mean squares of the features."""
    vectors: Tensor | None
    """Eigenvectors R (P, P), or None for the basis of the features themselves, in which covariances between features are ignored."""

    @staticmethod
    def from_gram(gram: Tensor, count: int) -> FeatureFactor:
        """Eigendecompose the mean, given the sum (P, P) of the features' outer products."""
        return FeatureFactor(*eigensystem(gram / count))

    def to(self, device: torch.device) -> FeatureFactor:
        """Return the same factor on another device."""
        return FeatureFactor(self.values.to(device), None if self.vectors is None else self.vectors.to(device))

    def project(self, phi: Tensor) -> Tensor:
        """Return the coordinates `R' phi`, of shape (n, P)."""
        return phi if self.vectors is None else phi @ self.vectors

    def restore(self, coordinates: Tensor) -> Tensor:
        """Return the vectors (..., P) with the given coordinates, the inverse of `project`."""
        return coordinates if self.vectors is None else coordinates @ self.vectors.T

    def mahalanobis(self, phi: Tensor) -> Tensor:
        """Return the Mahalanobis length `sqrt(phi' B^-1 phi)`, of shape (n,), of each feature vector relative to the training features."""
        largest = self.values.max()
        ridged = torch.where(largest > 0, self.values + OUTLIER_RIDGE * largest, torch.ones_like(self.values))
        return (self.project(phi).square() @ (1 / ridged)).sqrt()
