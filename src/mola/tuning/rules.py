"""Rules that choose the prior precision, and some of them temperature, pooling and distance exponent, on validation data.

A rule is an object that is called with a posterior and held-out data and returns a `Tuning`. The networks have run once by then; a
candidate costs what its predictive distribution costs. The search over the prior precision comes first in this file:
every ninth value of the paper's grid, then finer steps around the best, and beyond an end of the grid if that wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from mola.errors import OptionError, warn
from mola.likelihoods import Gaussian, Likelihood
from mola.options import is_real, one_of
from mola.tuning.held_out import HeldOut
from mola.tuning.scores import Candidates, averages, confidence_and_uniformity, paired, scores

if TYPE_CHECKING:
    from mola.posterior import MoLA

Scored = dict[str, Tensor]
Evaluate = Callable[[Sequence[float]], Scored]
"""From prior precisions to the scores (L,) of each."""

LOW, HIGH, STEPS = 0, 99, (9, 3, 1)
"""Indices of the paper's grid, 100 values from 1e-4 to 1e3, and the steps of the search."""

LOWEST, HIGHEST = -279, 225
"""Indices up to which the grid may grow: 2e-24 and 8e11. Below, the prior has no influence; above, no covariance is left."""

SAME = 1e-9
"""Relative difference of scores that are equal but for rounding."""

SCORE_NAMES = {"nll": "log loss", "brier": "Brier score", "ece": "calibration error", "crps": "CRPS"}

TEMPERATURES = (*(0.1 * 9.5 ** (step / 31) for step in range(32)), 1.0)
"""Tried where networks may be underconfident; the best is refined."""

DOUBTLESS = 2.0
"""Standard errors by which accuracy must exceed confidence before logits are sharpened."""

ALIKE = 1e-3
"""Log loss per output, in nats, up to which the prior precisions of a regression score alike; of other scores, the same share."""

NOISE_FACTORS = tuple(4.0 ** (step / 8) for step in range(-8, 9))
"""Of the noise of a regression, tried around the current one; then finer."""

EXPONENTS = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Distance exponents tried first; then finer between the last that meets the limits and the first that does not."""

GROWTHS = tuple(step / 16 for step in range(17))
"""Distance exponents of a regression: up to 1, where the standard deviation grows in proportion to the distance, as
the uncertainty about a function with bounded slope does."""

FINEST = 2.0**-11
"""Distance exponents are multiples of this."""

REGRESSION_PRICE = 0.01
"""Log loss per output, in nats, that the distance may cost a regression by default."""

FAR = 3.0
"""How much farther than the training data the validation data may be before a note says so."""


@dataclass(frozen=True)
class Tuning:
    """How a posterior was tuned."""

    rule: str
    prior_precision: tuple[float, ...]
    """Of each component."""
    summary: str = ""
    """What the tuning did, in one sentence."""
    notes: tuple[str, ...] = ()
    """What else the user should know."""
    curve: dict[str, tuple[float, ...]] = field(default_factory=dict, repr=False)
    """What each candidate scored on the validation data."""
    temperature: float = 1.0
    pooling: float = 1.0
    distance_exponent: float = 0.0
    onset: float = 1.0
    noise_factors: tuple[float, ...] = ()
    """Factor of each component's noise, where a rule chose the noise of a regression."""

    def __str__(self) -> str:
        return "\n".join(line for line in (self.summary, *self.notes) if line)

    def as_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "rule": self.rule,
            "prior_precision": list(self.prior_precision),
            "summary": self.summary,
            "notes": list(self.notes),
            "curve": {name: list(values) for name, values in self.curve.items()},
            "temperature": self.temperature,
            "pooling": self.pooling,
            "distance_exponent": self.distance_exponent,
            "onset": self.onset,
            "noise_factors": list(self.noise_factors),
        }

    @staticmethod
    def from_json(entry: dict[str, Any]) -> Tuning:
        """What `as_json` made."""
        tuples = {name: tuple(entry[name]) for name in ("prior_precision", "notes", "noise_factors")}
        curve = {name: tuple(values) for name, values in entry["curve"].items()}
        return Tuning(**(entry | tuples | {"curve": curve}))


class Rule(Protocol):
    """A way to choose the prior precision."""

    needs_data: bool
    """Whether it uses validation data."""

    def __call__(self, posterior: MoLA, data: HeldOut | None) -> Tuning:
        """Choose, from a posterior without scaling."""


def _noted(note: str) -> str:
    warn(note)
    return note


# --- the search over the prior precision --------------------------------------------------------------------------------


def grid_value(index: int) -> float:
    """The prior precision at an index of the paper's grid, which grows by 14 values per decade beyond its ends."""
    if index < LOW:
        return float(1e-4 * 10 ** (index / 14))
    return float(10 ** (-4 + 7 * index / HIGH) if index <= HIGH else 1e3 * 10 ** ((index - HIGH) / 14))


class PrecisionSearch:
    """Prior precisions that were tried, by index of the grid, and their scores."""

    def __init__(self, evaluate: Evaluate, grid: Sequence[float] | None = None) -> None:
        self.evaluate, self.given = evaluate, None if grid is None else _check_grid(grid)
        self.tried: dict[int, dict[str, float]] = {}
        if self.given is not None:
            self.try_at(range(len(self.given)))

    def value(self, index: int) -> float:
        """The prior precision at an index."""
        return grid_value(index) if self.given is None else self.given[index]

    def try_at(self, indices: Iterable[int]) -> None:
        """Score the prior precisions at these indices that were not tried before."""
        new = sorted(set(indices) - self.tried.keys())
        if new:
            found = self.evaluate([self.value(index) for index in new])
            for place, index in enumerate(new):
                self.tried[index] = {name: float(values[place]) for name, values in found.items()}

    def minimise(self, score: str, *, smooth: bool = True) -> int:
        """Index of the smallest score."""

        def best() -> int:
            return min(sorted(self.tried), key=lambda index: self.tried[index][score])

        if self.given is not None:
            return best()
        self.try_at(range(LOW, HIGH + 1, STEPS[0] if smooth else 1))
        while True:
            index = best()
            value, down = self.tried[index][score], index == min(self.tried)
            if not (down or index == max(self.tried)) or not LOWEST < index < HIGHEST:
                break
            self.try_at([index + (-1 if down else 1) * STEPS[0] * step for step in (1, 2)])
            if value - self.tried[best()][score] <= SAME * abs(value):
                break
        for step in STEPS[1:] if smooth else ():
            centre = best()
            self.try_at(centre + step * offset for offset in (-2, -1, 1, 2))
        return best()

    def smallest_meeting(self, meets: Callable[[dict[str, float]], bool], score: str) -> int | None:
        """Index of the smallest prior precision that meets a condition, assuming that larger ones do, too; None if none does."""
        if self.given is not None:
            return next((index for index in sorted(self.tried) if meets(self.tried[index])), None)
        self.try_at(range(LOW, HIGH + 1, STEPS[0]))
        for down in (True, False):
            while True:
                end = min(self.tried) if down else max(self.tried)
                met = meets(self.tried[end])
                if met != down or not LOWEST < end < HIGHEST:
                    break
                before = self.tried[end][score]
                self.try_at([end + (-1 if down else 1) * STEPS[0] * step for step in (1, 2)])
                after = self.tried[min(self.tried) if down else max(self.tried)][score]
                if abs(after - before) <= SAME * abs(before):
                    break
        for step in STEPS[1:]:
            first = next((index for index in sorted(self.tried) if meets(self.tried[index])), None)
            if first is None:
                return None
            below = max((index for index in self.tried if index < first), default=first)
            self.try_at(range(below, first, step))
        return next(index for index in sorted(self.tried) if meets(self.tried[index]))

    def curve(self) -> dict[str, tuple[float, ...]]:
        """All that was tried, by increasing prior precision."""
        order = sorted(self.tried)
        names = self.tried[order[0]]
        table = {name: tuple(self.tried[index][name] for index in order) for name in names}
        return {"prior_precision": tuple(self.value(index) for index in order)} | table

    def note(self, index: int) -> tuple[str, ...]:
        """A warning if the chosen value lies outside the paper's grid."""
        if self.given is not None or LOW <= index <= HIGH:
            return ()
        meaning = (
            "the prior has next to no influence, and the training data alone set the covariance. If confidence outside the data is "
            "then too low, use another rule or set the prior precision"
            if index < LOW
            else "next to no covariance is left, and predictions are close to the plain ensemble's"
        )
        return (
            _noted(f"the prior precision {self.value(index):.3g} lies outside the grid from 1e-4 to 1e3: {meaning}."),
        )


def _check_grid(grid: Sequence[float]) -> tuple[float, ...]:
    try:
        values = tuple(sorted(float(value) for value in grid))
    except (TypeError, ValueError, OverflowError):
        values = ()
    if not values or not all(math.isfinite(value) and value > 0 for value in values):
        raise OptionError(f"grid must hold finite numbers above 0, got {grid!r}.")
    return values


def maximise(objective: Callable[[float], float], low: float, high: float, *, coarse: int = 65) -> float:
    """Where a function of one number is largest: a coarse grid, then golden sections around its best point."""
    places = [low + (high - low) * step / (coarse - 1) for step in range(coarse)]
    best = max(range(coarse), key=[objective(place) for place in places].__getitem__)
    left, right = places[max(best - 1, 0)], places[min(best + 1, coarse - 1)]
    ratio = (math.sqrt(5) - 1) / 2
    one, two = right - ratio * (right - left), left + ratio * (right - left)
    value_one, value_two = objective(one), objective(two)
    while right - left > 1e-8 * max(1.0, abs(left)):
        if value_one > value_two:
            right, two, value_two = two, one, value_one
            one = right - ratio * (right - left)
            value_one = objective(one)
        else:
            left, one, value_one = one, two, value_two
            two = left + ratio * (right - left)
            value_two = objective(two)
    return (left + right) / 2


def _curve_of(posterior: MoLA, data: HeldOut, temperature: float = 1.0) -> Evaluate:
    def evaluate(precisions: Sequence[float]) -> Scored:
        return averages(
            scores(posterior, data, Candidates.of(posterior, precision=precisions, temperature=temperature))
        )

    return evaluate


def _require_data(data: HeldOut | None, rule: object) -> HeldOut:
    if data is None:
        raise OptionError(f"{type(rule).__name__} needs validation data: posterior.tune(val_loader, rule=...).")
    return data


def _require_classes(posterior: MoLA, rule: object) -> None:
    if not posterior.likelihood.discrete:
        raise OptionError(
            f"{type(rule).__name__} is about confidence in classes and does not apply to regression: use one of "
            f"{', '.join(posterior.likelihood.rules)}."
        )


# --- the paper's rule ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Threshold:
    """The paper's rule: the smallest prior precision whose mean confidence on validation data meets a threshold.

    Args:
        confidence: threshold on the mean confidence; None sets it `margin` below the networks' own mean accuracy on the validation
            data, as the paper does (0.98 for a network of 99.2 %, 0.94 for one of 94.8 %).
        brier: threshold on the Brier score, to be met as well.
        margin: how far below the accuracy the default threshold lies.
        grid: prior precisions to choose from; None is the paper's, 100 values from 1e-4 to 1e3, which grows past an end that wins.
    """

    confidence: float | None = None
    brier: float | None = None
    margin: float = 0.01
    grid: Sequence[float] | None = None
    needs_data = True

    def __post_init__(self) -> None:
        if self.confidence is not None and not (is_real(self.confidence) and 0 < self.confidence <= 1):
            raise OptionError(f"confidence must lie between 0 and 1, got {self.confidence!r}. 95 % is 0.95.")
        if not (is_real(self.margin) and -1 <= self.margin <= 1):
            raise OptionError(f"margin must lie between -1 and 1, got {self.margin!r}. One percentage point is 0.01.")
        if self.brier is not None and not (is_real(self.brier) and 0 <= self.brier <= 2):
            raise OptionError(f"brier must lie between 0 and 2, got {self.brier!r}.")

    @property
    def needs_labels(self) -> bool:
        """Whether labels are needed: not for a given confidence."""
        return self.confidence is None or self.brier is not None

    def target(self, data: HeldOut) -> tuple[float, str, tuple[str, ...]]:
        """The mean confidence to meet, where it comes from, and notes."""
        if self.confidence is not None:
            return self.confidence, f"{self.confidence:.2%} as given", ()
        accuracy, error = data.accuracy()
        least = 1 / data.likelihood.num_choices(data.outputs[0].shape[1])  # type: ignore[attr-defined]
        target = max(accuracy - self.margin, least)
        notes: tuple[str, ...] = ()
        if error > self.margin:
            notes = (
                f"few validation data: the networks' mean accuracy of {accuracy:.1%} has a standard error of "
                f"{100 * error:.2g} points, "
                f"and so has the target confidence.",
            )
        return (
            target,
            f"{target:.2%}, the networks' mean accuracy {accuracy:.2%} less {100 * self.margin:g} points",
            notes,
        )

    def __call__(self, posterior: MoLA, data: HeldOut | None) -> Tuning:
        """Choose the prior precision."""
        _require_classes(posterior, self)
        data = _require_data(data, self)
        target, origin, notes = self.target(data)
        search = PrecisionSearch(_curve_of(posterior, _with_labels(data)), self.grid)

        def meets(row: dict[str, float]) -> bool:
            return row["confidence"] >= target and (self.brier is None or row["brier"] <= self.brier)

        index = search.smallest_meeting(meets, "confidence")
        rule = f"Threshold: target confidence {origin}"
        if index is None:
            index = max(search.tried)
            summary = _noted(
                self._no_effect(posterior, data, search.tried[index]["confidence"], target, search.value(index))
            )
        else:
            notes = (*notes, *search.note(index))
            summary = (
                f"The mean confidence on the validation data is {search.tried[index]['confidence']:.2%} at prior precision "
                f"{search.value(index):.3g} (target: {origin})."
            )
        return Tuning(rule, (search.value(index),) * len(posterior.components), summary, notes, search.curve())

    def _no_effect(self, posterior: MoLA, data: HeldOut, confidence: float, target: float, precision: float) -> str:
        start = (
            f"The threshold rule has no effect here: without any covariance the mean confidence is {confidence:.2%}, "
            "already below the "
            f"target of {target:.2%}, and covariance only lowers it. "
        )
        end = f" Took prior precision {precision:.3g}, all but the plain ensemble. Use rule='nll', which also sharpens logits."
        if data.labels is None:
            return start.rstrip() + end
        likelihood: Any = posterior.likelihood
        each = [likelihood.choices(likelihood.probabilities(one)).amax(-1).mean() for one in data.outputs]
        single = float(torch.stack(each).mean())
        if single >= target:
            why = (
                f"The single networks are confident enough ({single:.2%}), but they disagree, and their average is "
                "less confident than "
                f"each of them."
            )
        else:
            why = f"The networks are underconfident: their own mean confidence is {single:.2%}, as after label smoothing or mixup."
        return start + why + end


def _with_labels(data: HeldOut) -> HeldOut:
    # Confidence alone needs no labels; scores are computed for class 0 then.
    if data.labels is not None:
        return data
    outputs = data.outputs[0]
    exclusive = data.likelihood.mutually_exclusive
    labels = torch.zeros(len(outputs), dtype=torch.int64, device="cpu") if exclusive else torch.zeros_like(outputs)
    return replace(data, labels=labels)


# --- scores --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """The prior precision with the best score on validation data.

    Where the data show beyond doubt that the networks are underconfident, logits are sharpened by a temperature below 1, too. For a
    regression the noise is chosen with it, unless it was given.

    Args:
        score: "nll", "brier" or "ece"; for regression "nll" or "crps".
        grid: prior precisions to choose from; None is the paper's, which grows past an end that wins.
    """

    score: Literal["nll", "brier", "ece", "crps"] = "nll"
    grid: Sequence[float] | None = None
    needs_data = True

    def __post_init__(self) -> None:
        one_of(self.score, tuple(SCORE_NAMES), "score")

    def __call__(self, posterior: MoLA, data: HeldOut | None) -> Tuning:
        """Choose the prior precision."""
        data, score, name = _require_data(data, self), self.score, f"Score({self.score!r})"
        if score not in posterior.likelihood.rules:
            known = ", ".join(posterior.likelihood.rules)
            raise OptionError(
                f"score {score!r} does not apply to likelihood {posterior.likelihood.name!r}: use one of {known}."
            )
        if not posterior.likelihood.discrete:
            return _tune_regression(posterior, data, score, self.grid)
        search = PrecisionSearch(_curve_of(posterior, data), self.grid)
        index, temperature = search.minimise(score, smooth=score != "ece"), 1.0
        notes: tuple[str, ...] = ()
        sharper = self._sharpened(posterior, data, search, index)
        if sharper is not None:
            temperature, search, index, notes = sharper
        value = search.tried[index][score]
        at = f" and temperature {temperature:.3g}" if temperature != 1 else ""
        summary = (
            f"The {SCORE_NAMES[score]} on the validation data is {value:.4g} at prior precision "
            f"{search.value(index):.3g}{at}, the best "
            f"of those tried."
        )
        chosen = (search.value(index),) * len(posterior.components)
        return Tuning(name, chosen, summary, (*notes, *search.note(index)), search.curve(), temperature)

    def _sharpened(
        self, posterior: MoLA, data: HeldOut, search: PrecisionSearch, index: int
    ) -> tuple[float, PrecisionSearch, int, tuple[str, ...]] | None:
        # A temperature below 1, if accuracy exceeds confidence by more than two standard errors. Covariance only lowers confidence;
        # networks trained with label smoothing or mixup need the opposite.
        score = self.score
        each = scores(posterior, data, Candidates.of(posterior, precision=[search.value(index)]))
        gap, error = paired(each["correct"][0], each["confidence"][0], data.independent)
        if gap <= DOUBTLESS * error:
            return None
        before, temperature, tried = search.tried[index][score], 1.0, TEMPERATURES
        for _ in range(3):  # in turn: one makes up for the other along a valley, and further rounds gain little
            candidates = Candidates.of(posterior, precision=[search.value(index)], temperature=tried)
            values = averages(scores(posterior, data, candidates))[score]
            if temperature == 1 and float(values[-1] - values.min()) <= SAME * abs(float(values[-1])):
                return None  # also where a link does not depend on the temperature
            temperature = tried[int(values.argmin())]
            step = 9.5 ** (1 / 31)
            low, high = max(TEMPERATURES[0], temperature / step), min(1.0, temperature * step)
            tried = tuple(low * (high / low) ** (part / 16) for part in range(17))
            search = PrecisionSearch(_curve_of(posterior, data, temperature), self.grid)
            index = search.minimise(score, smooth=score != "ece")
        note = (
            f"the networks are underconfident, as after label smoothing or mixup: on the validation data the mean confidence is "
            f"{float(each['confidence'].mean()):.2%} and the accuracy {float(each['correct'].mean()):.2%}, {gap / error:.1f} standard "
            f"errors apart. A temperature of {temperature:.3g} takes the {SCORE_NAMES[score]} from {before:.4g} to "
            f"{search.tried[index][score]:.4g}."
        )
        return temperature, search, index, (note,)


@dataclass(frozen=True)
class Outliers:
    """Validation log loss plus a penalty for confidence on outliers: their cross-entropy to the uniform distribution.

    Args:
        loader: batches of outliers; labels are not read.
        weight: of the penalty.
        grid: prior precisions to choose from; None is the paper's, which grows past an end that wins.
    """

    loader: Iterable[Any] = field(repr=False)
    weight: float = 0.25
    grid: Sequence[float] | None = None
    needs_data = True

    def __post_init__(self) -> None:
        if not (is_real(self.weight) and 0 <= self.weight < math.inf):
            raise OptionError(f"weight must be a finite number of at least 0, got {self.weight!r}.")

    def __call__(self, posterior: MoLA, data: HeldOut | None) -> Tuning:
        """Choose the prior precision."""
        _require_classes(posterior, self)
        data = _require_data(data, self)
        outliers = posterior.read(self.loader, "outlier loader", labelled=False, team=data.team)

        def evaluate(precisions: Sequence[float]) -> Scored:
            found = _curve_of(posterior, data)(precisions)
            candidates = Candidates.of(posterior, precision=precisions)
            confidence, uniform = confidence_and_uniformity(posterior, outliers, candidates)
            return found | {"outlier_confidence": confidence, "objective": found["nll"] + self.weight * uniform}

        search = PrecisionSearch(evaluate, self.grid)
        index = search.minimise("objective")
        row = search.tried[index]
        summary = (
            f"At prior precision {search.value(index):.3g} the validation log loss is {row['nll']:.4g} and the mean "
            "confidence on outliers "
            f"{row['outlier_confidence']:.1%}."
        )
        chosen = (search.value(index),) * len(posterior.components)
        return Tuning(f"Outliers(weight={self.weight})", chosen, summary, search.note(index), search.curve())


# --- evidence ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """The prior precision that maximises the log marginal likelihood of the training labels: no validation data needed.

    Args:
        shared: one prior precision for all components, which maximises the sum of their log evidences; False gives each its own.
    """

    shared: bool = True
    needs_data = False

    def __call__(self, posterior: MoLA, data: HeldOut | None = None) -> Tuning:
        """Choose the prior precision, and for a regression the noise unless it was given."""
        if data is not None:
            raise OptionError(
                "Evidence uses the training data alone: call posterior.tune(rule='evidence') without a loader."
            )
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
    # Prior precision and, unless it was given, noise, in turn. With many data the score hardly depends on the prior precision and its
    # smallest value is chance: of those that score alike, the one nearest to 1 is taken.
    count, factor = len(posterior.components), 1.0
    free = all(isinstance(one.likelihood, Gaussian) and one.likelihood.estimated for one in posterior.components)

    def at(noise: float) -> MoLA:
        return posterior._with(components=[one.noise_scaled(noise) for one in posterior.components])

    for _ in range(20):
        search = PrecisionSearch(_curve_of(at(factor), data), grid)
        smallest = search.tried[search.minimise(score)][score]
        room = ALIKE * data.outputs[0].shape[1] if score == "nll" else ALIKE * abs(smallest)
        close = [index for index, row in search.tried.items() if row[score] <= smallest + room]
        index, before = min(close, key=lambda one: abs(math.log(search.value(one)))), factor
        if not free:
            break
        for power in (1.0, 0.125, 1 / 64):
            tried = [factor * one**power for one in NOISE_FACTORS]
            values = [_curve_of(at(one), data)([search.value(index)])[score] for one in tried]
            factor = tried[int(torch.cat(values).argmin())]
        if abs(math.log(factor / before)) < 1e-3:
            break
    value = search.tried[index][score]
    at_noise = f" with the noise multiplied by {factor:.3g}" if free else ""
    summary = f"The {SCORE_NAMES[score]} on the validation data is {value:.4g} at prior precision {search.value(index):.3g}{at_noise}."
    factors = (factor,) * count if free else ()
    chosen = (search.value(index),) * count
    return Tuning(f"Score({score!r})", chosen, summary, search.note(index), search.curve(), noise_factors=factors)


# --- distance ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distance:
    """Divide logits by the distance from the training classes, at a price on validation data.

    The paper's rule lowers confidence everywhere until its mean on validation data meets a threshold. This rule
    takes the prior precision with the best log loss, and then the distance exponent at which the mean confidence meets the same
    threshold: the same price inside the data, spent on inputs that are farther away than usual.

    Args:
        price: what the distance may cost on validation data. None is the paper's price: the mean confidence falls to its threshold.
            "loss" stops before that where the log loss reaches that of the paper's rule. 0.02 lets the log loss rise by at most 2 %.
            For regression, in nats of log loss per output; None is 0.01.
        rule: chooses prior precision and temperature first: a name, or an object.
    """

    price: float | Literal["loss"] | None = None
    rule: Rule | str = "nll"
    needs_data = True

    def __post_init__(self) -> None:
        named = self.price is None or self.price == "loss"
        if not (named or (is_real(self.price) and 0 < float(self.price or 0) <= 1)):
            raise OptionError(
                f"price must be a number between 0 and 1, 'loss' or None, got {self.price!r}. At most 2 % more "
                "validation log loss is 0.02."
            )
        if isinstance(self.rule, str):
            one_of(self.rule, [name for name in RULES if name != "distance"], "rule")
        elif not callable(self.rule) or isinstance(self.rule, (type, Distance)):
            raise OptionError(f"rule must be a name or an object such as mola.rules.Score('nll'), got {self.rule!r}.")

    def __call__(self, posterior: MoLA, data: HeldOut | None) -> Tuning:
        """Choose prior precision, temperature and distance exponent."""
        data = _require_data(data, self)
        if not posterior.has_distances:
            raise OptionError(f"rule 'distance': {posterior._why_no_distances()}")
        first = RULES[self.rule] if isinstance(self.rule, str) else self.rule
        base = first(posterior, data if getattr(first, "needs_data", True) else None)
        if not posterior.likelihood.discrete:
            return self._regression(posterior.tuned(base), data, base)
        plain = self._scored(posterior, data, base, [0.0])
        before = {name: float(values[0]) for name, values in plain.items()}
        limits, origin, few = self._limits(posterior, data, before)
        chosen, tried = _largest_exponent(lambda some: self._scored(posterior, data, base, some), limits)
        notes = (*base.notes, *few, *_distance_notes(posterior))
        summary = _distance_summary(tried, chosen, origin)
        if chosen == 0:
            warn(summary)
        curve = {"distance_exponent": tuple(sorted(tried))}
        curve |= {name: tuple(tried[one][name] for one in sorted(tried)) for name in tried[0.0]}
        return Tuning(
            f"Distance: {origin}, after {base.rule}",
            base.prior_precision,
            summary,
            notes,
            curve,
            base.temperature,
            distance_exponent=chosen,
        )

    def _scored(self, posterior: MoLA, data: HeldOut, base: Tuning, exponents: Sequence[float]) -> Scored:
        candidates = Candidates.of(
            posterior, precision=[base.prior_precision], temperature=base.temperature, exponent=exponents
        )
        return averages(scores(posterior, data, candidates))

    def _limits(
        self, posterior: MoLA, data: HeldOut, plain: dict[str, float]
    ) -> tuple[Callable[[dict[str, float]], bool], str, tuple[str, ...]]:
        if is_real(self.price):
            price = float(self.price or 0)
            most = plain["nll"] * (1 + price)
            return lambda row: row["nll"] <= most, f"at most {100 * price:.4g} % more log loss", ()
        target, _, few = Threshold().target(data)
        if self.price is None:
            return (
                lambda row: row["confidence"] >= target,
                f"mean confidence at the paper's threshold, {target:.2%}",
                few,
            )
        paper = Threshold()(posterior, data)
        loss = float(_curve_of(posterior, data)(paper.prior_precision[:1])["nll"][0])
        return (
            lambda row: row["confidence"] >= target and row["nll"] <= loss,
            f"no more log loss than the paper's rule, and mean confidence at least {target:.2%}",
            few,
        )

    def _regression(self, posterior: MoLA, data: HeldOut, base: Tuning) -> Tuning:
        if isinstance(self.price, str):
            raise OptionError(
                f"price {self.price!r} is a price in confidence. For regression it is in nats per output, such as 0.01."
            )
        price = REGRESSION_PRICE if self.price is None else float(self.price)
        outputs = len(posterior.components[0].require_layer("distance").weights)

        def evaluate(exponents: Sequence[float]) -> Scored:
            return averages(scores(posterior, data, Candidates.of(posterior, exponent=exponents)))

        most = float(evaluate([0.0])["nll"][0]) + price * outputs
        chosen, tried = _largest_exponent(evaluate, lambda row: row["nll"] <= most, GROWTHS, 1 / 256)
        summary = (
            f"The distance costs {tried[chosen]['nll'] - tried[0.0]['nll']:.3g} nats of log loss on the validation "
            "data. For it, the standard "
            f"deviations of inputs twice as far from the training data as usual are multiplied by {2**chosen:.3g}."
            if chosen
            else "The distance has no effect: the smallest exponent costs more than the price. Raise it: "
            "mola.rules.Distance(price=0.05)."
        )
        curve = {"distance_exponent": tuple(sorted(tried)), "nll": tuple(tried[one]["nll"] for one in sorted(tried))}
        return replace(
            base,
            rule=f"Distance: at most {price:.4g} nats more log loss per output, after {base.rule}",
            summary=summary,
            notes=(*base.notes, *_distance_notes(posterior)),
            curve=curve,
            distance_exponent=chosen,
        )


def _largest_exponent(
    evaluate: Callable[[Sequence[float]], Scored],
    meets: Callable[[dict[str, float]], bool],
    first: Sequence[float] = EXPONENTS,
    finest: float = FINEST,
) -> tuple[float, dict[float, dict[str, float]]]:
    """The largest exponent up to which all that were tried meet the limits (0 if none does), and all that were tried."""
    tried: dict[float, dict[str, float]] = {}
    new = list(first)
    while True:
        found = evaluate(new)
        for place, one in enumerate(new):
            tried[one] = {name: float(values[place]) for name, values in found.items()}
        order = sorted(tried)
        last = 0.0
        for one in order:
            if not meets(tried[one]):
                break
            last = one
        above = [one for one in order if one > last]
        if not above or above[0] - last <= finest or not meets(tried[0.0]):
            return last, tried
        step = max(finest, (above[0] - last) / 8)
        new = [last + step * part for part in range(1, round((above[0] - last) / step))]


def _distance_summary(tried: dict[float, dict[str, float]], chosen: float, origin: str) -> str:
    plain, now = tried[0.0], tried[chosen]
    if chosen == 0:
        return (
            f"The distance has no effect: nothing is left to spend ({origin}). Without it the mean confidence on the "
            "validation data is "
            f"{plain['confidence']:.2%} and the log loss {plain['nll']:.4g}. Set a price, such as mola.rules.Distance(price=0.02)."
        )
    change = now["nll"] / plain["nll"] - 1 if plain["nll"] > 0 else 0.0
    return (
        f"The distance takes the log loss on the validation data from {plain['nll']:.4g} to {now['nll']:.4g} "
        f"({100 * change:+.1f} %) and the "
        f"mean confidence from {plain['confidence']:.2%} to {now['confidence']:.2%}. For it, the logits of inputs "
        "twice as far from the "
        f"training classes as usual are divided by {2**chosen:.3g}, four times as far by {4**chosen:.3g}."
    )


def _distance_notes(posterior: MoLA) -> tuple[str, ...]:
    reference = posterior.scaling.reference
    assert reference is not None
    distances = [
        one.layer.distance for one in posterior.components if one.layer is not None and one.layer.distance is not None
    ]
    notes = []
    if any(not one.known for one in distances):
        notes.append(
            _noted(
                "all training features of a network are alike, so its distances carry no information and count as 1."
            )
        )
    else:
        pairs = zip(reference.scales, distances, strict=True)
        logs = [math.log(max(scale.distance, 1e-300) / max(one.training_distance, 1e-300)) for scale, one in pairs]
        ratio = math.exp(sum(logs) / len(logs))
        if ratio > FAR:
            notes.append(
                _noted(
                    f"the validation data are {ratio:.1f} times as far from the training classes as the training data: "
                    "few training data "
                    f"for that many features, or data unlike those that the networks were trained on."
                )
            )
    if any(one.num_predicted for one in distances):
        notes.append(
            "the training data had no labels: distances are from the classes that the networks predict for them."
        )
    return tuple(notes)


RULES: dict[str, Rule] = {
    "threshold": Threshold(),
    "nll": Score("nll"),
    "brier": Score("brier"),
    "ece": Score("ece"),
    "crps": Score("crps"),
    "evidence": Evidence(),
}
RULES["distance"] = Distance()
"""Rules by name."""


def as_rule(rule: Rule | str | None, likelihood: Likelihood, data: object = None) -> Rule:
    """The rule of that name, or the rule itself; None is the likelihood's default. Checks that it has the data that it needs."""
    name = likelihood.rules[0] if rule is None else rule
    if isinstance(name, str):
        one_of(name, RULES, "rule", "an object such as mola.rules.Evidence()")
        if name not in likelihood.rules:
            raise OptionError(
                f"rule {name!r} does not apply to likelihood {likelihood.name!r}: use one of {', '.join(likelihood.rules)}."
            )
        chosen = RULES[name]
    elif callable(name) and not isinstance(name, type):
        chosen = name
    else:
        raise OptionError(
            f"rule must be one of {', '.join(RULES)}, or an object such as mola.rules.Evidence(); got {rule!r}."
        )
    needs_data = getattr(chosen, "needs_data", True)
    label = repr(name) if isinstance(name, str) else type(chosen).__name__
    if needs_data and data is None:
        raise OptionError(f"rule {label} needs validation data: pass val_loader, or use 'evidence', which needs none.")
    if not needs_data and data is not None:
        raise OptionError(f"rule {label} uses the training data alone: leave val_loader out, or choose another rule.")
    return chosen
