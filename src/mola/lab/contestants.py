"""Methods that compete in a suite, declared as values: what they are made of, and the group they belong to."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

import mola
from mola.baselines.temperature import fit_temperature
from mola.errors import MolaWarning
from mola.lab.activations import HeadOnly, Network, Seen
from mola.lab.detectors import DetectorEnsemble, Mahalanobis, NearestNeighbours
from mola.lab.workshop import Workshop
from mola.options import one_of
from mola.uncertainty import energy_score, entropy_score, max_logit_score, max_probability_score

__all__ = ["RULES", "Contestant", "Context", "Fitted", "LastLayer", "Outputs", "noting"]


@dataclass(frozen=True)
class Outputs:
    """What a method says about one set."""

    probs: Tensor
    scores: dict[str, Tensor] = field(default_factory=dict)
    """Outlier scores by name, higher for the more outlying."""


@dataclass(frozen=True)
class Context:
    """What a method may use in one run."""

    read: Callable[[str], Seen]
    """What the run's networks make of a set, by its name."""
    threshold: float | None
    """Of the paper's rule."""
    networks: tuple[Network, ...]
    """The run's."""
    run: int
    workshop: Workshop
    """For methods that need whole networks, or train."""


@dataclass(frozen=True)
class Fitted:
    """A method that is ready."""

    predict: Callable[[str, bool], Outputs]
    """On a set, by its name, with outlier scores or without."""
    chosen: dict[str, Any]
    """What was tuned."""
    seconds: float
    """Time to fit and tune."""


@contextmanager
def noting() -> Iterator[list[str]]:
    """Keep what the library warns of inside, for the record, instead of saying it; other warnings are passed on.

    Yields:
        The warnings, complete when the context ends.
    """
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MolaWarning)
        yield notes
    for one in caught:
        if issubclass(one.category, MolaWarning):
            notes.append(str(one.message))
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


class Contestant(Protocol):
    """A method of the comparison."""

    @property
    def name(self) -> str:
        """Shown in tables; unique within a suite."""

    @property
    def group(self) -> str:
        """The comparison it belongs to."""

    @property
    def components(self) -> int | None:
        """Networks it takes; None takes all of the run's."""

    def settings(self) -> dict[str, Any]:
        """What makes it, as plain JSON values."""

    def fit(self, context: Context) -> Fitted:
        """Make it ready."""


RULES: Mapping[str, Callable[[float | None], mola.Rule]] = {
    "threshold": lambda threshold: mola.ConfidenceThreshold(threshold),
    "nll": lambda _: mola.ValidationScore("nll"),
    "brier": lambda _: mola.ValidationScore("brier"),
    "ece": lambda _: mola.ValidationScore("ece"),
    "evidence": lambda _: mola.Evidence(),
}
"""Ways to choose the prior precision, by name."""

WEIGHTS = ("uniform", "evidence", "stacking")


@dataclass(frozen=True)
class LastLayer:
    """MAP, deep ensemble, LLLA, MoLA: one code path, with or without covariance, temperature-scaled or not."""

    name: str
    group: str = "main"
    components: int | None = None
    structure: str | None = None
    """None has no covariance."""
    link: str = "probit"
    rule: str = "threshold"
    weights: str = "uniform"
    temperature: bool = False
    """Whether one temperature, tuned by validation NLL, divides all logits."""
    detectors: bool = False
    """Whether to compare outlier scores, those of the bare features and logits included."""

    def __post_init__(self) -> None:
        """Check the names."""
        one_of(self.rule, tuple(RULES), "rule")
        one_of(self.weights, WEIGHTS, "weights")

    def settings(self) -> dict[str, Any]:
        """What makes it, as plain JSON values."""
        settings: dict[str, Any] = {"weights": self.weights}
        if self.structure is not None:
            settings |= {"structure": self.structure, "link": self.link, "rule": self.rule}
        if self.temperature:
            settings["temperature"] = "shared"
        return settings

    def fit(self, context: Context) -> Fitted:
        """Fit on stored training activations and tune on stored validation activations."""
        train, validation = self._seen(context, "train"), self._seen(context, "validation")
        start = time.perf_counter()
        with noting() as notes:
            posterior, chosen = self._posterior(train, validation, context.threshold)
        chosen["notes"] = notes
        seconds = time.perf_counter() - start
        plain = self.structure is None and not self.temperature

        @cache
        def detect() -> dict[str, Callable[[Seen], Tensor]]:
            """Made when an outlier set first asks for them."""
            return _detectors(train, validation) if plain else {}

        def predict(name: str, scores: bool) -> Outputs:
            seen = self._seen(context, name)
            if not (scores and self.detectors):
                probs = torch.cat([posterior(features) for features, _ in seen.loader()])
                return Outputs(probs, {"max probability": max_probability_score(probs)})
            prediction = posterior.predict(seen.loader(), progress=False)
            given = {
                "max probability": max_probability_score(prediction.probs),
                "entropy": entropy_score(prediction.probs),
            }
            if self.structure is not None or len(seen.heads) > 1:  # one network alone disagrees with nobody
                given["mutual information"] = prediction.mutual_information
            if self.structure is not None:
                given["ood score"] = prediction.ood_score
            return Outputs(prediction.probs, given | {score: by(seen) for score, by in detect().items()})

        return Fitted(predict, chosen, seconds)

    def _seen(self, context: Context, name: str) -> Seen:
        seen = context.read(name)
        return seen if self.components is None else seen.first(self.components)

    def _posterior(self, train: Seen, validation: Seen, threshold: float | None) -> tuple[mola.MoLA, dict[str, Any]]:
        if self.structure is None:
            if not self.temperature:
                return mola.ensemble(train.heads), {}
            temperature = fit_temperature(validation.logits.transpose(0, 1), validation.labels)
            return mola.ensemble(list(_cooled(train, temperature))), {"temperature": temperature}
        weights = "evidence" if self.weights == "evidence" else "uniform"
        posterior = mola.fit(
            train.heads, train.loader(), structure=self.structure, link=self.link, weights=weights, progress=False
        )
        rule = RULES[self.rule](threshold)
        needs_data = self.rule != "evidence"
        posterior = posterior.tune(validation.loader() if needs_data else None, rule, progress=False)
        if self.weights == "stacking":
            posterior = posterior.reweight(validation.loader(), progress=False)
        chosen: dict[str, Any] = {
            "prior_precision": list(posterior.prior_precision),
            "weights": [float(weight) for weight in posterior.weights],
            "log_evidence": [float(value) for value in posterior.log_evidence()],
        }
        if posterior.tuning is not None:
            chosen["rule"] = posterior.tuning.rule
        return posterior, chosen


def _cooled(seen: Seen, temperature: float) -> Iterator[HeadOnly]:
    """The same heads with logits divided by a temperature: a linear layer again."""
    for index, network in enumerate(seen.heads):
        head = network.head
        bias = None if head.bias is None else head.bias.detach() / temperature
        yield HeadOnly(head.weight.detach() / temperature, bias, index).eval()


BANK = 10_000
"""Training points that nearest neighbours are looked for among, evenly spaced: more would cost much and change little."""


def _detectors(train: Seen, validation: Seen) -> dict[str, Callable[[Seen], Tensor]]:
    """Scores of the bare logits and features, averaged over networks; those of features in units of their spread."""
    stride = max(1, len(train) // BANK)
    kinds: dict[str, Callable[[Tensor], Any]] = {
        "Mahalanobis": lambda features: Mahalanobis.fit(features, train.labels),
        "relative Mahalanobis": lambda features: Mahalanobis.fit(features, train.labels, relative=True),
        "nearest neighbours": lambda features: NearestNeighbours.fit(features[::stride], k=min(50, len(train))),
    }

    def ensemble(fit: Callable[[Tensor], Any]) -> Callable[[Seen], Tensor]:
        members = [fit(features) for features in train.features.unbind(1)]
        detector = DetectorEnsemble.fit(members, validation.features.unbind(1))
        return lambda seen: detector(seen.features.unbind(1))

    return {
        "energy": lambda seen: energy_score(seen.logits).mean(1),
        "maximum logit": lambda seen: max_logit_score(seen.logits).mean(1),
        **{name: ensemble(fit) for name, fit in kinds.items()},
    }
