r"""Metrics with standard errors, and differences in metrics between predictors on the same data.

To first order, every metric is a sum of sample means. The samples are the test data and, for outlier scores, the outliers. Datum i
contributes :math:`m_i` to the mean of its sample, and

.. math:: \mathrm{error}^2 = \sum_{\text{samples}} \frac{G}{(G - 1)\, n^2} \sum_g \Big(\sum_{i \in g} (m_i - \bar m)\Big)^2

where g runs over the G groups of dependent data, such as the labels of one input or the pixels of one image. The error of a difference
between two metrics is computed from the differences between their contributions. The contributions of two predictors on the same data
are correlated, so the difference usually has a smaller error than either metric. The error of an ECE does not account for its bias:
chance alone raises every ECE above 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from molaplace import metrics
from molaplace.evaluation.catalogue import CLASSIFICATION_METRICS, COVERAGES, REGRESSION_METRICS, WIDTHS
from molaplace.evaluation.columns import INPUT, Columns, PredictionColumns

TPR = 0.95
"""Fraction of the inliers that pass the threshold at which FPR95 is measured."""

WIDTH = 0.025
"""Half-width of the finite difference that estimates the slope of the ROC curve at `TPR`, as a fraction of the inliers."""

Groups = tuple[Tensor | None, Tensor | None]
"""Group indices of the inliers and the outliers."""


class Estimate(NamedTuple):
    """A metric and its standard error."""

    value: float
    error: float = math.nan
    """Standard error, or NaN if it is unknown."""

    @classmethod
    def of(cls, value: float, error: float | None) -> Estimate:
        """Return an estimate from plain JSON values, in which an unknown error is None."""
        return cls(value, math.nan if error is None else error)

    def scaled(self, factor: float) -> Estimate:
        """Return the estimate multiplied by a factor."""
        return Estimate(factor * self.value, abs(factor) * self.error)

    def text(self, digits: int) -> str:
        """Format the estimate as `98.9 ± 0.1`, or as `98.9` if the error is unknown."""
        value = f"{self.value:z.{digits}f}"
        return value if math.isnan(self.error) else f"{value} \N{PLUS-MINUS SIGN} {self.error:.{digits}f}"

    def __str__(self) -> str:
        # The error of a constant quantity is due to rounding.
        if not 1e-6 * abs(self.value) < self.error < math.inf:
            return f"{self.value:.4g}"
        digits = min(max(1 - math.floor(math.log10(self.error)), 0), 6)  # show two significant digits of the error
        return self.text(digits)


@dataclass(frozen=True, eq=False)
class Measurement:
    """A metric's value, and the contribution of each datum to that value."""

    value: float
    contributions: tuple[Tensor, ...]
    """For each sample, the float64 contributions of its data, of shape (n,), up to an additive constant."""
    groups: tuple[Tensor | None, ...] = ()
    """For each sample, the group indices of its data, of shape (n,), or None if the data are independent."""

    @property
    def error(self) -> float:
        """Standard error of the metric, or NaN if a sample has only one datum or one group."""
        groups = self.groups or (None,) * len(self.contributions)
        errors = [standard_error(*sample) for sample in zip(self.contributions, groups, strict=True)]
        return math.hypot(*errors)

    @property
    def estimate(self) -> Estimate:
        """The value and its standard error."""
        return Estimate(self.value, self.error)

    def minus(self, other: Measurement) -> Measurement:
        """Subtract another measurement of the same metric on the same data."""
        samples = zip(self.contributions, other.contributions, strict=True)
        contributions = tuple(minuend - subtrahend for minuend, subtrahend in samples)
        return Measurement(self.value - other.value, contributions, self.groups)


def standard_error(values: Tensor, groups: Tensor | None = None) -> float:
    """Return the standard error of the mean of values (n,), which may be dependent within groups; return NaN for a single group."""
    totals = values - values.mean()
    count = len(values)
    if groups is not None:
        totals = totals.new_zeros(int(groups.max()) + 1).index_add_(0, groups, totals)
        count = int((torch.bincount(groups) > 0).sum())
    return math.sqrt(count / (count - 1) * float(totals.square().sum())) / len(values) if count > 1 else math.nan


def mean_of(values: Tensor, groups: Tensor | None = None) -> Measurement:
    """Return the mean of values of shape (n,) as a measurement."""
    return Measurement(float(values.mean()), (values,), (groups,))


def root_mean_of(squares: Tensor, groups: Tensor | None = None) -> Measurement:
    """Return the root mean square as a measurement, given squares of shape (n,)."""
    root = math.sqrt(float(squares.mean()))
    return Measurement(root, (squares / (2 * root) if root > 0 else torch.zeros_like(squares),), (groups,))


def calibration_error(confidence: Tensor, correct: Tensor, groups: Tensor | None = None) -> Measurement:
    """Return the expected calibration error of float64 confidences (n,); `correct` (n,) is 1 for correct predictions, 0 otherwise."""
    sums = metrics.bin_sums(confidence, correct)
    # Each datum's contribution takes the sign of its bin's gap, so that the mean contribution is the calibration error.
    signs = (sums[:, 1] - sums[:, 2]).sign()[metrics.bin_index(confidence, len(sums))]
    return Measurement(metrics.calibration_gap(sums), ((confidence - correct) * signs,), (groups,))


def risk_area(uncertainty: Tensor, correct: Tensor, groups: Tensor | None = None) -> Measurement:
    r"""Return the area under the risk-coverage curve; see `mola.metrics.area_under_risk_coverage`.

    The area is :math:`E_t[R(t)]` with :math:`R(t) = E[e 1(u \le t)] / F(t)`, where e is the error, u is the uncertainty, F is the
    distribution function of u, and t has the same distribution as u. A datum affects the area through the thresholds, the errors and
    F, so its contribution is :math:`R(u_i) + e_i E_t[1(u_i \le t) / F(t)] - E_t[1(u_i \le t) R(t) / F(t)]`.
    """
    _, inverse, counts = torch.unique(uncertainty, return_inverse=True, return_counts=True)
    _, risk = metrics.risk_coverage_curve(uncertainty, correct)
    accepted = torch.arange(1, len(risk) + 1, dtype=risk.dtype, device=risk.device)

    def from_here(values: Tensor) -> Tensor:  # sum of each value and all later ones
        return values.flip(0).cumsum(0).flip(0)

    curves = torch.stack([risk, from_here(1 / accepted), from_here(risk / accepted)])
    # Average each curve over data with equal uncertainty.
    order = torch.arange(len(counts), device=risk.device).repeat_interleave(counts)
    means = curves.new_zeros(3, len(counts)).index_add_(1, order, curves) / counts
    risk_at, share, weighted = means[:, inverse]
    return Measurement(float(risk.mean()), (risk_at + (1 - correct) * share - weighted,), (groups,))


def area_between(inlier_scores: Tensor, outlier_scores: Tensor, groups: Groups = (None, None)) -> Measurement:
    """Return the AUROC of scores that are higher for outliers; see `mola.metrics.auroc`.

    An inlier contributes the fraction of outliers with higher scores, and an outlier contributes the fraction of inliers with lower
    scores. A tie counts as one half. The variances of the two means are added (DeLong et al., 1988; for groups, Obuchowski, 1997).
    """
    inliers, outliers = metrics.check_scores(inlier_scores, outlier_scores)
    inliers_below = metrics.share_below(outliers, inliers)
    outliers_above = 1 - metrics.share_below(inliers, outliers)
    return Measurement(float(inliers_below.mean()), (outliers_above, inliers_below), groups)


def pass_rate(inlier_scores: Tensor, outlier_scores: Tensor, groups: Groups = (None, None)) -> Measurement:
    """Return the fraction of outliers accepted at the threshold that accepts 95 % of the inliers; see `mola.metrics.fpr_at_tpr`.

    Inliers contribute to the standard error because they determine the threshold.
    """
    inliers, outliers = metrics.check_scores(inlier_scores, outlier_scores)
    low, high = (metrics.fpr_at_tpr(inliers, outliers, TPR + side * WIDTH) for side in (-1, 1))
    threshold = metrics.passing_threshold(inliers, TPR)
    passed = (outliers <= threshold).double()
    slope = (high - low) / (2 * WIDTH)
    return Measurement(float(passed.mean()), (slope * (inliers <= threshold).double(), passed), groups)


def mean_area_of_labels(yes: Tensor, truth: Tensor, labels: Tensor, groups: Tensor | None) -> Measurement | None:
    """Return the mean AUROC over labels, or None if no label has both positive and negative examples.

    Args:
        yes: float64 probabilities of the answer "yes", of shape (n,): one for each label of each input.
        truth: true answers, of shape (n,): 1 for yes and 0 for no.
        labels: label index of each row, of shape (n,).
        groups: input index of each row, of shape (n,).
    """
    areas: list[float] = []
    contributions = torch.zeros_like(yes)
    for label in torch.unique(labels).tolist():
        negatives = (labels == label) & (truth == 0)
        positives = (labels == label) & (truth == 1)
        if bool(negatives.any()) and bool(positives.any()):
            area = area_between(yes[negatives], yes[positives])
            areas.append(area.value)
            for rows, shares in zip((negatives, positives), area.contributions, strict=True):
                # Scale the deviations from the area so that their mean over all rows equals their mean over the selected rows.
                contributions[rows] = (shares - area.value) * len(yes) / len(shares)
    if not areas:
        return None
    return Measurement(sum(areas) / len(areas), (contributions / len(areas),), (groups,))


# --- metrics of columns ------------------------------------------------------------------------------------------------


def mean_column(columns: Columns, name: str) -> Measurement:
    """Return the mean of a column as a measurement."""
    return mean_of(columns[name], columns.groups)


def measured(columns: PredictionColumns) -> dict[str, Measurement]:
    """Return the metrics on labelled data that have standard errors: the mean of each score in the catalogue, and a few others.

    For classification: accuracy, nll, brier, ece, aurc and confidence, and for multi-label data the mean AUROC over labels. For regression:
    rmse, nll, crps, std, and the coverage and mean width of intervals, such as coverage_90 and width_90.
    """
    data = columns.data
    if "square" in data:
        measurements = {"rmse": root_mean_of(data["square"], data.groups)}
        names = {name: name for name in REGRESSION_METRICS}
        names |= {name: f"covered[{level}]" for level, name in COVERAGES.items()}
        names |= {name: f"width[{level}]" for level, name in WIDTHS.items()}
        return measurements | {name: mean_column(data, column) for name, column in names.items() if column in data}
    names = {name: name for name in CLASSIFICATION_METRICS if name != "confidence"} | {"accuracy": "correct"}
    measurements = {name: mean_column(data, column) for name, column in names.items() if column in data}
    measurements |= {
        "ece": calibration_error(data["confidence"], data["correct"], data.groups),
        "aurc": risk_area(1 - data["confidence"], data["correct"], data.groups),
        "confidence": mean_column(data, "confidence"),
    }
    if "yes" in data:
        area = mean_area_of_labels(data["yes"], data["label"], data["output"], data.groups)
        measurements |= {} if area is None else {"auroc": area}
    return measurements


def separation(inliers: PredictionColumns, outliers: PredictionColumns) -> dict[str, dict[str, Measurement]]:
    """Return the AUROC and FPR95 of each outlier score, which show how well the score separates outliers from test data."""
    groups = (inliers.scores.groups, outliers.scores.groups)
    names = [name for name in outliers.scores.names if name != INPUT]
    pairs = {name: (inliers.scores[name], outliers.scores[name]) for name in names}
    return {
        name: {"auroc": area_between(*scores, groups), "fpr95": pass_rate(*scores, groups)}
        for name, scores in pairs.items()
    }


def known_error(measurement: Measurement) -> float | None:
    """Return the standard error as a plain JSON value: None if it is unknown."""
    return None if math.isnan(measurement.error) else measurement.error
