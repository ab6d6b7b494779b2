"""Numbers out of records: one for each run, then mean and standard error over runs, and who leads by more than chance.

Runs with networks of their own are independent. The runs of a cross-fit are not: they have the same networks, and an image that one
tests on, another tests, tunes or fits on. Their spread understates the error of their mean; with n test data and m others in each of
J such runs, it is corrected as by Nadeau and Bengio (Machine Learning 52, 2003): s^2 (1 / J + n / m) in place of s^2 / J.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from mola.compare.measured import CLEAR
from mola.compare.record import Comparison, LabelledResult, Record, SetInfo
from mola.metrics import least_area_under_risk_coverage

SAME = 1e-9
"""Means that differ by less, in every run, are of one method under two names."""


@dataclass(frozen=True)
class Estimate:
    """A mean over runs."""

    mean: float
    error: float | None
    """Standard error of the mean; None if there was one run only."""
    runs: int
    by_run: Mapping[int, float] = field(default_factory=dict, compare=False, repr=False)
    """The values by run, where these are known: what two methods have in common in a run cancels in their difference."""
    overlap: float = field(default=0.0, compare=False, repr=False)
    """Of runs that share data, test data for each of the others; see `mola.compare.record.Record.overlap`."""

    @classmethod
    def of(cls, values: Iterable[float | None], overlap: float = 0.0) -> Estimate | None:
        """Mean m and standard error sqrt(sum (x - m)^2 / (n - 1) (1 / n + overlap)) of what there is.

        Args:
            values: one for each run; None is left out.
            overlap: of runs that share data, test data for each of the others.

        Returns:
            The estimate, or None if there are no values.
        """
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(math.fsum(known) / len(known), _error(known, overlap), len(known), overlap=overlap)

    @classmethod
    def over(cls, values: Mapping[int, float | None], overlap: float = 0.0) -> Estimate | None:
        """The same of values by run, which are kept to be compared run by run."""
        known = {run: value for run, value in values.items() if value is not None}
        found = cls.of(known.values(), overlap)
        return None if found is None else replace(found, by_run=known)

    def minus(self, other: Estimate) -> Estimate:
        """The difference: over the runs that both have, or of the means where there are fewer than two of these.

        A method of one run is then taken to spread as the other does; where both have one run, no error is known.
        """
        shared = [run for run in self.by_run if run in other.by_run]
        if len(shared) > 1:
            gaps = [self.by_run[run] - other.by_run[run] for run in shared]
            overlap = max(self.overlap, other.overlap)
            return Estimate(math.fsum(gaps) / len(gaps), _error(gaps, overlap), len(gaps), overlap=overlap)
        errors = [self._error_beside(other), other._error_beside(self)]
        known = [error for error in errors if error is not None]
        error = math.hypot(*known) if len(known) == 2 else None
        # So many runs stand behind the error: the fewer of the two, but not the one that has none of its own.
        runs = min((one.runs for one in (self, other) if one.error is not None), default=1)
        return Estimate(self.mean - other.mean, error, runs)

    def _error_beside(self, other: Estimate) -> float | None:
        # The own error; for one run, what the other's would be if it had one run.
        if self.error is not None or other.error is None:
            return self.error
        return other.error * math.sqrt(other.runs / self.runs)

    def scaled(self, factor: float) -> Estimate:
        """The same in another unit."""
        error = None if self.error is None else abs(factor) * self.error
        by_run = {run: factor * value for run, value in self.by_run.items()}
        return replace(self, mean=factor * self.mean, error=error, by_run=by_run)

    def text(self, digits: int) -> str:
        """Such as `98.9 ± 0.1`, or `98.9` where no error is known."""
        mean = f"{self.mean:z.{digits}f}"
        return mean if self.error is None else f"{mean} \N{PLUS-MINUS SIGN} {self.error:.{digits}f}"


def leaders(found: Mapping[str, float | Estimate | None], better: Literal["low", "high"]) -> list[str]:
    """Who leads by more than chance: as sure of being ahead of every other as `mola.compare.CLEAR` errors are for many data.

    An error that is itself known from a few runs asks for more: 2.9 errors with five runs, 14 with two (Student's t).

    Args:
        found: estimates by name; numbers without an error cannot lead.
        better: which end is best.

    Returns:
        The best, with those that are the same in every run; nobody, if the lead may be chance.
    """
    sign = 1 if better == "high" else -1
    known = {
        name: one if isinstance(one, Estimate) else Estimate(one, None, 1)
        for name, one in found.items()
        if one is not None
    }
    if len(known) < 2:
        return []
    first = max(known, key=lambda name: sign * known[name].mean)
    best = [first]
    for name, other in known.items():
        if name == first:
            continue
        gap = known[first].minus(other)
        if gap.error is not None and max(sign * gap.mean, gap.error) < SAME:
            best.append(name)
        elif gap.error is None or not _clear(sign * gap.mean, gap.error, gap.runs):
            return []
    return best if len(best) < len(known) else []


def _clear(ahead: float, error: float, runs: int) -> bool:
    # Whether Student's t with runs - 1 degrees of freedom exceeds `ahead / error` as rarely as a normal exceeds
    # `CLEAR`.
    if ahead <= 0 or runs < 2:
        return False
    return within(math.inf if error == 0 else ahead / error, runs - 1) > math.erf(CLEAR / math.sqrt(2))


def within(times: float, freedom: int) -> float:
    """Probability that |t| of Student is below `times`: a finite sum for whole degrees of freedom."""
    angle = math.atan(times / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def _error(values: Sequence[float], overlap: float = 0.0) -> float | None:
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) * (1 / count + overlap))


@dataclass(frozen=True)
class Ranking:
    """The best method by a number, and the next."""

    best: str
    value: Estimate
    level: tuple[str, ...]
    """Other methods whose mean rounds to the same."""
    second: str | None
    """The best of the rest."""
    ahead: Estimate | None
    """By how much: the mean over the runs that both have."""
    wins: int
    """Runs in which the best is ahead of the second."""


def ranking(found: Mapping[str, Estimate | None], better: Literal["low", "high"], digits: int) -> Ranking | None:
    """Who is best, by how much, and in how many of the runs.

    Args:
        found: estimates by method, with their values by run; None is left out.
        better: which end is best.
        digits: to which means are rounded.

    Returns:
        The ranking; None if there is no estimate.
    """
    known = {method: one for method, one in found.items() if one is not None}
    if not known:
        return None
    sign = 1 if better == "high" else -1
    best, *others = sorted(known, key=lambda method: -sign * known[method].mean)
    first, text = known[best], f"{known[best].mean:.{digits}f}"
    level = [method for method in others if f"{known[method].mean:.{digits}f}" == text]
    second = next((method for method in others if method not in level), None)
    theirs = known[second].by_run if second is not None else {}
    gaps = [sign * (value - theirs[run]) for run, value in first.by_run.items() if run in theirs]
    return Ranking(best, first, tuple(level), second, Estimate.of(gaps, first.overlap), sum(gap > 0 for gap in gaps))


Quantity = Callable[[Record], Estimate | None]
"""What is asked of a record, with its error over data where that is known; None if the record does not know."""

BY_CONFIDENCE = "max probability"


def estimate(records: Iterable[Record], quantity: Quantity, factor: float = 1.0) -> Estimate | None:
    """Mean and standard error over runs, in another unit if asked for; of a single run, the error over data."""
    records = tuple(records)
    known = {record.run: one for record in records if (one := quantity(record)) is not None}
    if len(known) == 1:
        ((run, one),) = known.items()
        return Estimate(one.mean, one.error, 1, {run: one.mean}).scaled(factor)
    overlap = max((record.overlap for record in records), default=0.0)
    found = Estimate.over({run: one.mean for run, one in known.items()}, overlap)
    return None if found is None else found.scaled(factor)


@dataclass(frozen=True)
class On:
    """A number on one set: of labelled data a metric; of outliers "confidence", "std", or how well a score tells them apart."""

    name: str
    metric: str
    score: str = BY_CONFIDENCE

    def __call__(self, record: Record) -> Estimate | None:
        """What the record knows of it."""
        value: float | None = None
        error: float | None = None
        if (labelled := record.labelled.get(self.name)) is not None:
            value, error = _metric(labelled, self.metric), labelled.errors.get(self.metric)
        elif (outliers := record.outliers.get(self.name)) is not None:
            value, error = outliers.confidence, outliers.confidence_error
            if self.metric == "std":
                value, error = outliers.std, outliers.std_error
            elif self.metric != "confidence":
                value, error = (
                    by_score.get(self.score, {}).get(self.metric) for by_score in (outliers.scores, outliers.errors)
                )
        return None if value is None else Estimate(value, error, 1)


EXCESS = "excess_aurc"
"""A metric that follows from others: what the order of predictions adds to the least AURC that so many errors allow."""


def _metric(result: LabelledResult, name: str) -> float | None:
    if name != EXCESS:
        return result.metrics.get(name)
    area, accuracy = result.metrics.get("aurc"), result.metrics.get("accuracy")
    if area is None or accuracy is None:
        return None
    return area - least_area_under_risk_coverage(result.count, round((1 - accuracy) * result.count))


def of_type(kind: str, level: float, metric: str) -> Quantity:
    """A metric on the data of one type of shift at one level."""

    def read(record: Record) -> Estimate | None:
        found = [
            one.types.get(kind, {}).get(metric) for one in record.labelled.values() if one.level == level and one.types
        ]
        return _mean([None if value is None else Estimate(value, None, 1) for value in found])

    return read


def at_level(level: float, metric: str) -> Quantity:
    """A metric at a level of shift; the mean over sets if several have it."""
    return lambda record: _mean(
        [On(name, metric)(record) for name, one in record.labelled.items() if one.level == level]
    )


def shifted(metric: str) -> Quantity:
    """A metric over all shifted sets: the mean over levels."""

    def read(record: Record) -> Estimate | None:
        levels = sorted({result.level for name, result in record.labelled.items() if name != "test"})
        return _mean([at_level(level, metric)(record) for level in levels])

    return read


def mean_over(names: Sequence[str], metric: str, score: str = BY_CONFIDENCE) -> Quantity:
    """The mean of a number over these sets; None unless all are known."""
    return lambda record: _mean([On(name, metric, score)(record) for name in names])


def _mean(values: Sequence[Estimate | None]) -> Estimate | None:
    known = [value for value in values if value is not None]
    if len(known) == 1 == len(values):
        return known[0]
    return Estimate(sum(one.mean for one in known) / len(known), None, 1) if 0 < len(known) == len(values) else None


def levels_of(comparison: Comparison) -> list[float]:
    """Levels of shift, 0 (the test set) among them."""
    return sorted({one.level for one in comparison.sets.values() if one.role in ("test", "shift")})


def shared_outliers(comparison: Comparison, methods: Mapping[str, Sequence[Record]]) -> list[SetInfo]:
    """The sets of outliers that all these records were evaluated on: means over other sets could not be compared."""
    records = [record for found in methods.values() for record in found]
    return [one for one in comparison.of_role("outlier") if all(one.name in record.outliers for record in records)]


def runs_counted(methods: Mapping[str, Sequence[Record]]) -> str:
    """How many runs these methods have: "4 runs", "2 to 4 runs", or "5 rotations" of a cross-fit."""
    counts = [len(records) for records in methods.values()]
    low, high = min(counts, default=0), max(counts, default=0)
    if high == 1:
        return "one run"
    runs = "rotations" if are_rotations(methods) else "runs"
    return f"{high} {runs}" if low == high else f"{low} to {high} {runs}"


def are_rotations(methods: Mapping[str, Sequence[Record]]) -> bool:
    """Whether the runs are rotations of a cross-fit, which share networks and data."""
    return any(record.overlap > 0 for records in methods.values() for record in records)


def runs_words(methods: Mapping[str, Sequence[Record]]) -> str:
    """Over what the means of these methods are taken."""
    counted = runs_counted(methods)
    if counted == "one run":
        return "One run, so no spread is known and nothing is bold."
    if are_rotations(methods):
        return (
            f"Mean \N{PLUS-MINUS SIGN} standard error over {counted} of a cross-fit, enlarged for the images that rotations share "
            f"(Nadeau and Bengio, 2003); networks and outliers are the same in all of them, so that it says nothing of others. Bold: "
            f"leads every other, rotation by rotation, by more than chance (Student's t, 95 %)."
        )
    return (
        f"Mean \N{PLUS-MINUS SIGN} standard error over {counted}. Bold: leads every other, run by run, by more than chance "
        f"(Student's t, 95 %)."
    )
