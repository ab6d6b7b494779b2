"""Curvature structures: approximations of the Hessian of the last layer."""

from molaplace.laplace import Diag, Full, Kron, KronDiag, KronExact, Structure

__all__ = ["Diag", "Full", "Kron", "KronDiag", "KronExact", "Structure"]
