"""MIMO-MoLA: a Laplace approximation on every head of one MIMO network, mixed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from mola.baselines.mimo import Mimo
from mola.fitting import fit
from mola.laplace import Structure
from mola.links import Link
from mola.posterior import MoLA

__all__ = ["mimo_mola"]


def mimo_mola(
    mimo: Mimo,
    train_loader: Iterable[Any],
    val_loader: Iterable[Any] | None = None,
    structure: str | Structure = "full",
    prior_precision: float = 1.0,
    weights: str | Sequence[float] | Tensor = "uniform",
    link: str | Link = "probit",
    progress: bool = True,
) -> MoLA:
    """`mola.fit(mimo.networks, ...)`, with the paper's full covariance for each head and one prior precision.

    Training images are repeated K times, as at test; one pass of the trunk over each batch serves all heads.

    Args:
        mimo: the trained network; it is not modified.
        train_loader: training data.
        val_loader: if given, the prior precision is tuned on it at once, by the paper's rule.
        structure: "full", "kron", "kron-exact" or "diag", or a `Structure`.
        prior_precision: lambda, one number for all heads.
        weights: "uniform", "evidence", or K numbers that sum to 1.
        link: "probit", "probit-centered", "mean-field", "bridge" or "mc", or a `Link`.
        progress: whether to show a progress bar on stderr, if that is a terminal.

    Returns:
        The posterior, with the same verbs as any other; load it with `mola.load(directory, models=mimo.networks)`.
    """
    return fit(
        mimo.networks,
        train_loader,
        val_loader,
        structure=structure,
        prior_precision=prior_precision,
        weights=weights,
        link=link,
        progress=progress,
    )
