"""Curvature structures, which accumulate sums over the data and turn them into a curvature that is valid for any prior precision."""

from molaplace.options import resolve
from molaplace.structures.base import Structure
from molaplace.structures.diag import Diag
from molaplace.structures.full import Full
from molaplace.structures.kron import Kron
from molaplace.structures.kron_diag import KronDiag
from molaplace.structures.kron_exact import KronExact

__all__ = ["Diag", "Full", "Kron", "KronDiag", "KronExact", "Structure"]

STRUCTURES: dict[str, type[Structure]] = {kind.name: kind for kind in (Kron, KronExact, KronDiag, Diag, Full)}


def as_structure(structure: str | Structure) -> Structure:
    """Return the structure with the given name and default settings; if a structure is given, return it unchanged."""
    return resolve(structure, Structure, STRUCTURES, "structure")  # type: ignore[type-abstract]
