"""Mixtures of Laplace approximations: calibrated uncertainty for trained PyTorch networks, after the fact."""
from heart.fitting import ensemble, fit, load
