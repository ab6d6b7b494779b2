r"""Prediction sets: sets of classes that contain the true class with a given probability.

Let :math:`s(x, c)` be a score that is lower for classes that fit better, and let q be the split-conformal quantile
(`mola.decisions.ranks`) of the scores :math:`s(x_i, y_i)` of n labelled examples at :math:`\alpha = 1 - \text{coverage}`. The set for
a new input is :math:`\{c : s(x, c) \le q\}`. It contains the true class y whenever :math:`s(x, y) \le q`. For exchangeable data, the
probability of this event is at least :math:`1 - \alpha` and, if there are no ties, at most :math:`1 - \alpha + 1/(n + 1)`, for every
predictor and every score. A better predictor gives smaller sets. Let p be the predicted probabilities, and let U be uniform between 0
and 1 (or equal to 1 without randomisation). The scores are

- "lac": :math:`-p_c`. A set contains all classes whose probability reaches a fixed threshold. These sets are the smallest on average
    (Sadinle et al., 2019).
- "aps": :math:`\sum_{c' \text{ above } c} p_{c'} + U p_c`, with the classes sorted by probability. Sets are larger for hard inputs
    (Romano et al., 2020).
- "raps": the score of "aps" plus :math:`\lambda \max(0, \text{rank}_c - k)`. The penalty makes very large sets rarer (Angelopoulos et
    al., 2021).

*By class*: each class has its own q, computed from the data of that class, and c is in the set if :math:`s(x, c) \le q_c`. The
coverage then holds for every class, not only on average (Mondrian prediction: Vovk et al., 2005; Löfström et al., 2015). Each q is
computed from fewer examples, so sets are larger and vary more.

*Empty sets* mean that no class fits well enough: either the input differs from most calibration data, or the requested coverage
is lower than the accuracy, so some sets exclude even the most probable class. An empty set misses the true class; `at_least_one` adds
the most probable class. *Full sets* mean that no class can be excluded. If the sets are calibrated by class, a class with fewer than
:math:`\lceil 1/\alpha \rceil - 1` examples is in every set.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from molaplace.decisions.calibration import Calibration, probs_of, ranked
from molaplace.decisions.ranks import conformal_quantiles, data_needed, thresholds
from molaplace.errors import DataError, OptionError, warn
from molaplace.fingerprints import check_fingerprint
from molaplace.options import check_share, is_real, listed, one_of, whole_number
from molaplace.prediction import Prediction

SET_METHODS = ("lac", "aps", "raps")


@dataclass(frozen=True, eq=False)
class PredictionSets:
    """A callable, made by `mola.prediction_sets`, that maps a prediction to a mask (n, C) of the classes in each set."""

    coverage: float
    """Probability that a set contains the true class."""
    method: str
    """Conformal method ("lac", "aps" or "raps")."""
    threshold: Tensor
    """Largest score that a class in a set may have, in float64. Its shape is (), or (C,) if each class has its own threshold."""
    classes: int
    """Number of classes C."""
    count: int
    """Number of calibration examples."""
    randomised: bool = False
    penalty: float = 0.0
    """Penalty for each rank beyond `free` in "raps"."""
    free: int = 0
    at_least_one: bool = False
    fingerprint: str | None = None
    """Fingerprint of the predictor and its settings, or None if unknown."""

    @property
    def least_probability(self) -> float:
        """Smallest probability at which "lac" includes a class, the same for all inputs; if it is 0, all classes are included."""
        if self.method != "lac" or self.threshold.ndim:
            raise OptionError(
                "least_probability exists only for 'lac' sets that were not calibrated by class. Use method='lac' and by=None."
            )
        return max(0.0, -float(self.threshold))

    def __call__(self, prediction: Prediction | Any, *, generator: torch.Generator | None = None) -> Tensor:
        """Return a mask (n, C), on the CPU, of the classes in each input's set.

        Args:
            prediction: a `mola.Prediction`, or probabilities (n, C). A prediction of another predictor, or of the same one with other
                settings, raises `OptionError`.
            generator: random generator for randomised sets; torch's default generator if None.
        """
        check_fingerprint(prediction, self.fingerprint, "these sets")
        invalid = prediction.invalid if isinstance(prediction, Prediction) else None
        if invalid is not None and bool(invalid.any()):
            sets = torch.ones(len(invalid), self.classes, dtype=torch.bool, device="cpu")  # no class can be ruled out
            sets[~invalid] = self(prediction[(~invalid).nonzero().flatten()], generator=generator)
            return sets
        probs = probs_of(prediction)
        if probs.shape[1] != self.classes:
            raise DataError(f"expected probabilities for {self.classes} classes; got {probs.shape[1]} classes.")
        above, rank = ranked(probs)
        draws = (
            torch.rand(len(probs), 1, dtype=torch.float64, generator=generator, device="cpu")
            if self.randomised
            else None
        )
        included = _scores(self.method, probs, above, rank, draws, self.penalty, self.free) <= self.threshold
        if self.at_least_one:
            included |= (rank == 1) & ~included.any(1, keepdim=True)
        return included

    def __repr__(self) -> str:
        by = " of each class" if self.threshold.ndim else ""
        return f"PredictionSets({self.method}: {self.coverage:.3g} coverage{by}, from {self.count} examples)"


def prediction_sets(
    prediction: Prediction | Any,
    labels: Any,
    coverage: float = 0.9,
    method: str = "lac",
    *,
    by: str | None = None,
    randomised: bool = False,
    penalty: float = 0.01,
    free: int = 5,
    at_least_one: bool = False,
    generator: torch.Generator | None = None,
) -> PredictionSets:
    """Use labelled data to calibrate sets of classes that contain the true class with a given probability.

    The probability is taken over draws of the labelled data and of exchangeable new data. `mola.decisions.sets`
    describes the methods and explains why the guarantee holds.

    Args:
        prediction: predictions for labelled data, as a `mola.Prediction`, probabilities (n, C), or a `mola.decisions.Calibration`,
            which includes the labels.
        labels: class indices (n,), or None if `prediction` is a `Calibration`.
        coverage: probability that a set contains the true class, such as 0.9.
        method: conformal method ("lac", "aps" or "raps").
        by: "class" to guarantee the coverage for each class; by default, the coverage holds only on average over the classes.
        randomised: let "aps" and "raps" drop the last class at random, so that the coverage is not higher than requested.
        penalty: penalty lambda of "raps", added for each rank beyond `free`.
        free: number k of ranks that "raps" does not penalise.
        at_least_one: add the most probable class to empty sets.
        generator: random generator for randomised scores; torch's default generator if None.

    Returns:
        A callable that maps predictions to masks (n, C). `DataError` is raised if there are not enough data for this coverage.
    """
    calibration = Calibration.of(prediction, labels)
    coverage = check_share(coverage, "coverage", "90 % is 0.9.")
    one_of(method, SET_METHODS, "method")
    if by is not None:
        one_of(by, ("class",), "by", "None")
    if method == "lac" and randomised:
        raise OptionError(
            "'lac' cannot be randomised, because its sets have no last class to drop at random. Use 'aps' or 'raps'.",
            argument="method",
        )
    if not is_real(penalty) or not 0 <= penalty < math.inf:
        raise OptionError(f"must be a non-negative number; got {penalty!r}.", argument="penalty")
    whole_number(free, "free", 0)
    if method != "raps":
        penalty = 0.0
        free = 0
    draws = torch.rand(len(calibration), dtype=torch.float64, generator=generator, device="cpu") if randomised else None
    columns = calibration.true_probability, calibration.mass_above, calibration.true_rank
    scores = _scores(method, *columns, draws, penalty, free)
    if by == "class":
        threshold = torch.stack(
            [
                conformal_quantiles(scores[calibration.label == label], 1 - coverage)
                for label in range(calibration.classes)
            ]
        )
        rare_classes = threshold.isinf().nonzero().flatten().tolist()
        if rare_classes:
            warn(
                f"a coverage of {coverage:g} requires at least {data_needed(1 - coverage)} labelled data points of each class. Every set "
                f"includes the classes that have fewer: {listed(rare_classes, 5)}."
            )
    else:
        threshold = thresholds(scores, coverage, "sets of all classes")
    return PredictionSets(
        coverage=coverage,
        method=method,
        threshold=threshold,
        classes=calibration.classes,
        count=len(calibration),
        randomised=randomised,
        penalty=float(penalty),
        free=free,
        at_least_one=at_least_one,
        fingerprint=calibration.fingerprint,
    )


def _scores(
    method: str, probability: Tensor, above: Tensor, rank: Tensor, draws: Tensor | None, penalty: float, free: int
) -> Tensor:
    # Return scores of the same shape as `probability`; `draws` is broadcast to this shape.
    if method == "lac":
        return -probability
    mass = probability if draws is None else draws * probability
    return above + mass + penalty * (rank - free).clamp_min(0)
