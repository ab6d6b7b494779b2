"""The paper's rule: the smallest prior precision at which the mean confidence on the validation data meets a threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from molaplace.errors import warned
from molaplace.options import check_number
from molaplace.rules.held_out import HeldOut
from molaplace.rules.objective import Objective, label_scores, scores_without_labels
from molaplace.rules.rule import Rule, Tuning
from molaplace.rules.search import PrecisionSearch

NEAR = 0.005
"""If the mean confidence exceeds the target by at most this much, the summary treats the target as met."""


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
        if self.confidence is not None:
            check_number(self.confidence, "confidence", 0, 1, "For 95 %, pass 0.95.")
        check_number(self.margin, "margin", -1, 1, "For one percentage point, pass 0.01.")
        if self.brier is not None:
            check_number(self.brier, "brier", 0, 2, "The Brier score of a uniform guess is 1 - 1/C.")

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
                f"{accuracy:.1%} with a standard error of {_points(error, '.2g')}.",
            )
        origin = f"the networks' mean accuracy of {accuracy:.2%} minus {_points(self.margin)}"
        if target > accuracy - self.margin:
            origin = f"the chance level, because {origin} would be even lower"
        return target, f"{target:.2%}, {origin}", notes

    def __call__(self, objective: Objective) -> Tuning:
        """Choose the prior precision."""
        target, origin, notes = self.target(objective.data)
        score = scores_without_labels if objective.data.labels is None else label_scores
        search = PrecisionSearch(
            lambda precisions: objective.mean_scores(
                [objective.settings.at_precision(value) for value in precisions], score
            ),
            self.grid,
        )

        def meets(scores: dict[str, float]) -> bool:
            return scores["confidence"] >= target and (self.brier is None or scores["brier"] <= self.brier)

        scores = search.smallest_meeting(meets, "confidence")
        if scores is None:
            scores = search.tried[max(search.tried)]
            summary = warned(
                f"The threshold rule has no effect: without any covariance, the mean confidence is "
                f"{scores['confidence']:.2%}, already below the target of {target:.2%}, and covariance only lowers it. "
                f"The networks disagree, or they are underconfident, as after label smoothing or mixup. The prior precision is set "
                f"to {scores['prior_precision']:.3g}, at which predictions are close to those of the plain ensemble. Use the default "
                f"rule, 'calibrated'."
            )
        else:
            notes = (*notes, *search.note(scores["prior_precision"]))
            lowest = min(trial["confidence"] for trial in search.tried.values())
            above = (
                "; none of the prior precisions tried lowers the confidence to the target"
                if lowest > target + NEAR
                else ""
            )
            summary = (
                f"The mean confidence on the validation data is {scores['confidence']:.2%} at prior precision "
                f"{scores['prior_precision']:.3g} (target: {origin}){above}."
            )
        settings = objective.settings.at_precision(scores["prior_precision"])
        return Tuning(f"Threshold: target confidence {origin}", settings, summary, notes, search.curve())


def _points(share: float, digits: str = "g") -> str:
    # Format a difference between two proportions in percentage points, such as "1 point" or "2.6 points".
    text = f"{100 * share:{digits}}"
    return f"{text} point{'' if text == '1' else 's'}"
