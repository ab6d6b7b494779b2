"""Records: the settings, checksums and results of one method in one run. Reports are written from records alone.

Suites store records as JSON (`mola-bench`, version 1). Per-class results, and standard errors over the data points of a set, exist
only in single-run comparisons. Suites compute standard errors over runs instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from molaplace.errors import StorageError
from molaplace.evaluation.leads import Lead
from molaplace.saving.schema import check

FORMAT = "mola-bench"
VERSION = 1

CONFIDENCE_BINS = 50
"""Number of equal-width bins from 0 to 1 in the confidence histograms."""

Role = Literal["train", "validation", "test", "shift", "outlier"]


@dataclass(frozen=True)
class SetInfo:
    """Description of a data set."""

    name: str
    title: str
    role: Role
    count: int
    level: float = 0.0
    """Level of shift, such as an angle in degrees or a severity; 0 for the test set."""
    parts: str = ""
    """Unit of `count`: "label" or "position"; empty if `count` is the number of inputs."""
    inputs: int | None = None
    """Number of inputs if `count` is the number of labels or positions, otherwise None."""


@dataclass(frozen=True)
class OutputResult:
    """Results of a method for one output of a regression model."""

    metrics: dict[str, float]
    """Metrics by name: "rmse", "nll", "crps", "std", and "coverage_90", the share of targets inside the 90 % intervals."""
    errors: dict[str, float | None]
    """Standard errors of the metrics, computed over the data points."""


@dataclass(frozen=True)
class RegressionDetail:
    """Detailed results for regression, in addition to the metrics."""

    coverage: list[list[float | None]]
    """For each central interval: its probability, the share of targets inside it, and the standard error of that share."""
    spread: dict[str, list[list[float]]]
    """Calibration of each output's standard deviation. Each group of data points has three entries: its size, the root mean square of
    the predicted standard deviations, and the root mean squared error."""
    examples: dict[str, list[list[float]]]
    """Examples for each output; an example consists of the target, the predicted mean, and both ends of the 90 % interval."""
    outputs: dict[str, OutputResult]
    """Results for the first few outputs, keyed by output name."""


@dataclass(frozen=True)
class LabelledResult:
    """Results of a method on labelled data: the test set or a shifted set."""

    level: float
    """Level of shift, such as an angle in degrees or a severity; 0 for the test set."""
    count: int
    metrics: dict[str, float]
    """Metrics by name; see `METRICS` in `mola.evaluation.results` and `regression_metrics` in `mola.evaluation.regression`."""
    reliability: list[list[float]]
    """Number of predictions, sum of their confidences and number of correct predictions in each of 15 confidence bins; empty in
    ablations."""
    histogram: list[int]
    """Number of predictions in each of the `CONFIDENCE_BINS` confidence bins; empty in ablations."""
    errors: dict[str, float | None] = field(default_factory=dict)
    """Standard errors of accuracy, nll, brier, ece and confidence, computed over the data points; None if there is only one data
    point."""
    classes: dict[str, dict[str, float]] = field(default_factory=dict)
    """Results for each class in the data: "count", "accuracy" and mean "confidence"; for multi-label data, also "auroc",
    "average_precision" and the "ece" of the label's predicted probability; for dense outputs, also "iou"."""
    types: dict[str, dict[str, float]] = field(default_factory=dict)
    """Results for each type of shift: "accuracy", "nll" and "ece", rounded to six significant digits; empty unless there are several
    types."""
    regression: RegressionDetail | None = None


@dataclass(frozen=True)
class OutlierResult:
    """Results of a method on outliers."""

    count: int
    confidence: float | None
    """Mean confidence (MMC), where confidence is the largest probability; None for regression."""
    scores: dict[str, dict[str, float]]
    """Metrics that show how well each outlier score separates outliers from the test set: "auroc", "aupr_in", "aupr_out", "fpr95"
    (inliers are the positive class) and "fpr95_out" (outliers are the positive class). Some stored records lack "fpr95_out"."""
    histogram: list[int]
    confidence_error: float | None = None
    """Standard error of `confidence`, computed over the outliers; None in suites or if there is only one outlier."""
    errors: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """Standard errors of the "auroc" and "fpr95" of each outlier score, computed over the test data and the outliers."""
    std: float | None = None
    """Standard deviation predicted by a regression model, averaged over inputs and outputs."""
    std_error: float | None = None
    """Standard error of `std`, computed over the outliers."""


@dataclass(frozen=True)
class Examples:
    """Predictions of a method for the first few inputs of a set, in order."""

    confidence: list[float]
    label: list[int]
    """Predicted classes."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Settings and results of one method in one run."""

    suite: str
    method: str
    """Name shown in tables, unique within the suite."""
    group: str = "main"
    """Group of the method: "main", or the name of an ablation."""
    run: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the method: structure, link, rule, weights and number of components."""
    networks: list[str] = field(default_factory=list)
    """Checksums of the networks used."""
    data: dict[str, str] = field(default_factory=dict)
    """Checksums of the data sets used, by name."""
    chosen: dict[str, Any]
    """Tuned values: "prior_precision" (a list), "temperature", "distance_exponent", "weights", "rule" (a description) and "notes".
    The entry "ood_score" is the name of the posterior's outlier score."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time in seconds taken to "fit" (including tuning) and to "predict". In suites, both steps start from stored activations."""
    labelled: dict[str, LabelledResult]
    """Results on the labelled sets, by set name, starting with the test set."""
    outliers: dict[str, OutlierResult]
    examples: dict[str, Examples] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    measures: dict[str, dict[str, float]] = field(default_factory=dict)
    """Additional measures that the suite defines, keyed by name. Files omit this entry if it is empty."""
    overlap: float = 0.0
    """In a cross-fit, whose runs share data, the ratio of test examples to examples used for fitting and tuning; 0 if every run has
    its own networks. Files omit this entry because it follows from the settings in the suite's document."""

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain JSON values for a suite's file, without the entries that only single-run comparisons have."""
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
        """Create a record from JSON values returned by `to_json`."""
        check(document, SCHEMA, "")
        for name, known in ENTRIES.items():
            if unknown := sorted({entry for one in document[name].values() for entry in one} - known):
                raise StorageError(f"the record is damaged: {name!r} has unknown entries {unknown[:3]}.")
        results = [*document["labelled"].values(), *document["outliers"].values()]
        if any(len(one["histogram"]) not in (0, CONFIDENCE_BINS) for one in results):
            raise StorageError(f"the record is damaged: expected histograms with {CONFIDENCE_BINS} bins.")
        for name, one in document["labelled"].items():
            check(one.get("types", {}), NUMBERS, f"labelled.{name}.types")
            if any(len(row) != 3 for row in one["reliability"]):
                raise StorageError("the record is damaged: expected three numbers for each reliability bin.")
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
"""Names of the entries that each type of result may have in a suite's record."""


@dataclass(frozen=True)
class Pictures:
    """The first few images of a set."""

    pixels: NDArray[np.uint8]
    """Pixels, shape (n, height, width, channels), with 1 or 3 channels."""
    labels: tuple[int, ...] | None = None
    """Classes of the images, or None for outliers."""


@dataclass(frozen=True)
class AnswerResult:
    """A guaranteed error rate, and the error rate observed on the test data."""

    promised: float
    certainty: float
    threshold: float | None
    """Confidence above which an input that raises no alarm is answered, or None if no threshold guarantees the error rate."""
    answered: float | None = None
    """Share of the test inputs that are answered."""
    realised: float | None = None
    """Error rate of the answers on the test data."""
    why: str = ""
    """Reason why there is no threshold; empty if a threshold exists."""


@dataclass(frozen=True)
class SetResult:
    """The guaranteed coverage of prediction sets, and their coverage on the test data."""

    promised: float
    realised: float
    size: float
    """Mean number of classes per prediction set."""
    empty: float
    """Share of prediction sets that contain no class."""
    classes: dict[str, float]
    """Coverage for each class in the test data."""


@dataclass(frozen=True)
class IntervalResult:
    """The guaranteed coverage of prediction intervals, and their coverage on the test data."""

    promised: float
    realised: float
    realised_error: float | None
    """Standard error of `realised`, computed over the test data."""
    width: float
    """Width of the intervals, averaged over inputs and outputs."""


@dataclass(frozen=True)
class DecisionResult:
    """Decisions on the test data, made with thresholds calibrated on the validation data."""

    false_alarm_rate: float
    alarms: float
    """Share of the test inputs that raise an alarm."""
    curves: dict[str, list[list[float]]]
    """Risk-coverage curve of each method: pairs of coverage and error rate, starting with the most confident predictions."""
    answers: list[AnswerResult]
    sets: SetResult | None
    intervals: list[IntervalResult] = field(default_factory=list)
    """Calibrated intervals of a regression model."""


@dataclass(frozen=True)
class Comparison:
    """Results of several methods on the same sets: the content of a report."""

    title: str
    sets: dict[str, SetInfo]
    """Data sets by name: first the test set, then the shifted sets in order of level, then the outlier sets."""
    records: tuple[Record, ...]
    """Records in the order of the methods; all records of a method are adjacent."""
    classes: tuple[str, ...] = ()
    """Names of the classes (or, for regression, of the outputs), in the order of the networks' outputs."""
    leads: dict[str, dict[str, Lead]] = field(default_factory=dict)
    """For single-run comparisons, the best method for each set and metric. On labelled sets, the metrics are "accuracy", "nll",
    "brier" and "ece", with entries named `(method,)`. On outlier sets, "confidence" and "max probability" (the AUROC of this score)
    have entries named `(method,)`, whereas "auroc" and "fpr95" have entries named `(method, score)`."""
    pictures: dict[str, Pictures] = field(default_factory=dict)
    """The first few images of each set that contains images, by set name."""
    notes: tuple[str, ...] = ()
    """Notes on tuning, and caveats about the data."""
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)
    """Reason why each unusable input was left out, by set name and input name."""
    made: Mapping[str, Any] = field(default_factory=dict)
    """Provenance of the comparison: versions, computing time and files."""
    decisions: DecisionResult | None = None
    """Decisions on the test data, if the posterior's folder contains validation predictions."""
    regression: bool = False
    differences: dict[str, dict[str, tuple[float, float | None]]] = field(default_factory=dict)
    """The nll (for regression, also rmse and crps) of every other method minus that of `own`, with standard errors."""

    def document(self) -> dict[str, Any]:
        """Return the sets, results, leads and decisions as plain JSON values for `numbers.json`, without empty entries."""
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
        """Return the sets that have the given role."""
        return [one for one in self.sets.values() if one.role == role]

    @property
    def test(self) -> SetInfo:
        """The test set."""
        return self.of_role("test")[0]

    @property
    def methods(self) -> dict[str, Record]:
        """The first record of each method."""
        found: dict[str, Record] = {}
        for record in self.records:
            found.setdefault(record.method, record)
        return found

    @property
    def runs(self) -> dict[str, tuple[Record, ...]]:
        """All records of each method, in the order of the runs."""
        return {name: tuple(one for one in self.records if one.method == name) for name in self.methods}

    @property
    def own(self) -> str:
        """Name of the last method: MoLA, or LLLA if there is only one network."""
        return self.records[-1].method

    @property
    def baseline(self) -> str:
        """Name of the method without a posterior: the deep ensemble, or MAP if there is only one network."""
        return "DE" if "DE" in self.methods else "MAP"


def _filled(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _filled(one) for name, one in value.items() if one is not None and one not in ({}, [], (), "")}
