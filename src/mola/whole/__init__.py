"""Laplace approximations over all weights of a network, or over a subnetwork."""

from mola.whole.files import load
from mola.whole.fitting import fit
from mola.whole.posterior import WholeMoLA

__all__ = ["WholeMoLA", "fit", "load"]
