"""The rule that lowers confidence on given outliers, at the least cost in validation log loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from molaplace.options import check_number
from molaplace.rules.objective import Objective, scores_without_labels
from molaplace.rules.rule import Rule, Tuning
from molaplace.rules.search import PrecisionSearch, Scored


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
        check_number(self.weight, "weight", 0, 1e12, "At 0, confidence on the outliers has no effect.")

    def __call__(self, objective: Objective) -> Tuning:
        """Choose the prior precision."""
        outliers = objective.read(self.loader, "outlier loader")

        def evaluate(precisions: Sequence[float]) -> Scored:
            candidates = [objective.settings.at_precision(precision) for precision in precisions]
            validation = objective.mean_scores(candidates)
            far = objective.mean_scores(candidates, scores_without_labels, outliers)
            penalised = validation["nll"] + self.weight * far["uniformity"]
            return validation | {"outlier_confidence": far["confidence"], "objective": penalised}

        search = PrecisionSearch(evaluate, self.grid)
        scores = search.minimise("objective")
        precision = scores["prior_precision"]
        summary = (
            f"At prior precision {precision:.3g}, the validation log loss is {scores['nll']:.4g} and the mean "
            f"confidence on outliers is {scores['outlier_confidence']:.1%}."
        )
        settings = objective.settings.at_precision(precision)
        return Tuning(f"Outliers(weight={self.weight})", settings, summary, search.note(precision), search.curve())
