r"""Kronecker-factored curvature, :math:`H \approx N\, A \otimes B`, with the prior added as in Algorithm 1 of the paper.

.. math:: A = \tfrac1N \sum_n \Lambda_n \;(C \times C), \qquad B = \tfrac1N \sum_n \phi_n \phi_n^\top \;(P \times P).

With :math:`A = Q_A\, \mathrm{diag}(a)\, Q_A^\top` and :math:`B = Q_B\, \mathrm{diag}(b)\, Q_B^\top`, the posterior precision has the
eigenvalues :math:`(\sqrt N a_i + \sqrt\lambda)(\sqrt N b_j + \sqrt\lambda)`. The covariance is therefore a Kronecker product
:math:`U \otimes V`, and the covariance of the logits is one number per datum times a fixed matrix,
:math:`(\phi^\top V \phi)\, U`.

`FactoredCurvature` implements the feature factor V, which `Kron` and `KronDiag` share. `KronExact` instead adds the prior exactly.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from molaplace.errors import OptionError
from molaplace.likelihoods.base import OutputCurvature
from molaplace.numerics import Generator, standard_normals
from molaplace.options import is_real
from molaplace.structures.base import (
    Curvature,
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
class Kron(Structure):
    """Kronecker factors as in Algorithm 1 of the paper: the prior is split evenly between the two factors.

    Args:
        running_average: the paper's beta in `A <- beta A + (1 - beta) A_batch`, where A starts at 0; by default, the factors
            are exact means over the training data. A running average depends on the order of the batches and cannot be computed by
            several processes.
    """

    running_average: float | None = None
    name = "kron"

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
        count = total.count + batch.count
        moved = dict((total + batch).tensors)  # the sums for labels and distances are never averaged
        for name in {"gram", "coupling", "separate"} & batch.tensors.keys():
            before = total.tensors[name] / total.count if total.count else torch.zeros_like(batch.tensors[name])
            moved[name] = count * (beta * before + (1 - beta) * batch.tensors[name] / batch.count)
        return replace(total + batch, tensors=moved)

    def solve(self, sums: Sums) -> Curvature:
        """Eigendecompose both factors."""
        return KronCurvature(**kron_eigensystem(sums))

    def bytes(self, features: int, outputs: int) -> int:
        """Return the memory, in bytes, needed for the sums, eigenvectors and workspace of both factors."""
        return 8 * 4 * (features**2 + outputs**2)

    def settings(self) -> dict[str, Any]:
        """Return a JSON-serialisable dictionary that contains `running_average` if it is set."""
        return {} if self.running_average is None else {"running_average": self.running_average}


def kron_eigensystem(sums: Sums) -> dict[str, Any]:
    """Return the eigensystems of both Kronecker factors. The hidden output direction, if any, comes last and has eigenvalue 0."""
    gram, coupling, separate = (sums.tensors.get(name) for name in ("gram", "coupling", "separate"))
    assert gram is not None
    output = gram.new_zeros(())
    if coupling is not None:
        output = laplacian(coupling.cpu())
    if separate is not None:
        output = output + torch.diag(separate.cpu())
    seen, unseen = output_bases(len(output), hidden=hides_shift(sums))
    values, vectors = eigensystem(seen.T @ (output / sums.count) @ seen)
    feature_values, feature_vectors = eigensystem(gram / sums.count)
    return {
        "outputs": len(output),
        "features": len(gram),
        "count": sums.count,
        "feature_values": feature_values,
        "feature_vectors": feature_vectors,
        "class_values": torch.cat([values, values.new_zeros(unseen.shape[1])]),
        "class_vectors": torch.cat([seen @ vectors, unseen], dim=1),
        "visible": len(values),
    }


@dataclass(frozen=True)
class FactoredCurvature(Curvature):
    """A curvature for which the posterior covariance is `U x V`, with `V = (sqrt(N) B + sqrt(lambda) I)^-1`."""

    count: int
    feature_values: Tensor
    """Eigenvalues b (P,) of B."""
    feature_vectors: Tensor
    """Eigenvectors Q_B (P, P) of B."""

    @abstractmethod
    def class_variance(self, precision: Precision, *, centred: bool = False) -> Tensor:
        """Return the diagonal (..., C) of U or, if `centred` is True, of its centred part."""

    @abstractmethod
    def class_matrix(self, precision: float, *, centred: bool = False) -> Tensor:
        """Return U (C, C) or, if `centred` is True, its centred part."""

    @abstractmethod
    def class_draws(self, precision: float, noise: Tensor) -> Tensor:
        """Turn standard normals (S, noise_size) into draws (S, C) with covariance U, up to a common shift."""

    @abstractmethod
    def class_log_determinant(self, precision: Tensor) -> Tensor:
        """Return the log determinant of the inverse of U."""

    def feature_inverse(self, precision: Precision) -> Tensor:
        """Return the eigenvalues (..., P) of V."""
        return 1 / (self.count**0.5 * self.feature_values + as_column(precision, self.feature_values, 1) ** 0.5)

    def squares(self, phi: Tensor) -> Tensor:
        """Return the squared coordinates (n, P) of the features in B's eigenbasis."""
        return (phi @ self.feature_vectors).square()

    def feature_variance(self, phi: Tensor, precision: Precision) -> Tensor:
        """Return `phi' V phi` (..., n)."""
        # The features are not transposed, because onnxruntime versions before 1.25 cannot multiply transposed float64 matrices.
        return (self.squares(phi) @ self.feature_inverse(precision).movedim(-1, 0)).movedim(0, -1)

    def variance(self, phi: Tensor, precision: Precision, *, centred: bool = False) -> Tensor:
        """Return `(phi' V phi) U_cc`."""
        return (
            self.feature_variance(phi, precision)[..., None]
            * self.class_variance(precision, centred=centred)[..., None, :]
        )

    def covariance(self, phi: Tensor, precision: float, *, centred: bool = False) -> Tensor:
        """Return `(phi' V phi) U`."""
        return self.feature_variance(phi, precision)[:, None, None] * self.class_matrix(precision, centred=centred)

    def perturb(self, phi: Tensor, precision: float, noise: Tensor) -> Tensor:
        """Return `sqrt(phi' V phi)` times draws with covariance U."""
        return self.feature_variance(phi, precision).sqrt()[:, None, None] * self.class_draws(precision, noise)

    def log_determinant(self, precision: Tensor) -> Tensor:
        """Return `P log det U^-1 + C sum_j log(sqrt(N) b_j + sqrt(lambda))`."""
        features = -self.feature_inverse(precision).log().sum()
        return self.features * self.class_log_determinant(precision) + self.outputs * features

    def mahalanobis(self, phi: Tensor) -> Tensor:
        """Return `sqrt(phi' B^-1 phi)`."""
        return (self.squares(phi) @ mahalanobis_weights(self.feature_values)).sqrt()

    def class_covariance(self, precision: float, output: int) -> Tensor:
        """Return `U_cc V`."""
        inverse = (self.feature_vectors * self.feature_inverse(precision)) @ self.feature_vectors.T
        return self.class_variance(precision)[output] * inverse

    def smallest_class_variance(self, precision: float) -> Tensor:
        """Return `U_cc / (sqrt(N) b_max + sqrt(lambda))`."""
        return self.class_variance(precision) * self.feature_inverse(precision).min()


@dataclass(frozen=True)
class KronCurvature(FactoredCurvature):
    """A factored curvature with `U = (sqrt(N) A + sqrt(lambda) I)^-1`, computed from A's eigensystem."""

    class_values: Tensor
    """Eigenvalues a (C,) of A. The eigenvalue of the hidden direction, if any, comes last."""
    class_vectors: Tensor
    """Eigenvectors Q_A (C, C) of A."""
    visible: int
    """Number of output directions with curvature."""

    def class_inverse(self, precision: Precision) -> Tensor:
        """Return the eigenvalues (..., C) of U."""
        return 1 / (self.count**0.5 * self.class_values + as_column(precision, self.class_values, 1) ** 0.5)

    def _visible(self, precision: Precision, *, centred: bool) -> tuple[Tensor, Tensor]:
        count = self.visible if centred else self.outputs
        return self.class_vectors[:, :count], self.class_inverse(precision)[..., :count]

    def class_variance(self, precision: Precision, *, centred: bool = False) -> Tensor:
        """Return the diagonal (..., C) of U or, if `centred` is True, of its centred part."""
        vectors, inverse = self._visible(precision, centred=centred)
        return inverse @ vectors.square().T

    def class_matrix(self, precision: float, *, centred: bool = False) -> Tensor:
        """Return U (C, C) or, if `centred` is True, its centred part."""
        vectors, inverse = self._visible(precision, centred=centred)
        return (vectors * inverse) @ vectors.T

    @property
    def noise_size(self) -> int:
        """Number of visible directions: one standard normal variable for each."""
        return self.visible

    def class_draws(self, precision: float, noise: Tensor) -> Tensor:
        """Return `U^1/2 noise` in the visible directions."""
        vectors, inverse = self._visible(precision, centred=True)
        return noise @ (vectors * inverse.sqrt()).T

    def class_log_determinant(self, precision: Tensor) -> Tensor:
        """Return `sum_i log(sqrt(N) a_i + sqrt(lambda))`."""
        return -self.class_inverse(precision).log().sum()

    def sample(self, precision: float, count: int, generator: Generator) -> Tensor:
        """Draw standard normals E and return `U^1/2 E V^1/2`."""
        noise = standard_normals((count, self.outputs, self.features), generator)
        left = self.class_vectors * self.class_inverse(precision).sqrt()
        right = self.feature_vectors * self.feature_inverse(precision).sqrt()
        return left @ noise.to(left.device) @ right.T

    def divided(self, by: float) -> Self:
        """Return the curvature divided by a number."""
        return replace(self, class_values=self.class_values / by)
