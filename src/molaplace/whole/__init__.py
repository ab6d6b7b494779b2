"""Laplace approximations over all weights of a network, or over a subnetwork."""

from molaplace.whole.fitting import fit
from molaplace.whole.posterior import WholeMoLA

__all__ = ["WholeMoLA", "fit"]
