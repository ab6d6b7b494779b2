"""Mixtures of predictors: weighted averages of callables that map inputs to probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from molaplace.errors import DataError, OptionError
from molaplace.fingerprints import digest
from molaplace.likelihoods import CATEGORICAL, ClassificationLikelihood, Likelihood, RegressionLikelihood, as_likelihood
from molaplace.likelihoods.base import mixed
from molaplace.network import Inputs, evaluating, one_batch
from molaplace.numerics import SUM_TOLERANCE, seed_from
from molaplace.options import one_of
from molaplace.prediction import Prediction, RegressionPrediction
from molaplace.predictor import Predictor
from molaplace.uncertainty import mutual_information
from molaplace.weights import check_weights, uniform_weights


class Mixture(Predictor):
    """A weighted average of predictors: a deep ensemble, MultiSWAG, or any other mixture. Predictors may come from other libraries.

    Args:
        predictors: callables that map inputs to probabilities (n, C). Modules among them are registered as submodules.
        weights: "uniform", or K non-negative numbers that sum to 1.
        likelihood: likelihood of the predictions, by name or as an object; by default, the members' likelihood, or "categorical" if
            they have none.
    """

    def __init__(
        self,
        predictors: Sequence[Callable[[Any], Any]],
        weights: str | Sequence[float] | Tensor = "uniform",
        *,
        likelihood: str | Likelihood | None = None,
    ) -> None:
        super().__init__()
        members = tuple(predictors) if isinstance(predictors, Iterable) else ()
        if not members or not all(callable(member) for member in members):
            names = ", ".join(type(member).__name__ for member in members) or "none"
            raise OptionError(
                f"must be one or more callables that map inputs to probabilities, got {names}. For an estimator of scikit-learn, pass "
                f"its predict_proba.",
                argument="predictors",
            )
        if isinstance(weights, str):
            one_of(weights, ("uniform",), "weights", "numbers that sum to 1, one for each member")
        self.predictors = members
        for index, member in enumerate(members):
            if isinstance(member, nn.Module):
                self.add_module(f"predictor_{index}", member)
        count = len(members)
        self.weights = uniform_weights(count) if isinstance(weights, str) else check_weights(weights, count)
        self.likelihood = _common_likelihood(members) if likelihood is None else as_likelihood(likelihood)
        parts = [getattr(member, "fingerprint", None) for member in members]
        if None not in parts:
            self.fingerprint = digest(parts, self.weights.tolist(), self.likelihood)

    def forward(self, inputs: Inputs, generator: torch.Generator | None = None) -> Tensor:
        """Return probabilities (n, C) or, for regression, means (n, D). Members that draw samples use the generator."""
        return mixed(self.weights, self._member_outputs(one_batch(inputs), seed_from(generator)))

    def check_unchanged(self) -> None:
        """Raise `OptionError` if a member is known to belong to other weights than its networks now have."""
        for member in self.predictors:
            if isinstance(member, Predictor):
                member.check_unchanged()

    def _member_outputs(self, inputs: Inputs, seed: int | None) -> list[Tensor]:
        def call_member(member: Callable[..., Any]) -> Any:
            if seed is None or not isinstance(member, Predictor):
                return member(inputs)
            return member(inputs, generator=torch.Generator("cpu").manual_seed(seed))

        modules = [predictor for predictor in self.predictors if isinstance(predictor, nn.Module)]
        with evaluating(*modules), torch.no_grad():
            members = [
                # A Predictor returns valid probabilities. The outputs of other callables must be checked.
                call_member(member)
                if isinstance(member, Predictor)
                else as_probabilities(call_member(member), self.likelihood, f"predictors[{index}]")
                for index, member in enumerate(self.predictors)
            ]
        shapes = [tuple(probs.shape) for probs in members]
        if any(shape != shapes[0] for shape in shapes):
            raise DataError(f"expected outputs of the same shape from every predictor, got {shapes}.")
        return members

    def predict_batch(self, inputs: Inputs, seed: int | None = None) -> Any:
        """Predict one batch; members that draw samples use `seed`."""
        if not isinstance(self.likelihood, ClassificationLikelihood):
            return self._predict_regression(inputs, seed)
        members = torch.stack(self._member_outputs(inputs, seed), 1)
        return prediction_of(members, self.weights, self.likelihood, self.fingerprint)

    def _predict_regression(self, inputs: Inputs, seed: int | None) -> RegressionPrediction:
        distributions = [member for member in self.predictors if isinstance(member, Predictor)]
        if distributions and len(distributions) < len(self.predictors):
            raise OptionError(
                "some predictors return only means and others return distributions, whose spread would be lost in a mixture of means. "
                "Wrap each network that returns means: mola.ensemble(network, likelihood=mola.likelihoods.Gaussian(noise=...))."
            )
        if distributions:
            parts = [member.predict_batch(inputs, seed) for member in distributions]
            return RegressionPrediction.mixed(parts, self.weights, self.fingerprint)
        # None of the members is a Predictor, so the mixture has no fingerprint.
        return prediction_of(torch.stack(self._member_outputs(inputs, seed), 1), self.weights, self.likelihood)


def prediction_of(members: Tensor, weights: Tensor, likelihood: Likelihood, fingerprint: str | None = None) -> Any:
    """Return the prediction of a mixture with weights (K,) whose members return only probabilities (n, K, C) or means (n, K, D)."""
    if isinstance(likelihood, RegressionLikelihood):
        return RegressionPrediction.of_means(members, weights, likelihood)
    assert isinstance(likelihood, ClassificationLikelihood)
    if members.dim() > 3:
        raise DataError(
            "a Mixture predicts one row per input. For dense outputs, fit all networks together with mola.fit."
        )
    distribution = likelihood.distribution(mixed(weights, members.unbind(1)))
    member_entropies = likelihood.distribution(members).entropy()
    return Prediction(
        {
            "probs": distribution.probs,
            "mutual_information": mutual_information(distribution.entropy(), member_entropies, weights),
            "ood_score": distribution.outlier_score(),
        },
        likelihood=likelihood,
        fingerprint=fingerprint,
    )


def _common_likelihood(members: Sequence[Any]) -> Likelihood:
    likelihoods = [getattr(member, "likelihood", None) for member in members]
    known = [likelihood for likelihood in likelihoods if isinstance(likelihood, Likelihood)]
    if any(likelihood.name != known[0].name for likelihood in known):
        names = ", ".join(dict.fromkeys(repr(likelihood.name) for likelihood in known))
        raise OptionError(f"must be members with the same likelihood, got {names}.", argument="predictors")
    return known[0] if known else CATEGORICAL


def as_probabilities(output: Any, likelihood: Likelihood, name: str) -> Tensor:
    """Return the output of the predictor `name` as probabilities (n, C), or raise a `DataError` if it cannot be."""
    remedy = "If the network returns logits, pass it to mola.ensemble or mola.fit."
    try:
        # Copy the array, because torch accepts neither read-only arrays nor negative strides.
        probs = output.detach() if isinstance(output, Tensor) else torch.tensor(np.array(output), device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"expected probabilities (n, C), got {type(output).__name__}.", place=name) from error
    if probs.dim() != 2 or not probs.is_floating_point():
        raise DataError(f"expected probabilities (n, C), got {probs.dtype} of shape {tuple(probs.shape)}.", place=name)
    if not likelihood.classification or not len(probs):
        return probs
    if bool(((probs < 0) | (probs > 1 + SUM_TOLERANCE)).any()):
        raise DataError(
            f"probabilities must lie between 0 and 1, got values from {float(probs.min()):.3g} to "
            f"{float(probs.max()):.3g}. {remedy}",
            place=name,
        )
    gap = float((probs.sum(1) - 1).abs().max())
    if likelihood.mutually_exclusive and not gap < SUM_TOLERANCE:
        raise DataError(f"rows must sum to 1, got sums that differ from 1 by up to {gap:.3g}. {remedy}", place=name)
    return probs
