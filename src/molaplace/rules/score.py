"""Rules that choose the prior precision with the best score on the validation data, such as the log loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from molaplace.likelihoods import Likelihood
from molaplace.options import one_of
from molaplace.rules.objective import Objective, paired
from molaplace.rules.priors import negative_log_prior
from molaplace.rules.rule import Rule, Tuning
from molaplace.rules.search import SAME, PrecisionSearch, Scored

SCORE_NAMES = {"nll": "log loss", "brier": "Brier score", "ece": "calibration error", "crps": "CRPS"}

TEMPERATURES = (*(0.1 * 9.5 ** (step / 31) for step in range(32)), 1.0)
"""Temperatures tried first if the networks are underconfident. The search then refines the best temperature."""

DOUBTLESS = 2.0
"""Number of standard errors by which accuracy must exceed confidence before logits are sharpened."""

ALIKE = 1e-3
"""Difference in log loss per output, in nats, below which two prior precisions are considered equally good in regression. For scores
other than the log loss, the difference is relative."""

NOISE_FACTORS = tuple(4.0 ** (step / 8) for step in range(-8, 9))
"""Multiples of the current noise that are tried first in regression. Multiples on a finer grid are tried next."""


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

    def __call__(self, objective: Objective) -> Tuning:
        """Choose the prior precision."""
        score = self.score
        if not objective.likelihood.classification:
            return _tune_regression(objective, score, self.grid)
        search = _search(objective, self.grid)
        best = search.minimise(score, smooth=score != "ece")
        temperature = 1.0
        notes: tuple[str, ...] = ()
        sharper = self._sharpened(objective, best)
        if sharper is not None:
            temperature, search, best, notes = sharper
        at_temperature = f" and temperature {temperature:.3g}" if temperature != 1 else ""
        summary = (
            f"The best {SCORE_NAMES[score]} found on the validation data is {best[score]:.4g}, at prior precision "
            f"{best['prior_precision']:.3g}{at_temperature}."
        )
        settings = objective.settings.at_precision(best["prior_precision"], temperature=temperature)
        notes = (*notes, *search.note(best["prior_precision"]))
        return Tuning(f"Score({score!r})", settings, summary, notes, search.curve())

    def _sharpened(
        self, objective: Objective, best: dict[str, float]
    ) -> tuple[float, PrecisionSearch, dict[str, float], tuple[str, ...]] | None:
        # Return a temperature below 1 if accuracy exceeds confidence by more than two standard errors. Covariance only lowers
        # confidence, but networks trained with label smoothing or mixup need the opposite.
        score = self.score
        scores = objective.scores([objective.settings.at_precision(best["prior_precision"])])
        correct = scores["correct"][0]
        confidence = scores["confidence"][0]
        gap, error = paired(correct, confidence, objective.data)
        num_data = objective.data.num_independent()
        # The error is at least 1 / (count + 2), because it is 0 if all data agree.
        error = max(error, 1 / (num_data + 2))
        if gap <= DOUBTLESS * error:
            return None
        before = best[score]
        temperature = 1.0
        tried = TEMPERATURES
        for _ in range(3):  # alternate, as each setting can compensate for the other; more rounds would gain little
            settings = objective.settings.at_precision(best["prior_precision"])
            values = objective.mean_scores([replace(settings, temperature=value) for value in tried])[score]
            if temperature == 1 and float(values[-1] - values.min()) <= SAME * abs(float(values[-1])):
                return None  # this also covers links that do not depend on the temperature
            if score == "nll":  # the prior is a density, and comparable only with log losses
                values = values + torch.from_numpy(negative_log_prior(np.log(tried))) / num_data
            temperature = tried[int(values.argmin())]
            step = 9.5 ** (1 / 31)
            low = max(TEMPERATURES[0], temperature / step)
            high = min(1.0, temperature * step)
            tried = tuple(low * (high / low) ** (part / 16) for part in range(17))
            search = _search(objective, self.grid, temperature=temperature)
            best = search.minimise(score, smooth=score != "ece")
        note = (
            f"the networks are underconfident, as after label smoothing or mixup: on the validation data, the mean confidence is "
            f"{float(confidence.mean()):.2%} and the accuracy is {float(correct.mean()):.2%}, which is "
            f"{gap / error:.1f} standard errors higher. A temperature of {temperature:.3g} changes the {SCORE_NAMES[score]} "
            f"from {before:.4g} to {best[score]:.4g}."
        )
        return temperature, search, best, (note,)


def _search(objective: Objective, grid: Sequence[float] | None, **settings: Any) -> PrecisionSearch:
    def evaluate(precisions: Sequence[float]) -> Scored:
        return objective.mean_scores([objective.settings.at_precision(value, **settings) for value in precisions])

    return PrecisionSearch(evaluate, grid)


def _tune_regression(objective: Objective, score: str, grid: Sequence[float] | None) -> Tuning:
    # Alternately choose the prior precision and, unless it was given, the noise. With a large data set, the score barely depends on
    # the prior precision, and the position of its minimum is arbitrary. Among equally good prior precisions, the value nearest to 1 is
    # chosen, and the grid is not extended for less: at precisions near 1e-22, rounding errors of the features have a variance that may
    # fit the validation data by chance.
    free = objective.likelihood.estimated
    targets = objective.likelihood.num_uncertain(objective.data.outputs[0].shape[1])
    relative, absolute = (0.0, ALIKE * targets) if score == "nll" else (ALIKE, 0.0)

    def noise(factor: float) -> tuple[float, ...]:
        return (factor,) * objective.num_networks if free else ()

    factor = 1.0
    for _ in range(20):
        search = _search(objective, grid, noise_factor=noise(factor))
        smallest = search.minimise(score, relative=relative, absolute=absolute)[score]
        limit = smallest + relative * abs(smallest) + absolute
        close = [scores for scores in search.tried.values() if scores[score] <= limit]
        best = min(close, key=lambda scores: abs(math.log(scores["prior_precision"])))
        if not free:
            break
        previous = factor
        settings = objective.settings.at_precision(best["prior_precision"])
        for power in (1.0, 0.125, 1 / 64):
            tried = [factor * multiple**power for multiple in NOISE_FACTORS]
            values = objective.mean_scores([replace(settings, noise_factor=noise(value)) for value in tried])[score]
            factor = tried[int(values.argmin())]
        if abs(math.log(factor / previous)) < 1e-3:
            break
    precision = best["prior_precision"]
    at_noise = f" with the noise multiplied by {factor:.3g}" if free else ""
    summary = f"The {SCORE_NAMES[score]} on the validation data is {best[score]:.4g} at prior precision {precision:.3g}{at_noise}."
    settings = objective.settings.at_precision(precision, noise_factor=noise(factor))
    return Tuning(f"Score({score!r})", settings, summary, search.note(precision), search.curve())
