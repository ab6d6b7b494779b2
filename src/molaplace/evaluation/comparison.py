"""The results of methods on the same data sets, as plain values from which reports are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal

from molaplace.errors import importing
from molaplace.evaluation.estimates import Estimate
from molaplace.evaluation.leads import Lead

CONFIDENCE_BINS = 50
"""Number of equal-width bins from 0 to 1 in the confidence histograms."""

SHOWN = (
    *("accuracy", "rmse", "nll", "crps", "brier", "ece", "aurc", "confidence", "auroc", "std", "coverage_90"),
    *(f"{metric}_{score}" for score in ("max_probability", "variance", "ood_score") for metric in ("auroc", "fpr95")),
)
"""Metrics in the table that a terminal or notebook shows."""

Role = Literal["train", "validation", "test", "shift", "outlier"]
"""Role of a data set in a comparison."""


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

    @property
    def num_inputs(self) -> int:
        """Number of inputs."""
        return self.count if self.inputs is None else self.inputs


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
    """Metrics by name; see `METRICS`. For regression: "rmse", "nll", "crps", "std", and the coverage and mean width of intervals, such
    as "coverage_90" and "width_90"."""
    reliability: list[list[float]]
    """Number of predictions, sum of their confidences and number of correct predictions in each confidence bin: at most 8
    bins with equal numbers of expected errors in single-run comparisons, 15 of equal width in suites; empty in ablations."""
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
class MethodResult:
    """Results of a method on every set of a comparison."""

    chosen: dict[str, Any]
    """Tuned values, such as "prior_precision" (a list), "temperature" or "noise"."""
    labelled: dict[str, LabelledResult]
    """Results on the labelled sets, by set name, starting with the test set."""
    outliers: dict[str, OutlierResult]


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
class Evaluation:
    """Results of several methods on the same sets, returned by `mola.evaluate`: a table of metrics with standard errors.

    It is shown in terminals and notebooks. `table[predictor, data]` maps the name of each metric to an `Estimate`, a value and its
    standard error, `to_frame()` returns a data frame, and `save("folder")` writes a page with tables, figures and a verdict.
    """

    title: str
    subject: str
    """Name of the method that the evaluation is about, such as MoLA; the verdict compares it with the others."""
    sets: dict[str, SetInfo]
    """Data sets by name: first the test set, then the shifted sets in order of level, then the outlier sets."""
    methods: dict[str, MethodResult]
    """Results by method."""
    classes: tuple[str, ...] = ()
    """Names of the classes (or, for regression, of the outputs), in the order of the networks' outputs."""
    leads: dict[str, dict[str, Lead]] = field(default_factory=dict)
    """For single-run comparisons, the best method for each set and metric. On labelled sets, the metrics are all that have a
    direction and a standard error, with entries named `(method,)`. On outlier sets, "confidence" and "max probability" (the AUROC of
    this score) have entries named `(method,)`, whereas "auroc" and "fpr95" have entries named `(method, score)`."""
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
    """The nll (for regression, also rmse and crps) of every other method minus that of `subject`, with standard errors."""

    @property
    def entries(self) -> dict[tuple[str, str], dict[str, Estimate]]:
        """Metrics by method and set, in the order of the table."""
        entries = {}
        for method, result in self.methods.items():
            for name, on_set in result.labelled.items():
                entries[method, name] = {
                    metric: Estimate.of(on_set.metrics[metric], error) for metric, error in on_set.errors.items()
                }
            for name, outliers in result.outliers.items():
                entries[method, name] = {
                    f"{metric}_{score.replace(' ', '_')}": Estimate.of(outliers.scores[score][metric], error)
                    for score, errors in outliers.errors.items()
                    for metric, error in errors.items()
                }
        return entries

    def __getitem__(self, key: tuple[str, str]) -> Mapping[str, Estimate]:
        entries = self.entries
        if key not in entries:
            listed = ", ".join(map(str, entries))
            raise KeyError(f"there is no row {key!r}; expected (predictor, data) to be one of {listed}")
        return entries[key]

    def _tables(self) -> list[list[list[str]]]:
        # Labelled data and outliers are shown in separate tables with the main metrics, each with its own header.
        tables: dict[tuple[str, ...], list[list[str]]] = {}
        entries = self.entries
        for outlying in (False, True):
            rows = {key: row for key, row in entries.items() if (self.sets[key[1]].role == "outlier") == outlying}
            names = tuple(dict.fromkeys(name for row in rows.values() for name in row if name in SHOWN))
            for (method, name), row in rows.items():
                table = tables.setdefault(names, [["predictor", "data", "count", *names]])
                cells = [str(row[metric]) if metric in row else "" for metric in names]
                table.append([method, name, f"{self.sets[name].num_inputs:,}", *cells])
        return list(tables.values())

    def __repr__(self) -> str:
        return "\n\n".join(map(_aligned, self._tables()))

    def _repr_html_(self) -> str:
        parts = []
        for header, *rows in self._tables():
            cells = [("th", header), *(("td", row) for row in rows)]
            lines = ["".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) for tag, row in cells]
            parts.append(f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>")
        return "".join(parts)

    def to_frame(self) -> Any:
        """Return a pandas data frame with a row per predictor and data set, and columns for each metric and its error (`_se`)."""
        with importing("to_frame", "pandas", "cli"):
            import pandas
        entries = self.entries
        records = []
        for (_, name), row in entries.items():
            values = {metric: estimate.value for metric, estimate in row.items()}
            errors = {f"{metric}_se": estimate.error for metric, estimate in row.items()}
            records.append({"count": self.sets[name].num_inputs} | values | errors)
        return pandas.DataFrame(records, index=pandas.MultiIndex.from_tuples(entries, names=["predictor", "data"]))

    def save(self, directory: str | Path, *, overwrite: bool = False) -> Path:
        """Write a page with the verdict, tables and figures to a folder, and return the path of the page.

        The page, `index.html`, is self-contained. Beside it are `numbers.json`, `tables.md` and the figures as SVG and PNG. An older page
        in the folder is replaced; a folder with other content is refused.

        Args:
            directory: the folder, which is created if it does not exist.
            overwrite: whether to write even if the folder has other content. Only files that molaplace wrote are ever replaced.
        """
        with importing("save", "matplotlib", "cli"):
            from molaplace.report.writing import write_evaluation
        return write_evaluation(self, Path(directory), overwrite=overwrite)

    def document(self) -> dict[str, Any]:
        """Return the sets, results, leads and decisions as plain JSON values for `numbers.json`, without empty entries."""
        document = asdict(self)
        entries = ("sets", "leads", "differences", "decisions", "notes", "left_out", "made")
        methods = {
            method: {entry: result[entry] for entry in ("chosen", "labelled", "outliers")}
            for method, result in document["methods"].items()
        }
        plain: dict[str, Any] = _filled(
            {"format": "mola-evaluation", "version": 1, "methods": methods}
            | {entry: document[entry] for entry in entries}
        )
        return plain

    def of_role(self, role: Role) -> list[SetInfo]:
        """Return the sets that have the given role."""
        return [info for info in self.sets.values() if info.role == role]

    @property
    def test(self) -> SetInfo:
        """The test set."""
        return self.of_role("test")[0]

    @property
    def on_test(self) -> dict[str, LabelledResult]:
        """Results of each method on the test set."""
        return {method: result.labelled[self.test.name] for method, result in self.methods.items()}

    @property
    def baseline(self) -> str:
        """Name of the method without a posterior: the deep ensemble, MAP, or else the first other method, if there is one."""
        others = [method for method in self.methods if method != self.subject]
        return next((method for method in ("DE", "MAP", *others) if method in self.methods), self.subject)


def _aligned(table: Sequence[Sequence[str]]) -> str:
    # The first two columns are aligned on the left, the numbers on the right.
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for cells in table:
        padded = [
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _filled(value: Any) -> Any:
    # Remove entries that are empty or unknown.
    if not isinstance(value, dict):
        return value
    return {
        name: _filled(entry) for name, entry in value.items() if entry is not None and entry not in ({}, [], (), "")
    }
