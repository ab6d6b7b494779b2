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


class Results(Protocol):
    """Results of a method on labelled sets and on outliers, by set name."""

    @property
    def labelled(self) -> Mapping[str, LabelledResult]:
        """Results on the labelled sets."""

    @property
    def outliers(self) -> Mapping[str, OutlierResult]:
        """Results on the outlier sets."""


def estimates_of(results: Results) -> Iterator[tuple[Quantity, Estimate]]:
    """Yield the metrics of a method, with standard errors over the data points where they are known."""
    for name, labelled in results.labelled.items():
        for metric, value in labelled.metrics.items():
            yield Quantity(name, metric), Estimate.of(value, labelled.errors.get(metric))
    for name, outliers in results.outliers.items():
        if outliers.confidence is not None:
            yield Quantity(name, "confidence"), Estimate.of(outliers.confidence, outliers.confidence_error)
        if outliers.std is not None:
            yield Quantity(name, "std"), Estimate.of(outliers.std, outliers.std_error)
        for score, values in outliers.scores.items():
            errors = outliers.errors.get(score, {})
            for metric, value in values.items():
                yield Quantity(name, metric, score), Estimate.of(value, errors.get(metric))


class Numbers:
    """The numbers of every method in a comparison."""

    def __init__(self, methods: Mapping[str, MethodResult]) -> None:
        self._estimates = {method: dict(estimates_of(result)) for method, result in methods.items()}

    def __call__(self, quantity: Quantity, factor: float = 1.0) -> dict[str, Estimate | None]:
        """Return each method's estimate of a quantity on one set, multiplied by a factor, or None for a method that lacks it."""
        known = {method: estimates.get(quantity) for method, estimates in self._estimates.items()}
        return {method: None if value is None else value.scaled(factor) for method, value in known.items()}
