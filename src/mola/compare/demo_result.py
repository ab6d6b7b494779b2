"""What the demo found: numbers and arrays, no tensors and no networks. The report reads nothing else.

Dictionaries by method have the keys and the order of `METHODS`, unless they say otherwise.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mola.compare.four_methods import METHODS
from mola.compare.measured import Lead
from mola.compare.record import Comparison, LabelledResult, OutlierResult, Pictures, Record, SetInfo
from mola.compare.record import Examples as RecordExamples

__all__ = [
    "METHODS",
    "TEST",
    "Array",
    "DemoResult",
    "DemoSettings",
    "Detection",
    "DigitsResult",
    "DistanceResult",
    "Examples",
    "MoonsResult",
    "Scores",
]

Array = NDArray[np.float64]

TEST = "test digits"
"""Name of the in-distribution set among the sets of inputs."""


@dataclass(frozen=True)
class DemoSettings:
    """What the demo can be asked to change."""

    seed: int = 0
    members: int = 5
    """Networks in the ensemble."""
    epochs: int = 60
    outliers: int = 500
    """Inputs in each out-of-distribution set."""
    moons_epochs: int = 150
    map_size: int = 181
    """Points along each side of a confidence map."""


@dataclass(frozen=True)
class Scores:
    """A method on labelled inputs."""

    accuracy: float
    nll: float
    ece: float
    brier: float
    confidence: float
    """Mean of the largest probability (MMC)."""
    errors: dict[str, float | None]
    """Standard errors of the above, by name."""


@dataclass(frozen=True)
class Detection:
    """A method on outliers, told apart from the test digits."""

    confidence: float
    confidence_error: float | None
    auroc: float
    """By the largest probability."""
    scores: dict[str, tuple[float, float | None]]
    """AUROC and its standard error by every outlier score that the method has."""


@dataclass(frozen=True)
class Examples:
    """A few inputs of one set, and how sure each method is of them."""

    images: Array
    """(m, 8, 8)"""
    confidence: dict[str, Array]
    """(m,) for each method."""


@dataclass(frozen=True)
class DigitsResult:
    """The comparison on handwritten digits."""

    sizes: dict[str, int]
    """Number of data for "train", "val" and "test"."""
    parameters: int
    """Of one network."""
    prior_precision: dict[str, float]
    """Of LLLA and MoLA."""
    rule: dict[str, str]
    """How it was chosen."""
    notes: tuple[str, ...]
    rotated: dict[int, dict[str, Scores]]
    """By angle in degrees, 0 being the test digits as they are, and method."""
    reliability: dict[int, dict[str, Array]]
    """By angle and method: (bins, 3) of count, and sums of confidence and of correct predictions."""
    detection: dict[str, dict[str, Detection]]
    """By set of outliers and method."""
    leads: dict[int, dict[str, Lead]]
    """By angle and score (nll, brier, ece): which method leads."""
    detection_leads: dict[str, dict[str, Lead]]
    """By set of outliers: by confidence, by auroc of the largest probability, and by auroc of any score ("any")."""
    confidences: dict[str, dict[str, Array]]
    """By set (`TEST`, and outliers) and method: the confidence of each input."""
    examples: dict[str, Examples]
    """By set."""

    @property
    def clean(self) -> dict[str, Scores]:
        """Scores in distribution, by method."""
        return self.rotated[0]


@dataclass(frozen=True)
class DistanceResult:
    """Confidence in inputs that are scaled away from the data."""

    scales: Array
    curves: dict[str, dict[str, Array]]
    """By kind of input and method: mean confidence at each scale."""
    limits: dict[str, dict[str, float]]
    """By kind of input and method (LLLA and MoLA): mean of the exact limit."""
    bounds: dict[str, dict[str, float]]
    """Likewise: mean of the Theorem's bound."""
    precisions: Array
    """Prior precisions tried for MoLA; what they give:"""
    test_confidence: Array
    """mean confidence in the test digits,"""
    limit: Array
    """mean of the exact far-field limit in the directions of noise,"""
    bound: Array
    """mean of the Theorem's bound there."""


@dataclass(frozen=True)
class MoonsResult:
    """Confidence over the plane around two moons."""

    points: Array
    """(n, 2): training data."""
    labels: NDArray[np.int64]
    reach: float
    """The maps cover the square from -reach to reach."""
    maps: dict[str, Array]
    """(size, size) by method; the first axis is y, upwards."""
    prior_precision: dict[str, float]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class DemoResult:
    """Everything the demo found."""

    settings: DemoSettings
    digits: DigitsResult
    distance: DistanceResult
    moons: MoonsResult
    seconds: dict[str, float]
    """Time that each part took."""
    versions: dict[str, str]
    """Of mola, torch and Python."""

    @cached_property
    def comparison(self) -> Comparison:
        """The digits as every comparison is shown."""
        digits = self.digits
        turned = {angle: TEST if angle == 0 else f"rotated by {angle}°" for angle in digits.rotated}
        sets = [
            SetInfo("train", "train", "train", digits.sizes["train"]),
            SetInfo("validation", "validation", "validation", digits.sizes["val"]),
            *(
                SetInfo(name, name, "shift" if angle else "test", digits.sizes["test"], float(angle))
                for angle, name in turned.items()
            ),
            *(SetInfo(name, name, "outlier", len(digits.confidences[name]["MAP"])) for name in digits.detection),
        ]
        leads = {turned[angle]: found for angle, found in digits.leads.items()}
        for name, found in digits.detection_leads.items():
            by_score = {"auroc": found["any"], "max probability": found["auroc"]}
            leads[name] = {"confidence": found["confidence"], **by_score}
        return Comparison(
            title="digits",
            sets={one.name: one for one in sets},
            records=tuple(self._record(method, turned) for method in METHODS),
            leads=leads,
            pictures={
                name: Pictures(np.round(255 * np.clip(one.images, 0, 1)).astype(np.uint8)[..., None])
                for name, one in digits.examples.items()
            },
            notes=digits.notes,
            made={"parameters": digits.parameters},
        )

    def _record(self, method: str, turned: dict[int, str]) -> Record:
        digits = self.digits
        chosen: dict[str, Any] = {}
        if method in digits.prior_precision:
            chosen = {"prior_precision": [digits.prior_precision[method]], "rule": digits.rule[method]}
        labelled = {}
        for angle, name in turned.items():
            scores = digits.rotated[angle][method]
            metrics = {metric: getattr(scores, metric) for metric in scores.errors}
            sure = [] if angle else _histogram(digits.confidences[TEST][method])
            bins = digits.reliability[angle][method].tolist()
            labelled[name] = LabelledResult(float(angle), digits.sizes["test"], metrics, bins, sure, scores.errors)
        outliers = {
            name: OutlierResult(
                len(digits.confidences[name][method]),
                found[method].confidence,
                {score: {"auroc": value} for score, (value, _) in found[method].scores.items()},
                _histogram(digits.confidences[name][method]),
                found[method].confidence_error,
                {score: {"auroc": error} for score, (_, error) in found[method].scores.items()},
            )
            for name, found in digits.detection.items()
        }
        examples = {
            name: RecordExamples(one.confidence[method].tolist(), [0] * len(one.images))
            for name, one in digits.examples.items()
        }
        return Record("digits", method, "main", 0, {}, [], {}, chosen, {}, labelled, outliers, examples)

    def numbers(self) -> dict[str, Any]:
        """The scores as plain JSON values, without arrays."""
        digits = self.digits
        return {
            "settings": asdict(self.settings),
            "versions": self.versions,
            "seconds": self.seconds,
            "sizes": digits.sizes,
            "prior_precision": digits.prior_precision,
            "rule": digits.rule,
            "notes": list(digits.notes),
            "rotated": {
                str(angle): {name: asdict(scores) for name, scores in by_method.items()}
                for angle, by_method in digits.rotated.items()
            },
            "detection": {
                outliers: {name: asdict(found) for name, found in by_method.items()}
                for outliers, by_method in digits.detection.items()
            },
            "far_field": {"limit": self.distance.limits, "bound": self.distance.bounds},
        }


def _histogram(confidences: Array) -> list[int]:
    return [int(count) for count in np.histogram(confidences, 25, (0.0, 1.0))[0]]
