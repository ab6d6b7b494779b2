"""The structures by name."""

from __future__ import annotations

from mola.errors import OptionError
from mola.laplace.base import Structure
from mola.laplace.diag import Diag
from mola.laplace.full import Full
from mola.laplace.kron import Kron
from mola.laplace.kron_exact import KronExact

__all__ = ["STRUCTURES", "as_structure"]

STRUCTURES: dict[str, type[Structure]] = {kind.name: kind for kind in (Kron, KronExact, Diag, Full)}


def as_structure(structure: str | Structure) -> Structure:
    """The structure of that name, or the structure itself.

    Args:
        structure: a name of `STRUCTURES`, or a structure.

    Returns:
        A structure.

    Raises:
        OptionError: if the name is unknown.
    """
    if isinstance(structure, Structure):
        return structure
    if not isinstance(structure, str) or structure not in STRUCTURES:
        message = f"structure must be one of {sorted(STRUCTURES)} or a Structure object, got {structure!r}."
        raise OptionError(message)
    return STRUCTURES[structure]()
