"""The rule that divides logits by the distance from the training classes, while limiting the increase in validation loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from molaplace.errors import OptionError, warn, warned
from molaplace.likelihoods import Likelihood
from molaplace.options import check_number
from molaplace.rules.objective import Objective, TunableMixture
from molaplace.rules.rule import Rule, Tuning, rule_of
from molaplace.rules.score import Score
from molaplace.rules.search import Scored, as_curve
from molaplace.rules.threshold import Threshold

EXPONENTS = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Distance exponents tried first. The search then refines the interval in which a limit is first exceeded."""

GROWTHS = tuple(step / 16 for step in range(17))
"""Distance exponents tried for regression. With exponent 1, the standard deviation grows in proportion to the distance, like the
uncertainty about a function with a bounded slope."""

FINEST = 2.0**-11
"""Smallest step between two distance exponents tried."""

REGRESSION_PRICE = 0.01
"""Default limit, in nats per output, on the increase in log loss that the distance exponent may cause in regression."""

FAR = 3.0
"""Ratio of validation distances to training distances above which the rule issues a warning."""


@dataclass(frozen=True)
class Distance(Rule):
    """The rule that divides logits by the distance from the training classes, while limiting the increase in validation loss.

    The paper's rule lowers confidence everywhere until the mean confidence on the validation data meets a threshold. This rule chooses
    the prior precision with the best log loss, and then the distance exponent at which the mean confidence meets the same threshold.
    The mean confidence is then about the same under both rules, but this rule lowers confidence mostly for inputs that are unusually
    far from the training classes.

    Args:
        price: limit on what dividing the logits by the distance may cost on the validation data. By default, the mean confidence may
            fall to the paper's threshold. With a number such as 0.02, the log loss may rise by at most that fraction, here 2 %. For
            regression, the price is given in nats of log loss per output; the default is 0.01.
        rule: rule (a name or an object) that first chooses the prior precision and the temperature; by default, "nll".
    """

    price: float | None = None
    rule: Rule | str = field(default_factory=Score)

    def __post_init__(self) -> None:
        if self.price is not None:
            remedy = "With a price of 0.02, the validation log loss may rise by up to 2 %."
            check_number(self.price, "price", 0, 1, remedy)
        object.__setattr__(self, "rule", rule_of(self.rule))
        if isinstance(self.rule, Distance):
            raise OptionError(f"must be another rule, such as 'nll', got {self.rule!r}.", argument="rule")

    def applies_to(self, likelihood: Likelihood) -> bool:
        """Return True for every likelihood. For regression, the rule multiplies standard deviations instead of dividing logits."""
        return True

    def __call__(self, objective: Objective) -> Tuning:
        """Choose the prior precision, temperature and distance exponent."""
        likelihood = objective.likelihood
        if not objective.has_distances:
            raise OptionError(
                "'distance' needs distances from the training classes. Fit with mola.fit(..., distances=True).",
                argument="rule",
            )
        first = rule_of(self.rule)
        if not first.applies_to(likelihood):
            raise OptionError(f"{self.rule!r} does not apply to likelihood {likelihood.name!r}.", argument="rule")
        base = first(objective)

        def evaluate(exponents: Sequence[float]) -> Scored:
            return objective.mean_scores([replace(base.settings, distance_exponent=exponent) for exponent in exponents])

        plain = {name: float(values[0]) for name, values in evaluate([0.0]).items()}
        if likelihood.classification:
            meets, limit, notes = self._limits(objective, plain)
            chosen, tried = _largest_exponent(evaluate, meets, EXPONENTS, FINEST)
            summary = _summary(tried, chosen, limit)
        else:
            price = REGRESSION_PRICE if self.price is None else self.price
            largest = plain["nll"] + price * likelihood.num_uncertain(objective.data.outputs[0].shape[1])
            limit = f"log loss per output at most {price:.4g} nats higher"
            notes = ()
            chosen, tried = _largest_exponent(evaluate, lambda scores: scores["nll"] <= largest, GROWTHS, 1 / 256)
            summary = _regression_summary(tried, chosen)
        if chosen == 0:
            warn(summary)
        return replace(
            base,
            rule=f"Distance: {limit}, after {base.rule}",
            settings=replace(base.settings, distance_exponent=chosen),
            summary=summary,
            notes=(*base.notes, *notes, *_notes(objective.mixture)),
            curve=as_curve([{"distance_exponent": exponent} | tried[exponent] for exponent in sorted(tried)]),
        )

    def _limits(
        self, objective: Objective, plain: dict[str, float]
    ) -> tuple[Callable[[dict[str, float]], bool], str, tuple[str, ...]]:
        # Return the condition under which an exponent is accepted, a description of that condition, and any notes.
        price = self.price
        if price is None:
            target, _, notes = Threshold().target(objective.data)
            limit = f"mean confidence at the paper's threshold, {target:.2%}"
            return lambda scores: scores["confidence"] >= target, limit, notes
        largest = plain["nll"] * (1 + price)
        return lambda scores: scores["nll"] <= largest, f"at most {100 * price:.4g} % more log loss", ()


def _largest_exponent(
    evaluate: Callable[[Sequence[float]], Scored],
    meets: Callable[[dict[str, float]], bool],
    first: Sequence[float],
    finest: float,
) -> tuple[float, dict[float, dict[str, float]]]:
    """Return the largest exponent that, like all smaller candidates, meets the limits (0 if there is none), and all scores."""
    tried: dict[float, dict[str, float]] = {}
    candidates = list(first)
    while True:
        scores = evaluate(candidates)
        for index, exponent in enumerate(candidates):
            tried[exponent] = {name: float(values[index]) for name, values in scores.items()}
        failing = [exponent for exponent in sorted(tried) if not meets(tried[exponent])]
        if not failing:
            return max(tried), tried
        largest = max((exponent for exponent in tried if exponent < failing[0]), default=0.0)
        if failing[0] == 0 or failing[0] - largest <= finest:
            return largest, tried
        step = max(finest, (failing[0] - largest) / 8)
        candidates = [largest + step * part for part in range(1, round((failing[0] - largest) / step))]


def _summary(tried: dict[float, dict[str, float]], chosen: float, limit: str) -> str:
    plain = tried[0.0]
    now = tried[chosen]
    if chosen == 0:
        return (
            f"The distance has no effect, because no exponent above 0 satisfies the limit ({limit}). At exponent 0, the mean "
            f"confidence on the validation data is {plain['confidence']:.2%} and the log loss is {plain['nll']:.4g}. Set a price, "
            f"for example with mola.rules.Distance(price=0.02)."
        )
    change = now["nll"] / plain["nll"] - 1 if plain["nll"] > 0 else 0.0
    return (
        f"Dividing by the distance changes the log loss on the validation data from {plain['nll']:.4g} to {now['nll']:.4g} "
        f"({100 * change:+.1f} %) and the mean confidence from {plain['confidence']:.2%} to {now['confidence']:.2%}. Logits are "
        f"divided by {2**chosen:.3g} at twice the usual distance from the training classes, and by {4**chosen:.3g} at four "
        f"times that distance."
    )


def _regression_summary(tried: dict[float, dict[str, float]], chosen: float) -> str:
    if chosen == 0:
        return (
            "The distance has no effect, because even the smallest exponent would raise the log loss by more than the price. Raise "
            "the price, for example with mola.rules.Distance(price=0.05)."
        )
    return (
        f"Scaling by the distance costs {tried[chosen]['nll'] - tried[0.0]['nll']:.3g} nats of log loss on the validation data. "
        f"Standard deviations are multiplied by {2**chosen:.3g} at twice the usual distance from the training data."
    )


def _notes(mixture: TunableMixture) -> tuple[str, ...]:
    notes = []
    reference = mixture.reference
    assert reference is not None  # mixtures with distances have a reference
    if not all(distance.known for distance in mixture.distances):
        notes.append(
            warned(
                "the training features of at least one network do not vary within classes, so its distances are all set to 1."
            )
        )
    else:
        pairs = zip(reference.scales, mixture.distances, strict=True)
        logs = [
            math.log(max(scale.distance, 1e-300) / max(distance.training_distance, 1e-300)) for scale, distance in pairs
        ]
        ratio = math.exp(sum(logs) / len(logs))
        if ratio > FAR:
            notes.append(
                warned(
                    f"the validation data are {ratio:.1f} times as far from the training classes as the training data are. Either "
                    f"there are too few training data for the number of features, or the validation data differ from the training "
                    f"data."
                )
            )
    if any(distance.num_predicted for distance in mixture.distances):
        notes.append(
            "the training data had no labels, so distances are measured from the classes that the networks predict."
        )
    return tuple(notes)
