"""What a comparison of methods on a user's data found: numbers only, the same in memory and in JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from mola.compare.measured import Lead, Measured, area_between, lead, mean_of, pass_rate
from mola.compare.record import ClassResult as RecordClass
from mola.compare.record import Comparison, LabelledResult, OutlierResult, Record, ScoreHistogram, SetInfo
from mola.compare.tally import Tally

__all__ = [
    "CONFIDENCE_BINS",
    "SCORE_BINS",
    "ClassResult",
    "Detection",
    "Evaluation",
    "MethodResult",
    "Outside",
    "compare_inside",
    "compare_outside",
    "short",
]

CONFIDENCE_BINS = 25
"""Equal-width bins of the confidence histograms, from 0 to 1."""

SCORE_BINS = 25
"""Equal-width bins of the histograms of outlier scores."""

TAIL = 0.005
"""Share of the inputs at each end that the outermost bins of these take in, however far away."""

BETTER: dict[str, Literal["low", "high"]] = {"accuracy": "high", "nll": "low", "brier": "low", "ece": "low"}


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
class ClassResult:
    """A method on the test data of one class."""

    count: int
    accuracy: float
    confidence: float
    """Mean of the largest probability."""


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

    def comparison(self) -> Comparison:
        """The same as every comparison is shown."""
        sets = {self.test: SetInfo(self.test, short(self.test, (self.test,)), "test", self.count)}
        first = next(iter(self.methods.values()))
        for name, out in first.outside.items():
            sets[name] = SetInfo(name, short(name, self.outside), "outlier", out.count)
        records = [self._record(method, one) for method, one in self.methods.items()]
        return Comparison(
            title=self.test,
            sets=sets,
            records=tuple(records),
            classes=tuple(first.classes),
            leads={self.test: self.leads, **self.outside_leads},
            notes=self.notes,
            left_out=self.left_out,
            noted=self.noted,
            made={**self.made, "components": self.components},
        )

    def _record(self, method: str, one: MethodResult) -> Record:
        chosen: dict[str, Any] = {}
        if (precision := self.chosen.get(f"prior precision of {method}")) is not None:
            chosen["prior_precision"] = [precision]
        if (temperature := self.chosen.get(f"temperature of {method}")) is not None:
            chosen["temperature"] = temperature
        labelled = LabelledResult(
            0.0,
            self.count,
            one.scores,
            one.reliability,
            [round(share * self.count) for share in one.histogram],
            one.errors,
            {name: RecordClass(**vars(found)) for name, found in one.classes.items()},
        )
        outliers = {
            name: OutlierResult(
                out.count,
                out.confidence,
                {score: {"auroc": found.auroc, "fpr95": found.fpr95} for score, found in out.scores.items()},
                [round(share * out.count) for share in out.histogram],
                out.confidence_error,
                {
                    score: {"auroc": found.auroc_error, "fpr95": found.fpr95_error}
                    for score, found in out.scores.items()
                },
                {
                    score: ScoreHistogram(found.edges, found.inside, found.outside)
                    for score, found in out.scores.items()
                },
            )
            for name, out in one.outside.items()
        }
        return Record("", method, "main", 0, {}, [], {}, chosen, {}, {self.test: labelled}, outliers)

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        return {"format": "mola-evaluation", "version": 2, **asdict(self)}


def short(name: str, names: tuple[str, ...]) -> str:
    """What a set is called where there is little room: the last part of its path, if that tells it from the others."""
    last = name.rstrip("/").split("/")[-1]
    return last if last and sum(other.rstrip("/").split("/")[-1] == last for other in names) == 1 else name


def compare_inside(
    tallies: Mapping[str, Tally],
    classes: Sequence[str],
    outside: Mapping[str, Mapping[str, Outside]],
) -> tuple[dict[str, MethodResult], dict[str, Lead]]:
    """Methods on the same labelled data.

    Args:
        tallies: by method.
        classes: their names.
        outside: what the methods do on each set of outliers, by set and method.

    Returns:
        The results by method, and who leads by which number.
    """
    measured = {method: tally.measured() for method, tally in tallies.items()}
    results = {
        method: MethodResult(
            scores={name: one.value for name, one in measured[method].items()},
            errors={name: one.error for name, one in measured[method].items()},
            reliability=tally.bins.tolist(),
            histogram=_shares(tally["confidence"]),
            classes=_classes(tally, classes),
            outside={name: by_method[method] for name, by_method in outside.items()},
        )
        for method, tally in tallies.items()
    }
    leads = {
        name: lead({(method,): numbers[name] for method, numbers in measured.items()}, better)
        for name, better in BETTER.items()
    }
    return results, leads


def compare_outside(
    inside: Mapping[str, Tally], outside: Mapping[str, Tally]
) -> tuple[dict[str, Outside], dict[str, Lead]]:
    """Every method by every outlier score that it has, on the same outliers.

    Args:
        inside: tallies of the test data, by method.
        outside: tallies of the outliers.

    Returns:
        The results by method, and who leads by which number.
    """
    results: dict[str, Outside] = {}
    confidences: dict[tuple[str, ...], Measured] = {}
    areas: dict[tuple[str, ...], Measured] = {}
    rates: dict[tuple[str, ...], Measured] = {}
    for method, tally in outside.items():
        confidences[method,] = sure = mean_of(tally["confidence"])
        detections = {}
        for score, far in tally.scores.items():
            near = inside[method][score]
            areas[method, score], rates[method, score] = area, rate = area_between(near, far), pass_rate(near, far)
            edges = _edges(near, far)
            detections[score] = Detection(
                area.value,
                area.error,
                rate.value,
                rate.error,
                edges.tolist(),
                *(_binned(values, edges) for values in (near, far)),
            )
        results[method] = Outside(tally.count, sure.value, sure.error, detections, _shares(tally["confidence"]))
    leads = {"confidence": lead(confidences, "low"), "auroc": lead(areas, "high"), "fpr95": lead(rates, "low")}
    return results, leads


def _classes(tally: Tally, classes: Sequence[str]) -> dict[str, ClassResult]:
    rows = zip(classes, *tally.by_class(len(classes)), strict=True)
    return {name: ClassResult(count, right / count, sure / count) for name, count, right, sure in rows if count}


def _shares(confidence: Tensor) -> list[float]:
    """Shares of inputs in each bin of confidence."""
    counts: list[float] = torch.histc(confidence, CONFIDENCE_BINS, 0, 1).tolist()
    return [count / len(confidence) for count in counts]


def _edges(inside: Tensor, outside: Tensor) -> Tensor:
    """Bins that both fill: the outermost hundredth of either does not stretch them."""
    ends = [
        one.sort().values[[int(TAIL * (len(one) - 1)), -1 - int(TAIL * (len(one) - 1))]] for one in (inside, outside)
    ]
    low, high = min(float(ends[0][0]), float(ends[1][0])), max(float(ends[0][1]), float(ends[1][1]))
    return torch.linspace(low, high if high > low else low + 1, SCORE_BINS + 1, dtype=torch.float64)


def _binned(scores: Tensor, edges: Tensor) -> list[float]:
    index = torch.bucketize(scores, edges[1:-1])
    shares: list[float] = (torch.bincount(index, minlength=SCORE_BINS) / len(scores)).tolist()
    return shares
