"""Which method is best by a metric, and whether its lead is larger than chance would explain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from molaplace.evaluation.catalogue import CATALOGUE, OUTLIER_METRICS, REGRESSION_METRICS, Better
from molaplace.evaluation.columns import PredictionColumns
from molaplace.evaluation.estimates import Estimate, Measurement, known_error, mean_column, measured, separation

CLEAR = 2.0
"""Number of standard errors by which a method must lead every other method to be marked as best (about 95 % confidence)."""

TIE = 1e-6
"""Tolerance for ties: two values count as equal if both their difference and its standard error are below this value. Exact equality
would be too strict, because rounding may swap the ranks of two inputs whose scores are almost equal."""

Name = tuple[str, ...]
"""Name of an entry: `(method,)` or `(method, score)`."""


@dataclass(frozen=True)
class Lead:
    """The best method according to a metric, and the evidence that its lead is larger than chance would explain."""

    best: Name
    value: float
    level: tuple[Name, ...]
    """Entries of other methods that tie with the best entry, for example because their scores come from identical logits."""
    rival: Name | None
    """The second-best entry if the lead is clear; otherwise, the best entry that is not clearly behind."""
    ahead: float | None
    """Lead of the best entry over the rival."""
    error: float | None
    """Standard error of `ahead`, or None if it is unknown."""
    clear: tuple[Name, ...]
    """Entries that lead all entries of other methods by more than `CLEAR` standard errors of the difference."""


def lead(measurements: Mapping[Name, Measurement], better: Better) -> Lead:
    """Compare methods by a metric on the same data; entries of the same method are not compared with each other."""
    sign = 1 if better == "high" else -1

    def advantages(name: Name) -> dict[Name, Estimate]:
        # Return the lead over each entry of the other methods, without ties.
        others = {other: measurement for other, measurement in measurements.items() if other[0] != name[0]}
        leads = {other: measurements[name].minus(measurement).estimate for other, measurement in others.items()}
        return {
            other: Estimate(sign * gap.value, gap.error)
            for other, gap in leads.items()
            if math.isnan(gap.error) or max(abs(gap.value), gap.error) >= TIE
        }

    best = max(measurements, key=lambda name: sign * measurements[name].value)
    by_name = {name: advantages(name) for name in measurements}
    clear = tuple(name for name, leads in by_name.items() if leads and min(map(_in_errors, leads.values())) > CLEAR)
    # If the lead is clear, the rival is the second-best entry; otherwise, it is the best entry that is not clearly behind.
    leads = by_name[best]
    contenders = {name: gap for name, gap in leads.items() if best in clear or _in_errors(gap) <= CLEAR}
    rival = min(contenders, key=lambda name: contenders[name].value, default=None)
    ahead = None if rival is None else leads[rival].value
    error = None if rival is None or math.isnan(leads[rival].error) else leads[rival].error
    level = tuple(name for name in measurements if name[0] != best[0] and name not in leads)
    return Lead(best, measurements[best].value, level, rival, ahead, error, clear)


def _in_errors(gap: Estimate) -> float:
    # Return a lead in standard errors, or 0 if the error is unknown.
    if math.isnan(gap.error):
        return 0.0
    return math.copysign(math.inf, gap.value) if gap.error == 0 else gap.value / gap.error


def labelled_leads(methods: Mapping[str, PredictionColumns]) -> dict[str, Lead]:
    """Return the best method on labelled data for each metric with a direction that all methods have."""
    measurements = {method: measured(columns) for method, columns in methods.items()}
    return {
        name: lead({(method,): by_metric[name] for method, by_metric in measurements.items()}, metric.better)
        for name, metric in CATALOGUE.items()
        if metric.better is not None and all(name in by_metric for by_metric in measurements.values())
    }


def differences(
    methods: Mapping[str, PredictionColumns], reference: str
) -> dict[str, dict[str, tuple[float, float | None]]]:
    """Return the nll (for regression, also rmse and crps) of every other method minus that of `reference`, with standard errors."""
    measurements = {method: measured(columns) for method, columns in methods.items()}
    base = measurements.pop(reference)
    compared = [name for name, metric in REGRESSION_METRICS.items() if metric.better]
    gaps: dict[str, dict[str, tuple[float, float | None]]] = {}
    for method, by_metric in measurements.items():
        leads = {name: by_metric[name].minus(base[name]) for name in compared if name in base}
        gaps[method] = {name: (gap.value, known_error(gap)) for name, gap in leads.items()}
    return gaps


def outlier_leads(
    inliers: Mapping[str, PredictionColumns], outliers: Mapping[str, PredictionColumns]
) -> dict[str, Lead]:
    """Return the best methods on outliers by AUROC and FPR95 and, for classifiers, also by confidence; see `Evaluation.leads`."""
    separated: dict[Name, dict[str, Measurement]] = {
        (method, score): measurements
        for method, columns in outliers.items()
        for score, measurements in separation(inliers[method], columns).items()
    }
    leads = {
        name: lead({entry: measurements[name] for entry, measurements in separated.items()}, metric.better)
        for name, metric in OUTLIER_METRICS.items()
        if metric.better is not None and all(name in measurements for measurements in separated.values())
    }
    if not all("confidence" in columns.data for columns in outliers.values()):
        return leads
    confidence: dict[Name, Measurement] = {
        (method,): mean_column(columns.data, "confidence") for method, columns in outliers.items()
    }
    by_confidence: dict[Name, Measurement] = {
        (method,): separated[method, "max probability"]["auroc"] for method in outliers
    }
    return {"confidence": lead(confidence, "low"), "max probability": lead(by_confidence, "high"), **leads}
