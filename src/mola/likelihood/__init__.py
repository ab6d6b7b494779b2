"""What the last layer's outputs mean: one file for each likelihood. The structures ask here alone."""

from mola.likelihood.base import Likelihood, OutputCurvature, laplacian
from mola.likelihood.categorical import CATEGORICAL, Categorical

__all__ = ["CATEGORICAL", "Categorical", "Likelihood", "OutputCurvature", "laplacian"]
