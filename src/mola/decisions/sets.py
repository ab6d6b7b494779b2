r"""Prediction sets: a few classes instead of one, which contain the true class with a given probability.

Let :math:`s(x, c)` be a score, lower for classes that fit better, and q the split-conformal quantile
(`mola.decisions.ranks`) of the scores :math:`s(x_i, y_i)` of n labelled data at :math:`\alpha = 1 - \text{coverage}`.
The set of a new input is :math:`\{c : s(x, c) \le q\}`. It contains the true class y whenever :math:`s(x, y) \le q`,
which for exchangeable data has probability at least :math:`1 - \alpha`, and without ties at most :math:`1 - \alpha +
1/(n + 1)`, for every predictor and every score. A better predictor has smaller sets. With p the predicted
probabilities, and U uniform between 0 and 1 (1 without randomisation), the scores are

- "lac": :math:`-p_c`, all classes above one probability. The smallest sets on average (Sadinle et al., 2019).
- "aps": :math:`\sum_{c' \text{ above } c} p_{c'} + U p_c`, classes in order of probability: sets are larger for hard
  inputs (Romano et al., 2020).
- "raps": the same plus :math:`\lambda \max(0, \text{rank}_c - k)`: fewer very large sets (Angelopoulos et al., 2021).

*By class*, each class has its own q, from the data of that class, and c is in the set if :math:`s(x, c) \le q_c`: the
coverage then holds for every class, not only on average (Mondrian prediction: Vovk et al., 2005; Löfström et al.,
2015). Each q has fewer data, so sets are larger and vary more.

*Empty sets* mean that no class fits well enough: the input is stranger than most calibration data, or the coverage is
below the accuracy, so that some inputs may be missed. They count as misses; `at_least_one` adds the most probable
class. *Full sets* mean that no class can be excluded; a class with fewer than :math:`\lceil 1/\alpha \rceil -
1` data always gets them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mola.decisions.calibration import Calibration, probs_of, ranked
from mola.decisions.ranks import check_share, conformal_quantiles, data_needed, thresholds
from mola.errors import DataError, OptionError, warn
from mola.options import is_real, one_of, whole_number
from mola.prediction import Prediction

METHODS = ("lac", "aps", "raps")


@dataclass(frozen=True)
class PredictionSets:
    """Call it with a prediction to get a mask (n, C) of the classes in each set. Made by `mola.prediction_sets`."""

    coverage: float
    """Probability that a set contains the true class."""
    method: str
    """"lac", "aps" or "raps"."""
    threshold: Tensor
    """Largest score of a class in a set, in float64: (), or (C,) if sets are by class."""
    classes: int
    """C."""
    count: int
    """Number of calibration data."""
    randomised: bool = False
    penalty: float = 0.0
    """Penalty of each rank above `free`, for "raps"."""
    free: int = 0
    at_least_one: bool = False

    @property
    def least_probability(self) -> float:
        """Smallest probability of a class that "lac" includes, the same for all inputs; 0 includes all classes."""
        if self.method != "lac" or self.threshold.ndim:
            raise OptionError("only sets of the method 'lac' that are not by class have one least probability.")
        return max(0.0, -float(self.threshold))

    def __call__(self, prediction: Prediction | Any, *, generator: torch.Generator | None = None) -> Tensor:
        """Return a mask (n, C) of the classes in the set of each input, on the CPU.

        Args:
            prediction: a `mola.Prediction`, or probabilities (n, C).
            generator: source of randomness for randomised sets; None uses torch's default.
        """
        probs = probs_of(prediction)
        if probs.shape[1] != self.classes:
            raise DataError(f"expected probabilities of {self.classes} classes, got {probs.shape[1]}.")
        above, rank = ranked(probs)
        draws = torch.rand(len(probs), 1, dtype=torch.float64, generator=generator) if self.randomised else None
        included = _scores(self.method, probs, above, rank, draws, self.penalty, self.free) <= self.threshold
        if self.at_least_one:
            included |= (rank == 1) & ~included.any(1, keepdim=True)
        return included

    def __repr__(self) -> str:
        by = " of each class" if self.threshold.ndim else ""
        return f"PredictionSets({self.method}: {self.coverage:.3g} coverage{by}, from {self.count} data)"


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
    """Calibrate sets of classes that contain the true class with a given probability, on labelled data.

    The probability is over draws of the labelled data and of new data that are exchangeable with them. Methods and
    proof: `mola.decisions.sets`.

    Args:
        prediction: prediction for labelled data; a `mola.Prediction`, or probabilities (n, C). Or a `mola.decisions.Calibration`,
            which has its labels.
        labels: (n,); None for a `Calibration`.
        coverage: such as 0.9.
        method: "lac", "aps" or "raps".
        by: "class" guarantees the coverage for each class; None on average over classes.
        randomised: "aps" and "raps" drop a random part of the last class, which lowers the coverage to the given value.
        penalty: lambda of "raps", added for each rank above `free`.
        free: k of "raps", the number of ranks without penalty.
        at_least_one: add the most probable class to empty sets.
        generator: source of randomness for randomised scores; None uses torch's default.

    Returns:
        A callable from predictions to masks (n, C). `DataError` if there are too few data for the coverage.
    """
    calibration = Calibration.of(prediction, labels)
    share = check_share(coverage, "coverage", "90 % is 0.9.")
    one_of(method, METHODS, "method")
    if by is not None:
        one_of(by, ("class",), "by", "None")
    if method == "lac" and randomised:
        raise OptionError(
            "the method 'lac' cannot be randomised: its score has no last class to cut. Use 'aps' or 'raps'."
        )
    if not is_real(penalty) or not 0 <= penalty < math.inf:
        raise OptionError(f"penalty must be a number of at least 0, got {penalty!r}.")
    whole_number(free, "free", 0)
    strength, ranks = (float(penalty), free) if method == "raps" else (0.0, 0)
    draws = torch.rand(len(calibration), dtype=torch.float64, generator=generator) if randomised else None
    columns = calibration.true_probability, calibration.mass_above, calibration.true_rank
    scores = _scores(method, *columns, draws, strength, ranks)
    if by == "class":
        threshold = torch.stack(
            [conformal_quantiles(scores[calibration.label == one], 1 - share) for one in range(calibration.classes)]
        )
        lacking = threshold.isinf().nonzero().flatten().tolist()
        if lacking:
            warn(
                f"a coverage of {share:g} needs at least {data_needed(1 - share)} labelled data of each class, and there are fewer of "
                f"class {', '.join(map(str, lacking[:5]))}{', ...' if len(lacking) > 5 else ''}, which gets a place in every set."
            )
    else:
        threshold = thresholds(scores, share, "sets of all classes")
    return PredictionSets(
        coverage=share,
        method=method,
        threshold=threshold,
        classes=calibration.classes,
        count=len(calibration),
        randomised=randomised,
        penalty=strength,
        free=ranks,
        at_least_one=at_least_one,
    )


def _scores(
    method: str, probability: Tensor, above: Tensor, rank: Tensor, draws: Tensor | None, penalty: float, free: int
) -> Tensor:
    # Scores in the shape of `probability`, with which `draws` is broadcast.
    if method == "lac":
        return -probability
    own = probability if draws is None else draws * probability
    return above + own + penalty * (rank - free).clamp_min(0)
