r"""Diagonal curvature, :math:`H_{cp} = \sum_n \Lambda_{n,cc}\, \phi_{np}^2`, without covariances between weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molaplace.likelihoods.base import OutputCurvature
from molaplace.structures.base import FeatureFactor, Structure, hides_shift
from molaplace.structures.eigen import EigenCurvature
from molaplace.sums import Sums


@dataclass(frozen=True)
class Diag(Structure):
    """The diagonal of the Hessian. It needs O(C P) memory."""

    name = "diag"

    def sums(self, phi: Tensor, curvature: OutputCurvature) -> dict[str, Tensor]:
        """Return the Hessian's diagonals (C, P) for coupled and separate curvature, and the sums (P,) of the squared features."""
        squares = phi.square()
        sums = {"squares": squares.sum(0)}
        if curvature.coupling is not None:
            sums["coupled"] = (
                curvature.coupling * (curvature.coupling.sum(1, keepdim=True) - curvature.coupling)
            ).T @ squares
        if curvature.separate is not None:
            sums["separate"] = curvature.separate.T @ squares
        return sums

    def solve(self, sums: Sums) -> EigenCurvature:
        """Build the curvature from the diagonal, without an eigendecomposition."""
        diagonal = torch.stack(sums.present("coupled", "separate")).sum(0)
        (squares,) = sums.present("squares")
        outputs, features = diagonal.shape
        return EigenCurvature(
            outputs=outputs,
            features=features,
            left=None,
            feature_factor=FeatureFactor(squares / sums.count, None),
            spectrum=diagonal,
            hidden=hides_shift(sums),
        )

    def nonnegative(self, sums: Sums) -> Sequence[Tensor]:
        """Return all sums."""
        return sums.present("squares", "coupled", "separate")

    def bytes(self, features: int, outputs: int) -> int:
        """Return the memory, in bytes, needed for the sums and one more table of size (C, P)."""
        return 8 * 3 * features * outputs
