"""The four methods of the paper's comparison, from one set of trained networks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mola.errors import MolaWarning
from mola.fitting import ensemble, fit
from mola.posterior import MoLA

__all__ = ["METHODS", "Contestants", "four_methods"]

METHODS = ("MAP", "DE", "LLLA", "MoLA")
"""One network, all of them, and both again with a Laplace approximation on the last layer."""


@dataclass(frozen=True)
class Contestants:
    """The methods, and what tuning them had to say."""

    predictors: dict[str, MoLA]
    notes: tuple[str, ...]

    def tuned(self) -> dict[str, MoLA]:
        """Those with a prior precision."""
        return {name: posterior for name, posterior in self.predictors.items() if posterior.structure is not None}


def four_methods(networks: Sequence[nn.Module], train: Iterable[Any], val: Iterable[Any]) -> Contestants:
    """MAP, deep ensemble, LLLA and MoLA; the last two tuned by the paper's rule, each for itself.

    Args:
        networks: trained classifiers. MAP and LLLA take the first, the others take all.
        train: the training data.
        val: the validation data, read by tuning alone.

    Returns:
        The methods in the order of `METHODS`.
    """
    with warnings.catch_warnings():
        # What tuning warns of is kept in its notes, which the report shows.
        warnings.simplefilter("ignore", MolaWarning)
        predictors = {
            "MAP": ensemble(networks[0]),
            "DE": ensemble(networks),
            "LLLA": fit(networks[0], train, val, progress=False),
            "MoLA": fit(networks, train, val, progress=False),
        }
    notes = [
        f"{name}: {note}"
        for name, posterior in predictors.items()
        if posterior.tuning is not None
        for note in posterior.tuning.notes
    ]
    return Contestants(predictors, tuple(notes))
