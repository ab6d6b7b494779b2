"""Decisions for a posterior's folder: what fitting keeps of each validation datum, and the thresholds that follow from it.

`mola fit` keeps a few numbers of each validation datum, so that any false-alarm rate, error rate or coverage can be asked for later
without further data. The alarm comes first: where it rings nothing is answered, and the error rate is promised for what is left.

The prior precision was tuned on the same data. That is one number chosen by thousands of labels; how little it changes is measured in
docs/decisions.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mola.app.jobs.folder import PosteriorFolder, alarm, read_scores
from mola.decisions.abstain import AnswerThreshold, threshold_of
from mola.decisions.calibration import Calibration
from mola.decisions.sets import PredictionSets, sets_of
from mola.errors import DataError, OptionError, StorageError

__all__ = [
    "CERTAINTY",
    "Decisions",
    "decide",
    "decision_columns",
    "decision_rows",
    "gated_threshold",
    "kept_calibration",
    "make_decisions",
]

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


@dataclass(frozen=True)
class Decisions:
    """Thresholds for what is predicted next."""

    alarm: float | None
    """Outlier score above which inputs are called outlying; None without validation data."""
    answer: AnswerThreshold | None = None
    """Confidence above which inputs that are not outlying are answered; None if no error rate was asked for."""
    sets: PredictionSets | None = None
    """None if no coverage was asked for."""

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
        return found


def kept_calibration(fitted: PosteriorFolder, option: str) -> tuple[Calibration, Tensor]:
    """What fitting kept of each validation datum.

    Args:
        fitted: an opened posterior.
        option: that asks for it, for messages.

    Returns:
        The numbers, and outlier scores (n,).

    Raises:
        OptionError: if there were no validation data, or an older version kept none of this.
        StorageError: if the file is damaged.
    """
    likelihood = fitted.posterior.likelihood
    if not likelihood.competing:
        message = (
            f"{option} is for networks that choose one of several classes: the likelihood of {fitted.folder} is {likelihood.name!r}. "
            f"The outlier alarm works for it."
        )
        raise OptionError(message)
    validation = fitted.document["result"].get("validation")
    if validation is None:
        message = (
            f"{option}: {fitted.folder} was fitted without validation data, so that nothing is known of how often it errs. Fit again "
            f"with --val: mola fit --config {fitted.folder / 'job.toml'} --val DATA"
        )
        raise OptionError(message)
    columns: dict[str, Tensor] = {}
    if "scores" in validation:
        columns = read_scores(fitted.folder, validation)[3]
    if not columns:
        message = (
            f"{option}: {fitted.folder} was fitted by an older version, which did not keep what decisions need of the validation "
            f"data. Fit again: mola fit --config {fitted.folder / 'job.toml'}"
        )
        raise OptionError(message)
    try:
        known = Calibration.of_columns(columns, fitted.outputs)
    except DataError as error:
        message = f"the validation scores of {fitted.folder} are invalid: {error}"
        raise StorageError(message) from error
    score = columns.get("ood_score")
    if score is None or score.shape != known.confidence.shape or score.dtype != torch.float64:
        message = f"the validation scores of {fitted.folder} are invalid: expected an ood_score for each datum."
        raise StorageError(message)
    return known, score


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
    answer = threshold_of(known, error_rate, certainty, score=quiet)
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
        coverage: of the sets; None asks for none.
        by_class: whether sets hold each class as often as asked for.

    Returns:
        The thresholds.

    Raises:
        OptionError: if a promise cannot be given, or options do not fit together.
    """
    limit = alarm(fitted, false_alarm_rate)
    if certainty is not None and error_rate is None:
        message = "--certainty goes with --error-rate: give both, or neither."
        raise OptionError(message)
    if by_class and coverage is None:
        message = "--by-class goes with --coverage: give both, or neither."
        raise OptionError(message)
    answer = sets = None
    if error_rate is not None:
        known, score = kept_calibration(fitted, "--error-rate")
        try:
            answer = gated_threshold(known, score, limit, error_rate, CERTAINTY if certainty is None else certainty)
        except DataError as error:
            message = f"--error-rate: {error}"
            raise OptionError(message) from error
    if coverage is not None:
        known, _ = kept_calibration(fitted, "--coverage")
        try:
            sets = sets_of(known, coverage, by="class" if by_class else None)
        except DataError as error:
            message = f"--coverage: {error}"
            raise OptionError(message) from error
    return Decisions(limit, answer, sets)


def decide(decisions: Decisions, confidence: float, score: float) -> str:
    """What is done with one input: "strange" where the alarm rings, "answer", or "hand over"; "answer" without an error rate."""
    if decisions.alarm is not None and score > decisions.alarm:
        return "strange"
    return "answer" if decisions.answer is None or confidence > decisions.answer else "hand over"
