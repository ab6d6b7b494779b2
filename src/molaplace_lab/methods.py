"""Methods to compare: plain objects that can be fitted and then used for prediction.

`LastLayerMethod` covers MAP, MAP-T, DE, DE-T, DE-L, LLLA, MoLA and all their ablations. It applies the public functions
`mola.fit` and `tune` to stored features.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

import molaplace as mola
from molaplace.calibration import fit_temperature
from molaplace.errors import collect_warnings
from molaplace.evaluation import outlier_scores
from molaplace.options import one_of
from molaplace.rules import Calibrated, Distance, Evidence, Rule, Score, Threshold
from molaplace_lab.activations_file import ActivationSlice, StoredActivations
from molaplace_lab.context import Context
from molaplace_lab.detectors import feature_scores, gen_score
from molaplace_lab.measures import BatchPrediction


@dataclass(frozen=True)
class FittedMethod:
    """A fitted and tuned method."""

    batches: Callable[[str], Iterable[tuple[Any, Tensor]]]
    """Function that returns the labelled batches of a set, given its name."""
    predict: Callable[[Any, bool], BatchPrediction]
    """Function that returns predictions for a batch, with or without all outlier scores."""
    chosen: dict[str, Any]
    """Tuned values."""
    seconds: float
    """Time to fit and tune, in seconds."""


class Method(Protocol):
    """A method that can be fitted and compared with others."""

    @property
    def name(self) -> str:
        """The name shown in tables, unique within a comparison."""

    @property
    def group(self) -> str:
        """The group of the method; methods in the same group are compared with each other."""

    @property
    def components(self) -> int | None:
        """Number of networks to use, or None for all networks of the run."""

    def settings(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""

    def fit(self, context: Context, /) -> FittedMethod:
        """Fit and tune the method."""


RULES: Mapping[str, Callable[[float | None], Rule | str]] = {
    "threshold": lambda threshold: Threshold(threshold),
    "nll": lambda _: Score("nll"),
    "brier": lambda _: Score("brier"),
    "ece": lambda _: Score("ece"),
    "evidence": lambda _: Evidence(),
    "distance": lambda _: "distance",
    "distance at 2 %": lambda _: Distance(price=0.02),
    "calibrated": lambda _: Calibrated(),
}
"""Functions that return tuning rules, keyed by name; each takes a target confidence, which only the paper's rule uses."""

WEIGHTS = ("uniform", "evidence", "stacking")


@dataclass(frozen=True)
class LastLayerMethod:
    """MAP, a deep ensemble, LLLA or MoLA, optionally with a temperature."""

    name: str
    group: str = "main"
    components: int | None = None
    structure: str | None = None
    """Structure of the Laplace approximation, or None if the networks are used without one."""
    link: str = "probit"
    rule: str = "threshold"
    weights: str = "uniform"
    temperature: bool = False
    """If True, all logits are divided by one temperature, chosen to minimise the validation NLL."""
    mean: Literal["probabilities", "logits"] = "probabilities"
    """Quantity that the ensemble averages."""
    detectors: bool = False
    """If True, predictions include all available outlier scores, including those computed from features and logits; otherwise, they
    include only the score based on the largest probability."""

    def __post_init__(self) -> None:
        one_of(self.rule, tuple(RULES), "rule")
        one_of(self.weights, WEIGHTS, "weights")

    def settings(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        settings: dict[str, Any] = {"weights": self.weights}
        if self.structure is not None:
            settings |= {"structure": self.structure, "link": self.link, "rule": self.rule}
        if self.temperature:
            settings["temperature"] = "shared"
        if self.mean == "logits":
            settings["mean"] = self.mean
        return settings

    def fit(self, context: Context) -> FittedMethod:
        """Fit the method to stored training activations, and tune it on stored validation activations."""
        validation = self._read(context, "validation")
        train = self._read(context, "train")
        start = time.perf_counter()
        with collect_warnings() as notes:
            networks = validation.heads
            chosen: dict[str, Any] = {}
            if self.temperature:
                logits = validation.logits()
                averaged = logits.mean(0) if self.mean == "logits" else logits
                temperature = fit_temperature(averaged, validation.labels)
                networks = tuple(head.scaled(temperature) for head in networks)
                chosen["temperature"] = temperature
            posterior = self._posterior(networks, train, validation, context)
        chosen |= self.tuned(posterior)
        chosen["notes"] = notes
        seconds = time.perf_counter() - start
        if self.structure is not None and self.detectors:
            features, _ = next(iter(validation))
            chosen["ood_score"] = posterior.predict([features[:1]], progress=False).ood_score_name

        @cache
        def feature_scorers() -> Mapping[str, Callable[[ActivationSlice], Tensor]]:
            return feature_scores(train, validation)

        def predict(activations: ActivationSlice, all_scores: bool) -> BatchPrediction:
            if not (all_scores and self.detectors):
                with torch.no_grad():
                    probs = torch.cat([posterior(features) for features in activations.batches()])
                return BatchPrediction(probs, {"max probability": outlier_scores(probs)["max probability"]})
            prediction = posterior.predict(activations.batches(), progress=False)
            # `chosen["ood_score"]` is the name of the posterior's own score.
            own_score = None if self.structure is None else prediction.ood_score
            scores = outlier_scores(prediction.probs, ood_score=own_score) | {"GEN": gen_score(prediction.probs)}
            # A single network without a posterior has no mutual information.
            if self.structure is not None or len(networks) > 1:
                scores["mutual information"] = prediction.mutual_information
            if self.structure is not None:
                if (distance := getattr(prediction, "distance", None)) is not None:
                    scores["distance"] = distance
            elif not self.temperature:
                scores |= {name: score(activations) for name, score in feature_scorers().items()}
            return BatchPrediction(prediction.probs, scores)

        def batches(name: str) -> Iterator[tuple[ActivationSlice, Tensor]]:
            return ((activations, activations.labels) for activations in self._read(context, name).slices())

        return FittedMethod(batches, predict, chosen, seconds)

    def _read(self, context: Context, name: str) -> StoredActivations:
        return context.read(name).only(slice(self.components))

    def _posterior(
        self, networks: Sequence[nn.Module], train: Iterable[Any], validation: StoredActivations, context: Context
    ) -> mola.MoLA:
        if self.structure is None:
            return mola.ensemble(networks).with_pooling(0.0 if self.mean == "logits" else 1.0)
        posterior = mola.fit(networks, train, structure=self.structure, link=self.link, progress=False)
        posterior = posterior.with_weights("evidence" if self.weights == "evidence" else "uniform")
        data = validation if self.rule != "evidence" else None
        posterior = posterior.tune(data, rule=RULES[self.rule](context.threshold), progress=False)
        return posterior.reweight(validation, progress=False) if self.weights == "stacking" else posterior

    @staticmethod
    def tuned(posterior: mola.MoLA) -> dict[str, Any]:
        """Return the tuned quantities of a posterior as plain JSON values."""
        if posterior.structure is None:
            return {}
        chosen: dict[str, Any] = {
            "prior_precision": list(posterior.prior_precision),
            **posterior.settings.changed(),
            "weights": [float(weight) for weight in posterior.weights],
            "log_evidence": [float(value) for value in posterior.log_evidence()],
        }
        if posterior.tuning is not None:
            chosen["rule"] = posterior.tuning.rule
        return chosen
