r"""The rule that spends caution where it is needed: logits are cooled by the distance from the training classes.

The paper's rule lowers confidence everywhere until its mean on validation data meets a threshold. This one takes the prior precision
that fits the validation data best, and then the exponent of the distance (`cooling.py`) at which the mean confidence meets the same
threshold: the same price inside the data, spent on inputs that are farther than usual. Or the user names the price.

Fitted on the validation data alone the exponent would be close to 0: they know nothing of what lies outside. So the price has to be
chosen, and is told in words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mola.errors import OptionError, warn
from mola.links import LINKS, Bridge
from mola.options import is_real, one_of
from mola.tuning.candidates import COPIES, HeldOut, LastLayerProblem, Problem, Tuning
from mola.tuning.regression import RegressionProblem
from mola.tuning.rules import PLAIN_RULES, ConfidenceThreshold, Evidence, Rule, ValidationScore, require_data

EXPONENTS = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Tried first; then, again and again, some between the last that meets the limits and the first that does not."""

FINEST = 2.0**-11
"""Exponents are multiples of this."""

PARTS = 8
"""In how many parts the gap is divided each time. The finest grid has 16,384 exponents, of which so some thirty are tried."""

BETWEEN = 16
"""Exponents between two of those that are tried where outputs are numbers."""

GROWTHS = tuple(step / 16 for step in range(17))
"""Exponents that are tried where outputs are numbers: up to 1, where the standard deviation grows in proportion to the distance. So
does what is open about a function whose slope is bounded; more is not asked for, however little it costs on a few validation data."""

NATS = 0.01
"""Log loss for each output that caution may cost where outputs are numbers, unless the user names another price."""

FAR = 3.0
"""How much farther than the training data the validation data may be before it is said that they look like nothing in training."""


@dataclass(frozen=True)
class Distance:
    """Cool logits by the distance from the training classes, at a price on validation data.

    Args:
        price: what caution may cost on validation data. For numbers, in nats of log loss for each output; None is 0.01. For classes,
            None is the paper's price: the mean confidence falls to its threshold, one
            percentage point below the single networks' mean accuracy. "loss" stops before that where the log loss reaches that of
            the paper's rule, so that neither is worse. 0.02 lets the log loss rise by at most 2 %.
        rule: chooses the prior precision first, and with it the temperature: "nll", "brier", "ece", "threshold", "evidence", or an
            object.
    """

    price: float | Literal["loss"] | None = None
    rule: Rule | str = "nll"

    def __post_init__(self) -> None:
        named = self.price is None or self.price == "loss"
        if not (named or (is_real(self.price) and 0 < float(self.price or 0) <= 1)):
            raise OptionError(
                f"price must be a number between 0 and 1, 'loss' or None, got {self.price!r}. At most 2 % more validation log loss is "
                f"0.02; None is the paper's price in confidence, 'loss' its price in log loss."
            )
        if isinstance(self.rule, str):
            one_of(self.rule, tuple(PLAIN_RULES), "rule")
        elif not hasattr(self.rule, "choose") or isinstance(self.rule, (type, Distance)):
            names = ", ".join(PLAIN_RULES)
            raise OptionError(
                f"rule must be one of {names}, or an object such as mola.ValidationScore('nll'); got {self.rule!r}."
            )

    def choose(self, problem: Problem, val_loader: Iterable[Any] | None) -> Tuning:
        """Read the validation data once, and choose.

        Args:
            problem: the mixture.
            val_loader: the validation data, with labels.

        Returns:
            Prior precision, temperature and exponent.
        """
        given = require_data(val_loader, self)
        if isinstance(problem, RegressionProblem):
            return self._for_numbers(problem, given)
        if problem.lacks_distances is not None or not isinstance(problem, LastLayerProblem):
            raise OptionError(f"rule 'distance': {problem.lacks_distances}")
        data = problem.read(given, "validation loader", True)
        first = PLAIN_RULES[self.rule] if isinstance(self.rule, str) else self.rule
        if type(first) is ValidationScore:
            base = first.best(problem, data)
        else:
            base = first.choose(problem, None if isinstance(first, Evidence) else data)  # type: ignore[arg-type]
        search = _Exponents(problem, data, base)
        target, _, notes = ConfidenceThreshold().target(data)
        if self.price is None:
            limits = [_Limit("confidence", target, above=True)]
            why = f"mean confidence at the paper's threshold, {100 * target:.4g} %"
        elif isinstance(self.price, str):
            limits = [_Limit("confidence", target, above=True), _paper_loss(problem, data, target)]
            why = f"no more log loss than by the paper's rule, and mean confidence at least at its threshold, {100 * target:.4g} %"
        else:
            limits = [_Limit("nll", search.plain["nll"] * (1 + float(self.price)), above=False)]
            why, notes = f"at most {100 * self.price:.4g} % more log loss", ()
        chosen = search.largest(limits)
        doubts = (*_far(problem), *_predicted(problem), *_without_effect(problem))
        notes = (*base.notes, *notes, *doubts, search.told(chosen, self.price, limits))
        return Tuning(
            f"Distance: {why}, after {base.rule}",
            base.prior_precision,
            search.table(),
            notes,
            base.temperature,
            chosen,
        )

    def _for_numbers(self, problem: RegressionProblem, given: Iterable[Any]) -> Tuning:
        if problem.lacks_distances is not None:
            raise OptionError(f"rule 'distance': {problem.lacks_distances}")
        if isinstance(self.price, str):
            raise OptionError(
                f"price {self.price!r} is the paper's, in confidence. For numbers it is in nats for each output, such as 0.01."
            )
        data = problem.read(given, "validation loader", True)
        first = PLAIN_RULES[self.rule] if isinstance(self.rule, str) else self.rule
        base = first.choose(problem, None if isinstance(first, Evidence) else data)  # type: ignore[arg-type]
        factors = base.noise_factors or (1.0,) * len(problem.spectra)
        price = NATS if self.price is None else float(self.price)
        tried, scores = _grown(
            lambda some: problem.exponent_curve(data, base.prior_precision, factors, some),
            price * problem.spectra[0].outputs,
        )
        chosen = max(one for one, met in tried.items() if met)
        plain, now = scores[0.0], scores[chosen]
        if chosen == 0:
            note = (
                "no caution by distance: the smallest exponent that was tried costs more. Name a higher price, such as "
                "mola.Distance(price=0.05)."
            )
            warn(note)
        else:
            note = (
                f"caution costs, on the validation data: log loss {plain:.4g} -> {now:.4g} nats. For it, standard deviations of "
                f"inputs 2 times as far from the training data as usual are multiplied by {2**chosen:.3g}, 4 times as far by "
                f"{4**chosen:.3g}."
            )
        order = sorted(scores)
        curve = {"distance_exponent": tuple(order), "nll": tuple(scores[one] for one in order)}
        return Tuning(
            f"Distance: at most {price:.4g} nats more log loss for each output, after {base.rule}",
            base.prior_precision,
            curve,
            (*base.notes, *_far(problem), note),
            distance_exponent=chosen,
            noise_factors=base.noise_factors,
        )


def _grown(scored: Callable[[Sequence[float]], Tensor], price: float) -> tuple[dict[float, bool], dict[float, float]]:
    # Exponents that were tried: whether each, and all below it, keep to the price; and what they score.
    scores: dict[float, float] = {}

    def add(exponents: Sequence[float]) -> dict[float, bool]:
        scores.update(zip(exponents, scored(exponents).tolist(), strict=True))
        met, so_far = {}, True
        for one in sorted(scores):
            so_far = so_far and scores[one] <= scores[0.0] + price
            met[one] = so_far
        return met

    met = add(GROWTHS)
    for _ in range(2):
        low = max(one for one, kept in met.items() if kept)
        above = [one for one in scores if one > low]
        if not above:
            break
        met = add([low + (min(above) - low) * step / BETWEEN for step in range(1, BETWEEN)])
    return met, scores


class _Exponents:
    # Exponents that were tried, and what they score; the prior precision and the temperature are given.

    def __init__(self, problem: LastLayerProblem, data: HeldOut, base: Tuning) -> None:
        self.problem, self.data, self.base = problem, data, base
        self.tried: list[float] = []
        self.curve: dict[str, Tensor] = {}
        self._try(EXPONENTS)
        self.plain = {name: float(values[0]) for name, values in self.curve.items()}

    def _try(self, exponents: Sequence[float]) -> None:
        coolings = [(self.base.temperature, one) for one in exponents]
        scored = self.problem.cooled_curve(self.data, self.base.prior_precision, coolings)
        self.tried += exponents
        order = sorted(range(len(self.tried)), key=self.tried.__getitem__)
        joined = {name: torch.cat([self.curve[name], one]) if self.curve else one for name, one in scored.items()}
        self.curve = {name: one[order] for name, one in joined.items()}
        self.tried = [self.tried[place] for place in order]

    def largest(self, limits: Sequence[_Limit]) -> float:
        """The largest exponent up to which all that were tried meet the limits; 0 if none does."""
        place = self._last(limits)
        while place is not None and place + 1 < len(self.tried):
            low, high = self.tried[place], self.tried[place + 1]
            step = max(FINEST, (high - low) / PARTS)
            if high - low <= FINEST:
                break
            self._try([low + step * part for part in range(1, round((high - low) / step))])
            place = self._last(limits)
        return 0.0 if place is None else self.tried[place]

    def _last(self, limits: Sequence[_Limit]) -> int | None:
        met = torch.stack([limit.met(self.curve) for limit in limits]).all(0)
        missed = (~met).nonzero().flatten()
        first = int(missed[0]) if len(missed) else len(self.tried)
        return first - 1 if first else None

    def table(self) -> dict[str, tuple[float, ...]]:
        """The curve as plain numbers."""
        return {"distance_exponent": tuple(self.tried)} | {
            name: tuple(values.tolist()) for name, values in self.curve.items()
        }

    def told(self, chosen: float, price: object, limits: Sequence[_Limit]) -> str:
        """What caution costs inside the data, and what it does outside, in words."""
        place = self.tried.index(chosen)
        now, plain = {name: float(values[place]) for name, values in self.curve.items()}, self.plain
        if chosen == 0:
            missed = next((limit for limit in limits if not bool(limit.met(self.curve)[0])), None)
            if missed is None:
                reason = "the smallest exponent that was tried costs more. Name a higher price"
            elif missed.score == "confidence":
                reason = (
                    f"the mean confidence on the validation data is {100 * plain['confidence']:.2f} % without it, below the paper's "
                    f"threshold of {100 * missed.value:.2f} %, so nothing is left to spend"
                )
            else:
                reason = f"the log loss on the validation data is {plain['nll']:.4g} already, with the paper's rule {missed.value:.4g}"
            reason += ". Name a price, such as mola.Distance(price=0.02)" if not is_real(price) else ""
            note = f"no cooling by distance: {reason}."
            warn(note)
            return note
        cost = now["nll"] / plain["nll"] - 1 if plain["nll"] > 0 else 0.0
        costs = "caution costs," if cost > 0 else "caution costs no log loss"
        return (
            f"{costs} on the validation data: log loss {plain['nll']:.4g} -> {now['nll']:.4g} ({100 * cost:+.1f} %), mean "
            f"confidence {100 * plain['confidence']:.2f} -> {100 * now['confidence']:.2f} %. For it, logits of inputs "
            f"{self._divided(chosen)}{self._far_away()}."
        )

    def _divided(self, chosen: float) -> str:
        if not any(one.known for one in self.problem.geometries or ()):
            return "whose features are longer than usual are divided by the square of how much longer they are"
        return (
            f"2 times as far from the training classes as usual are divided by {2**chosen:.3g}, 4 times as far by "
            f"{4**chosen:.3g}"
        )

    def _far_away(self) -> str:
        link, likelihood = self.problem.link, self.problem.likelihood
        if isinstance(link, Bridge):
            return "; with link 'bridge' confidence does not tend to a guess: the ratios of the variances stay"
        if type(link) not in LINKS.values():
            return ""  # a link of the user's own may give anything
        return f"; where features grow without bound, confidence tends to 1/{likelihood.answers(self.problem.spectra[0].outputs)}"


@dataclass(frozen=True)
class _Limit:
    score: str
    value: float
    above: bool

    def met(self, curve: dict[str, Tensor]) -> Tensor:
        """Whether each exponent meets it."""
        values = curve[self.score]
        return values >= self.value if self.above else values <= self.value


def _paper_loss(problem: LastLayerProblem, data: HeldOut, target: float) -> _Limit:
    # The log loss that the paper's rule would have on the validation data.
    search, meets = ConfidenceThreshold().search(problem, data, target, meant=not data.guessed())
    place = int(meets.nonzero()[0]) if bool(meets.any()) else len(search.grid) - 1
    return _Limit("nll", float(search.curve["nll"][place]), above=False)


def _far(problem: LastLayerProblem | RegressionProblem) -> tuple[str, ...]:
    geometries, usual = problem.geometries or (), problem.usual[0]
    pairs = [(scale.distance, one.training_scale.distance) for one, scale in zip(geometries, usual.scales, strict=True)]
    if not all(here > 0 and there > 0 for here, there in pairs):
        note = "all training features are alike in some network: its distances say nothing, and count as usual ones."
        warn(note)
        return (note,)
    if any(here <= COPIES * there * (1 + 1e-9) for here, there in pairs):
        note = (
            "more than half of the validation data are almost copies of training data, as the networks see them: distances count from "
            f"{COPIES:g} of the training data's own."
        )
        warn(note)
        return (note,)
    ratio = math.exp(sum(math.log(here / there) for here, there in pairs) / len(pairs))
    if ratio <= FAR:
        return ()
    note = (
        f"the validation data are {ratio:.1f} times as far from the training classes as the training data: few training data for so "
        f"many features, or other data than the networks were trained on. Distances count from the validation "
        f"data's median all the same."
    )
    warn(note)
    return (note,)


def _predicted(problem: LastLayerProblem) -> tuple[str, ...]:
    sums = [one.sums for one in problem.geometries or ()]
    if not any(one.predicted for one in sums):
        return ()
    note = "the training data had no labels: distances are from the classes that the networks predict for them."
    return (note,)


def _without_effect(problem: LastLayerProblem) -> tuple[str, ...]:
    if not (isinstance(problem.link, Bridge) and problem.link.normalised):
        return ()
    note = (
        "the normalised bridge scales logits to a common spread: dividing them by the distance changes no probability. Use another "
        "link, such as 'probit'."
    )
    warn(note)
    return (note,)
