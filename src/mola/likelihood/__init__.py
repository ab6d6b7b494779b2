"""What the last layer's outputs mean: one file for each likelihood. Everything else asks here."""

from mola.likelihood.base import Likelihood, OutputCurvature, laplacian
from mola.likelihood.bernoulli import BERNOULLI, Bernoulli
from mola.likelihood.categorical import CATEGORICAL, Categorical
from mola.likelihood.gaussian import GAUSSIAN, Gaussian
from mola.options import resolve

__all__ = [
    "BERNOULLI",
    "CATEGORICAL",
    "GAUSSIAN",
    "LIKELIHOODS",
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Likelihood",
    "OutputCurvature",
    "as_likelihood",
    "laplacian",
]

LIKELIHOODS: dict[str, type[Likelihood]] = {kind.name: kind for kind in (Categorical, Bernoulli, Gaussian)}


def as_likelihood(likelihood: str | Likelihood) -> Likelihood:
    """The likelihood of that name, or the likelihood itself."""
    return resolve(likelihood, Likelihood, LIKELIHOODS, "likelihood")  # type: ignore[type-abstract]
