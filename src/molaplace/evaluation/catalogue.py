"""The catalogue of metrics: heading, direction of improvement, decimals and unit of each metric, for all tables and figures.

Tables select metrics by name. Those that show every metric of a kind also show a new one, if results contain it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from molaplace.evaluation.columns import LEVELS

Better = Literal["low", "high"]


@dataclass(frozen=True)
class Metric:
    """How tables and figures show a metric."""

    heading: str
    """Heading of a column."""
    better: Better | None = None
    """Direction of improvement; None if neither direction is better."""
    digits: int | None = None
    """Number of decimals; None shows two significant digits of the standard error."""
    factor: float = 1.0
    """Factor that converts values to the unit of the heading."""
    title: str = ""
    """Name of the metric in titles; empty if it equals the heading."""

    @property
    def name(self) -> str:
        """Name of the metric in titles."""
        return self.title or self.heading


CLASSIFICATION_METRICS: Mapping[str, Metric] = {
    "accuracy": Metric("accuracy %", "high", 2, 100, "accuracy"),
    "log_likelihood": Metric("log-likelihood", "high", 4),
    "nll": Metric("NLL", "low", 4, title="log loss (NLL)"),
    "brier": Metric("Brier", "low", 4, title="Brier score"),
    "ece": Metric("ECE %", "low", 2, 100, "calibration error (ECE)"),
    "ece100": Metric("ECE % (100 bins)", "low", 2, 100),
    "ece_legacy": Metric("ECE % (legacy)", None, 2, 100),
    "mce": Metric("MCE %", None, 1, 100),
    "mce_legacy": Metric("MCE % (legacy)", None, 1, 100),
    "confidence": Metric("mean conf. %", None, 2, 100, "mean confidence"),
    "aurc": Metric("AURC %", "low", 3, 100),
}
"""Metrics of classifiers on labelled data."""

METRICS = tuple(CLASSIFICATION_METRICS)
"""Names of the metrics of classifiers on labelled data."""

CLASS_METRICS: Mapping[str, Metric] = {
    "auroc": Metric("AUROC %", "high", 2, 100),
    "average_precision": Metric("AP %", "high", 2, 100),
    "miou": Metric("mean IoU %", "high", 2, 100),
    "iou": Metric("IoU %", "high", 2, 100),
}
"""Metrics of single classes and means over classes: AUROC and average precision for multi-label data, and the intersection over union
for dense outputs."""

REGRESSION_METRICS: Mapping[str, Metric] = {
    "rmse": Metric("RMSE", "low"),
    "nll": Metric("NLL", "low"),
    "crps": Metric("CRPS", "low"),
    "std": Metric("mean std."),
}
"""Metrics of regression models on labelled data, in the unit of the targets."""

COVERAGES = {level: f"coverage_{100 * level:g}" for level in LEVELS}
"""Name of the metric for the coverage of central intervals, by their nominal coverage."""

WIDTHS = {level: f"width_{100 * level:g}" for level in LEVELS}
"""Name of the metric for the mean width of central intervals, by their nominal coverage."""

COVERAGE_METRICS: Mapping[str, Metric] = {
    name: Metric(f"{100 * level:g} %", None, 1, 100, f"{100 * level:g} % covered, %")
    for level, name in COVERAGES.items()
}
WIDTH_METRICS: Mapping[str, Metric] = {name: Metric(f"{100 * level:g} %") for level, name in WIDTHS.items()}

CATALOGUE: Mapping[str, Metric] = {
    **REGRESSION_METRICS,
    **COVERAGE_METRICS,
    **WIDTH_METRICS,
    **CLASSIFICATION_METRICS,
    **CLASS_METRICS,
}
"""All metrics on labelled data."""

OUTLIER_METRICS: Mapping[str, Metric] = {
    "auroc": Metric("AUROC", "high", 1, 100),
    "aupr_in": Metric("AUPR in", "high", 1, 100),
    "aupr_out": Metric("AUPR out", "high", 1, 100),
    "fpr95": Metric("FPR95", "low", 1, 100),
    "fpr95_out": Metric("FPR95 out", "low", 1, 100),
}
"""Metrics of an outlier score, in %."""


def with_digits(digits: Mapping[str, int]) -> dict[str, Metric]:
    """Return metrics of classifiers with the given numbers of decimals."""
    return {name: replace(CLASSIFICATION_METRICS[name], digits=number) for name, number in digits.items()}
