"""Decisions for a posterior's folder: the numbers that fitting keeps of each validation datum, and thresholds from them.

`mola fit` keeps a few numbers of each validation datum, so any false-alarm rate, error rate or coverage can be chosen later without
further data. The alarm comes first: inputs that raise it are not answered, and the error rate is guaranteed for the others.

The prior precision was tuned on the same data: a single number, chosen by thousands of labels. docs/decisions.md measures its effect.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mola.app.jobs.folder import PosteriorFolder, alarm, read_scores
from mola.app.jobs.regression import regression_prediction
from mola.decisions.abstain import AnswerThreshold, abstain_threshold
from mola.decisions.calibration import Calibration
from mola.decisions.intervals import PredictionIntervals, prediction_intervals
from mola.decisions.sets import PredictionSets, prediction_sets
from mola.errors import DataError, OptionError, StorageError
from mola.prediction import RegressionPrediction

CERTAINTY = 0.95
"""Default confidence level of the error rate."""

MEANS, VARIANCES, TARGETS = "component_mean", "component_variance", "target"

COLUMNS = {
    True: ("confidence", "entropy", "label", "true_probability", "mass_above", "true_rank", "ood_score"),
    False: (MEANS, VARIANCES, TARGETS),
}
"""Numbers that are kept of each datum, for classification and for regression."""


def decision_columns(prediction: Any, labels: Tensor) -> dict[str, Tensor]:
    """Return the numbers of labelled data to keep, by name.

    Classification: a number (n,) of each datum. Regression: means and variances (n, K, D) of the components, and targets (n, D).
    """
    if isinstance(prediction, RegressionPrediction):
        means, variances = prediction.component_mean.transpose(0, 1), prediction.component_variance.transpose(0, 1)
        found = {MEANS: means, VARIANCES: variances, TARGETS: labels}
    else:
        found = {**Calibration.of(prediction.probs, labels).columns(), "ood_score": prediction.ood_score}
    found = {name: values.detach().cpu() for name, values in found.items()}
    return {name: values.double() if values.is_floating_point() else values for name, values in found.items()}


@dataclass(frozen=True)
class Decisions:
    """Thresholds for new inputs."""

    alarm: float | None
    """Outlier score above which inputs are outlying; None without validation data."""
    answer: AnswerThreshold | None = None
    """Confidence above which inputs are answered unless they are outlying; None without an error rate."""
    sets: PredictionSets | None = None
    """None without a coverage, and for regression."""
    intervals: PredictionIntervals | None = None
    """For regression; None without a coverage."""

    def apply(self, prediction: Any) -> dict[str, Tensor]:
        """Return the decisions for each input that have a threshold: "outlying" and "answer" (n,), "set" (n, C)."""
        found: dict[str, Tensor] = {}
        if self.alarm is not None:
            found["outlying"] = prediction.ood_score.double() > self.alarm
        if self.answer is not None:
            found["answer"] = (prediction.confidence.double() > float(self.answer)) & ~found["outlying"]
        if self.sets is not None:
            found["set"] = self.sets(prediction)
        return found

    def plain(self) -> dict[str, Any]:
        """Return the decisions as plain values."""
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
    """Return the stored numbers of each validation datum, and outlier scores (n,); messages name the option that needs them."""
    likelihood = fitted.posterior.likelihood
    if not likelihood.mutually_exclusive:
        others = (
            "--coverage gives intervals for it" if not likelihood.classification else "The outlier alarm works for it"
        )
        raise OptionError(
            f"{option} is for networks that choose one of several classes: the likelihood of {fitted.folder} is {likelihood.name!r}. "
            f"{others}."
        )
    columns = _kept_columns(fitted, option)
    try:
        known = Calibration.of_columns(columns, fitted.outputs)
        score = columns.get("ood_score")
        if score is None or score.shape != known.confidence.shape or score.dtype != torch.float64:
            raise DataError("expected an ood_score for each datum.")
    except DataError as error:
        raise StorageError(f"the validation scores of {fitted.folder} are invalid: {error}") from error
    return known, score


def kept_predictions(fitted: PosteriorFolder, option: str) -> tuple[RegressionPrediction, Tensor]:
    """Return the stored predictions of a regression's validation data, and targets (n, D) in their own units."""
    columns, weights = _kept_columns(fitted, option), fitted.posterior.weights
    known = [columns[name] for name in (MEANS, VARIANCES, TARGETS) if name in columns]
    if len(known) < 3 or not _are_predictions(known, len(weights)):
        raise StorageError(
            f"the validation scores of {fitted.folder} are invalid: expected means and variances of {len(weights)} networks, and a "
            f"target for each datum."
        )
    means, variances = (values.transpose(0, 1).contiguous() for values in known[:2])
    # Intervals use neither the share of the noise nor outlier scores.
    return regression_prediction(means, variances, variances, weights), known[2]


def _kept_columns(fitted: PosteriorFolder, option: str) -> dict[str, Tensor]:
    if fitted.posterior.is_dense:
        raise OptionError(
            f"{option} guarantees something for each input, and the networks of {fitted.folder} have dense outputs: positions of one "
            f"input are correlated, so no guarantee would hold. Leave it out; the outlier alarm works position by position."
        )
    if fitted.document["result"].get("validation") is None:
        raise OptionError(
            f"{option}: {fitted.folder} was fitted without validation data, so its error rate is unknown. Fit again with --val: "
            f"mola fit --config {fitted.folder / 'job.toml'} --val DATA"
        )
    return read_scores(fitted.folder)[2]


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
    """Return the confidence, from 0, above which inputs that do not raise the alarm are answered.

    Raises:
        DataError: no threshold guarantees the error rate.
    """
    # Data that raise the alarm are never answered, so they are neither an answer nor an error.
    quiet = known.confidence if alarm is None else torch.where(score > alarm, -math.inf, known.confidence)
    answer = abstain_threshold(known, None, error_rate, certainty, score=quiet)
    # Minus infinity answers everything else. Every confidence is above 0, which can be written to a file.
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
    """Thresholds for the options of `mola.app.jobs.groups.Deciding`; the alarm is always there, by default at a rate of 0.05."""
    if certainty is not None and error_rate is None:
        raise OptionError("--certainty requires --error-rate: give both, or neither.")
    if by_class and coverage is None:
        raise OptionError("--by-class requires --coverage: give both, or neither.")
    regression = not fitted.posterior.likelihood.classification
    for option, given in (("--error-rate", error_rate is not None), ("--by-class", by_class)):
        if regression and given and not fitted.posterior.is_dense:
            raise OptionError(
                f"{option} is for classes, and {fitted.folder} is a regression: --coverage 0.9 gives intervals."
            )
    limit, answer, sets, intervals = alarm(fitted, false_alarm_rate), None, None, None
    if error_rate is not None:
        known, score = kept_calibration(fitted, "--error-rate")
        with _naming("--error-rate"):
            answer = gated_threshold(known, score, limit, error_rate, CERTAINTY if certainty is None else certainty)
    if coverage is not None and regression:
        prediction, targets = kept_predictions(fitted, "--coverage")
        with _naming("--coverage"):
            intervals = prediction_intervals(prediction, targets, coverage)
    elif coverage is not None:
        known, _ = kept_calibration(fitted, "--coverage")
        with _naming("--coverage"):
            sets = prediction_sets(known, None, coverage, by="class" if by_class else None)
    return Decisions(limit, answer, sets, intervals)


@contextmanager
def _naming(option: str) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise OptionError(f"{option}: {error}") from error


def decide(decisions: Decisions, confidence: float, score: float) -> str:
    """Decide for one input: "strange" if it raises the alarm, "answer", or "hand over"; "answer" without an error rate."""
    if decisions.alarm is not None and score > decisions.alarm:
        return "strange"
    return "answer" if decisions.answer is None or confidence > decisions.answer else "hand over"
