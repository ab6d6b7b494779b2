r"""Metrics with standard errors over data, and differences between methods on the same data.

Every metric is, to first order, a sum of means over data: over the test data, and for outlier scores also over the outliers. Datum i
contributes :math:`m_i` to such a mean (`mola.evaluation` has the contributions of AUROC, FPR95 and ECE), and

.. math:: \mathrm{error}^2 = \sum_{\text{samples}} \frac{G}{(G - 1)\, n^2} \sum_g \Big(\sum_{i \in g} (m_i - \bar m)\Big)^2

over the G groups of data that are dependent, such as the labels of one input or the pixels of one image. The error of a difference
follows from the differences of the contributions: methods vary together on the same data, so their difference is known better
than either metric. Chance alone lifts every ECE above 0; the error does not include that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mola import metrics
from mola.evaluation import passing, placements, signed_gaps, standard_error

CLEAR = 2.0
"""Standard errors of the difference by which a method must lead every other one to be marked as best: about 95 %."""

SAME = 1e-6
"""Metrics whose difference and its error are smaller are equal: rounding may swap two inputs that are almost tied."""


@dataclass(frozen=True, eq=False)
class Measurement:
    """A metric, and the contribution of each datum to it."""

    value: float
    contributions: tuple[Tensor, ...]
    """Contributions (n,) of each sample, in float64, in the order of the data, up to a constant."""
    groups: tuple[Tensor | None, ...] = ()
    """Group (n,) of each datum of each sample; None if data are independent."""

    @property
    def error(self) -> float | None:
        """Standard error; None if a sample is a single datum or a single group."""
        groups = self.groups or (None,) * len(self.contributions)
        parts = [
            standard_error(own, torch.arange(len(own)) if group is None else group.long())
            for own, group in zip(self.contributions, groups, strict=True)
        ]
        total = math.hypot(*parts)
        return None if math.isnan(total) else total

    def minus(self, other: Measurement) -> Measurement:
        """Return the difference from a metric on the same data."""
        pairs = zip(self.contributions, other.contributions, strict=True)
        return Measurement(self.value - other.value, tuple(mine - theirs for mine, theirs in pairs), self.groups)


def mean_of(values: Tensor, groups: Tensor | None = None) -> Measurement:
    """Return a mean over data (n,)."""
    return Measurement(float(values.mean()), (values,), (groups,))


def root_mean_of(squares: Tensor, groups: Tensor | None = None) -> Measurement:
    """Return the root of a mean of squares (n,)."""
    root = math.sqrt(float(squares.mean()))
    return Measurement(root, (squares / (2 * root) if root > 0 else torch.zeros_like(squares),), (groups,))


def calibration_error(confidence: Tensor, correct: Tensor, bins: int, groups: Tensor | None = None) -> Measurement:
    """Return the expected calibration error from confidences (n,) in float64 and correctness (n,), 1 or 0."""
    gap = metrics.calibration_gap(metrics.bin_sums(confidence, correct, bins))
    return Measurement(gap, (signed_gaps(confidence, correct, bins),), (groups,))


Groups = tuple[Tensor | None, Tensor | None]
"""Groups of the inliers and of the outliers."""


def area_between(inlier_scores: Tensor, outlier_scores: Tensor, groups: Groups = (None, None)) -> Measurement:
    """Return the AUROC of scores that are higher for outliers; see `mola.metrics.auroc`."""
    terms = placements(*metrics.check_scores(inlier_scores, outlier_scores))
    return Measurement(float(terms[1].mean()), terms, groups)


def pass_rate(inlier_scores: Tensor, outlier_scores: Tensor, groups: Groups = (None, None)) -> Measurement:
    """Return the share of outliers that pass where 95 % of the inliers do; see `mola.metrics.fpr_at_tpr`."""
    pair = metrics.check_scores(inlier_scores, outlier_scores)
    return Measurement(metrics.fpr_at_tpr(*pair), passing(*pair), groups)


def mean_area_of_labels(yes: Tensor, truth: Tensor, labels: Tensor, groups: Tensor | None) -> Measurement | None:
    """Return the mean over labels of each label's AUROC, with DeLong's contributions; None if no label has both a yes and a no.

    Args:
        yes: probabilities of "yes" (n,) in float64, one row for each label of each input.
        truth: 1 for yes, 0 for no (n,).
        labels: label of each row (n,).
        groups: input of each row (n,).
    """
    areas, contributions = [], torch.zeros_like(yes)
    for label in torch.unique(labels).tolist():
        no_rows, yes_rows = ((labels == label) & (truth == answer) for answer in (0, 1))
        if bool(yes_rows.any()) and bool(no_rows.any()):
            pair = placements(yes[no_rows], yes[yes_rows])
            areas.append(float(pair[1].mean()))
            for rows, placed in zip((no_rows, yes_rows), pair, strict=True):
                # Deviations of each part's mean, in units of a mean over all rows.
                contributions[rows] = (placed - areas[-1]) * len(yes) / len(placed)
    if not areas:
        return None
    return Measurement(sum(areas) / len(areas), (contributions / len(areas),), (groups,))


Name = tuple[str, ...]
"""`(method,)` or `(method, score)`."""


@dataclass(frozen=True)
class Lead:
    """The best method by a metric, and whether its lead is more than chance."""

    best: Name
    value: float
    level: tuple[Name, ...]
    """Other methods that equal the best to every digit, such as scores of the same logits."""
    rival: Name | None
    """The next best method; where the lead is not clear, the closest in units of the error of the difference."""
    ahead: float | None
    """Difference between the best and the rival."""
    error: float | None
    """Standard error of that difference."""
    clear: tuple[Name, ...]
    """Names that lead every other method by more than `CLEAR` standard errors of the difference."""


Better = Literal["low", "high"]


def leads(measured: Mapping[str, Mapping[str, Measurement]], better: Mapping[str, Better]) -> dict[str, Lead]:
    """Return which method leads on the same data, by each metric that all methods have."""
    return {
        name: lead({(method,): found[name] for method, found in measured.items()}, end)
        for name, end in better.items()
        if all(name in found for found in measured.values())
    }


def lead(found: Mapping[Name, Measurement], better: Better) -> Lead:
    """Compare methods by a metric on the same data; a method may have several entries, which do not compete with each other."""
    sign = 1 if better == "high" else -1

    def rivals(name: Name) -> dict[Name, tuple[float, float, float | None]]:
        # Lead over each other method: in standard errors, as a difference, and its error. Equal methods are left out.
        behind: dict[Name, tuple[float, float, float | None]] = {}
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
    # The next best; where the lead is not clear, the method that prevents it.
    rival = min(others, key=lambda name: others[name][1] if best in clear else others[name][0], default=None)
    _, ahead, error = (0.0, None, None) if rival is None else others[rival]
    level = tuple(name for name in found if name[0] != best[0] and name not in others)
    return Lead(best, found[best].value, level, rival, ahead, error, clear)
