"""`mola evaluate` where outputs are numbers: one network, the ensemble, both with scaled noise, LLLA and MoLA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mola.app.jobs.decisions import kept_predictions
from mola.app.jobs.folder import PosteriorFolder, alarm
from mola.app.jobs.numbers import networks_alone, noise_factors, untuned_noise
from mola.app.jobs.positions import DrawnRows, draw_rows, layout_of
from mola.compare import Tally, TallyRows, mean_of
from mola.compare.record import DecisionResult, IntervalResult
from mola.compare.regression import LEVELS, RegressionAnswer
from mola.decisions.intervals import PredictionIntervals, prediction_intervals
from mola.distributed import Team
from mola.errors import DataError, OptionError
from mola.posterior import MoLA
from mola.prediction import Field, RegressionPrediction
from mola.tuning.held_out import HeldOut

SINGLE, SINGLE_N, ENSEMBLE, ENSEMBLE_N, LAPLACE, MIXTURE = "MAP", "MAP-N", "DE", "DE-N", "LLLA", "MoLA"


@dataclass(frozen=True)
class NumbersContest:
    """The methods, from one posterior for numbers."""

    posterior: MoLA
    single: MoLA
    """The first component alone."""
    untuned: Tensor
    """Factors (K, D) to the noise that networks have before anything was tuned."""
    factors: Mapping[str, Tensor]
    """By method whose noise is scaled: factors (D,) of it."""
    intervals: Mapping[float, PredictionIntervals]
    """By coverage: calibrated on the validation data, where the folder has what that takes."""

    def chosen(self, method: str) -> dict[str, Any]:
        """What was tuned of a method; noises are standard deviations, or factors where networks say their own."""
        own = {LAPLACE: self.single, MIXTURE: self.posterior}.get(method)
        if own is None:
            noise = self.posterior.noise[0] * self.posterior.temperature * self.untuned[0].sqrt()
            return {"noise": (noise * self.factors[method]).tolist()} if method in self.factors else {}
        grown = {} if own.distance_exponent == 0 else {"distance_exponent": own.distance_exponent}
        return {"prior_precision": list(own.prior_precision), "noise": own.noise[0].tolist(), **grown}

    def ask(self, batch: Any, labels: Tensor | None, start: int) -> tuple[dict[str, TallyRows], Tensor | None, int]:
        """What every method says of a batch; the ensemble has the posterior's weights.

        Args:
            batch: as a loader yields it.
            labels: its targets, where there are any.
            start: how many inputs came before.

        Returns:
            Answers by method, the targets of their rows, and the number of inputs.
        """
        said: Any = self.posterior.predict_batches([batch])
        whole: RegressionPrediction = next(iter(said))
        one = whole
        if self.single is not self.posterior:
            said = self.single.predict_batches([batch])
            one = next(iter(said))
        count, inputs = len(whole), None
        if self.posterior.is_dense:
            layout = layout_of(whole, whole.component_mean[0])
            given = None if labels is None else layout.labels(labels, whole.component_mean.shape[2], "the targets")
            ignored = self.posterior.components[0].head.ignore_index  # type: ignore[union-attr]
            drawn = draw_rows(layout, given, ignored, start)
            inputs = drawn.inputs
            whole, one = _rows_of(whole, drawn), _rows_of(one, drawn)
            if labels is not None:
                labels = drawn.of_outputs(labels) if labels.dim() == len(layout.sizes) + 2 else drawn.of_map(labels)
            if not len(inputs):
                return {}, None, count
        networks = len(self.posterior.components)
        answers: dict[str, TallyRows] = {}
        for name, scaled, some in ((SINGLE, SINGLE_N, 1), (ENSEMBLE, ENSEMBLE_N, networks)):
            if some == 1 and name == ENSEMBLE:
                continue
            answers[name] = RegressionAnswer(networks_alone(whole, some, self.untuned), inputs=inputs)
            if scaled in self.factors:
                alone = networks_alone(whole, some, self.untuned, self.factors[scaled])
                answers[scaled] = RegressionAnswer(alone, inputs=inputs)
        if networks > 1:
            answers[LAPLACE] = RegressionAnswer(one, one.ood_score, inputs=inputs)
        promised = {level: band(whole) for level, band in self.intervals.items()}
        own = RegressionAnswer(whole, whole.ood_score, promised, inputs)
        return {**answers, LAPLACE if networks == 1 else MIXTURE: own}, labels, count


def _rows_of(said: RegressionPrediction, drawn: DrawnRows) -> RegressionPrediction:
    # The prediction at some positions, as rows.
    parts = (said.component_mean, said.component_variance, said.component_noise)
    means, variances, noises = (drawn.of_outputs(part) for part in parts)
    distance = None if said.distance is None else drawn.of_map(said.distance)
    score = drawn.of_map(said.ood_score)
    fields: dict[str, Field] = {"component_mean": means, "component_variance": variances, "component_noise": noises}
    fields |= {"ood_score": score, "distance": distance}
    return RegressionPrediction(
        fields, weights=said.weights, ood_score_name=said.ood_score_name, likelihood=said.likelihood
    )


def scaled_noise(posterior: MoLA, held: HeldOut, team: Team) -> dict[str, Tensor]:
    """What the noise of the networks alone is multiplied by to do best on validation data.

    Args:
        posterior: whose networks they are.
        held: what they make of the validation data.
        team: the processes that hold them.

    Returns:
        Factors (D,), by method.
    """
    assert held.labels is not None
    said = posterior.predict_from_features(held.phi, held.outputs) if len(held) else None
    untuned, targets = untuned_noise(posterior), team.gather(held.labels if len(held) else None)
    found = {}
    for name, count in ((SINGLE_N, 1), (ENSEMBLE_N, len(posterior.components))):
        if name == SINGLE_N or count > 1:
            given = [] if said is None else [networks_alone(said, count, untuned)]
            everyone = RegressionPrediction.gather(given, team)
            found[name] = noise_factors(everyone, targets)
    return found


def promised_intervals(fitted: PosteriorFolder) -> dict[float, PredictionIntervals]:
    """Intervals at the usual coverages that the folder's validation data can promise."""
    try:
        said, targets = kept_predictions(fitted, "intervals")
    except OptionError:
        return {}
    found = {}
    for level in LEVELS:
        try:
            found[level] = prediction_intervals(said, targets, level)
        except DataError:  # too few data for it
            continue
    return found


def interval_decisions(fitted: PosteriorFolder, tally: Tally, levels: Sequence[float]) -> DecisionResult | None:
    """What the test data show of promises that were made on the validation data.

    Args:
        fitted: an opened posterior.
        tally: of the posterior on the test data.
        levels: coverages that were promised.

    Returns:
        The numbers; None where nothing was promised.
    """
    limit = alarm(fitted, None)
    if limit is None:
        return None
    intervals = []
    for level in levels:
        held = mean_of(tally[f"promised[{level}]"], tally.groups)
        width = float(tally[f"promised width[{level}]"].mean())
        intervals.append(IntervalResult(level, held.value, held.error, width))
    return DecisionResult(
        false_alarm_rate=float(fitted.document["result"]["validation"]["false_alarm_rate"]),
        alarms=float((tally["ood score"] > limit).double().mean()),
        curves={},
        answers=[],
        sets=None,
        intervals=intervals,
    )
