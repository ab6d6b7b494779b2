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

import torch
from torch import Tensor

from molaplace import metrics

TPR = 0.95
"""Fraction of the inliers that pass the threshold at which FPR95 is measured."""

WIDTH = 0.025
"""Half-width of the finite difference that estimates the slope of the ROC curve at `TPR`, as a fraction of the inliers."""

Groups = tuple[Tensor | None, Tensor | None]
"""Group indices of the inliers and the outliers."""


@dataclass(frozen=True, eq=False)
class Measurement:
    """A metric's value, and the contribution of each datum to that value."""

    value: float
    contributions: tuple[Tensor, ...]
    """For each sample, the float64 contributions of its data, of shape (n,), up to an additive constant."""
    groups: tuple[Tensor | None, ...] = ()
    """For each sample, the group indices of its data, of shape (n,), or None if the data are independent."""

    @property
    def error(self) -> float | None:
        """Standard error of the metric, or None if a sample has only one datum or one group."""
        groups = self.groups or (None,) * len(self.contributions)
        parts = [standard_error(own, group) for own, group in zip(self.contributions, groups, strict=True)]
        return None if any(math.isnan(one) for one in parts) else math.hypot(*parts)

    def minus(self, other: Measurement) -> Measurement:
        """Subtract another measurement of the same metric on the same data."""
        pairs = zip(self.contributions, other.contributions, strict=True)
        return Measurement(self.value - other.value, tuple(mine - theirs for mine, theirs in pairs), self.groups)


def standard_error(values: Tensor, groups: Tensor | None = None) -> float:
    """Return the standard error of the mean of values (n,), which may be dependent within groups; return NaN for a single group."""
    totals, count = values - values.mean(), len(values)
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


def calibration_error(confidence: Tensor, correct: Tensor, bins: int = 15, groups: Tensor | None = None) -> Measurement:
    """Return the expected calibration error of float64 confidences (n,); `correct` (n,) is 1 for correct predictions, 0 otherwise."""
    sums = metrics.bin_sums(confidence, correct, bins)
    # Each datum's contribution takes the sign of its bin's gap, so that the mean contribution is the calibration error.
    signs = (sums[:, 1] - sums[:, 2]).sign()[metrics.bin_index(confidence, bins)]
    return Measurement(metrics.calibration_gap(sums), ((confidence - correct) * signs,), (groups,))


def risk_area(uncertainty: Tensor, correct: Tensor, groups: Tensor | None = None) -> Measurement:
    r"""Return the area under the risk-coverage curve; see `mola.metrics.area_under_risk_coverage`.

    The area is :math:`E_t[R(t)]` with :math:`R(t) = E[e 1(u \le t)] / F(t)`, where e is the error, u is the uncertainty, F is the
    distribution function of u, and t has the same distribution as u. A datum affects the area through the thresholds, the errors and
    F, so its contribution is :math:`R(u_i) + e_i E_t[1(u_i \le t) / F(t)] - E_t[1(u_i \le t) R(t) / F(t)]`.
    """
    _, place, counts = torch.unique(uncertainty, return_inverse=True, return_counts=True)
    _, risk = metrics.risk_coverage_curve(uncertainty, correct)
    accepted = torch.arange(1, len(risk) + 1, dtype=risk.dtype)

    def from_here(values: Tensor) -> Tensor:  # sum of each value and all later ones
        return values.flip(0).cumsum(0).flip(0)

    curves = torch.stack([risk, from_here(1 / accepted), from_here(risk / accepted)])
    # Average each curve over data with equal uncertainty.
    order = torch.arange(len(counts)).repeat_interleave(counts)
    own, share, weighted = (curves.new_zeros(3, len(counts)).index_add_(1, order, curves) / counts)[:, place]
    return Measurement(float(risk.mean()), (own + (1 - correct) * share - weighted,), (groups,))


def area_between(inlier_scores: Tensor, outlier_scores: Tensor, groups: Groups = (None, None)) -> Measurement:
    """Return the AUROC of scores that are higher for outliers; see `mola.metrics.auroc`.

    An inlier contributes the fraction of outliers with higher scores, and an outlier contributes the fraction of inliers with lower
    scores. A tie counts as one half. The variances of the two means are added (DeLong et al., 1988; for groups, Obuchowski, 1997).
    """
    inliers, outliers = metrics.check_scores(inlier_scores, outlier_scores)
    placed = metrics.share_below(outliers, inliers)
    return Measurement(float(placed.mean()), (1 - metrics.share_below(inliers, outliers), placed), groups)


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
    areas, contributions = [], torch.zeros_like(yes)
    for label in torch.unique(labels).tolist():
        no_rows, yes_rows = ((labels == label) & (truth == answer) for answer in (0, 1))
        if bool(no_rows.any()) and bool(yes_rows.any()):
            area = area_between(yes[no_rows], yes[yes_rows])
            areas.append(area.value)
            for rows, placed in zip((no_rows, yes_rows), area.contributions, strict=True):
                # Scale the deviations from the area so that their mean over all rows equals their mean over the selected rows.
                contributions[rows] = (placed - area.value) * len(yes) / len(placed)
    if not areas:
        return None
    return Measurement(sum(areas) / len(areas), (contributions / len(areas),), (groups,))
