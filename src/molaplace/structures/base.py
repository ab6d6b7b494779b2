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
from pathlib import Path
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from molaplace.errors import StructureTooLargeError
from molaplace.likelihoods.base import OutputCurvature
from molaplace.numerics import Generator
from molaplace.sums import Sums

OUTLIER_RIDGE = 1e-10
"""Ridge added to the feature covariance in `mahalanobis`, relative to the largest eigenvalue of that covariance. The ridge leaves
lengths almost unchanged in directions that the training data span; in all other directions, it makes lengths very large instead of
infinite."""

WEIGHTS_AT_ONCE = 2**19
"""Largest number of drawn weights in memory at once (4 MB in float64)."""

Precision: TypeAlias = "float | Tensor"
"""One prior precision, or a tensor (L,) of L prior precisions, in which case results have a leading dimension of size L."""


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


@dataclass(frozen=True)
class Curvature(ABC):
    """The curvature of uncertain weights in its eigenbasis, in float64 and without the prior."""

    outputs: int
    features: int

    def to(self, device: torch.device) -> Self:
        """Return the same curvature on another device."""
        return replace(self, **tree_map(lambda value: value.to(device) if hasattr(value, "to") else value, vars(self)))

    @abstractmethod
    def variance(self, phi: Tensor, precision: Precision, *, centred: bool = False) -> Tensor:
        """Return the variances (n, C) of the logits for features (n, P); for L prior precisions, their shape is (L, n, C)."""

    @abstractmethod
    def covariance(self, phi: Tensor, precision: float, *, centred: bool = False) -> Tensor:
        """Return the covariance (n, C, C) of the logits."""

    @abstractmethod
    def joint_covariance(self, phi: Tensor, precision: float) -> Tensor:
        """Return the covariances (n, C, n, C) between all logits at all data points."""

    @abstractmethod
    def output_covariance_matrix(self, phi: Tensor, precision: float, output: int) -> Tensor:
        """Return the covariances (n, n) of one logit between the data points."""

    @property
    @abstractmethod
    def noise_size(self) -> int:
        """Number of standard normal variables in one draw of the logits."""

    @abstractmethod
    def perturb(self, phi: Tensor, precision: float, noise: Tensor) -> Tensor:
        """Turn standard normals (S, noise_size) shared by all data into logit deviations (n, S, C), up to a common shift."""

    @abstractmethod
    def sample(self, precision: float, count: int, generator: Generator) -> Tensor:
        """Draw random offsets (count, C, P) to add to the trained weights."""

    @abstractmethod
    def perturb_by_weights(self, phi: Tensor, precision: float, count: int, generator: Generator) -> Tensor:
        """Return deviations (n, count, C) of the logits, computed from draws of the weights."""

    @abstractmethod
    def draw(self, precision: float, generator: Generator) -> Tensor:
        """Draw one random offset of the weights, in the coordinates of the features."""

    @abstractmethod
    def deviation(self, phi: Tensor, draw: Tensor) -> Tensor:
        """Return the deviations (n, C) of the logits that an offset from `draw` causes."""

    @abstractmethod
    def log_determinant(self, precision: Tensor) -> Tensor:
        """Return the log determinant of the posterior precision matrix, differentiable in the prior precision."""

    @abstractmethod
    def divided_by(self, factor: float) -> Self:
        """Return the curvature divided by a factor, such as that of the noise variance; the variances of the logits grow."""


class LayerCurvature(Curvature):
    """The curvature of a last layer, whose weights (C, P) multiply the features."""

    def perturb_by_weights(self, phi: Tensor, precision: float, count: int, generator: Generator) -> Tensor:
        """Return deviations (n, count, C) of the logits, computed from draws of the weights."""
        most = max(1, WEIGHTS_AT_ONCE // (self.outputs * self.features))
        deviations = phi.new_empty(phi.shape[0], count, self.outputs)  # `len` would fix the batch size of a trace
        for start in range(0, count, most):
            weights = self.sample(precision, min(most, count - start), generator).to(phi)
            deviations[:, start : start + most] = torch.einsum("np,scp->nsc", phi, weights)
        return deviations

    def draw(self, precision: float, generator: Generator) -> Tensor:
        """Draw an offset (C, P) of the weights."""
        return self.sample(precision, 1, generator)[0]

    def deviation(self, phi: Tensor, draw: Tensor) -> Tensor:
        """Return the deviations (n, C) of the logits that an offset (C, P) of the weights causes."""
        return phi @ draw.T

    def output_covariance_matrix(self, phi: Tensor, precision: float, output: int) -> Tensor:
        """Return `phi' Sigma_cc phi` for all pairs of data points."""
        return phi @ self.class_covariance(precision, output) @ phi.mT

    @abstractmethod
    def mahalanobis(self, phi: Tensor) -> Tensor:
        """Return the Mahalanobis length (n,) of each feature vector relative to the training features."""

    @abstractmethod
    def class_covariance(self, precision: float, output: int) -> Tensor:
        """Return the marginal covariance (P, P) of one output's weights."""

    def smallest_class_variance(self, precision: float) -> Tensor:
        """Return the smallest eigenvalue (C,) of each output's marginal covariance."""
        blocks = (self.class_covariance(precision, output) for output in range(self.outputs))
        return torch.stack([torch.linalg.eigvalsh(block)[0] for block in blocks])


@dataclass(frozen=True)
class Spread:
    """Covariance of the logits `phi' w / s` for n data points; links combine it with the mean."""

    curvature: Curvature
    phi: Tensor
    """Features (n, P), including the constant 1."""
    precision: Precision
    divisor: float | Tensor = 1.0
    """Divisor s of the logits: either 1 or a tensor (..., n, 1)."""
    variances: Tensor | None = None
    """Variances (n, C) of the logits before division, if they have been computed (`with_variances`)."""

    @property
    def _column(self) -> float | Tensor:
        return self.divisor[..., None] if isinstance(self.divisor, Tensor) else self.divisor

    def variance(self, *, centred: bool = False) -> Tensor:
        """Return the variance (..., n, C) of each logit."""
        if self.variances is not None and not centred:
            return self.variances / self.divisor**2
        if isinstance(self.precision, float):
            return self.curvature.variance(self.phi, self.precision, centred=centred) / self.divisor**2
        # A search tries many temperatures at each prior precision, so the variances are computed only once per prior precision. With
        # 1000 classes, computing the variances takes most of the time.
        precisions, indices = torch.unique(self.precision, return_inverse=True)
        return self.curvature.variance(self.phi, precisions, centred=centred)[indices] / self.divisor**2

    def with_variances(self) -> Spread:
        """Return the spread with its variances computed, for callers that read them several times."""
        return replace(self, variances=replace(self, divisor=1.0).variance())

    def covariance(self, *, centred: bool = False) -> Tensor:
        """Return the covariance (..., n, C, C) of the logits for a single prior precision."""
        return self.curvature.covariance(self.phi, float(self.precision), centred=centred) / self._column**2

    def smallest_class_variance(self) -> Tensor:
        """Return the smallest eigenvalue (..., C) of each output's weight covariance, divided as the logits are."""
        assert isinstance(self.curvature, LayerCurvature)  # only last layers have one block of weights for each output
        return self.curvature.smallest_class_variance(float(self.precision)) / self.divisor**2

    @property
    def noise_size(self) -> int:
        """Number of standard normal variables in one draw of the logits."""
        return self.curvature.noise_size

    def perturb(self, noise: Tensor) -> Tensor:
        """Return deviations (..., n, S, C) of the logits, up to a common shift, for a single prior precision."""
        return self.curvature.perturb(self.phi, float(self.precision), noise) / self._column

    def perturb_by_weights(self, count: int, generator: Generator) -> Tensor:
        """Return deviations (..., n, count, C) of the logits, computed from draws of the weights for a single prior precision."""
        return self.curvature.perturb_by_weights(self.phi, float(self.precision), count, generator) / self._column

    def with_divided_logits(self, divisor: Tensor) -> Spread:
        """Return the spread after dividing each datum's logits by its entry in `divisor` (..., n, 1)."""
        return replace(self, divisor=divisor * self.divisor)


# --- linear algebra ---------------------------------------------------------------------------------------------------


def as_column(precision: Precision, like: Tensor, dims: int) -> Tensor:
    """Return the prior precision as a tensor with `dims` trailing dimensions of size 1, for broadcasting."""
    value = torch.as_tensor(precision, dtype=like.dtype, device=like.device)
    return value.reshape(*value.shape, *[1] * dims)


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


def mahalanobis_weights(values: Tensor) -> Tensor:
    """Return `1 / (b + ridge)` for the eigenvalues b (P,) of the features' mean outer product, or 1 if every eigenvalue is 0."""
    largest = values.max()
    return 1 / torch.where(largest > 0, values + OUTLIER_RIDGE * largest, torch.ones_like(values))
