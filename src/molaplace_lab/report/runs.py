"""Means over runs with standard errors, tests of whether a method's lead is larger than chance would explain, and tables of means.

Runs with separately trained networks are independent. Runs of a cross-fit share networks and data, so their spread understates the
error of their mean. If each of J runs has n test examples and m other examples, the variance s^2 / J of the mean is replaced by
s^2 (1 / J + n / m) (Nadeau and Bengio, Machine Learning 52, 2003).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from molaplace.evaluation import CLEAR, Estimate, SetInfo
from molaplace.metrics import least_area_under_risk_coverage
from molaplace.report.numbers import Quantity, estimates_of
from molaplace.report.tables import Column, Number, Table, make_table, quantity_table
from molaplace_lab.records import Record

TIE_OF_RUNS = 1e-9
"""Tolerance for ties: two methods tie if both their difference and its standard error are below this value."""


@dataclass(frozen=True)
class RunMean:
    """A mean over runs with its standard error."""

    value: float
    error: float
    """Standard error of the mean; NaN if it is unknown, for example after a single run."""
    runs: int
    by_run: Mapping[int, float] = field(default_factory=dict, compare=False, repr=False)
    """Values of the individual runs, needed to compute differences between methods."""
    overlap: float = field(default=0.0, compare=False, repr=False)
    """Correction for runs that share data; see `molaplace_lab.report.reading.SuiteResults.overlap`."""

    @classmethod
    def over(cls, by_run: Mapping[int, float], overlap: float = 0.0) -> RunMean | None:
        """Return the mean m over n runs and its standard error sqrt(sum (x - m)^2 / (n - 1) (1 / n + overlap)), or None if n = 0."""
        if not by_run:
            return None
        count = len(by_run)
        mean = math.fsum(by_run.values()) / count
        error = math.nan
        if count > 1:
            sum_of_squares = math.fsum((value - mean) ** 2 for value in by_run.values())
            error = math.sqrt(sum_of_squares / (count - 1) * (1 / count + overlap))
        return cls(mean, error, count, by_run, overlap)

    @property
    def known(self) -> bool:
        """Whether the standard error is known."""
        return not math.isnan(self.error)

    def minus(self, other: RunMean) -> RunMean:
        """Return the mean difference over the shared runs, or the difference of the means if fewer than two runs are shared.

        In the second case, an estimate from a single run is assumed to have the same spread as the other estimate. If both estimates
        come from a single run, the error is unknown.
        """
        gaps = {run: value - other.by_run[run] for run, value in self.by_run.items() if run in other.by_run}
        if len(gaps) > 1 and (mean := RunMean.over(gaps, max(self.overlap, other.overlap))):
            return mean
        error = math.hypot(self._error_beside(other), other._error_beside(self))
        runs = min((mean.runs for mean in (self, other) if mean.known), default=1)
        return RunMean(self.value - other.value, error, runs)

    def _error_beside(self, other: RunMean) -> float:
        return self.error if self.known else other.error * math.sqrt(other.runs / self.runs)

    def scaled(self, factor: float) -> RunMean:
        """Return the estimate multiplied by a factor."""
        by_run = {run: factor * value for run, value in self.by_run.items()}
        return replace(self, value=factor * self.value, error=abs(factor) * self.error, by_run=by_run)

    def text(self, digits: int) -> str:
        """Format the estimate as `98.9 ± 0.1`, or as `98.9` if the error is unknown."""
        return Estimate(self.value, self.error).text(digits)


def leaders(means: Mapping[str, RunMean | None], better: Literal["low", "high"]) -> list[str]:
    """Return the best method and all methods that tie with it, if they lead all other methods by more than chance would explain.

    The lead must be at least as significant as a lead of `mola.evaluation.CLEAR` standard errors under a normal distribution. Under
    Student's t-distribution, this requires 2.9 standard errors for five runs and 14 for two runs.
    """
    sign = 1 if better == "high" else -1
    known = {name: mean for name, mean in means.items() if mean is not None}
    if len(known) < 2:
        return []
    first = max(known, key=lambda name: sign * known[name].value)
    best = [first]
    for name, other in known.items():
        gap = known[first].minus(other)
        if name == first:
            continue
        if gap.known and max(sign * gap.value, gap.error) < TIE_OF_RUNS:
            best.append(name)
        elif not is_clear(gap):
            return []
    return best if len(best) < len(known) else []


def is_clear(gap: RunMean) -> bool:
    """Return True if the difference is unlikely to be due to chance alone."""
    if not gap.known or gap.value == 0 or gap.runs < 2:
        return False
    from scipy.special import stdtr

    times = math.inf if gap.error == 0 else abs(gap.value) / gap.error
    return bool(1 - 2 * stdtr(gap.runs - 1, -times) > math.erf(CLEAR / math.sqrt(2)))


# --- numbers of records ----------------------------------------------------------------------------------------------

EXCESS = "excess_aurc"
"""Name of the excess AURC: the AURC minus its minimum for the same number of errors."""


def _estimates_of(record: Record) -> dict[Quantity, Estimate]:
    # Return every number of a record, with its standard error over the data points where that is known.
    estimates = dict(estimates_of(record.labelled, record.outliers))
    for name, result in record.labelled.items():
        if {"aurc", "accuracy"} <= result.metrics.keys():
            wrong = round((1 - result.metrics["accuracy"]) * result.count)
            least = least_area_under_risk_coverage(result.count, wrong)
            estimates[Quantity(name, EXCESS)] = Estimate(result.metrics["aurc"] - least)
        for kind, metrics in result.types.items():
            estimates |= {Quantity(name, metric, kind=kind): Estimate(value) for metric, value in metrics.items()}
    for measure, values in record.measures.items():
        estimates |= {Quantity(measure, metric): Estimate(value) for metric, value in values.items()}
    return estimates


class Numbers:
    """Means over each method's runs, with standard errors; for a single run, the standard errors are computed over the data points."""

    def __init__(self, methods: Mapping[str, Sequence[Record]], overlap: float = 0.0) -> None:
        self.overlap = overlap
        names: dict[float, set[str]] = {}
        for record in (record for records in methods.values() for record in records):
            for name, result in record.labelled.items():
                names.setdefault(result.level, set()).add(name)
        self._sets = {level: tuple(sorted(names[level])) for level in sorted(names)}
        self._runs: dict[str, dict[int, Mapping[Quantity, Estimate]]] = {
            method: {record.run: _estimates_of(record) for record in records} for method, records in methods.items()
        }

    def __call__(self, quantity: Quantity, factor: float = 1.0) -> dict[str, RunMean | None]:
        """Return each method's estimate of the quantity, multiplied by a factor, or None for a method that lacks the quantity."""
        sets = (quantity.sets,) if isinstance(quantity.sets, str) else quantity.sets
        quantities = [replace(quantity, sets=name) for name in sets]
        means = {method: self._mean(runs, quantities) for method, runs in self._runs.items()}
        return {method: None if mean is None else mean.scaled(factor) for method, mean in means.items()}

    def _mean(self, runs: Mapping[int, Mapping[Quantity, Estimate]], quantities: Sequence[Quantity]) -> RunMean | None:
        complete = {run: numbers for run, numbers in runs.items() if quantities and numbers.keys() >= set(quantities)}
        values = {run: [numbers[quantity].value for quantity in quantities] for run, numbers in complete.items()}
        mean = RunMean.over({run: sum(of_run) / len(of_run) for run, of_run in values.items()}, self.overlap)
        if mean is None or not mean.runs == len(quantities) == 1:
            return mean
        (numbers,) = complete.values()
        return replace(mean, error=numbers[quantities[0]].error)

    @property
    def over_runs(self) -> str:
        """A sentence such as "Mean ± standard error over 2 to 4 runs." for the caption of a table."""
        counts = [len(runs) for runs in self._runs.values()]
        if max(counts) == 1:
            return "With one run, the spread is unknown, so no number is bold."
        sizes = " to ".join(str(count) for count in dict.fromkeys((min(counts), max(counts))))
        kind = (
            "rotations of a cross-fit, corrected for shared data (Nadeau and Bengio, 2003)" if self.overlap else "runs"
        )
        return f"Mean \N{PLUS-MINUS SIGN} standard error over {sizes} {kind}."

    def at_level(self, level: float, metric: str, kind: str = "") -> Quantity:
        """Specify the mean of a metric over all sets at one level of shift."""
        return Quantity(self._sets.get(level, ()), metric, kind=kind)

    @property
    def shifted_sets(self) -> tuple[str, ...]:
        """Names of all shifted sets."""
        return tuple(name for level, names in self._sets.items() if level for name in names)

    def shifted(self, metric: str) -> Quantity:
        """Specify the mean of a metric over all shifted sets."""
        return Quantity(self.shifted_sets, metric)


def levels_of(sets: Mapping[str, SetInfo]) -> list[float]:
    """Return the levels of shift, including 0 for the test set."""
    return sorted({info.level for info in sets.values() if info.role in ("test", "shift")})


def shared_outliers(sets: Mapping[str, SetInfo], methods: Mapping[str, Sequence[Record]]) -> list[SetInfo]:
    """Return the outlier sets that all records have in common; means over different sets would not be comparable."""
    outliers = [info for info in sets.values() if info.role == "outlier"]
    return [
        info
        for info in outliers
        if all(info.name in record.outliers for records in methods.values() for record in records)
    ]


LEADS = (
    "A number is bold if it is better than those of all other methods by more than chance would explain "
    "(paired t-test over runs, 95 %)."
)
"""Caption that explains bold numbers in the tables of suites."""


# --- tables ----------------------------------------------------------------------------------------------------------


def marked_table(
    title: str,
    caption: str,
    columns: Sequence[Column],
    values: Mapping[str, Sequence[Number]],
) -> Table:
    """Return a table of means over runs; in each column, the methods that lead all others are bold."""
    best = [
        (name, index)
        for index, column in enumerate(columns)
        for name in _leaders({method: row[index] for method, row in values.items()}, column)
    ]
    return make_table(title, caption, columns, values, best=best)


def records_table(
    title: str,
    caption: str,
    numbers: Numbers,
    columns: Sequence[Column],
    aside: Mapping[str, Sequence[Number]] | None = None,
) -> Table:
    """Return a table with the numbers of each method; columns without numbers are omitted unless `aside` has rows."""
    return quantity_table(title, caption, numbers, columns, aside, lambda column, values: _leaders(values, column))


def _leaders(values: Mapping[str, Number], column: Column) -> list[str]:
    if column.better is None:
        return []
    means: dict[str, RunMean | None] = {}
    for name, value in values.items():
        mean = RunMean(value, math.nan, 1) if isinstance(value, float) else value
        means[name] = mean if isinstance(mean, RunMean) else None
    return leaders(means, column.better)
