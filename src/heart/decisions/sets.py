r"""A few labels instead of one: sets that hold the true class as often as asked for.

Let :math:`s(x, c)` be a score, lower for classes that fit better, and q the split-conformal quantile (`mola.decisions.ranks`) of
the scores :math:`s(x_i, y_i)` of n labelled data at :math:`\alpha = 1 - \text{coverage}`. The set of a new input is :math:`\{c :
s(x, c) \le q\}`. It holds the true class y whenever :math:`s(x, y) \le q`, which for exchangeable data has probability at least
:math:`1 - \alpha`, and without ties at most :math:`1 - \alpha + 1/(n + 1)`: whatever the predictor and the score. A better
predictor has smaller sets. With p the predicted probabilities, and U uniform between 0 and 1 (1 without randomisation):

- "lac": :math:`-p_c`, all classes above one probability. The smallest sets on average (Sadinle et al., 2019).
- "aps": :math:`\sum_{c' \text{ before } c} p_{c'} + U p_c`, classes in order of probability: sets grow where inputs are hard
  (Romano et al., 2020).
- "raps": the same plus :math:`\lambda \max(0, \text{rank}_c - k)`: fewer very large sets (Angelopoulos et al., 2021).

*By class* there is a q for each class, of the data of that class alone, and c is held if :math:`s(x, c) \le q_c`: then every
class is held as often as asked for, not only their mean (Vovk et al., 2005, as Mondrian prediction; Löfström et al., 2015). *By
group* the same for groups of inputs that are known beforehand. Each q has fewer data, so sets are larger and vary more.

*Empty sets* say that no class fits well enough: the input is stranger than most calibration data, or the coverage is below the
accuracy, so that the promise is kept with some inputs left out. They count as misses that were allowed; `at_least_one` fills them
with the most probable class. *Whole sets* say that no class can be ruled out; where a class or group has fewer than :math:`\lceil
1/\alpha \rceil - 1` data, nothing else would keep the promise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heart.decisions.calibration import Calibration, probs_of, ranked
from heart.decisions.ranks import checked_share, conformal_quantile, data_needed
from heart.errors import DataError, OptionError, warn
from heart.options import counted, is_real, one_of, whole_number
from heart.prediction import Prediction

METHODS = ("lac", "aps", "raps")


@dataclass(frozen=True)
class PredictionSets:
    """Call it with a prediction: truth values (n, C), which classes each set holds. Made by `mola.prediction_sets`."""

    coverage: float
    """Share of sets that hold the true class."""
    method: str
    """"lac", "aps" or "raps"."""
    threshold: Tensor
    """Largest score of a class in a set, in float64: a number, or one for each class (C,)."""
    classes: int
    """C."""
    count: int
    """Calibration data."""
    groups: Mapping[Any, float] | None = None
    """Threshold of each group, where they are by group."""
    randomised: bool = False
    penalty: float = 0.0
    """Of each rank above `free`, for "raps"."""
    free: int = 0
    at_least_one: bool = False

    @property
    def least_probability(self) -> float:
        """Of "lac", the same for all inputs: a set holds the classes that are at least so probable. 0 holds all."""
        if self.method != "lac" or self.groups is not None or self.threshold.ndim:
            raise OptionError(
                "only sets of the method 'lac' that are not by class or group have one least probability."
            )
        return max(0.0, -float(self.threshold))

    def __call__(
        self, prediction: Prediction | Any, *, groups: Any = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Which classes the set of each input holds.

        Args:
            prediction: a `mola.Prediction`, or probabilities (n, C).
            groups: (n,), where the sets are by group.
            generator: of the draws of randomised sets; None is torch's own.

        Returns:
            (n, C) of truth values, in main memory.
        """
        probs = probs_of(prediction)
        if probs.shape[1] != self.classes:
            raise DataError(f"expected probabilities of {self.classes} classes, got {probs.shape[1]}.")
        if (groups is None) != (self.groups is None):
            raise OptionError(
                "these sets are by group: give groups=(n,)." if groups is None else "these sets are not by group."
            )
        limit = self.threshold
        if self.groups is not None:
            names = group_names(groups, len(probs))
            unknown = sorted({str(name) for name in names if name not in self.groups})
            if unknown:
                raise DataError(
                    f"there were no calibration data of the group {unknown[0]}: nothing can be promised for it. Known groups: "
                    f"{', '.join(map(str, self.groups))}."
                )
            limit = torch.tensor([self.groups[name] for name in names], dtype=torch.float64)[:, None]
        above, rank = ranked(probs)
        draws = torch.rand(len(probs), 1, dtype=torch.float64, generator=generator) if self.randomised else None
        held = _scores(self.method, probs, above, rank, draws, self.penalty, self.free) <= limit
        if self.at_least_one:
            held |= (rank == 1) & ~held.any(1, keepdim=True)
        return held

    def __repr__(self) -> str:
        by = (
            ""
            if self.groups is None and not self.threshold.ndim
            else " in each group"
            if self.groups
            else " of each class"
        )
        return (
            f"PredictionSets({self.method}: hold the label {self.coverage:.3g} of the time{by}; from {self.count} data)"
        )


def prediction_sets(
    prediction: Prediction | Any,
    labels: Any,
    coverage: float = 0.9,
    method: str = "lac",
    *,
    by: str | None = None,
    groups: Any = None,
    randomised: bool = False,
    penalty: float = 0.01,
    free: int = 5,
    at_least_one: bool = False,
    generator: torch.Generator | None = None,
) -> PredictionSets:
    """Sets of classes that hold the true one as often as asked for, calibrated on labelled data. See `mola.decisions.sets`.

    The promise is a mean over draws of the labelled data and over new data that are exchangeable with them.

    Args:
        prediction: of labelled data; a `mola.Prediction`, or probabilities (n, C).
        labels: (n,).
        coverage: such as 0.9.
        method: "lac", "aps" or "raps".
        by: "class" keeps the promise for each class; None on average over classes.
        groups: (n,), names or numbers of groups of inputs: the promise is kept for each, and calls need the groups of their inputs.
        randomised: "aps" and "raps" cut off a random part of the last class, which brings coverage down to what was asked for.
        penalty: lambda of "raps": what each rank above `free` adds.
        free: k of "raps": ranks that cost nothing.
        at_least_one: empty sets get the most probable class.
        generator: of the draws of randomised scores; None is torch's own.

    Returns:
        A callable from predictions to truth values (n, C). `DataError` if there are too few data for the coverage.
    """
    return sets_of(
        Calibration.of(prediction, labels),
        coverage,
        method,
        by=by,
        groups=groups,
        randomised=randomised,
        penalty=penalty,
        free=free,
        at_least_one=at_least_one,
        generator=generator,
    )


def sets_of(
    calibration: Calibration,
    coverage: float = 0.9,
    method: str = "lac",
    *,
    by: str | None = None,
    groups: Any = None,
    randomised: bool = False,
    penalty: float = 0.01,
    free: int = 5,
    at_least_one: bool = False,
    generator: torch.Generator | None = None,
) -> PredictionSets:
    """As `prediction_sets`, of numbers that were kept.

    Args:
        calibration: of labelled data.
        coverage: as for `prediction_sets`, and so are the others.
        method: likewise.
        by: likewise.
        groups: likewise.
        randomised: likewise.
        penalty: likewise.
        free: likewise.
        at_least_one: likewise.
        generator: likewise.

    Returns:
        The sets.
    """
    share = checked_share(coverage, "coverage", "90 % is 0.9.")
    one_of(method, METHODS, "method")
    if by is not None:
        one_of(by, ("class",), "by", "None")
    if by is not None and groups is not None:
        raise OptionError("sets are by class or by group, not both: give by='class' or groups=(n,).")
    if method == "lac" and randomised:
        raise OptionError(
            "the method 'lac' is not randomised: its score has no last class to cut. Use 'aps' or 'raps'."
        )
    if not is_real(penalty) or not 0 <= penalty < math.inf:
        raise OptionError(f"penalty must be a number of at least 0, got {penalty!r}.")
    whole_number(free, "free", 0)
    strength, spared = (float(penalty), free) if method == "raps" else (0.0, 0)
    draws = torch.rand(len(calibration), dtype=torch.float64, generator=generator) if randomised else None
    columns = calibration.true_probability, calibration.mass_above, calibration.true_rank
    scores = _scores(method, *columns, draws, strength, spared)
    rate = 1 - share
    settings: dict[str, Any] = {
        "coverage": share,
        "method": method,
        "classes": calibration.classes,
        "count": len(calibration),
        "randomised": randomised,
        "penalty": strength,
        "free": spared,
        "at_least_one": at_least_one,
    }
    if by == "class":
        found = [conformal_quantile(scores[calibration.label == one], rate) for one in range(calibration.classes)]
        _tell_of_too_few({str(place): value for place, value in enumerate(found)}, "class", rate)
        return PredictionSets(threshold=torch.tensor(found, dtype=torch.float64), **settings)
    if groups is not None:
        names = np.array(group_names(groups, len(calibration)), dtype=object)
        each = {one: conformal_quantile(scores[torch.from_numpy(names == one)], rate) for one in dict.fromkeys(names)}
        _tell_of_too_few({str(name): value for name, value in each.items()}, "group", rate)
        return PredictionSets(threshold=torch.tensor(math.inf, dtype=torch.float64), groups=each, **settings)
    limit = conformal_quantile(scores, rate)
    if limit == math.inf:
        raise DataError(
            f"{counted(len(calibration), 'labelled datum is', 'labelled data are')} too few for a coverage of {share:g}: only sets of "
            f"all classes would keep the promise. Give at least {data_needed(rate)}, or ask for less."
        )
    return PredictionSets(threshold=torch.tensor(limit, dtype=torch.float64), **settings)


def _scores(
    method: str, probability: Tensor, above: Tensor, rank: Tensor, draws: Tensor | None, penalty: float, free: int
) -> Tensor:
    # How badly classes fit, of any shape; `draws` fits to it.
    if method == "lac":
        return -probability
    own = probability if draws is None else draws * probability
    scores = above + own
    return scores + penalty * (rank - free).clamp_min(0) if penalty else scores


def _tell_of_too_few(limits: Mapping[str, float], what: str, rate: float) -> None:
    lacking = [name for name, limit in limits.items() if limit == math.inf]
    if lacking:
        effect = "which every set therefore holds" if what == "class" else "whose sets therefore hold all classes"
        listed = f"{', '.join(lacking[:5])}{', ...' if len(lacking) > 5 else ''}"
        warn(
            f"a coverage of {1 - rate:g} takes at least {data_needed(rate)} labelled data of each {what}: there are fewer of "
            f"{what} {listed}, {effect}."
        )


def group_names(groups: Any, count: int) -> list[Any]:
    """Names of groups as plain values.

    Args:
        groups: a tensor, an array or a list.
        count: how many there must be.

    Returns:
        One for each datum.
    """
    names = groups.tolist() if isinstance(groups, (Tensor, np.ndarray)) else list(groups)
    if len(names) != count or any(isinstance(name, (list, dict)) for name in names):
        raise DataError(f"groups must hold one name or number for each of the {count} data, got {len(names)}.")
    return names
