"""Curvature structures, which accumulate sums over the data and turn them into a curvature that is valid for any prior precision."""

from molaplace.laplace.base import Curvature, Spread, Structure, check_precision, check_size
from molaplace.laplace.diag import Diag
from molaplace.laplace.distance import ClassDistance, distance_sums
from molaplace.laplace.full import Full
from molaplace.laplace.kron import Kron
from molaplace.laplace.kron_diag import KronDiag
from molaplace.laplace.kron_exact import KronExact
from molaplace.laplace.sums import Sums
from molaplace.options import resolve

__all__ = [
    "STRUCTURES",
    "ClassDistance",
    "Curvature",
    "Diag",
    "Full",
    "Kron",
    "KronDiag",
    "KronExact",
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
    """Return the structure with the given name and default settings; if a structure is given, return it unchanged."""
    return resolve(structure, Structure, STRUCTURES, "structure")  # type: ignore[type-abstract]
