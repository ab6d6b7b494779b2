"""Records: the settings, checksums and results of one method in one run. Reports read nothing else.

Suites store records as JSON (`mola-bench`, version 1). Standard errors over data and results by class exist in comparisons of one run
only; the errors of a suite come from its runs, and its files have no such entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mola.compare.leads import Lead
from mola.errors import StorageError
from mola.saving.schema import check

FORMAT = "mola-bench"
VERSION = 1

CONFIDENCE_BINS = 50
"""Equal-width bins of the confidence histograms, from 0 to 1."""

Role = Literal["train", "validation", "test", "shift", "outlier"]


@dataclass(frozen=True)
class SetInfo:
    """A set of data."""

    name: str
    title: str
    role: Role
    count: int
    level: float = 0.0
    """Shift of the data (degrees, severity); 0 for the test set."""
    parts: str = ""
    """Unit of `count` if it is not the input: "label" or "position"."""
    inputs: int | None = None
    """Number of inputs, if the unit is not the input."""


@dataclass(frozen=True)
class OutputResult:
    """A method on one output of a regression."""

    metrics: dict[str, float]
    """"rmse", "nll", "crps", "std", and "coverage_90", the share of targets in 90 % intervals."""
    errors: dict[str, float | None]
    """Standard errors over data."""


@dataclass(frozen=True)
class RegressionDetail:
    """Details of a regression, in addition to its metrics."""

    coverage: list[list[float | None]]
    """Triples: probability of central intervals, share of targets in them, and its standard error."""
    spread: dict[str, list[list[float]]]
    """Calibration of each output's standard deviation, in groups of data: count, root mean square of the predicted standard
    deviation, root mean squared error."""
    examples: dict[str, list[list[float]]]
    """Some data of each output: target, mean, and the ends of the 90 % interval."""
    outputs: dict[str, OutputResult]
    """Results of the first outputs, by name."""


@dataclass(frozen=True)
class LabelledResult:
    """A method on labelled data: the test set, or a shifted one."""

    level: float
    """Shift of the data (degrees, severity); 0 for the test set."""
    count: int
    metrics: dict[str, float]
    """Metrics by name, as in `mola.compare.results.METRICS`."""
    reliability: list[list[float]]
    """Count, sum of confidences and number of correct predictions in each of 15 bins of confidence. Empty in ablations."""
    histogram: list[int]
    """Number of predictions in each of `CONFIDENCE_BINS` bins of confidence. Empty in ablations."""
    errors: dict[str, float | None] = field(default_factory=dict)
    """Standard errors over data of accuracy, nll, brier, ece and confidence; None for a single datum."""
    classes: dict[str, dict[str, float]] = field(default_factory=dict)
    """"count", "accuracy" and mean "confidence" of each class in the data. Multi-label data have "auroc", "average_precision" and
    "ece" (of the probability of yes), dense outputs "iou"."""
    types: dict[str, dict[str, float]] = field(default_factory=dict)
    """"accuracy", "nll" and "ece" of each type of shift, to six digits, if the data have several types."""
    regression: RegressionDetail | None = None


@dataclass(frozen=True)
class OutlierResult:
    """A method on outliers."""

    count: int
    confidence: float | None
    """Mean of the largest probability (MMC); None for regression."""
    scores: dict[str, dict[str, float]]
    """"auroc", "aupr_in", "aupr_out", "fpr95" (inliers positive) and "fpr95_out" (outliers positive) of each outlier score, against
    the test set. Some stored records lack "fpr95_out"."""
    histogram: list[int]
    confidence_error: float | None = None
    """Standard error over data; None for a single datum, and in suites."""
    errors: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """Standard errors over data of "auroc" and "fpr95" of each outlier score."""
    std: float | None = None
    """Mean standard deviation over inputs and outputs, for regression."""
    std_error: float | None = None
    """Standard error over data."""


@dataclass(frozen=True)
class Examples:
    """A method on the first few inputs of one set, in their order."""

    confidence: list[float]
    label: list[int]
    """The class predicted."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One method, one run."""

    suite: str
    method: str
    """Name shown in tables; unique within the suite."""
    group: str = "main"
    """"main", or the ablation it belongs to."""
    run: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    """Structure, link, rule, weights, number of components."""
    networks: list[str] = field(default_factory=list)
    """Checksums of the networks used."""
    data: dict[str, str] = field(default_factory=dict)
    """Checksum of every set used, by name."""
    chosen: dict[str, Any]
    """Tuned values: "prior_precision" (a list), "temperature", "distance_exponent", "weights", "rule" (in words), "notes", and the
    name of the posterior's own "ood_score"."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time to "fit" (tuning included) and to "predict"; in suites, from stored activations."""
    labelled: dict[str, LabelledResult]
    """Results on labelled sets, by name: the test set first."""
    outliers: dict[str, OutlierResult]
    examples: dict[str, Examples] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    measures: dict[str, dict[str, float]] = field(default_factory=dict)
    """Further measures of a suite, by name. Absent from files if empty."""
    overlap: float = 0.0
    """Number of test data for each datum of fitting or tuning, if the runs of a cross-fit share data; 0 for runs with their own
    networks. Not in files: it follows from the suite's document."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values of a suite's record, without the entries of comparisons of one run (errors over data, classes)."""
        document = {"format": FORMAT, "version": VERSION, **asdict(self)}
        for name in ("labelled", "outliers"):
            document[name] = {
                one: {key: value for key, value in result.items() if key in ENTRIES[name] and (key != "types" or value)}
                for one, result in document[name].items()
            }
        del document["overlap"]
        if not self.measures:
            del document["measures"]
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Record:
        """Read the values that `to_json` returned."""
        check(document, SCHEMA, "")
        for name, known in ENTRIES.items():
            if unknown := sorted({entry for one in document[name].values() for entry in one} - known):
                raise StorageError(f"the record is garbled: unknown entries {unknown[:3]} under {name!r}.")
        results = [*document["labelled"].values(), *document["outliers"].values()]
        if any(len(one["histogram"]) not in (0, CONFIDENCE_BINS) for one in results):
            raise StorageError(f"expected histograms of {CONFIDENCE_BINS} bins.")
        for name, one in document["labelled"].items():
            check(one.get("types", {}), NUMBERS, f"labelled.{name}.types")
            if any(len(row) != 3 for row in one["reliability"]):
                raise StorageError("expected three numbers for each bin of reliability.")
        check(document.get("measures", {}), NUMBERS, "measures")
        made = {"labelled": LabelledResult, "outliers": OutlierResult, "examples": Examples}
        plain = {one.name: document[one.name] for one in fields(cls) if one.name in SCHEMA}
        plain |= {kind: {name: make(**one) for name, one in document[kind].items()} for kind, make in made.items()}
        return cls(**plain, measures=document.get("measures", {}))


NUMBERS: dict[Any, Any] = {str: {str: float}}

SCHEMA: dict[str, Any] = {
    "suite": str,
    "method": str,
    "group": str,
    "run": int,
    "settings": {},
    "networks": [str],
    "data": {str: str},
    "chosen": {},
    "seconds": {str: float},
    "labelled": {
        str: {
            "level": float,
            "count": int,
            "metrics": {str: float},
            "reliability": [[float]],
            "histogram": [int],
        }
    },
    "outliers": {str: {"count": int, "confidence": float, "scores": {str: {str: float}}, "histogram": [int]}},
    "examples": {str: {"confidence": [float], "label": [int]}},
    "environment": {},
}


ENTRIES: dict[str, set[str]] = {name: set(SCHEMA[name][str]) for name in ("labelled", "outliers", "examples")}
ENTRIES["labelled"].add("types")
"""Entries of each result in a suite's record."""


@dataclass(frozen=True)
class Pictures:
    """The first images of a set."""

    pixels: NDArray[np.uint8]
    """(n, height, width, 1 or 3)"""
    labels: tuple[int, ...] | None = None
    """Their classes; None for outliers."""


@dataclass(frozen=True)
class AnswerResult:
    """A guaranteed error rate, and the error rate on the test data."""

    promised: float
    certainty: float
    threshold: float | None
    """Confidence above which inputs that raise no alarm are answered; None if no threshold can guarantee the rate."""
    answered: float | None = None
    """Share of the test data that are answered."""
    realised: float | None = None
    """Error rate of these answers."""
    why: str = ""
    """Reason why there is no threshold."""


@dataclass(frozen=True)
class SetResult:
    """A guaranteed coverage of prediction sets, and the coverage on the test data."""

    promised: float
    realised: float
    size: float
    """Mean number of classes in a set."""
    classes: dict[str, float]
    """Coverage of each class that the test data have."""


@dataclass(frozen=True)
class IntervalResult:
    """A guaranteed coverage of intervals, and the coverage on the test data."""

    promised: float
    realised: float
    realised_error: float | None
    """Standard error over data."""
    width: float
    """Mean over inputs and outputs."""


@dataclass(frozen=True)
class DecisionResult:
    """Decisions about the test data, by thresholds from validation data."""

    false_alarm_rate: float
    alarms: float
    """Share of the test data that raise the alarm."""
    curves: dict[str, list[list[float]]]
    """Pairs of coverage and error rate of each method, the most confident predictions first."""
    answers: list[AnswerResult]
    sets: SetResult | None
    intervals: list[IntervalResult] = field(default_factory=list)
    """Calibrated intervals of a regression."""


@dataclass(frozen=True)
class Comparison:
    """Methods side by side on the same sets: the content of a report."""

    title: str
    sets: dict[str, SetInfo]
    """Sets by name, in order: the test set, shifted sets by level, outliers."""
    records: tuple[Record, ...]
    """Methods in order, each method's runs one after the other."""
    classes: tuple[str, ...] = ()
    """Names of the classes, or of a regression's outputs, in the order of the networks' outputs."""
    leads: dict[str, dict[str, Lead]] = field(default_factory=dict)
    """Best method on each set by each metric, for one run. Labelled data: "accuracy", "nll", "brier" and "ece", of `(method,)`.
    Outliers: "confidence" and "max probability" (AUROC of that score), of `(method,)`; "auroc" and "fpr95", of `(method, score)`."""
    pictures: dict[str, Pictures] = field(default_factory=dict)
    """Images of some sets."""
    notes: tuple[str, ...] = ()
    """Remarks of tuning, and caveats."""
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)
    """Inputs of each set that could not be used, with the reason."""
    made: Mapping[str, Any] = field(default_factory=dict)
    """Versions, seconds and files of the comparison."""
    decisions: DecisionResult | None = None
    """Decisions, if the posterior's folder has validation predictions."""
    regression: bool = False
    differences: dict[str, dict[str, tuple[float, float | None]]] = field(default_factory=dict)
    """Excess of each other method's metrics over those of `own`, and its standard error, for regression."""

    def document(self) -> dict[str, Any]:
        """Return sets, results of each method, leads and decisions as plain JSON values, without empty entries: `numbers.json`."""
        document = asdict(self)
        kept = ("sets", "leads", "differences", "decisions", "notes", "left_out", "made")
        methods = {
            one["method"]: {entry: one[entry] for entry in ("chosen", "labelled", "outliers")}
            for one in document["records"]
        }
        plain: dict[str, Any] = _filled(
            {"format": "mola-evaluation", "version": 1, "methods": methods} | {entry: document[entry] for entry in kept}
        )
        return plain

    def of_role(self, role: Role) -> list[SetInfo]:
        """Return the sets of a role."""
        return [one for one in self.sets.values() if one.role == role]

    @property
    def test(self) -> SetInfo:
        """The test set."""
        return self.of_role("test")[0]

    @property
    def methods(self) -> dict[str, Record]:
        """The first run of each method."""
        found: dict[str, Record] = {}
        for record in self.records:
            found.setdefault(record.method, record)
        return found

    @property
    def runs(self) -> dict[str, tuple[Record, ...]]:
        """All records by method, in the order of the runs."""
        return {name: tuple(one for one in self.records if one.method == name) for name in self.methods}

    @property
    def own(self) -> str:
        """Name of the last method: MoLA, or LLLA of one network."""
        return self.records[-1].method

    @property
    def baseline(self) -> str:
        """Name of the method without a posterior: the deep ensemble, or a single network."""
        return "DE" if "DE" in self.methods else "MAP"


def _filled(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _filled(one) for name, one in value.items() if one is not None and one not in ({}, [], (), "")}
