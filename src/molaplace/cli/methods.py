"""The methods that `molaplace evaluate` compares, derived from one posterior: MAP, DE, their scaled versions, LLLA and MoLA.

The networks run once for all methods, which predict from the captured features and outputs. The validation data are also read only once:
temperatures, noise and LLLA are tuned on the stored outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from molaplace.calibration.noise import scale_noise
from molaplace.cli.decisions import make_decisions
from molaplace.cli.folder import PosteriorFolder
from molaplace.component import Component
from molaplace.data.dataset import Loader
from molaplace.decisions.intervals import PredictionIntervals
from molaplace.decisions.sets import PredictionSets
from molaplace.distributed import Team
from molaplace.errors import OptionError, collect_warnings
from molaplace.evaluation import PredictionColumns, outlier_scores, regression_scores
from molaplace.evaluation.columns import LEVELS
from molaplace.evaluation.positions import DenseRows
from molaplace.likelihoods import Gaussian
from molaplace.likelihoods.base import pooled
from molaplace.network import Captured
from molaplace.posterior import MoLA
from molaplace.prediction import RegressionPrediction
from molaplace.rules import Temperature
from molaplace.rules.held_out import POSITIONS_PER_INPUT, HeldOut
from molaplace.settings import Settings

CapturedType = TypeVar("CapturedType", bound=Captured)

COVERAGE = 0.9
"""Coverage guaranteed for the prediction sets in the report."""

SINGLE, ENSEMBLE, LAPLACE, MIXTURE = "MAP", "DE", "LLLA", "MoLA"

TEMPERATURE, NOISE, LOGITS = "-T", "-N", "-L"
"""Suffixes of methods without Laplace approximations whose temperature or noise is tuned, and of the one that averages logits."""


# --- networks without Laplace approximations -------------------------------------------------------------------------


def networks_alone(posterior: MoLA, count: int) -> MoLA:
    """Return a posterior's first `count` networks, one or all, without Laplace approximations; the weights are the posterior's.

    In regression, the noise is that before tuning: the standard deviation of the training residuals, the given noise, or the standard
    deviation that a heteroscedastic network predicts.
    """
    components = []
    for component in posterior.components[:count]:
        likelihood = component.likelihood
        if isinstance(likelihood, Gaussian):
            likelihood = likelihood.as_specified().fitted(component.require_layer("the noise").sums.weighted())
        components.append(Component(component.network, None, None, likelihood))
    return MoLA(components, weights=posterior.weights if count > 1 else "uniform")


def part_of(captured: CapturedType, method: MoLA) -> CapturedType:
    """Return the captured features and outputs that a method uses: those of its networks, and no features without a posterior."""
    count = len(method.components)
    if isinstance(captured, HeldOut):
        captured = replace(captured, networks=captured.networks[:count])
    outputs = captured.outputs[:count]
    if method.structure is None:
        return replace(captured, heads=[None] * count, features=[rows[..., :0] for rows in outputs], outputs=outputs)
    return replace(captured, heads=captured.heads[:count], features=captured.features[:count], outputs=outputs)


def _plain_methods(posterior: MoLA, held_out: HeldOut | None) -> tuple[dict[str, MoLA], list[str]]:
    # Return the methods without Laplace approximations by name, and notes on their tuning for the report.
    count = len(posterior.components)
    members = {SINGLE: 1, ENSEMBLE: count} if count > 1 else {SINGLE: 1}
    unscaled = {name: networks_alone(posterior, size) for name, size in members.items()}
    if held_out is None:
        return unscaled, []
    methods: dict[str, MoLA] = {}
    notes: list[str] = []
    for name, method in unscaled.items():
        methods[name] = method
        data = part_of(held_out, method)
        if not method.likelihood.classification:
            methods[name + NOISE] = scale_noise(method, data)
            continue
        with collect_warnings() as warnings:
            methods[name + TEMPERATURE] = method.tune(data, rule=Temperature())
        notes += [f"{name}{TEMPERATURE}: {warning}" for warning in warnings]
        if name == ENSEMBLE:
            with collect_warnings():  # drop these notes, because the ensemble gives the same ones
                methods[name + LOGITS] = method.tune(data, rule=Temperature("logits"))
    return methods, notes


# --- all methods -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComparedMethods:
    """All methods, derived from one posterior. The ensemble uses the posterior's mixture weights."""

    posterior: MoLA
    methods: Mapping[str, MoLA]
    """All methods by name, in the order of the report; the last is the posterior."""
    sets: PredictionSets | None = None
    """Conformal sets for classification, if the posterior's folder contains scores for enough validation examples."""
    intervals: Mapping[float, PredictionIntervals] = field(default_factory=dict)
    """Calibrated intervals for regression, keyed by each coverage for which there are enough validation examples."""

    @property
    def subject(self) -> str:
        """Name of the method that the posterior implements: LLLA for one network, and MoLA otherwise."""
        return list(self.methods)[-1]

    def tuned(self) -> dict[str, dict[str, Any]]:
        """Return the values tuned for each method, by name, in the order of the report."""
        tuned: dict[str, dict[str, Any]] = {}
        for name, method in self.methods.items():
            laplace = method.structure is not None
            values = {"prior_precision": list(method.prior_precision)} if laplace else {}
            if not method.likelihood.classification and (laplace or name.endswith(NOISE)):
                values["noise"] = method.noise[0].tolist()
            changed = method.settings.changed()
            tuned[name] = values | {key: changed[key] for key in changed if laplace or key == "temperature"}
        return tuned

    def add(self, columns: Mapping[str, PredictionColumns], captured: Captured) -> None:
        """Add each method's predictions for a batch, whose features and outputs have been captured, to its columns."""
        labels = None if captured.labels is None else captured.labels.cpu()
        dense_rows = None
        if captured.layout.sizes:
            dense_rows = DenseRows(captured.row_numbers // captured.layout.count, captured.layout.inputs)
        elif labels is not None and captured.in_use is not None:
            # Inputs without any label have outlier scores, too.
            labels = labels.new_full((captured.layout.inputs, *labels.shape[1:]), torch.nan).index_copy(
                0, captured.in_use, labels
            )
            captured = replace(captured, in_use=None)
        rows = captured.used()
        for name, method in self.methods.items():
            part = part_of(rows, method)
            prediction = method.make_prediction(part).cpu()
            guarantees: dict[str, Any] = {}
            if name == self.subject:
                guarantees["sets"] = None if self.sets is None else self.sets(prediction)
                guarantees["intervals"] = {level: ends(prediction) for level, ends in self.intervals.items()}
            scores = _scores(method, prediction, part)
            columns[name].add(prediction, labels, scores=scores, dense_rows=dense_rows, detail=True, **guarantees)


def _scores(method: MoLA, prediction: Any, captured: Captured) -> dict[str, Tensor]:
    laplace = method.structure is not None
    if isinstance(prediction, RegressionPrediction):
        return regression_scores(prediction, ood_score=laplace)
    if laplace:
        return outlier_scores(
            prediction.probs, prediction.logit_mean, method.weights, prediction.ood_score, prediction.likelihood
        )
    scaled = [outputs.cpu() / method.temperature for outputs in captured.outputs]
    logits = torch.stack(list(pooled(scaled, method.weights, method.pooling)), 1)
    return outlier_scores(prediction.probs, logits, method.weights, likelihood=prediction.likelihood)


def tune_methods(
    fitted: PosteriorFolder, held_out: HeldOut | None, outlier_loader: Loader | None, team: Team
) -> tuple[ComparedMethods, list[str]]:
    """Return the methods, tuned on the validation data with the posterior's rule, and notes for the report.

    `outlier_loader` contains the outliers that the posterior's rule needs, if any.
    """
    posterior = fitted.posterior
    single = _tune_single(fitted, held_out, outlier_loader, team)
    plain, plain_notes = _plain_methods(posterior, held_out)
    posteriors = {LAPLACE: single} if single is posterior else {LAPLACE: single, MIXTURE: posterior}
    methods = ComparedMethods(posterior, plain | posteriors, *_guarantees(fitted))
    tunings = {method: mixture.tuning for method, mixture in posteriors.items()}
    tuning_notes = [f"{method}: {note}" for method, tuning in tunings.items() if tuning for note in tuning.notes]
    return methods, [*_notes_on_data(posterior, held_out), *tuning_notes, *plain_notes]


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
            f"Every number is computed over at most {POSITIONS_PER_INPUT} positions drawn at random from each input. Standard "
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
        scaled = ENSEMBLE + (TEMPERATURE if classification else NOISE)
        notes.append(f"{ENSEMBLE}, {scaled} and {MIXTURE} use these weights: {listed}.")
    return notes


def _tune_single(fitted: PosteriorFolder, held_out: HeldOut | None, outlier_loader: Loader | None, team: Team) -> MoLA:
    # Return the posterior of the first network, tuned with the rule of the whole posterior.
    posterior = fitted.posterior
    if len(posterior.components) == 1:
        return posterior
    single = MoLA(posterior.components[:1], Settings(posterior.prior_precision[:1]), link=posterior.link)
    rule = fitted.job.make_rule(outlier_loader)
    if rule is None:
        return single
    first = part_of(held_out, single) if held_out is not None and rule.needs_data else None
    with collect_warnings():  # the report shows the notes from tuning instead of warnings
        return single.tune(first, rule=rule, progress=False, team=team)


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
