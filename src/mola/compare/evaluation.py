"""A comparison on a user's data as the document that `mola evaluate` writes: `numbers.json`, version 2."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from mola.compare.measured import Lead
from mola.compare.record import ClassResult, Comparison, OutlierResult, Record

__all__ = ["CONFIDENCE_BINS", "Detection", "Evaluation", "MethodResult", "Outside", "as_evaluation"]

CONFIDENCE_BINS = 25
"""Equal-width bins of the confidence histograms, from 0 to 1: half as many as a record has."""


@dataclass(frozen=True)
class Detection:
    """How well one outlier score of a method tells outliers from the test data."""

    auroc: float
    auroc_error: float | None
    """Standard errors; None where there is a single datum."""
    fpr95: float
    fpr95_error: float | None
    edges: list[float]
    """Of the bins of the histograms; the outermost bins hold all beyond."""
    inside: list[float]
    """Shares of the test data in each bin."""
    outside: list[float]
    """Shares of the outliers."""


@dataclass(frozen=True)
class Outside:
    """A method on a set of outliers, told apart from the test data."""

    count: int
    confidence: float
    """Mean of the largest probability (MMC)."""
    confidence_error: float | None
    scores: dict[str, Detection]
    """By outlier score, those of `mola.compare.SCORES` that the method has."""
    histogram: list[float]
    """Shares of the inputs in each of `CONFIDENCE_BINS` bins of confidence."""


@dataclass(frozen=True)
class MethodResult:
    """A method on the test data and on the sets of outliers."""

    scores: dict[str, float]
    """accuracy, nll, brier, ece, confidence."""
    errors: dict[str, float | None]
    """Their standard errors."""
    reliability: list[list[float]]
    """For each of 15 bins of confidence: count, sum of confidences, correct predictions."""
    histogram: list[float]
    classes: dict[str, ClassResult] = field(default_factory=dict)
    """By class, those that the test data have."""
    outside: dict[str, Outside] = field(default_factory=dict)
    """By set."""


@dataclass(frozen=True)
class Evaluation:
    """Methods side by side.

    Attributes:
        test: what the test data are called.
        count: how many they are.
        methods: by name, in the order to show them in.
        leads: by accuracy, nll, brier and ece: which method leads on the test data, as `(method,)`.
        outside_leads: by set of outliers: by confidence the method, as `(method,)`; by auroc and fpr95 the method and the score, as
            `(method, score)`, of all methods and scores.
        components: number of networks.
        chosen: what was tuned: prior precisions and temperatures, by method.
        notes: what tuning had to say, and what to know when reading.
        left_out: by set and input, why it was left out.
        noted: by set and input, what is worth a word.
        made: the posterior's folder, versions, seconds.
    """

    test: str
    count: int
    methods: dict[str, MethodResult]
    leads: dict[str, Lead]
    outside_leads: dict[str, dict[str, Lead]]
    components: int
    chosen: dict[str, float]
    notes: tuple[str, ...]
    left_out: dict[str, dict[str, str]]
    noted: dict[str, dict[str, str]]
    made: dict[str, Any]

    @property
    def outside(self) -> tuple[str, ...]:
        """The sets of outliers."""
        return tuple(next(iter(self.methods.values())).outside)

    @property
    def own(self) -> str:
        """The posterior itself: MoLA, or LLLA of one network."""
        return list(self.methods)[-1]

    @property
    def baseline(self) -> str:
        """The same networks without a posterior: the deep ensemble, or one network alone."""
        return "DE" if "DE" in self.methods else "MAP"

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        return {"format": "mola-evaluation", "version": 2, **asdict(self)}


def as_evaluation(comparison: Comparison) -> Evaluation:
    """A comparison of one run as the document of `mola evaluate`."""
    methods, test = comparison.methods, comparison.test.name
    chosen = {
        f"prior precision of {name}": one.chosen["prior_precision"][0]
        for name, one in methods.items()
        if "prior_precision" in one.chosen
    }
    chosen |= {
        f"temperature of {name}": one.chosen["temperature"]
        for name, one in methods.items()
        if "temperature" in one.chosen
    }
    return Evaluation(
        test=test,
        count=comparison.test.count,
        methods={name: _method(one, test) for name, one in methods.items()},
        leads=comparison.leads[test],
        outside_leads={
            one.name: {name: comparison.leads[one.name][name] for name in ("confidence", "auroc", "fpr95")}
            for one in comparison.of_role("outlier")
        },
        components=methods[comparison.own].settings["components"],
        chosen=chosen,
        notes=comparison.notes,
        left_out=comparison.left_out,
        noted=comparison.noted,
        made=dict(comparison.made),
    )


def _method(record: Record, test: str) -> MethodResult:
    found = record.labelled[test]
    return MethodResult(
        scores={name: found.metrics[name] for name in found.errors},
        errors=found.errors,
        reliability=found.reliability,
        histogram=_shares(found.histogram, found.count),
        classes=found.classes,
        outside={name: _outside(one) for name, one in record.outliers.items()},
    )


def _outside(result: OutlierResult) -> Outside:
    detections = {
        name: Detection(
            auroc=result.scores[name]["auroc"],
            auroc_error=result.errors[name]["auroc"],
            fpr95=result.scores[name]["fpr95"],
            fpr95_error=result.errors[name]["fpr95"],
            edges=histogram.edges,
            inside=histogram.inside,
            outside=histogram.outside,
        )
        for name, histogram in result.score_histograms.items()
    }
    histogram = _shares(result.histogram, result.count)
    return Outside(result.count, result.confidence, result.confidence_error, detections, histogram)


def _shares(histogram: list[int], count: int) -> list[float]:
    """Shares of inputs in bins that are twice as wide."""
    return [sum(pair) / count for pair in zip(histogram[::2], histogram[1::2], strict=True)]
