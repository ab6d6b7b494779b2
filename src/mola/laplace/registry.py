"""The structures by name."""

from __future__ import annotations

from mola.laplace.base import Structure
from mola.laplace.diag import Diag
from mola.laplace.full import Full
from mola.laplace.kron import Kron
from mola.laplace.kron_diag import KronDiag
from mola.laplace.kron_exact import KronExact
from mola.options import resolve

__all__ = ["STRUCTURES", "as_structure"]

STRUCTURES: dict[str, type[Structure]] = {kind.name: kind for kind in (Kron, KronExact, KronDiag, Diag, Full)}


def as_structure(structure: str | Structure) -> Structure:
    """The structure of that name, or the structure itself."""
    return resolve(structure, Structure, STRUCTURES, "structure")  # type: ignore[type-abstract]
