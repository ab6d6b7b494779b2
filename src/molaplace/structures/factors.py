"""The Kronecker factors A and B (`structures/kron.py`) that `kron`, `kron-exact` and `kron-diag` share.

`kron` and `kron-exact` use the eigensystems of both factors, and differ in the prior. `kron` and `kron-diag` have a posterior
covariance that is a Kronecker product, and differ in the output factor.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from molaplace.errors import OptionError
from molaplace.likelihoods.base import OutputCurvature
from molaplace.numerics import square_root
from molaplace.options import is_real
from molaplace.structures.base import (
    LayerCurvature,
    Precision,
    Structure,
    as_column,
    eigensystem,
    hides_shift,
    laplacian,
    mahalanobis_weights,
    output_bases,
)
from molaplace.sums import Sums


@dataclass(frozen=True)
class FeatureFactor:
    """The mean outer product B of the training features, in its eigenbasis."""

    values: Tensor
    """Eigenvalues b (P,)."""
    vectors: Tensor
    """Eigenvectors Q_B (P, P)."""

    @staticmethod
    def from_gram(gram: Tensor, count: int) -> FeatureFactor:
        """Eigendecompose the mean, given the sum (P, P) of the features' outer products."""
        return FeatureFactor(*eigensystem(gram / count))

    def to(self, device: torch.device) -> FeatureFactor:
        """Return the same factor on another device."""
        return FeatureFactor(self.values.to(device), self.vectors.to(device))

    def squares(self, phi: Tensor) -> Tensor:
        """Return the squared coordinates (n, P) of the features in the eigenbasis."""
        return (phi @ self.vectors).square()

    def matrix(self, values: Tensor) -> Tensor:
        """Return the matrix `Q_B diag(values) Q_B'`, given its eigenvalues (P,)."""
        return (self.vectors * values) @ self.vectors.T

    def mahalanobis(self, phi: Tensor) -> Tensor:
        """Return `sqrt(phi' B^-1 phi)`, of shape (n,)."""
        return (self.squares(phi) @ mahalanobis_weights(self.values)).sqrt()


@dataclass(frozen=True)
class OutputFactor:
    """The mean output curvature A, in its eigenbasis."""

    values: Tensor
    """Eigenvalues a (C,). The eigenvalue of the hidden direction, if any, is 0 and comes last."""
    vectors: Tensor
    """Eigenvectors Q_A (C, C)."""
    visible: int
    """Number of output directions with curvature."""

    @staticmethod
    def from_sums(sums: Sums) -> OutputFactor:
        """Eigendecompose the mean of the coupled and the separate curvature."""
        matrices = []
        if "coupling" in sums.tensors:
            matrices.append(laplacian(sums.tensors["coupling"].cpu()))
        if "separate" in sums.tensors:
            matrices.append(torch.diag(sums.tensors["separate"].cpu()))
        total = torch.stack(matrices).sum(0)
        basis, hidden_basis = output_bases(len(total), hidden=hides_shift(sums))
        values, vectors = eigensystem(basis.T @ (total / sums.count) @ basis)
        return OutputFactor(
            torch.cat([values, values.new_zeros(hidden_basis.shape[1])]),
            torch.cat([basis @ vectors, hidden_basis], dim=1),
            len(values),
        )

    def to(self, device: torch.device) -> OutputFactor:
        """Return the same factor on another device."""
        return replace(self, values=self.values.to(device), vectors=self.vectors.to(device))

    def directions(self, *, centred: bool) -> Tensor:
        """Return all eigenvectors or, if `centred` is True, only those with curvature."""
        return self.vectors[:, : self.visible] if centred else self.vectors

    def divided_by(self, factor: float) -> OutputFactor:
        """Return the output factor divided by a number."""
        return replace(self, values=self.values / factor)


@dataclass(frozen=True)
class KroneckerStructure(Structure):
    """A structure computed from both Kronecker factors."""

    running_average: float | None = None

    def __post_init__(self) -> None:
        beta = self.running_average
        if beta is not None and not (is_real(beta) and 0 < beta < 1):
            raise OptionError(f"must lie between 0 and 1, or be None; got {beta!r}.", argument="running_average")

    @property
    def additive(self) -> bool:  # type: ignore[override]
        """False for a running average, which depends on the order of the batches."""
        return self.running_average is None

    def sums(self, phi: Tensor, curvature: OutputCurvature) -> dict[str, Tensor]:
        """Return the summed outer products of the features and of the couplings, and each output's summed separate curvature."""
        sums = {"gram": phi.T @ phi}
        if curvature.coupling is not None:
            sums["coupling"] = curvature.coupling.T @ curvature.coupling
        if curvature.separate is not None:
            sums["separate"] = curvature.separate.sum(0)
        return sums

    def accumulate(self, total: Sums, batch: Sums) -> Sums:
        """Add the sums of a batch, or update the running average, which is stored multiplied by N."""
        beta = self.running_average
        if beta is None:
            return super().accumulate(total, batch)
        summed = total + batch
        averages = {}  # the sums for labels and distances are never averaged
        for name in {"gram", "coupling", "separate"} & batch.tensors.keys():
            batch_mean = batch.tensors[name] / batch.count
            previous_mean = total.tensors[name] / total.count if total.count else torch.zeros_like(batch_mean)
            averages[name] = summed.count * (beta * previous_mean + (1 - beta) * batch_mean)
        return replace(summed, tensors=summed.tensors | averages)

    def semidefinite(self, sums: Sums) -> Sequence[Tensor]:
        """Return both factors, without the separate curvature."""
        return sums.present("gram", "coupling")

    def nonnegative(self, sums: Sums) -> Sequence[Tensor]:
        """Return the separate curvature."""
        return sums.present("separate")

    @staticmethod
    def solve_factors(sums: Sums) -> tuple[int, int, int, FeatureFactor, OutputFactor]:
        """Eigendecompose both factors; return the numbers of outputs, features and data points, and the factors."""
        output_factor = OutputFactor.from_sums(sums)
        feature_factor = FeatureFactor.from_gram(sums.tensors["gram"], sums.count)
        return len(output_factor.values), len(feature_factor.values), sums.count, feature_factor, output_factor

    def bytes(self, features: int, outputs: int) -> int:
        """Return the memory, in bytes, needed for the sums, eigenvectors and workspace of both factors."""
        return 8 * 4 * (features**2 + outputs**2)

    def settings(self) -> dict[str, Any]:
        """Return a JSON-serialisable dictionary that contains `running_average` if it is set."""
        return {} if self.running_average is None else {"running_average": self.running_average}


@dataclass(frozen=True)
class ProductCurvature(LayerCurvature):
    """A curvature for which the posterior covariance is `U x V`, with `V = (sqrt(N) B + sqrt(lambda) I)^-1`."""

    count: int
    feature_factor: FeatureFactor

    @abstractmethod
    def output_variance(self, precision: Precision, *, centred: bool = False) -> Tensor:
        """Return the diagonal (..., C) of U or, if `centred` is True, of its centred part."""

    @abstractmethod
    def output_covariance(self, precision: float, *, centred: bool = False) -> Tensor:
        """Return U (C, C) or, if `centred` is True, its centred part."""

    @abstractmethod
    def output_draws(self, precision: float, noise: Tensor) -> Tensor:
        """Turn standard normals (S, noise_size) into draws (S, C) with covariance U, up to a common shift."""

    @abstractmethod
    def output_log_determinant(self, precision: Tensor) -> Tensor:
        """Return the log determinant of the inverse of U."""

    def feature_inverse(self, precision: Precision) -> Tensor:
        """Return the eigenvalues (..., P) of V."""
        values = self.feature_factor.values
        return 1 / (self.count**0.5 * values + as_column(precision, values, 1) ** 0.5)

    def feature_variance(self, phi: Tensor, precision: Precision) -> Tensor:
        """Return `phi' V phi` (..., n)."""
        # The features are not transposed, because onnxruntime versions before 1.25 cannot multiply transposed float64 matrices.
        return (self.feature_factor.squares(phi) @ self.feature_inverse(precision).movedim(-1, 0)).movedim(0, -1)

    def variance(self, phi: Tensor, precision: Precision, *, centred: bool = False) -> Tensor:
        """Return `(phi' V phi) U_cc`."""
        outputs = self.output_variance(precision, centred=centred)
        return self.feature_variance(phi, precision)[..., None] * outputs[..., None, :]

    def covariance(self, phi: Tensor, precision: float, *, centred: bool = False) -> Tensor:
        """Return `(phi' V phi) U`."""
        outputs = self.output_covariance(precision, centred=centred)
        return self.feature_variance(phi, precision)[:, None, None] * outputs

    def feature_covariance(self, phi: Tensor, precision: float) -> Tensor:
        """Return `phi' V phi` (n, n) for all pairs of data points."""
        coordinates = phi @ self.feature_factor.vectors
        return (coordinates * self.feature_inverse(precision)) @ coordinates.mT

    def joint_covariance(self, phi: Tensor, precision: float) -> Tensor:
        """Return `(phi' V phi) U` for all pairs of data points."""
        return torch.einsum("nm,cd->ncmd", self.feature_covariance(phi, precision), self.output_covariance(precision))

    def output_covariance_matrix(self, phi: Tensor, precision: float, output: int) -> Tensor:
        """Return `(phi' V phi) U_cc` for all pairs of data points."""
        return self.feature_covariance(phi, precision) * self.output_variance(precision)[output]

    def perturb(self, phi: Tensor, precision: float, noise: Tensor) -> Tensor:
        """Return `sqrt(phi' V phi)` times draws with covariance U."""
        return square_root(self.feature_variance(phi, precision))[:, None, None] * self.output_draws(precision, noise)

    def log_determinant(self, precision: Tensor) -> Tensor:
        """Return `P log det U^-1 + C sum_j log(sqrt(N) b_j + sqrt(lambda))`."""
        features = -self.feature_inverse(precision).log().sum()
        return self.features * self.output_log_determinant(precision) + self.outputs * features

    def mahalanobis(self, phi: Tensor) -> Tensor:
        """Return `sqrt(phi' B^-1 phi)`."""
        return self.feature_factor.mahalanobis(phi)

    def class_covariance(self, precision: float, output: int) -> Tensor:
        """Return `U_cc V`."""
        return self.output_variance(precision)[output] * self.feature_factor.matrix(self.feature_inverse(precision))

    def smallest_class_variance(self, precision: float) -> Tensor:
        """Return `U_cc / (sqrt(N) b_max + sqrt(lambda))`."""
        return self.output_variance(precision) * self.feature_inverse(precision).min()
