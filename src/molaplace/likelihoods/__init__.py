"""Likelihoods, which define the meaning of a network's outputs."""

from molaplace.likelihoods.base import (
    ClassificationLikelihood,
    InverseLink,
    Likelihood,
    LinkFunction,
    Members,
    OutputCurvature,
    OutputSpread,
    RegressionLikelihood,
)
from molaplace.likelihoods.bernoulli import BERNOULLI, Bernoulli, BernoulliPredictive
from molaplace.likelihoods.categorical import CATEGORICAL, Categorical, CategoricalPredictive
from molaplace.likelihoods.gaussian import GAUSSIAN, Gaussian, NormalMixture
from molaplace.likelihoods.predictive import ClassificationPredictive, Predictive, RegressionPredictive
from molaplace.options import resolve

__all__ = [
    "BERNOULLI",
    "CATEGORICAL",
    "GAUSSIAN",
    "LIKELIHOODS",
    "Bernoulli",
    "BernoulliPredictive",
    "Categorical",
    "CategoricalPredictive",
    "ClassificationLikelihood",
    "ClassificationPredictive",
    "Gaussian",
    "InverseLink",
    "Likelihood",
    "LinkFunction",
    "Members",
    "NormalMixture",
    "OutputCurvature",
    "OutputSpread",
    "Predictive",
    "RegressionLikelihood",
    "RegressionPredictive",
    "as_likelihood",
]

LIKELIHOODS: dict[str, type[Likelihood]] = {kind.name: kind for kind in (Categorical, Bernoulli, Gaussian)}


def as_likelihood(likelihood: str | Likelihood) -> Likelihood:
    """Return the likelihood with the given name and default settings; if a likelihood is given, return it unchanged."""
    return resolve(likelihood, Likelihood, LIKELIHOODS, "likelihood")  # type: ignore[type-abstract]
