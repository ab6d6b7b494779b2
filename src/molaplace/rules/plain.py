"""Rules that use validation data, or the evidence of the training data, to choose the prior precision.

A rule is called with a posterior and held-out data, and returns a `Tuning`. The networks have already been run, so evaluating a
candidate only requires its predictive distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from molaplace.errors import OptionError
from molaplace.likelihoods import Gaussian, Likelihood
from molaplace.options import is_real, one_of
from molaplace.rules.held_out import HeldOut
from molaplace.rules.rule import Rule, Tuning, warned
from molaplace.rules.scores import label_scores, mean_scores, paired, scores, share_error, without_labels
from molaplace.rules.search import (
    SAME,
    PrecisionSearch,
    Scored,
    curve_of,
    maximise,
    points,
)

if TYPE_CHECKING:
    from molaplace.posterior import MoLA

SCORE_NAMES = {"nll": "log loss", "brier": "Brier score", "ece": "calibration error", "crps": "CRPS"}

TEMPERATURES = (*(0.1 * 9.5 ** (step / 31) for step in range(32)), 1.0)
"""Temperatures tried first if the networks are underconfident. The search then refines the best temperature."""

DOUBTLESS = 2.0
"""Number of standard errors by which accuracy must exceed confidence before logits are sharpened."""

ALIKE = 1e-3
"""Difference in log loss per output, in nats, below which two prior precisions are considered equally good in regression. For scores
other than the log loss, the difference is relative."""

NEAR = 0.005
"""If the mean confidence exceeds the target by at most this much, the summary treats the target as met."""

NOISE_FACTORS = tuple(4.0 ** (step / 8) for step in range(-8, 9))
"""Multiples of the current noise that are tried first in regression. Multiples on a finer grid are tried next."""


# --- the paper's rule ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Threshold(Rule):
    """The paper's rule: choose the smallest prior precision at which the mean confidence on the validation data meets a threshold.

    Args:
        confidence: threshold on the mean confidence. By default, the threshold is `margin` below the networks' mean accuracy on the
            validation data. The paper's thresholds are 0.98 for an accuracy of 99.2 % and 0.94 for an accuracy of 94.8 %.
        brier: optional threshold that the Brier score must also meet.
        margin: amount by which the default threshold lies below the accuracy.
        grid: prior precisions to choose from. By default, these are the 100 values of the paper's grid from 1e-4 to 1e3, which is
            extended if the best value is at either end.
    """

    confidence: float | None = None
    brier: float | None = None
    margin: float = 0.01
    grid: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.confidence is not None and not (is_real(self.confidence) and 0 < self.confidence <= 1):
            raise OptionError(
                f"must lie between 0 and 1, got {self.confidence!r}. For 95 %, pass 0.95.", argument="confidence"
            )
        if not (is_real(self.margin) and -1 <= self.margin <= 1):
            raise OptionError(
                f"must lie between -1 and 1, got {self.margin!r}. For one percentage point, pass 0.01.",
                argument="margin",
            )
        if self.brier is not None and not (is_real(self.brier) and 0 <= self.brier <= 2):
            raise OptionError(f"must lie between 0 and 2, got {self.brier!r}.", argument="brier")

    @property
    def needs_labels(self) -> bool:  # type: ignore[override]
        """False if a confidence threshold is given without a Brier threshold, because no labels are then needed."""
        return self.confidence is None or self.brier is not None

    def target(self, data: HeldOut) -> tuple[float, str, tuple[str, ...]]:
        """Return the target mean confidence, a text that states and explains it, and any notes."""
        if self.confidence is not None:
            return self.confidence, f"{self.confidence:.2%} as given", ()
        accuracy, error = data.accuracy()
        least = 1 / data.likelihood.num_choices(data.outputs[0].shape[1])  # type: ignore[attr-defined]
        target = max(accuracy - self.margin, least)
        notes: tuple[str, ...] = ()
        if error > self.margin:
            notes = (
                "the validation set is small: the networks' mean accuracy, on which the target confidence is based, is "
                f"{accuracy:.1%} with a standard error of {points(error, '.2g')}.",
            )
        origin = f"the networks' mean accuracy of {accuracy:.2%} minus {points(self.margin)}"
        if target > accuracy - self.margin:
            origin = f"the chance level, because {origin} would be even lower"
        return target, f"{target:.2%}, {origin}", notes

    def __call__(self, posterior: MoLA, data: HeldOut) -> Tuning:
        """Choose the prior precision."""
        target, origin, notes = self.target(data)
        score = label_scores if data.labels is not None else without_labels(posterior.likelihood)
        search = PrecisionSearch(lambda some: mean_scores(posterior, data, score, precision=some), self.grid)

        def meets(row: dict[str, float]) -> bool:
            return row["confidence"] >= target and (self.brier is None or row["brier"] <= self.brier)

        index = search.smallest_meeting(meets, "confidence")
        if index is None:
            index = max(search.tried)
            summary = warned(
                f"The threshold rule has no effect: without any covariance, the mean confidence is "
                f"{search.tried[index]['confidence']:.2%}, already below the target of {target:.2%}, and covariance only lowers it. "
                f"The networks disagree, or they are underconfident, as after label smoothing or mixup. The prior precision is set "
                f"to {search.value(index):.3g}, at which predictions are close to those of the plain ensemble. Use the default "
                f"rule, 'calibrated'."
            )
        else:
            notes = (*notes, *search.note(index))
            lowest = min(row["confidence"] for row in search.tried.values())
            above = (
                "; none of the prior precisions tried lowers the confidence to the target"
                if lowest > target + NEAR
                else ""
            )
            summary = (
                f"The mean confidence on the validation data is {search.tried[index]['confidence']:.2%} at prior precision "
                f"{search.value(index):.3g} (target: {origin}){above}."
            )
        chosen = (search.value(index),) * len(posterior.components)
        return Tuning(f"Threshold: target confidence {origin}", chosen, summary, notes, search.curve())


# --- scores --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score(Rule):
    """The rule that chooses the prior precision with the best score on the validation data.

    If the networks are clearly underconfident on these data, the rule also sharpens the logits with a temperature below 1. For
    regression, the rule also chooses the noise unless it was given.

    Args:
        score: "nll", "brier" or "ece" for classification, "nll" or "crps" for regression.
        grid: prior precisions to choose from; by default, the paper's grid, which is extended if the best value is at either end.
    """

    score: Literal["nll", "brier", "ece", "crps"] = "nll"
    grid: Sequence[float] | None = None

    def __post_init__(self) -> None:
        one_of(self.score, tuple(SCORE_NAMES), "score")

    def applies_to(self, likelihood: Likelihood) -> bool:
        """Return True if the rule is defined for the likelihood."""
        return {"nll": True, "crps": not likelihood.classification}.get(self.score, likelihood.classification)

    def __call__(self, posterior: MoLA, data: HeldOut) -> Tuning:
        """Choose the prior precision."""
        score = self.score
        if not posterior.likelihood.classification:
            return _tune_regression(posterior, data, score, self.grid)
        search = PrecisionSearch(curve_of(posterior, data), self.grid)
        index, temperature = search.minimise(score, smooth=score != "ece"), 1.0
        notes: tuple[str, ...] = ()
        sharper = self._sharpened(posterior, data, search, index)
        if sharper is not None:
            temperature, search, index, notes = sharper
        value = search.tried[index][score]
        at = f" and temperature {temperature:.3g}" if temperature != 1 else ""
        summary = (
            f"The best {SCORE_NAMES[score]} found on the validation data is {value:.4g}, at prior precision "
            f"{search.value(index):.3g}{at}."
        )
        chosen = (search.value(index),) * len(posterior.components)
        return Tuning(f"Score({score!r})", chosen, summary, (*notes, *search.note(index)), search.curve(), temperature)

    def _sharpened(
        self, posterior: MoLA, data: HeldOut, search: PrecisionSearch, index: int
    ) -> tuple[float, PrecisionSearch, int, tuple[str, ...]] | None:
        # Return a temperature below 1 if accuracy exceeds confidence by more than two standard errors. Covariance only lowers
        # confidence, but networks trained with label smoothing or mixup need the opposite.
        score = self.score
        each = scores(posterior, data, precision=[search.value(index)])
        gap, error = paired(each["correct"][0], each["confidence"][0], data, least=share_error(data))
        if gap <= DOUBTLESS * error:
            return None
        before, temperature, tried = search.tried[index][score], 1.0, TEMPERATURES
        for _ in range(3):  # alternate, as each setting can compensate for the other; more rounds would gain little
            values = mean_scores(posterior, data, precision=[search.value(index)], temperature=tried)[score]
            if temperature == 1 and float(values[-1] - values.min()) <= SAME * abs(float(values[-1])):
                return None  # this also covers links that do not depend on the temperature
            temperature = tried[int(values.argmin())]
            step = 9.5 ** (1 / 31)
            low, high = max(TEMPERATURES[0], temperature / step), min(1.0, temperature * step)
            tried = tuple(low * (high / low) ** (part / 16) for part in range(17))
            search = PrecisionSearch(curve_of(posterior, data, temperature), self.grid)
            index = search.minimise(score, smooth=score != "ece")
        note = (
            f"the networks are underconfident, as after label smoothing or mixup: on the validation data, the mean confidence is "
            f"{float(each['confidence'].mean()):.2%} and the accuracy is {float(each['correct'].mean()):.2%}, which is "
            f"{gap / error:.1f} standard errors higher. A temperature of {temperature:.3g} changes the {SCORE_NAMES[score]} "
            f"from {before:.4g} to {search.tried[index][score]:.4g}."
        )
        return temperature, search, index, (note,)


@dataclass(frozen=True)
class Outliers(Rule):
    """The rule that minimises the validation log loss plus a penalty for confidence on outliers.

    The penalty is the cross-entropy between the uniform distribution and the predictions for the outliers.

    Args:
        loader: batches of outliers, whose labels are ignored.
        weight: weight of the penalty.
        grid: prior precisions to choose from; by default, the paper's grid, which is extended if the best value is at either end.
    """

    loader: Iterable[Any] = field(repr=False)
    weight: float = 0.25
    grid: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not (is_real(self.weight) and 0 <= self.weight < math.inf):
            raise OptionError(f"must be finite and non-negative, got {self.weight!r}.", argument="weight")

    def __call__(self, posterior: MoLA, data: HeldOut) -> Tuning:
        """Choose the prior precision."""
        outliers = posterior.read(self.loader, "outlier loader", labelled=False, team=data.team)

        def evaluate(precisions: Sequence[float]) -> Scored:
            found = mean_scores(posterior, data, precision=precisions)
            far = mean_scores(posterior, outliers, without_labels(posterior.likelihood), precision=precisions)
            objective = found["nll"] + self.weight * far["uniformity"]
            return found | {"outlier_confidence": far["confidence"], "objective": objective}

        search = PrecisionSearch(evaluate, self.grid)
        index = search.minimise("objective")
        row = search.tried[index]
        summary = (
            f"At prior precision {search.value(index):.3g}, the validation log loss is {row['nll']:.4g} and the mean "
            f"confidence on outliers is {row['outlier_confidence']:.1%}."
        )
        chosen = (search.value(index),) * len(posterior.components)
        return Tuning(f"Outliers(weight={self.weight})", chosen, summary, search.note(index), search.curve())


# --- evidence ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evidence(Rule):
    """The rule that maximises the log marginal likelihood of the training labels, without validation data.

    Args:
        shared: choose a single prior precision, which maximises the sum of the components' log evidences. Otherwise, a separate prior
            precision is chosen for each component.
    """

    shared: bool = True
    needs_data = False

    def applies_to(self, likelihood: Likelihood) -> bool:
        """Return True if the rule is defined for the likelihood."""
        return True

    def __call__(self, posterior: MoLA, data: HeldOut | None = None) -> Tuning:
        """Choose the prior precision and, for regression, the noise unless it was given."""
        count = len(posterior.components)
        free = all(isinstance(one.likelihood, Gaussian) and one.likelihood.estimated for one in posterior.components)
        precisions, factors = [1.0] * count, [1.0] * count
        for group in [range(count)] if self.shared else [range(index, index + 1) for index in range(count)]:

            def best(log_factor: float, group: range = group) -> tuple[float, float]:
                parts = [posterior.components[index].noise_scaled(math.exp(log_factor)) for index in group]

                def evidence(log_precision: float) -> float:
                    precision = torch.tensor(math.exp(log_precision), dtype=torch.float64, device="cpu")
                    return float(sum(one.log_evidence(precision) for one in parts))

                found = maximise(evidence, math.log(1e-16), math.log(1e16))
                return found, evidence(found)

            log_factor = maximise(lambda value: best(value)[1], -7.0, 7.0, coarse=29) if free else 0.0
            for index in group:
                precisions[index], factors[index] = math.exp(best(log_factor)[0]), math.exp(log_factor)
        listed = ", ".join(dict.fromkeys(f"{one:.3g}" for one in precisions))
        summary = f"The log evidence of the training labels is largest at prior precision {listed}."
        return Tuning(
            f"Evidence(shared={self.shared})",
            tuple(precisions),
            summary,
            noise_factors=tuple(factors) if free else (),
        )


# --- regression ----------------------------------------------------------------------------------------------------------


def _tune_regression(posterior: MoLA, data: HeldOut, score: str, grid: Sequence[float] | None) -> Tuning:
    # Alternately choose the prior precision and, unless it was given, the noise. With a large data set, the score barely depends on
    # the prior precision, and the position of its minimum is arbitrary. Among equally good prior precisions, the value nearest to 1 is
    # chosen.
    count, factor = len(posterior.components), 1.0
    free = all(isinstance(one.likelihood, Gaussian) and one.likelihood.estimated for one in posterior.components)

    def at(noise: float) -> MoLA:
        return posterior.with_parts(components=[one.noise_scaled(noise) for one in posterior.components])

    for _ in range(20):
        search = PrecisionSearch(curve_of(at(factor), data), grid)
        smallest = search.tried[search.minimise(score)][score]
        targets = posterior.likelihood.num_uncertain(data.outputs[0].shape[1])
        room = ALIKE * targets if score == "nll" else ALIKE * abs(smallest)
        close = [index for index, row in search.tried.items() if row[score] <= smallest + room]
        index, before = min(close, key=lambda one: abs(math.log(search.value(one)))), factor
        if not free:
            break
        for power in (1.0, 0.125, 1 / 64):
            tried = [factor * one**power for one in NOISE_FACTORS]
            values = [curve_of(at(one), data)([search.value(index)])[score] for one in tried]
            factor = tried[int(torch.cat(values).argmin())]
        if abs(math.log(factor / before)) < 1e-3:
            break
    value = search.tried[index][score]
    at_noise = f" with the noise multiplied by {factor:.3g}" if free else ""
    summary = f"The {SCORE_NAMES[score]} on the validation data is {value:.4g} at prior precision {search.value(index):.3g}{at_noise}."
    factors = (factor,) * count if free else ()
    chosen = (search.value(index),) * count
    return Tuning(f"Score({score!r})", chosen, summary, search.note(index), search.curve(), noise_factors=factors)


PLAIN_RULES: dict[str, Rule] = {
    "threshold": Threshold(),
    "nll": Score("nll"),
    "brier": Score("brier"),
    "ece": Score("ece"),
    "crps": Score("crps"),
    "evidence": Evidence(),
}
"""Tuning rules, keyed by name, except those that build on another rule."""
