"""Curvature structures: how the Hessian of the last layer is approximated."""

from mola.laplace import Diag, Full, Kron, KronDiag, KronExact, Structure

__all__ = ["Diag", "Full", "Kron", "KronDiag", "KronExact", "Structure"]
