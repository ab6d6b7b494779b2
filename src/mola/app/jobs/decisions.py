"""Decisions for a posterior's folder: what fitting keeps of each validation datum, and the thresholds that follow from it.

`mola fit` keeps a few numbers of each validation datum, so that any false-alarm rate, error rate or coverage can be asked for later
without further data. The alarm comes first: where it rings nothing is answered, and the error rate is promised for what is left.

The prior precision was tuned on the same data. That is one number chosen by thousands of labels; how little it changes is measured in
docs/decisions.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mola.app.jobs.folder import PosteriorFolder, alarm, read_scores
from mola.app.jobs.numbers import regression_prediction
from mola.decisions.abstain import AnswerThreshold, abstain_threshold
from mola.decisions.calibration import Calibration
from mola.decisions.intervals import PredictionIntervals, prediction_intervals
from mola.decisions.sets import PredictionSets, prediction_sets
from mola.errors import DataError, OptionError, StorageError
from mola.prediction import RegressionPrediction

CERTAINTY = 0.95
"""Of the error rate, where the user asks for no other."""

COLUMNS = ("confidence", "entropy", "label", "true_probability", "mass_above", "true_rank", "ood_score")
WHOLE = ("label", "true_rank")


def decision_rows(probs: Tensor, labels: Tensor, score: Tensor) -> Tensor:
    """What is kept of labelled data, as rows that processes can join.

    Args:
        probs: (n, C).
        labels: (n,).
        score: outlier scores (n,).

    Returns:
        (n, 7) in float64.
    """
    known = {**Calibration.of(probs, labels).columns(), "ood_score": score.detach().cpu()}
    return torch.stack([known[name].double() for name in COLUMNS], 1)


def decision_columns(rows: Tensor) -> dict[str, Tensor]:
    """Such rows by name, as they are written."""
    return {name: rows[:, place].long() if name in WHOLE else rows[:, place] for place, name in enumerate(COLUMNS)}


MEANS, VARIANCES, TARGETS = "component_mean", "component_variance", "target"
"""What is kept of data whose targets are numbers: all that the mixture's distribution is made of."""


def interval_rows(said: RegressionPrediction, targets: Tensor) -> Tensor:
    """What is kept of data whose targets are numbers, as rows that processes can join.

    Args:
        said: of n inputs with D outputs, by K components.
        targets: (n, D), in their own units.

    Returns:
        (n, 2 K D + D) in float64.
    """
    parts = (said.component_mean.transpose(0, 1), said.component_variance.transpose(0, 1), targets)
    return torch.cat([part.detach().cpu().double().flatten(1) for part in parts], 1)


def interval_columns(rows: Tensor, components: int) -> dict[str, Tensor]:
    """Such rows by name, as they are written: means and variances (n, K, D), and targets (n, D)."""
    outputs = rows.shape[1] // (2 * components + 1)
    size = components * outputs
    shape = (len(rows), components, outputs)
    means, variances = (part.reshape(shape) for part in (rows[:, :size], rows[:, size : 2 * size]))
    return {MEANS: means, VARIANCES: variances, TARGETS: rows[:, 2 * size :]}


@dataclass(frozen=True)
class Decisions:
    """Thresholds for what is predicted next."""

    alarm: float | None
    """Outlier score above which inputs are called outlying; None without validation data."""
    answer: AnswerThreshold | None = None
    """Confidence above which inputs that are not outlying are answered; None if no error rate was asked for."""
    sets: PredictionSets | None = None
    """None if no coverage was asked for, or outputs are numbers."""
    intervals: PredictionIntervals | None = None
    """Where outputs are numbers; None if no coverage was asked for."""

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        found: dict[str, Any] = {}
        if self.answer is not None:
            found["answer"] = {
                "threshold": float(self.answer),
                "error_rate": self.answer.error_rate,
                "certainty": self.answer.certainty,
                "validation_share": self.answer.share,
            }
        if self.sets is not None:
            found["sets"] = {
                "coverage": self.sets.coverage,
                "least_probability": [max(0.0, -one) for one in self.sets.threshold.reshape(-1).tolist()],
                "by_class": bool(self.sets.threshold.ndim),
            }
        if self.intervals is not None:
            found["intervals"] = {
                "coverage": self.intervals.coverage,
                "added": self.intervals.threshold.tolist(),
                "count": self.intervals.count,
            }
        return found


def kept_calibration(fitted: PosteriorFolder, option: str) -> tuple[Calibration, Tensor]:
    """What fitting kept of each validation datum.

    Args:
        fitted: an opened posterior.
        option: that asks for it, for messages.

    Returns:
        The numbers, and outlier scores (n,).
    """
    likelihood = fitted.posterior.likelihood
    if not likelihood.mutually_exclusive:
        others = "--coverage gives intervals for it" if not likelihood.discrete else "The outlier alarm works for it"
        raise OptionError(
            f"{option} is for networks that choose one of several classes: the likelihood of {fitted.folder} is {likelihood.name!r}. "
            f"{others}."
        )
    columns = _kept_columns(fitted, option)
    try:
        known = Calibration.of_columns(columns, fitted.outputs)
    except DataError as error:
        raise StorageError(f"the validation scores of {fitted.folder} are invalid: {error}") from error
    score = columns.get("ood_score")
    if score is None or score.shape != known.confidence.shape or score.dtype != torch.float64:
        raise StorageError(
            f"the validation scores of {fitted.folder} are invalid: expected an ood_score for each datum."
        )
    return known, score


def _kept_columns(fitted: PosteriorFolder, option: str) -> dict[str, Tensor]:
    if fitted.posterior.is_dense:
        raise OptionError(
            f"{option}: the networks of {fitted.folder} have outputs at many positions of each input. Positions of one input are "
            f"alike, so that no promise made by them would hold; the outlier alarm works position by position."
        )
    validation = fitted.document["result"].get("validation")
    if validation is None:
        raise OptionError(
            f"{option}: {fitted.folder} was fitted without validation data, so that nothing is known of how often it errs. Fit again "
            f"with --val: mola fit --config {fitted.folder / 'job.toml'} --val DATA"
        )
    return read_scores(fitted.folder, validation)[3]


def kept_predictions(fitted: PosteriorFolder, option: str) -> tuple[RegressionPrediction, Tensor]:
    """What was said of each validation datum whose targets are numbers.

    Args:
        fitted: an opened posterior for numbers.
        option: that asks for it, for messages.

    Returns:
        The prediction and targets (n, D), in their own units.
    """
    columns = _kept_columns(fitted, option)
    weights = fitted.posterior.weights
    known = [columns[name] for name in (MEANS, VARIANCES, TARGETS) if name in columns]
    if len(known) < 3 or not _are_predictions(known, len(weights)):
        raise StorageError(
            f"the validation scores of {fitted.folder} are invalid: expected means and variances of {len(weights)} networks, and a "
            f"target for each datum."
        )
    means, variances, targets = known
    means, variances = means.transpose(0, 1).contiguous(), variances.transpose(0, 1).contiguous()
    # The noise's share and outlier scores are no part of an interval.
    return regression_prediction(means, variances, variances, weights), targets


def _are_predictions(known: Sequence[Tensor], components: int) -> bool:
    means, variances, targets = known
    shaped = means.dim() == 3 and means.shape == variances.shape and means.shape[1] == components
    if not (shaped and len(means) and targets.shape == (len(means), means.shape[2])):
        return False
    exact = all(one.dtype == torch.float64 and bool(one.isfinite().all()) for one in known)
    return exact and bool((variances > 0).all())


def gated_threshold(
    known: Calibration, score: Tensor, alarm: float | None, error_rate: float, certainty: float = CERTAINTY
) -> AnswerThreshold:
    """The confidence above which to answer what the alarm does not ring for; `DataError` if none can promise it.

    Args:
        known: labelled data.
        score: their outlier scores (n,).
        alarm: the score above which it rings, if there is one.
        error_rate: of the answers.
        certainty: of the error rate.

    Returns:
        The threshold, from 0.
    """
    # What rings is never answered, so it is neither an answer nor an error.
    quiet = known.confidence if alarm is None else torch.where(score > alarm, -math.inf, known.confidence)
    answer = abstain_threshold(known, None, error_rate, certainty, score=quiet)
    # Minus infinity answers all that is quiet. Every confidence is above 0, which can be written to a file.
    return AnswerThreshold(0.0, *answer.__getnewargs__()[1:]) if answer < 0 else answer


def make_decisions(
    fitted: PosteriorFolder,
    *,
    false_alarm_rate: float | None = None,
    error_rate: float | None = None,
    certainty: float | None = None,
    coverage: float | None = None,
    by_class: bool = False,
) -> Decisions:
    """The thresholds that a user asks for.

    Args:
        fitted: an opened posterior.
        false_alarm_rate: of the alarm; None is 0.05.
        error_rate: of the answers; None asks for none.
        certainty: of the error rate; None is 0.95.
        coverage: of the sets, or of the intervals where outputs are numbers; None asks for none.
        by_class: whether sets hold each class as often as asked for.

    Returns:
        The thresholds.
    """
    limit = alarm(fitted, false_alarm_rate)
    if certainty is not None and error_rate is None:
        raise OptionError("--certainty goes with --error-rate: give both, or neither.")
    if by_class and coverage is None:
        raise OptionError("--by-class goes with --coverage: give both, or neither.")
    answer = sets = intervals = None
    if not fitted.posterior.likelihood.discrete:
        for option, asked in (("--error-rate", error_rate is not None), ("--by-class", by_class)):
            if asked:
                raise OptionError(
                    f"{option} is for classes, and the outputs of {fitted.folder} are numbers: --coverage 0.9 gives intervals."
                )
        if coverage is not None:
            said, targets = kept_predictions(fitted, "--coverage")
            try:
                intervals = prediction_intervals(said, targets, coverage)
            except DataError as error:
                raise OptionError(f"--coverage: {error}") from error
        return Decisions(limit, intervals=intervals)
    if error_rate is not None:
        known, score = kept_calibration(fitted, "--error-rate")
        try:
            answer = gated_threshold(known, score, limit, error_rate, CERTAINTY if certainty is None else certainty)
        except DataError as error:
            raise OptionError(f"--error-rate: {error}") from error
    if coverage is not None:
        known, _ = kept_calibration(fitted, "--coverage")
        try:
            sets = prediction_sets(known, None, coverage, by="class" if by_class else None)
        except DataError as error:
            raise OptionError(f"--coverage: {error}") from error
    return Decisions(limit, answer, sets)


def decide(decisions: Decisions, confidence: float, score: float) -> str:
    """What is done with one input: "strange" where the alarm rings, "answer", or "hand over"; "answer" without an error rate."""
    if decisions.alarm is not None and score > decisions.alarm:
        return "strange"
    return "answer" if decisions.answer is None or confidence > decisions.answer else "hand over"
