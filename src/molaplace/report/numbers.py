"""Access to the numbers in records, and estimates of their means over runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from molaplace.evaluation.record import Comparison, LabelledResult, Record, SetInfo
from molaplace.metrics import least_area_under_risk_coverage
from molaplace.report.estimate import Estimate

BY_CONFIDENCE = "max probability"
"""Outlier score used in tables that show only one score."""

EXCESS = "excess_aurc"
"""Name of the excess AURC: the AURC minus its minimum for the same number of errors."""


def _excess(result: LabelledResult) -> dict[str, float]:
    if not {"aurc", "accuracy"} <= result.metrics.keys():
        return {}
    wrong = round((1 - result.metrics["accuracy"]) * result.count)
    return {EXCESS: result.metrics["aurc"] - least_area_under_risk_coverage(result.count, wrong)}


@dataclass(frozen=True)
class On:
    """A metric on one set, or its mean over several sets; the mean is unknown if any set lacks the metric."""

    sets: str | tuple[str, ...]
    metric: str
    score: str = ""
    """Outlier score from which a metric such as "auroc" or "fpr95" is computed."""
    kind: str = ""
    """Type of shift, such as "fog"; empty if the metric covers all types."""


def _numbers_of(record: Record) -> Iterator[tuple[On, float | None, float | None]]:
    # Yield every number with its standard error over the data points, or with None if the error is unknown.
    for name, found in record.labelled.items():
        for metric, value in {**found.metrics, **_excess(found)}.items():
            yield On(name, metric), value, found.errors.get(metric)
        for kind, typed in found.types.items():
            for metric, value in typed.items():
                yield On(name, metric, kind=kind), value, None
    for name, out in record.outliers.items():
        yield On(name, "confidence"), out.confidence, out.confidence_error
        yield On(name, "std"), out.std, out.std_error
        for score, scored in out.scores.items():
            for metric, value in scored.items():
                yield On(name, metric, score), value, out.errors.get(score, {}).get(metric)
    for measure, given in record.measures.items():
        for metric, value in given.items():
            yield On(measure, metric), value, None


class Numbers:
    """Means over each method's runs, with standard errors; for a single run, the standard errors are computed over the data points."""

    def __init__(self, methods: Mapping[str, Sequence[Record]]) -> None:
        records = [record for found in methods.values() for record in found]
        self.methods = tuple(methods)
        self.overlap = max((record.overlap for record in records), default=0.0)
        levels = {(name, one.level) for record in records for name, one in record.labelled.items()}
        self.levels = sorted({level for _, level in levels})
        self._sets = {level: tuple(sorted(name for name, own in levels if own == level)) for level in self.levels}
        self._runs: dict[str, dict[int, dict[On, tuple[float, float | None]]]] = {
            method: {
                record.run: {on: (value, error) for on, value, error in _numbers_of(record) if value is not None}
                for record in found
            }
            for method, found in methods.items()
        }

    def __call__(self, quantity: On, factor: float = 1.0) -> dict[str, Estimate | None]:
        """Return each method's estimate of the quantity, multiplied by a factor, or None for a method that lacks the quantity."""
        sets = (quantity.sets,) if isinstance(quantity.sets, str) else quantity.sets
        keys = [replace(quantity, sets=name) for name in sets]
        estimates: dict[str, Estimate | None] = {}
        for method, runs in self._runs.items():
            known = {
                run: [found[key] for key in keys]
                for run, found in runs.items()
                if keys and all(key in found for key in keys)
            }
            means = {run: sum(value for value, _ in pairs) / len(pairs) for run, pairs in known.items()}
            one = Estimate.over(means, self.overlap)
            if one is not None and one.runs == len(keys) == 1:
                ((_, error),) = next(iter(known.values()))
                one = replace(one, error=error)
            estimates[method] = None if one is None else one.scaled(factor)
        return estimates

    def at_level(self, level: float, metric: str, kind: str = "") -> On:
        """Specify the mean of a metric over all sets at one level of shift."""
        return On(self._sets.get(level, ()), metric, kind=kind)

    def shifted(self, metric: str) -> On:
        """Specify the mean of a metric over all shifted sets."""
        return On(tuple(name for level in self.levels if level for name in self._sets[level]), metric)


def levels_of(comparison: Comparison) -> list[float]:
    """Return the levels of shift, including 0 for the test set."""
    return sorted({one.level for one in comparison.sets.values() if one.role in ("test", "shift")})


def shared_outliers(comparison: Comparison, methods: Mapping[str, Sequence[Record]]) -> list[SetInfo]:
    """Return the outlier sets that all records have in common; means over different sets would not be comparable."""
    records = [record for found in methods.values() for record in found]
    return [one for one in comparison.of_role("outlier") if all(one.name in record.outliers for record in records)]


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
