"""Numbers out of records: one for each run, then an estimate over runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mola.compare.record import Record
from mola.compare.report.estimate import Estimate

__all__ = ["Quantity", "at_level", "estimate", "labelled", "mmc", "outlier_mean", "outlier_score", "shifted"]

Quantity = Callable[[Record], float | None]
"""What is asked of a record; None if it does not know."""

BY_CONFIDENCE = "max probability"


def estimate(records: Iterable[Record], quantity: Quantity, factor: float = 1.0) -> Estimate | None:
    """Mean and standard error over runs, in another unit if asked for."""
    found = Estimate.over({record.run: quantity(record) for record in records})
    return None if found is None else found.scaled(factor)


def labelled(name: str, metric: str) -> Quantity:
    """A metric on a labelled set."""

    def read(record: Record) -> float | None:
        result = record.labelled.get(name)
        return None if result is None else result.metrics.get(metric)

    return read


def at_level(level: float, metric: str) -> Quantity:
    """A metric at a level of shift; the mean over sets if several have it."""

    def read(record: Record) -> float | None:
        return _mean([result.metrics.get(metric) for result in record.labelled.values() if result.level == level])

    return read


def shifted(metric: str) -> Quantity:
    """A metric over all shifted sets: the mean over levels."""

    def read(record: Record) -> float | None:
        levels = sorted({result.level for name, result in record.labelled.items() if name != "test"})
        return _mean([at_level(level, metric)(record) for level in levels])

    return read


def mmc(name: str) -> Quantity:
    """Mean confidence in a set of outliers."""

    def read(record: Record) -> float | None:
        result = record.outliers.get(name)
        return None if result is None else result.confidence

    return read


def outlier_score(name: str, metric: str = "auroc", score: str = BY_CONFIDENCE) -> Quantity:
    """How well a score tells outliers from the test set."""

    def read(record: Record) -> float | None:
        result = record.outliers.get(name)
        return None if result is None else result.scores.get(score, {}).get(metric)

    return read


def outlier_mean(quantity: Callable[[str], Quantity], names: Sequence[str]) -> Quantity:
    """A quantity of outlier sets: its mean over these sets; None unless all are known."""

    def read(record: Record) -> float | None:
        return _mean([quantity(name)(record) for name in names])

    return read


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
