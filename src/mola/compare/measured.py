r"""Numbers with their errors, and differences of numbers that were measured on the same data.

Every number here is, to first order, a sum of means over data: over the test data, and for outlier scores also over the
outliers. Let :math:`m_i` be what datum i contributes to such a mean. Then

.. math:: \mathrm{error}^2 = \sum_{\text{samples}} \frac{1}{n (n - 1)} \sum_i (m_i - \bar m)^2,

and the error of the difference of two methods follows from the differences of their contributions. Methods that are compared
on the same data go up and down together, so that their difference is known better than either number.

* log loss, Brier score, accuracy, mean confidence: the contribution of a datum is its own loss.
* AUROC: its placement, the share of the other sample that it is on the right side of (DeLong et al., 1988). The error is
  DeLong's, and the error of a difference has his covariance in it.
* ECE: confidence minus correctness, with the sign that this has on average in the datum's bin (the delta method). Chance
  alone lifts every ECE above 0; that is not in the error.
* FPR at 95 % TPR: whether the outlier passes, and through the threshold, which moves with the inliers, whether the inlier
  does, times the slope of the curve there (Bahadur's representation of a quantile).
* root mean squared error: the squared error over twice the root (the delta method).

Data that belong together, as the labels of one input or the pixels of one picture, go up and down together as well. With G groups,
the sum over data becomes one over groups,

.. math:: \frac{G}{(G - 1)\, n^2} \sum_g \Big(\sum_{i \in g} (m_i - \bar m)\Big)^2,

which is the first formula where every datum is a group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mola.metrics import (
    bin_index,
    bin_sums,
    calibration_gap,
    check_scores,
    fpr_at_tpr,
    least_area_under_risk_coverage,
    passing_threshold,
)

CLEAR = 2.0
"""Standard errors by which a number must lead every other before it is called the best: about 95 % of chance lie within."""

SAME = 1e-6
"""Numbers that differ by less, with an error of less, are the same: rounding may swap two inputs that are all but tied."""


@dataclass(frozen=True, eq=False)
class Measurement:
    """A number, and what each datum contributes to it.

    Args:
        value: the number.
        contributions: (n,) for each sample, in float64 and in the order of the data; constants do not matter.
        groups: (n,) for each sample, which data belong together, as whole numbers; None, or nothing at all: each is by itself.
    """

    value: float
    contributions: tuple[Tensor, ...]
    groups: tuple[Tensor | None, ...] = ()

    @property
    def error(self) -> float | None:
        """Standard error; None where a sample is a single datum, or a single group."""
        groups = self.groups or (None,) * len(self.contributions)
        parts = [_squared_error(one, group) for one, group in zip(self.contributions, groups, strict=True)]
        known = [one for one in parts if one is not None]
        return math.sqrt(sum(known)) if len(known) == len(parts) else None

    def minus(self, other: Measurement) -> Measurement:
        """The difference to a number measured on the same data."""
        pairs = zip(self.contributions, other.contributions, strict=True)
        return Measurement(self.value - other.value, tuple(mine - theirs for mine, theirs in pairs), self.groups)


def _squared_error(contributions: Tensor, groups: Tensor | None) -> float | None:
    count = len(contributions)
    if groups is None:
        return float(contributions.var()) / count if count > 1 else None
    places, each = torch.unique(groups, return_inverse=True)
    if len(places) < 2:
        return None
    centred = contributions - contributions.mean()
    sums = torch.zeros(len(places), dtype=torch.float64).index_add_(0, each, centred.double())
    return float(sums.square().sum()) * len(places) / (len(places) - 1) / count**2


def mean_of(values: Tensor, groups: Tensor | None = None) -> Measurement:
    """A mean over data (n,)."""
    return Measurement(float(values.mean()), (values,), (groups,))


def root_mean_of(squares: Tensor, groups: Tensor | None = None) -> Measurement:
    """The root of a mean of squares (n,)."""
    root = math.sqrt(float(squares.mean()))
    return Measurement(root, (squares / (2 * root) if root > 0 else torch.zeros_like(squares),), (groups,))


def calibration_error(confidence: Tensor, correct: Tensor, bins: int, groups: Tensor | None = None) -> Measurement:
    """Expected calibration error from confidences (n,) in float64 and whether they were right (n,), 1 or 0."""
    binned = bin_sums(confidence, correct, bins)
    signs = torch.sign(binned[:, 1] - binned[:, 2])
    gaps = signs[bin_index(confidence, bins)] * (confidence - correct)
    return Measurement(calibration_gap(binned), (gaps,), (groups,))


def _placements(scores: Tensor, among: Tensor) -> Tensor:
    # For each score the share of the others that lie below it, ties counting half.
    ordered = among.sort().values
    below, not_above = torch.searchsorted(ordered, scores), torch.searchsorted(ordered, scores, right=True)
    return (below + not_above).double() / (2 * len(among))


Groups = tuple[Tensor | None, Tensor | None]
"""Which inliers, and which outliers, belong together."""


def area_between(inlier_scores: Tensor, outlier_scores: Tensor, groups: Groups = (None, None)) -> Measurement:
    """AUROC of scores that are higher for what is more outlying; see `mola.metrics.auroc`."""
    inliers, outliers = check_scores(inlier_scores, outlier_scores)
    found = _placements(outliers, inliers)
    return Measurement(float(found.mean()), (1 - _placements(inliers, outliers), found), groups)


def mean_area_of_labels(yes: Tensor, truth: Tensor, labels: Tensor, groups: Tensor | None) -> Measurement | None:
    """Mean over labels of the AUROC of each, from a row for each label of each input.

    Args:
        yes: probabilities of yes (n,), in float64.
        truth: 1 where it is yes, 0 where it is not (n,).
        labels: which label each row is of (n,).
        groups: which input each row is of (n,).

    Returns:
        The mean over labels that have both answers, with DeLong's contributions; None if there is none.
    """
    areas, contributions = [], torch.zeros_like(yes)
    for label in sorted(set(labels.tolist())):
        positive, negative = ((labels == label) & (truth == answer) for answer in (1, 0))
        if bool(positive.any()) and bool(negative.any()):
            above = _placements(yes[positive], yes[negative])
            area = float(above.mean())
            areas.append(area)
            for rows, placed in ((positive, above), (negative, 1 - _placements(yes[negative], yes[positive]))):
                # Deviations of each part's mean, in units of a mean over all rows.
                contributions[rows] = (placed - area) * len(yes) / len(placed)
    if not areas:
        return None
    return Measurement(sum(areas) / len(areas), (contributions / len(areas),), (groups,))


def pass_rate(
    inlier_scores: Tensor, outlier_scores: Tensor, tpr: float = 0.95, groups: Groups = (None, None)
) -> Measurement:
    """Share of outliers that pass where `tpr` of the inliers do; see `mola.metrics.fpr_at_tpr`."""
    inliers, outliers = check_scores(inlier_scores, outlier_scores)
    threshold = passing_threshold(inliers, tpr)
    # The slope of the curve, measured over the stretch that chance moves the threshold in.
    reach = 2 * math.sqrt(tpr * (1 - tpr) / len(inliers))
    low, high = (passing_threshold(inliers, min(1.0, max(0.0, tpr + step))) for step in (-reach, reach))
    rise, run = (float(((scores > low) & (scores <= high)).double().mean()) for scores in (outliers, inliers))
    slope = rise / run if run else 0.0
    passed = ((inliers <= threshold).double(), (outliers <= threshold).double())
    return Measurement(fpr_at_tpr(inliers, outliers, tpr), (-slope * passed[0], passed[1]), groups)


def excess_risk(area: float, accuracy: float, count: int) -> float:
    """Excess AURC from an AURC, the accuracy and the number of data; see `mola.metrics.excess_area_under_risk_coverage`."""
    return area - least_area_under_risk_coverage(count, round((1 - accuracy) * count))


@dataclass(frozen=True)
class Lead:
    """Who is best by a number, and whether that is more than chance. Names are `(method,)` or `(method, score)`."""

    best: tuple[str, ...]
    value: float
    level: tuple[tuple[str, ...], ...]
    """Those of other methods that are the same as the best to every digit, such as scores made from the same logits."""
    rival: tuple[str, ...] | None
    """The next best of the other methods; where the lead is not clear, the closest in units of the error of the difference."""
    ahead: float | None
    """By how much the best leads the rival."""
    error: float | None
    """Standard error of that difference."""
    clear: tuple[tuple[str, ...], ...]
    """All that lead everything of every other method by more than `CLEAR` standard errors of the difference."""


def lead(found: Mapping[tuple[str, ...], Measurement], better: Literal["low", "high"]) -> Lead:
    """Compare methods by numbers that were measured on the same data.

    Args:
        found: by name, the method first; a method may have several. At least one.
        better: which end is best.

    Returns:
        Who leads, and how clearly.
    """
    sign = 1 if better == "high" else -1

    def rivals(name: tuple[str, ...]) -> dict[tuple[str, ...], tuple[float, float, float | None]]:
        # Of the other methods: how many errors they are behind, by how much, and the error; not those that are the
        # same.
        behind: dict[tuple[str, ...], tuple[float, float, float | None]] = {}
        for other, theirs in found.items():
            gap = found[name].minus(theirs)
            ahead, error = sign * gap.value, gap.error
            if other[0] == name[0] or (error is not None and max(abs(ahead), error) < SAME):
                continue
            times = 0.0 if error is None else math.copysign(math.inf, ahead) if error == 0 else ahead / error
            behind[other] = (times, ahead, error)
        return behind

    best = max(found, key=lambda name: sign * found[name].value)
    others = rivals(best)
    clear = tuple(
        name for name in found if (behind := rivals(name)) and min(times for times, *_ in behind.values()) > CLEAR
    )
    # The next best; but where the lead is not clear, the one that stands in its way.
    rival = min(others, key=lambda name: others[name][1] if best in clear else others[name][0], default=None)
    _, ahead, error = (0.0, None, None) if rival is None else others[rival]
    level = tuple(name for name in found if name[0] != best[0] and name not in others)
    return Lead(best, found[best].value, level, rival, ahead, error, clear)
