"""Thresholds for decisions, computed from the validation scores saved in a posterior's folder.

Along with the posterior's tensors, `molaplace fit` saves a few numbers for each validation example. Any false-alarm rate, error rate
or coverage can therefore be chosen later without more data. The alarm is applied first: inputs that raise the alarm are not
answered, and the error rate is guaranteed for all other inputs.

The prior precision, a single number, is tuned on the same data; docs/decisions.md reports how this affects the guarantees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from molaplace.cli.folder import PosteriorFolder
from molaplace.cli.job import NAME
from molaplace.decisions.abstain import AnswerThreshold, abstain_threshold
from molaplace.decisions.alarm import alarm_threshold
from molaplace.decisions.calibration import Calibration
from molaplace.decisions.intervals import PredictionIntervals, prediction_intervals
from molaplace.decisions.sets import PredictionSets, prediction_sets
from molaplace.errors import DataError, OptionError
from molaplace.prediction import Field, RegressionPrediction
from molaplace.saving.bundle import MEANS, SCORE, TARGETS, VARIANCES

CERTAINTY = 0.95
"""Default confidence level for the guaranteed error rate."""

FALSE_ALARMS = 0.05
"""Default false-alarm rate."""


def default_alarm(scores: Tensor) -> tuple[float, float]:
    """Return the alarm threshold and its false-alarm rate: the default rate, or a larger rate if there are fewer than 19 scores."""
    rate = max(FALSE_ALARMS, 1 / (len(scores) + 1))
    return float(alarm_threshold(scores, rate)), rate


def outlier_threshold(fitted: PosteriorFolder, false_alarm_rate: float | None) -> float | None:
    """Return the OOD score above which inputs are flagged as outliers, or None if there are no validation data."""
    if SCORE not in fitted.columns and false_alarm_rate is None:
        return None
    _require_validation(fitted, "--false-alarm-rate")
    if false_alarm_rate is None:
        return default_alarm(fitted.columns[SCORE])[0]
    with _naming("--false-alarm-rate"):
        return float(alarm_threshold(fitted.columns[SCORE], false_alarm_rate))


@dataclass(frozen=True)
class Decisions:
    """Thresholds for new inputs."""

    alarm: float | None
    """OOD score above which inputs are flagged as outliers; None if there are no validation data."""
    answers: AnswerThreshold | None = None
    """Confidence above which inputs are answered unless they are flagged as outliers; None if no error rate is given."""
    sets: PredictionSets | None = None
    """Conformal prediction sets; None if no coverage is given."""
    intervals: PredictionIntervals | None = None
    """Prediction intervals for regression; None if no coverage is given."""

    def apply(self, prediction: Any) -> dict[str, Tensor]:
        """Return the decisions for each input: "outlying" (n,), "answer" (n,) and "set" (n, C), each only if its threshold exists."""
        decisions: dict[str, Tensor] = {}
        if self.alarm is not None:
            decisions["outlying"] = prediction.ood_score.double() > self.alarm
        if self.answers is not None:
            decisions["answer"] = (prediction.confidence.double() > float(self.answers)) & ~decisions["outlying"]
        if self.sets is not None:
            decisions["set"] = self.sets(prediction)
        return decisions

    def plain(self) -> dict[str, Any]:
        """Return the guarantees and their thresholds as plain values."""
        values: dict[str, Any] = {}
        if self.answers is not None:
            guarantee = {name: getattr(self.answers, name) for name in ("error_rate", "certainty")}
            values["answer"] = {"threshold": float(self.answers), **guarantee}
        for name, decision in (("sets", self.sets), ("intervals", self.intervals)):
            if decision is not None:
                values[name] = {"coverage": decision.coverage, "threshold": decision.threshold.tolist()}
        return values


def _saved_calibration(fitted: PosteriorFolder, option: str) -> tuple[Calibration, Tensor]:
    # Return the saved calibration data and OOD scores (n,) of a posterior for one of several classes.
    likelihood = fitted.posterior.likelihood
    if not likelihood.mutually_exclusive:
        instead = "Use the OOD alarm" if likelihood.classification else "Use --coverage for intervals"
        raise OptionError(
            f"{option} requires networks that predict one of several classes, but {fitted.folder} was fitted with --likelihood "
            f"{likelihood.name}. {instead} instead."
        )
    columns = _saved_columns(fitted, option)
    return Calibration.of_columns(columns, fitted.outputs), columns[SCORE]


def _saved_predictions(fitted: PosteriorFolder, option: str) -> tuple[RegressionPrediction, Tensor]:
    # Return the saved predictions and targets (n, D) of a posterior for regression.
    columns = _saved_columns(fitted, option)
    # The intervals use neither the noise variance nor OOD scores.
    fields: dict[str, Field] = {name: columns[name] for name in (MEANS, VARIANCES)}
    fields["component_noise"] = fields[VARIANCES]
    return RegressionPrediction(fields, weights=fitted.posterior.weights), columns[TARGETS]


def _saved_columns(fitted: PosteriorFolder, option: str) -> dict[str, Tensor]:
    if fitted.posterior.is_dense:
        raise OptionError(
            f"{option} does not support dense outputs, but the networks of {fitted.folder} have dense outputs. The positions of an "
            f"input are correlated, so no guarantee would hold. Omit {option}. The OOD alarm is available for each position."
        )
    _require_validation(fitted, option)
    return fitted.columns


def _require_validation(fitted: PosteriorFolder, option: str) -> None:
    if SCORE not in fitted.columns:
        raise OptionError(
            f"{option}: {fitted.folder} was fitted without validation data, which {option} requires. Fit again with --val: molaplace fit "
            f"--config {fitted.folder / NAME} --val DATA"
        )


def make_decisions(
    fitted: PosteriorFolder,
    *,
    false_alarm_rate: float | None = None,
    error_rate: float | None = None,
    certainty: float | None = None,
    coverage: float | None = None,
    by_class: bool = False,
) -> Decisions:
    """Return the thresholds requested by the options in `DecisionOptions`. The default false-alarm rate is 0.05."""
    if certainty is not None and error_rate is None:
        raise OptionError("--certainty requires --error-rate. Pass both or neither.")
    if by_class and coverage is None:
        raise OptionError("--by-class requires --coverage. Pass both or neither.")
    limit = outlier_threshold(fitted, false_alarm_rate)
    answers = None
    sets = None
    intervals = None
    if error_rate is not None:
        calibration, score = _saved_calibration(fitted, "--error-rate")
        left_out = (
            ""
            if limit is None
            else " Inputs above the outlier threshold are left out first, as they are never answered."
        )
        with _naming("--error-rate", left_out):
            # Inputs that raise the alarm are never answered, so they count neither as answers nor as errors.
            quiet = (
                calibration.confidence
                if limit is None
                else torch.where(score > limit, -math.inf, calibration.confidence)
            )
            answers = abstain_threshold(
                calibration, None, error_rate, CERTAINTY if certainty is None else certainty, score=quiet
            )
        if answers < 0:  # minus infinity means that all of these inputs are answered, for which JSON has no number
            answers = AnswerThreshold(0.0, **vars(answers))
    if coverage is not None and (by_class or fitted.posterior.likelihood.classification):
        calibration, _ = _saved_calibration(fitted, "--by-class" if by_class else "--coverage")
        with _naming("--coverage"):
            sets = prediction_sets(calibration, None, coverage, by="class" if by_class else None)
    elif coverage is not None:
        prediction, targets = _saved_predictions(fitted, "--coverage")
        with _naming("--coverage"):
            intervals = prediction_intervals(prediction, targets, coverage)
    return Decisions(limit, answers, sets, intervals)


@contextmanager
def _naming(option: str, remark: str = "") -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise OptionError(f"{error}{remark}", place=option) from error
