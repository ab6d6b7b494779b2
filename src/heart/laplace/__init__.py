"""Curvature structures: features to sums, sums to a curvature, and all that follows for any prior precision."""

from heart.laplace.base import Curvature, LastLayerSpread, Spread, Structure, check_precision, check_size
from heart.laplace.diag import Diag
from heart.laplace.distance import ClassDistance, distance_sums
from heart.laplace.full import Full
from heart.laplace.kron import Kron
from heart.laplace.kron_diag import KronDiag
from heart.laplace.kron_exact import KronExact
from heart.laplace.sums import Sums
from heart.options import resolve

__all__ = [
    "STRUCTURES",
    "ClassDistance",
    "Curvature",
    "Diag",
    "Full",
    "Kron",
    "KronDiag",
    "KronExact",
    "LastLayerSpread",
    "Spread",
    "Structure",
    "Sums",
    "as_structure",
    "check_precision",
    "check_size",
    "distance_sums",
]

STRUCTURES: dict[str, type[Structure]] = {kind.name: kind for kind in (Kron, KronExact, KronDiag, Diag, Full)}


def as_structure(structure: str | Structure) -> Structure:
    """The structure of that name with its defaults, or the structure itself."""
    return resolve(structure, Structure, STRUCTURES, "structure")  # type: ignore[type-abstract]
