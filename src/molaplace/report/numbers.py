"""Access to the numbers in a comparison, by quantity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from molaplace.evaluation import Estimate, LabelledResult, MethodResult, OutlierResult

BY_CONFIDENCE = "max probability"
"""Outlier score used in figures that show only one score."""


@dataclass(frozen=True)
class Quantity:
    """A metric on one set, or its mean over several sets; the mean is unknown if any set lacks the metric."""

    sets: str | tuple[str, ...]
    metric: str
    score: str = ""
    """Outlier score from which a metric such as "auroc" or "fpr95" is computed."""
    kind: str = ""
    """Type of shift, such as "fog"; empty if the metric covers all types."""


class Formatted(Protocol):
    """A number with its standard error, such as an `Estimate`."""

    @property
    def value(self) -> float:
        """The number."""

    @property
    def error(self) -> float:
        """The standard error; NaN if it is unknown."""

    def text(self, digits: int) -> str:
        """Return the number and its error with this many decimals."""


def estimates_of(
    labelled: Mapping[str, LabelledResult], outliers: Mapping[str, OutlierResult]
) -> Iterator[tuple[Quantity, Estimate]]:
    """Yield the metrics of a method, with standard errors over the data points where they are known."""
    for name, on_labelled in labelled.items():
        for metric, value in on_labelled.metrics.items():
            yield Quantity(name, metric), Estimate.of(value, on_labelled.errors.get(metric))
    for name, on_outliers in outliers.items():
        if on_outliers.confidence is not None:
            yield Quantity(name, "confidence"), Estimate.of(on_outliers.confidence, on_outliers.confidence_error)
        if on_outliers.std is not None:
            yield Quantity(name, "std"), Estimate.of(on_outliers.std, on_outliers.std_error)
        for score, values in on_outliers.scores.items():
            errors = on_outliers.errors.get(score, {})
            for metric, value in values.items():
                yield Quantity(name, metric, score), Estimate.of(value, errors.get(metric))


class Numbers:
    """The numbers of every method in a comparison."""

    def __init__(self, methods: Mapping[str, MethodResult]) -> None:
        self._estimates = {
            method: dict(estimates_of(result.labelled, result.outliers)) for method, result in methods.items()
        }

    def __call__(self, quantity: Quantity, factor: float = 1.0) -> dict[str, Estimate | None]:
        """Return each method's estimate of a quantity on one set, multiplied by a factor, or None for a method that lacks it."""
        known = {method: estimates.get(quantity) for method, estimates in self._estimates.items()}
        return {method: None if value is None else value.scaled(factor) for method, value in known.items()}
