"""Posteriors as constants of a graph, one file per structure."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from mola.export.folding.base import Draws, Folded, FoldedAsItIs
from mola.export.folding.diag import FoldedDiag
from mola.export.folding.full import FoldedFull
from mola.export.folding.kron import FoldedDamped, FoldedExact, FoldedKronDiag
from mola.laplace.diag import DiagPosterior
from mola.laplace.full import FullPosterior
from mola.laplace.kron import DampedPosterior
from mola.laplace.kron_diag import KronDiagPosterior
from mola.laplace.kron_exact import ExactPosterior

__all__ = ["Draws", "Folded", "fold"]


@singledispatch
def fold(posterior: Any, *, bias: bool) -> Folded:
    """Constants of a graph for a posterior; `bias`: whether the constant 1 joins the features."""
    return FoldedAsItIs(posterior, bias=bias)


@fold.register
def _(posterior: DampedPosterior, *, bias: bool) -> Folded:
    return FoldedDamped(posterior, bias=bias)


@fold.register
def _(posterior: KronDiagPosterior, *, bias: bool) -> Folded:
    return FoldedKronDiag(posterior, bias=bias)


@fold.register
def _(posterior: ExactPosterior, *, bias: bool) -> Folded:
    return FoldedExact(posterior, bias=bias)


@fold.register
def _(posterior: DiagPosterior, *, bias: bool) -> Folded:
    return FoldedDiag(posterior, bias=bias)


@fold.register
def _(posterior: FullPosterior, *, bias: bool) -> Folded:
    return FoldedFull(posterior, bias=bias)
