"""The methods that `molaplace evaluate` compares, derived from one posterior: MAP, DE, their scaled versions, LLLA and MoLA.

All methods except LLLA are derived from the posterior's prediction, so the data are read once and the networks run once. LLLA
runs the first network a second time. The validation data are also read only once: temperatures, noise and LLLA are tuned on the
stored outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from molaplace.calibration.temperature import as_classes, fit_temperature
from molaplace.cli.data.dataset import Loader
from molaplace.cli.decisions import make_decisions
from molaplace.cli.fit import make_rule
from molaplace.cli.folder import PosteriorFolder
from molaplace.cli.networks_alone import networks_alone, noise_factors, untuned_noise
from molaplace.decisions.intervals import PredictionIntervals
from molaplace.decisions.sets import PredictionSets
from molaplace.distributed import Team
from molaplace.errors import OptionError, collect_warnings
from molaplace.evaluation import PredictionColumns, outlier_scores, regression_scores
from molaplace.evaluation.columns import LEVELS, flatten_positions
from molaplace.likelihoods import ClassificationLikelihood
from molaplace.network import IGNORE_INDEX
from molaplace.posterior import MoLA
from molaplace.prediction import Prediction, RegressionPrediction
from molaplace.rules.held_out import POSITIONS_KEPT, HeldOut
from molaplace.settings import Settings

COVERAGE = 0.9
"""Coverage guaranteed for the prediction sets in the report."""

SINGLE, ENSEMBLE, LAPLACE, MIXTURE = "MAP", "DE", "LLLA", "MoLA"

SCALED = {True: "-T", False: "-N"}
"""Suffix for the names of scaled methods without Laplace approximations: "-T" for temperature scaling (classes), "-N" for scaled
noise (regression)."""

LOGITS = "DE-L"
"""Name of the method that averages the networks' logits and scales the mean by a temperature."""


@dataclass(frozen=True)
class EvaluatedMethods:
    """All methods, derived from one posterior. The ensemble uses the posterior's mixture weights."""

    posterior: MoLA
    single: MoLA
    """The posterior of the first network alone, tuned with the same rule."""
    alone: Mapping[str, Any]
    """Temperature or noise factors (D,) of each method without Laplace approximations, or None if the method is not scaled."""
    sets: PredictionSets | None = None
    """Conformal sets for classification, if the posterior's folder contains scores for enough validation examples."""
    intervals: Mapping[float, PredictionIntervals] = field(default_factory=dict)
    """Calibrated intervals for regression, keyed by each coverage for which there are enough validation examples."""

    @property
    def subject(self) -> str:
        """Name of the method that the posterior implements: LLLA for one network, and MoLA otherwise."""
        return LAPLACE if self.single is self.posterior else MIXTURE

    @property
    def names(self) -> list[str]:
        """Names of all methods, in the order of the report."""
        return list(dict.fromkeys([*self.alone, LAPLACE, self.subject]))

    def tuned(self, method: str) -> dict[str, Any]:
        """Return the values tuned for a method."""
        classification = self.posterior.likelihood.classification
        if method in self.alone:
            factor = self.alone[method]
            if factor is None:
                return {}
            if classification:
                return {"temperature": factor}
            noise = self.posterior.noise[0] * self.posterior.temperature * untuned_noise(self.posterior)[0].sqrt()
            return {"noise": (noise * factor).tolist()}
        posterior = self.posterior if method == self.subject else self.single
        values: dict[str, Any] = {"prior_precision": list(posterior.prior_precision)}
        if not classification:
            values["noise"] = posterior.noise[0].tolist()
        return values | posterior.settings.changed()

    def add(self, columns: Mapping[str, PredictionColumns], batch: Any, labels: Tensor | None) -> None:
        """Add each method's predictions for a batch to its columns."""
        (whole,) = self.posterior.predict_batches([batch])
        (single,) = (whole,) if self.single is self.posterior else self.single.predict_batches([batch])
        head = self.posterior.components[0].head
        where = "the test data"
        flatten = partial(
            flatten_positions,
            where=where,
            ignore_index=IGNORE_INDEX if head is None else head.ignore_index,
            positions=POSITIONS_KEPT,
            first=columns[self.subject].count,
        )
        single, _, _ = flatten(single, labels)
        whole, labels, dense_rows = flatten(whole, labels)
        predictions = {method: self._without_laplace(method, whole) for method in self.alone}
        for method, prediction in {**predictions, LAPLACE: single, self.subject: whole}.items():
            sets = None
            intervals = None
            if method == self.subject:
                sets = None if self.sets is None else self.sets(prediction)
                intervals = {level: calibrated(prediction) for level, calibrated in self.intervals.items()}
            scores = self._scores(prediction, laplace=method not in self.alone)
            columns[method].add(
                prediction,
                labels,
                scores=scores,
                sets=sets,
                intervals=intervals,
                dense_rows=dense_rows,
                detail=True,
                where=where,
            )

    def _without_laplace(self, method: str, whole: Any) -> Any:
        factor = self.alone[method]
        if method == LOGITS:
            logits = torch.tensordot(self.posterior.weights.to(whole.logit_mean), whole.logit_mean, 1)[None] / factor
            (probs,) = whole.likelihood.probabilities(logits)
            return Prediction({"probs": probs, "logit_mean": logits}, likelihood=whole.likelihood)
        count = 1 if method.startswith(SINGLE) else len(self.posterior.components)
        return networks_alone(self.posterior, whole, count, factor)

    def _scores(self, prediction: Any, *, laplace: bool) -> dict[str, Tensor]:
        if isinstance(prediction, RegressionPrediction):
            return regression_scores(prediction, own=laplace)
        logits = prediction.logit_mean
        weights = self.posterior.weights if len(logits) > 1 else None
        own_score = prediction.ood_score if laplace else None
        return outlier_scores(prediction.probs, logits, weights, own_score, prediction.likelihood)


def tune_methods(
    fitted: PosteriorFolder, held_out: HeldOut | None, exposed: Loader | None, team: Team
) -> tuple[EvaluatedMethods, list[str]]:
    """Return the methods, tuned on the validation data with the posterior's rule, and notes for the report.

    `exposed` contains the outliers that the posterior's rule needs, if any.
    """
    posterior = fitted.posterior
    single = _tune_single(fitted, held_out, exposed, team)
    alone, alone_notes = _scale_networks(posterior, held_out, team)
    methods = EvaluatedMethods(posterior, single, alone, *_guarantees(fitted))
    tunings = {method: tuned.tuning for method, tuned in {LAPLACE: single, methods.subject: posterior}.items()}
    tuning_notes = [f"{method}: {note}" for method, tuning in tunings.items() if tuning for note in tuning.notes]
    return methods, [*_notes_on_data(posterior, held_out), *tuning_notes, *alone_notes]


def _notes_on_data(posterior: MoLA, held_out: HeldOut | None) -> list[str]:
    classification = posterior.likelihood.classification
    notes = []
    if held_out is None:
        lacking = "temperatures" if classification else "scaled noise"
        notes.append(
            f"The report has no {lacking}, because there are no validation data. Specify validation data with --val."
        )
    if posterior.is_dense:
        notes.append(
            f"Every number is computed over at most {POSITIONS_KEPT} positions drawn at random from each input. Standard "
            f"errors treat each input as one observation, because the positions of one input are correlated."
        )
    elif classification and not posterior.likelihood.mutually_exclusive:
        notes.append(
            "Metrics on labelled data count each known label of an input once. Standard errors treat each input as one "
            "observation, because the labels of one input may depend on each other."
        )
    weights = posterior.weights.tolist()
    if max(weights) - min(weights) > 1e-9:
        listed = ", ".join(f"{weight:.3f}" for weight in weights)
        notes.append(f"{ENSEMBLE}, {ENSEMBLE}{SCALED[classification]} and {MIXTURE} use these weights: {listed}.")
    return notes


def _tune_single(fitted: PosteriorFolder, held_out: HeldOut | None, exposed: Loader | None, team: Team) -> MoLA:
    # Return the posterior of the first network, tuned with the rule of the whole posterior.
    posterior = fitted.posterior
    if len(posterior.components) == 1:
        return posterior
    single = MoLA(posterior.components[:1], Settings(posterior.prior_precision[:1]), link=posterior.link)
    rule = make_rule(fitted.job, exposed)
    if rule is None:
        return single
    first = None
    if held_out is not None and rule.needs_data:
        first = replace(held_out, phi=held_out.phi[:1], outputs=held_out.outputs[:1])
    with collect_warnings():  # the report shows the notes from tuning instead of warnings
        return single.tune(first, rule=rule, progress=False, team=team)


def _scale_networks(posterior: MoLA, held_out: HeldOut | None, team: Team) -> tuple[dict[str, Any], list[str]]:
    # Return the mapping for `EvaluatedMethods.alone`, and notes for the report.
    count = len(posterior.components)
    likelihood = posterior.likelihood
    members = {SINGLE: 1, ENSEMBLE: count} if count > 1 else {SINGLE: 1}
    if held_out is None:
        return dict.fromkeys(members), []
    factors: dict[str, Any] = {}
    if not isinstance(likelihood, ClassificationLikelihood):
        for method, size in members.items():
            factors |= {method: None, f"{method}{SCALED[False]}": noise_factors(posterior, held_out, size)}
        return factors, []
    held_out.check_labels()
    # Logits (K, n, C) and labels (n,) of the data from all processes.
    rows = team.gather(torch.stack(list(held_out.outputs), dim=1) if len(held_out) else None)
    logits = rows.transpose(0, 1)
    labels = team.gather(held_out.labels if len(held_out) else None)
    if not likelihood.mutually_exclusive:
        logits, labels = as_classes(logits, labels, likelihood)
    notes: list[str] = []
    for method, size in members.items():
        with collect_warnings() as warnings:
            temperature = fit_temperature(logits[:size], labels, posterior.weights if size > 1 else None)
        factors |= {method: None, f"{method}{SCALED[True]}": temperature}
        notes += [f"{method}{SCALED[True]}: {warning}" for warning in warnings]
    if count > 1:
        with collect_warnings():  # drop these notes, because the ensemble gives the same ones
            factors[LOGITS] = fit_temperature(torch.tensordot(posterior.weights.to(logits), logits, 1), labels)
    return factors, notes


def _guarantees(fitted: PosteriorFolder) -> tuple[PredictionSets | None, dict[float, PredictionIntervals]]:
    # Return conformal sets, or calibrated intervals at each coverage for which there are enough validation data.
    intervals: dict[float, PredictionIntervals] = {}
    with suppress(OptionError):
        if fitted.posterior.likelihood.classification:
            return make_decisions(fitted, coverage=COVERAGE).sets, intervals
        for level in LEVELS:  # higher levels need more data
            calibrated = make_decisions(fitted, coverage=level).intervals
            assert calibrated is not None
            intervals[level] = calibrated
    return None, intervals
