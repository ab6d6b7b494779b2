"""Baselines: temperature scaling, noise scaling, SWAG, MIMO and Monte Carlo dropout. `mola.lab.training` trains them."""

from mola.baselines.dropout import McDropout
from mola.baselines.mimo import Mimo, mimo_mola
from mola.baselines.noise import scale_noise
from mola.baselines.swag import MultiSwag, Swag
from mola.baselines.temperature import fit_temperature, temperature_scaled

__all__ = [
    "McDropout",
    "Mimo",
    "MultiSwag",
    "Swag",
    "fit_temperature",
    "mimo_mola",
    "scale_noise",
    "temperature_scaled",
]
