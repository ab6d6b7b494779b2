"""The Kronecker factors A and B (`structures/kron.py`) that `kron` and `kron-exact` share; they differ in the prior."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from molaplace.errors import OptionError
from molaplace.likelihoods.base import OutputCurvature
from molaplace.options import is_real
from molaplace.structures.base import (
    FeatureFactor,
    Structure,
    eigensystem,
    hides_shift,
    laplacian,
    output_bases,
)
from molaplace.structures.eigen import EigenCurvature
from molaplace.sums import Sums


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

    def solve(self, sums: Sums) -> EigenCurvature:
        """Eigendecompose both factors."""
        values, left = output_eigensystem(sums)
        feature_factor = FeatureFactor.from_gram(sums.tensors["gram"], sums.count)
        return EigenCurvature(
            outputs=len(values),
            features=len(feature_factor.values),
            left=left,
            feature_factor=feature_factor,
            spectrum=self.spectrum(sums.count, values, feature_factor.values),
            hidden=hides_shift(sums),
        )

    @abstractmethod
    def spectrum(self, count: int, outputs: Tensor, features: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the spectrum of `EigenCurvature`, given the number of data and the eigenvalues a (C,) of A and b (P,) of B."""

    def bytes(self, features: int, outputs: int) -> int:
        """Return the memory, in bytes, needed for the sums, eigenvectors and workspace of both factors."""
        return 8 * 4 * (features**2 + outputs**2)

    def settings(self) -> dict[str, Any]:
        """Return a JSON-serialisable dictionary that contains `running_average` if it is set."""
        return {} if self.running_average is None else {"running_average": self.running_average}


def output_eigensystem(sums: Sums) -> tuple[Tensor, Tensor]:
    """Eigendecompose the mean output curvature A; return its eigenvalues (C,) and eigenvectors (C, C), the hidden direction last."""
    matrices = [laplacian(coupling) for coupling in sums.present("coupling")]
    matrices += [torch.diag(separate) for separate in sums.present("separate")]
    total = torch.stack(matrices).sum(0)
    basis, hidden_basis = output_bases(len(total), hidden=hides_shift(sums))
    values, vectors = eigensystem(basis.T @ (total / sums.count) @ basis)
    of_hidden = values.new_zeros(hidden_basis.shape[1])
    return torch.cat([values, of_hidden]), torch.cat([basis @ vectors, hidden_basis], dim=1)
