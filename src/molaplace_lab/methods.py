"""Methods to compare: plain objects that can be fitted and then used for prediction.

`LastLayer` covers MAP, MAP-T, DE, DE-T, DE-L, LLLA, MoLA and all their ablations. It applies the public functions
`mola.fit` and `tune` to stored features.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

import molaplace as mola
from molaplace.calibration import fit_temperature
from molaplace.errors import OptionError, collect_warnings
from molaplace.likelihoods import CATEGORICAL
from molaplace.options import one_of
from molaplace.outliers import max_probability_score
from molaplace.rules import Calibrated, Distance, Evidence, Rule, Score, Threshold
from molaplace.uncertainty import entropy
from molaplace_lab.activations_file import Seen, Stored
from molaplace_lab.detectors import gen_score

FeatureScores = Mapping[str, Callable[[Seen], Tensor]]
"""Functions, keyed by name, that compute outlier scores from stored features and logits."""


@dataclass(frozen=True)
class Material:
    """Data and settings for one run."""

    read: Callable[[str], Stored]
    """Function that returns the stored features and logits of a set, given its name."""
    threshold: float | None
    """Target confidence of the paper's rule."""
    detectors: Callable[[Stored, Stored], FeatureScores]
    """Function that builds the outlier scores from the activations of the training and validation sets."""
    sums: Callable[[str, Sequence[Any]], mola.MoLA] | None = field(default=None, kw_only=True)
    """Function that builds a posterior from stored sums, given a structure and heads; used if no training activations are stored."""


@dataclass(frozen=True)
class BatchPrediction:
    """Predictions of a classifier for a batch."""

    probs: Tensor
    """Probabilities, shape (n, C)."""
    scores: Mapping[str, Tensor] = field(default_factory=dict)
    """Outlier scores by name, each of shape (n,)."""


@dataclass(frozen=True)
class Fitted:
    """A fitted and tuned method."""

    batches: Callable[[str], Iterable[tuple[Any, Tensor]]]
    """Function that returns the labelled batches of a set, given its name."""
    answer: Callable[[Any, bool], BatchPrediction]
    """Function that returns predictions for a batch, with or without outlier scores."""
    chosen: dict[str, Any]
    """Tuned values."""
    seconds: float
    """Time to fit and tune, in seconds."""


MaterialT = TypeVar("MaterialT", contravariant=True)


class Method(Protocol[MaterialT]):
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

    def fit(self, material: MaterialT, /) -> Fitted:
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
class LastLayer:
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

    def fit(self, material: Material) -> Fitted:
        """Fit the method to stored training activations or stored sums, and tune it on stored validation activations."""
        validation = self._read(material, "validation")
        train = self._read(material, "train") if material.sums is None else None
        if train is None and self.temperature and self.structure is not None:
            raise OptionError(
                f"{self.name} scales the logits before fitting, so it requires stored training activations. Omit --stream."
            )
        start = time.perf_counter()
        with collect_warnings() as notes:
            networks = validation.heads
            chosen: dict[str, Any] = {}
            if self.temperature:
                logits = validation.logits()
                averaged = logits.mean(0) if self.mean == "logits" else logits
                temperature = fit_temperature(averaged, validation.labels)
                networks, chosen["temperature"] = tuple(one.scaled(temperature) for one in networks), temperature
            posterior = self._posterior(networks, train or (), validation, material)
        chosen |= self.tuned(posterior)
        chosen["notes"] = notes
        seconds = time.perf_counter() - start
        if self.structure is not None and self.detectors:
            features, _ = next(iter(validation))
            chosen["ood_score"] = posterior.predict([features[:1]], progress=False).ood_score_name

        @cache
        def detectors() -> FeatureScores:
            return {} if train is None else material.detectors(train, validation)

        def answer(seen: Seen, scores: bool) -> BatchPrediction:
            if not (scores and self.detectors):
                probs = torch.cat([posterior(features) for features in seen.batches()])
                return BatchPrediction(probs, {"max probability": max_probability_score(probs, CATEGORICAL)})
            found = posterior.predict(seen.batches(), progress=False)
            given = {
                "max probability": max_probability_score(found.probs, CATEGORICAL),
                "entropy": entropy(found.probs),
                "GEN": gen_score(found.probs),
            }
            if (
                self.structure is not None or len(networks) > 1
            ):  # a single network without a posterior has no mutual information
                given["mutual information"] = found.mutual_information
            if self.structure is not None:
                # `chosen["ood_score"]` is the name of this score.
                given["ood score"] = found.ood_score
                if (distance := getattr(found, "distance", None)) is not None:
                    given["distance"] = distance
            elif not self.temperature:
                given |= {name: score(seen) for name, score in detectors().items()}
            return BatchPrediction(found.probs, given)

        def batches(name: str) -> Iterator[tuple[Seen, Tensor]]:
            return ((seen, seen.labels) for seen in self._read(material, name).slices())

        return Fitted(batches, answer, chosen, seconds)

    def _read(self, material: Material, name: str) -> Stored:
        return material.read(name).only(slice(self.components))

    def _posterior(
        self, networks: Sequence[nn.Module], train: Iterable[Any], validation: Stored, material: Material
    ) -> mola.MoLA:
        if self.structure is None:
            return mola.ensemble(networks).with_pooling(0.0 if self.mean == "logits" else 1.0)
        if material.sums is None:
            posterior = mola.fit(networks, train, structure=self.structure, link=self.link, progress=False)
        else:
            posterior = material.sums(self.structure, networks).with_link(self.link)
        posterior = posterior.with_weights("evidence" if self.weights == "evidence" else "uniform")
        held = validation if self.rule != "evidence" else None
        posterior = posterior.tune(held, rule=RULES[self.rule](material.threshold), progress=False)
        return posterior.reweight(validation, progress=False) if self.weights == "stacking" else posterior

    @staticmethod
    def tuned(posterior: mola.MoLA) -> dict[str, Any]:
        """Return the tuned quantities of a posterior as plain JSON values."""
        if posterior.structure is None:
            return {}
        chosen: dict[str, Any] = {
            "prior_precision": list(posterior.prior_precision),
            "weights": [float(weight) for weight in posterior.weights],
            "log_evidence": [float(value) for value in posterior.log_evidence()],
        }
        if posterior.tuning is not None:
            chosen["rule"] = posterior.tuning.rule
        for name, without in (("temperature", 1.0), ("pooling", 1.0), ("distance_exponent", 0.0)):
            if (value := float(getattr(posterior, name, without))) != without:
                chosen[name] = value
        return chosen
