"""Scaling of predictors without a Laplace approximation: one temperature for classifiers, one noise factor per output for regression."""

from molaplace.calibration.noise import scale_noise
from molaplace.calibration.temperature import temperature_scaled
from molaplace.rules.temperature import fit_temperature

__all__ = ["fit_temperature", "scale_noise", "temperature_scaled"]
