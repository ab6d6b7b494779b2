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

from molaplace.evaluation import CLEAR, Estimate, LabelledResult, SetInfo
from molaplace.metrics import least_area_under_risk_coverage
from molaplace.report.numbers import Quantity, estimates_of
from molaplace.report.tables import Column, Number, Table, make_table, quantity_table
from molaplace_lab.record import Record

SAME = 1e-9
"""Tolerance for ties: two methods tie if both their difference and its standard error are below this value."""


@dataclass(frozen=True)
class RunMean:
    """A mean over runs with its standard error."""

    value: float
    error: float | None
    """Standard error of the mean; None if it is unknown, for example after a single run."""
    runs: int
    by_run: Mapping[int, float] = field(default_factory=dict, compare=False, repr=False)
    """Values of the individual runs, needed to compute differences between methods."""
    overlap: float = field(default=0.0, compare=False, repr=False)
    """Correction for runs that share data; see `molaplace_lab.record.Record.overlap`."""

    @classmethod
    def over(cls, values: Mapping[int, float], overlap: float = 0.0) -> RunMean | None:
        """Return the mean m over n runs and its standard error sqrt(sum (x - m)^2 / (n - 1) (1 / n + overlap)), or None if n = 0."""
        if not values:
            return None
        mean = math.fsum(values.values()) / len(values)
        return cls(mean, _error(list(values.values()), overlap), len(values), values, overlap)

    def minus(self, other: RunMean) -> RunMean:
        """Return the mean difference over the shared runs, or the difference of the means if fewer than two runs are shared.

        In the second case, an estimate from a single run is assumed to have the same spread as the other estimate. If both estimates
        come from a single run, the error is unknown.
        """
        shared = [run for run in self.by_run if run in other.by_run]
        if len(shared) > 1:
            gaps = {run: self.by_run[run] - other.by_run[run] for run in shared}
            overlap = max(self.overlap, other.overlap)
            return RunMean(math.fsum(gaps.values()) / len(gaps), _error(list(gaps.values()), overlap), len(gaps), gaps)
        errors = [one for one in (self._error_beside(other), other._error_beside(self)) if one is not None]
        runs = min((one.runs for one in (self, other) if one.error is not None), default=1)
        return RunMean(self.value - other.value, math.hypot(*errors) if len(errors) == 2 else None, runs)

    def _error_beside(self, other: RunMean) -> float | None:
        if self.error is not None or other.error is None:
            return self.error
        return other.error * math.sqrt(other.runs / self.runs)

    def scaled(self, factor: float) -> RunMean:
        """Return the estimate multiplied by a factor."""
        error = None if self.error is None else abs(factor) * self.error
        by_run = {run: factor * value for run, value in self.by_run.items()}
        return replace(self, value=factor * self.value, error=error, by_run=by_run)

    def text(self, digits: int) -> str:
        """Format the estimate as `98.9 ± 0.1`, or as `98.9` if the error is unknown."""
        mean = f"{self.value:z.{digits}f}"
        return mean if self.error is None else f"{mean} \N{PLUS-MINUS SIGN} {self.error:.{digits}f}"


def _error(values: Sequence[float], overlap: float) -> float | None:
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) * (1 / count + overlap))


def leaders(estimates: Mapping[str, RunMean | None], better: Literal["low", "high"]) -> list[str]:
    """Return the best method and all methods that tie with it, if they lead all other methods by more than chance would explain.

    The lead must be at least as significant as a lead of `mola.evaluation.CLEAR` standard errors under a normal distribution. Under
    Student's t-distribution, this requires 2.9 standard errors for five runs and 14 for two runs.
    """
    sign = 1 if better == "high" else -1
    known = {name: estimate for name, estimate in estimates.items() if estimate is not None}
    if len(known) < 2:
        return []
    first = max(known, key=lambda name: sign * known[name].value)
    best = [first]
    for name, other in known.items():
        gap = known[first].minus(other)
        if name == first:
            continue
        if gap.error is not None and max(sign * gap.value, gap.error) < SAME:
            best.append(name)
        elif not is_clear(gap):
            return []
    return best if len(best) < len(known) else []


def is_clear(gap: RunMean) -> bool:
    """Return True if the difference is unlikely to be due to chance alone."""
    if gap.error is None or gap.value == 0 or gap.runs < 2:
        return False
    from scipy.special import stdtr

    times = math.inf if gap.error == 0 else abs(gap.value) / gap.error
    return bool(1 - 2 * stdtr(gap.runs - 1, -times) > math.erf(CLEAR / math.sqrt(2)))


# --- numbers of records ----------------------------------------------------------------------------------------------

BY_CONFIDENCE = "max probability"
"""Outlier score used in tables that show only one score."""

EXCESS = "excess_aurc"
"""Name of the excess AURC: the AURC minus its minimum for the same number of errors."""


def _excess(result: LabelledResult) -> dict[str, float]:
    if not {"aurc", "accuracy"} <= result.metrics.keys():
        return {}
    wrong = round((1 - result.metrics["accuracy"]) * result.count)
    return {EXCESS: result.metrics["aurc"] - least_area_under_risk_coverage(result.count, wrong)}


def _estimates_of(record: Record) -> dict[Quantity, Estimate]:
    # Return every number of a record with its standard error over the data points.
    estimates = dict(estimates_of(record))
    for name, result in record.labelled.items():
        estimates |= {Quantity(name, metric): Estimate(value) for metric, value in _excess(result).items()}
        for kind, metrics in result.types.items():
            estimates |= {Quantity(name, metric, kind=kind): Estimate(value) for metric, value in metrics.items()}
    for measure, values in record.measures.items():
        estimates |= {Quantity(measure, metric): Estimate(value) for metric, value in values.items()}
    return estimates


class Numbers:
    """Means over each method's runs, with standard errors; for a single run, the standard errors are computed over the data points."""

    def __init__(self, methods: Mapping[str, Sequence[Record]]) -> None:
        records = [record for found in methods.values() for record in found]
        self.methods = tuple(methods)
        self.overlap = max((record.overlap for record in records), default=0.0)
        levels = {(name, one.level) for record in records for name, one in record.labelled.items()}
        self.levels = sorted({level for _, level in levels})
        self._sets = {level: tuple(sorted(name for name, own in levels if own == level)) for level in self.levels}
        self._runs: dict[str, dict[int, Mapping[Quantity, Estimate]]] = {
            method: {record.run: _estimates_of(record) for record in found} for method, found in methods.items()
        }

    def __call__(self, quantity: Quantity, factor: float = 1.0) -> dict[str, RunMean | None]:
        """Return each method's estimate of the quantity, multiplied by a factor, or None for a method that lacks the quantity."""
        sets = (quantity.sets,) if isinstance(quantity.sets, str) else quantity.sets
        keys = [replace(quantity, sets=name) for name in sets]
        estimates: dict[str, RunMean | None] = {}
        for method, runs in self._runs.items():
            known = {
                run: [found[key] for key in keys]
                for run, found in runs.items()
                if keys and all(key in found for key in keys)
            }
            means = {run: sum(value for value, _ in pairs) / len(pairs) for run, pairs in known.items()}
            one = RunMean.over(means, self.overlap)
            if one is not None and one.runs == len(keys) == 1:
                ((_, error),) = next(iter(known.values()))
                one = replace(one, error=None if math.isnan(error) else error)
            estimates[method] = None if one is None else one.scaled(factor)
        return estimates

    def at_level(self, level: float, metric: str, kind: str = "") -> Quantity:
        """Specify the mean of a metric over all sets at one level of shift."""
        return Quantity(self._sets.get(level, ()), metric, kind=kind)

    def shifted(self, metric: str) -> Quantity:
        """Specify the mean of a metric over all shifted sets."""
        return Quantity(tuple(name for level in self.levels if level for name in self._sets[level]), metric)


def levels_of(sets: Mapping[str, SetInfo]) -> list[float]:
    """Return the levels of shift, including 0 for the test set."""
    return sorted({one.level for one in sets.values() if one.role in ("test", "shift")})


def shared_outliers(sets: Mapping[str, SetInfo], methods: Mapping[str, Sequence[Record]]) -> list[SetInfo]:
    """Return the outlier sets that all records have in common; means over different sets would not be comparable."""
    records = [record for found in methods.values() for record in found]
    return [
        info
        for info in sets.values()
        if info.role == "outlier" and all(info.name in record.outliers for record in records)
    ]


LEADS = (
    "A number is bold if it is better than those of all other methods by more than chance would explain "
    "(paired t-test over runs, 95 %)."
)
"""Caption that explains bold numbers in the tables of suites."""


def runs_words(methods: Mapping[str, Sequence[Record]]) -> str:
    """Return a sentence such as "Mean ± standard error over 2 to 4 runs." for the caption of a table."""
    counts = [len(records) for records in methods.values()]
    if max(counts) == 1:
        return "With one run, the spread is unknown, so no number is bold."
    counted = " to ".join(str(count) for count in dict.fromkeys((min(counts), max(counts))))
    if any(record.overlap > 0 for records in methods.values() for record in records):
        counted += " rotations of a cross-fit, corrected for shared data (Nadeau and Bengio, 2003)"
    else:
        counted += " runs"
    return f"Mean \N{PLUS-MINUS SIGN} standard error over {counted}."


# --- tables ----------------------------------------------------------------------------------------------------------


def marked_table(
    title: str,
    caption: str,
    columns: Sequence[Column],
    values: Mapping[str, Sequence[Number]],
    aside: Mapping[str, Sequence[Number]] | None = None,
) -> Table:
    """Return a table of means over runs; in each column, the methods that lead all others are bold."""
    best = [
        (name, index)
        for index, column in enumerate(columns)
        for name in _leaders({method: row[index] for method, row in values.items()}, column)
    ]
    return make_table(title, caption, columns, values, aside, best)


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
    means = {name: RunMean(value, None, 1) if isinstance(value, float) else value for name, value in values.items()}
    return leaders({name: mean if isinstance(mean, RunMean) else None for name, mean in means.items()}, column.better)
