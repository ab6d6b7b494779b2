"""Baselines: temperature scaling, noise scaling, SWAG, MIMO and Monte Carlo dropout. `mola.lab.training` trains them."""

from molaplace.baselines.dropout import McDropout
from molaplace.baselines.mimo import Mimo, mimo_mola
from molaplace.baselines.noise import scale_noise
from molaplace.baselines.swag import MultiSwag, Swag
from molaplace.baselines.temperature import fit_temperature, temperature_scaled

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
