"""The methods that `molaplace evaluate` compares, derived from one posterior: MAP, DE, their scaled versions, LLLA and MoLA.

The networks run once: the predictions of all methods except LLLA are computed from the posterior's prediction. LLLA runs the first
network a second time. The validation data are also read only once: temperatures, noise and LLLA are tuned on the stored outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from molaplace.calibration.noise import best_factors
from molaplace.calibration.temperature import as_classes, fit_temperature
from molaplace.cli.data.dataset import Loader
from molaplace.cli.decisions import make_decisions
from molaplace.cli.folder import PosteriorFolder
from molaplace.decisions.intervals import PredictionIntervals
from molaplace.decisions.sets import PredictionSets
from molaplace.distributed import Team
from molaplace.errors import OptionError, collect_warnings
from molaplace.evaluation import PredictionColumns, outlier_scores, regression_scores
from molaplace.evaluation.columns import LEVELS, flatten_positions
from molaplace.likelihoods import ClassificationLikelihood, Gaussian
from molaplace.likelihoods.base import mixed
from molaplace.network import IGNORE_INDEX, Batch, as_batch, labels_of_logits
from molaplace.posterior import MoLA
from molaplace.prediction import Field, Prediction, RegressionPrediction
from molaplace.rules.held_out import POSITIONS_PER_INPUT, HeldOut
from molaplace.settings import Settings

COVERAGE = 0.9
"""Coverage guaranteed for the prediction sets in the report."""

SINGLE, ENSEMBLE, LAPLACE, MIXTURE = "MAP", "DE", "LLLA", "MoLA"

TEMPERATURE, NOISE, LOGITS = "-T", "-N", "-L"
"""Suffixes of methods without Laplace approximations whose temperature or noise is tuned, and of the one that averages logits."""


# --- networks without Laplace approximations -------------------------------------------------------------------------


def networks_alone(posterior: MoLA, prediction: Any, count: int, factor: Any = None) -> Any:
    """Return the prediction of a posterior's first `count` networks without Laplace approximations, from that of the posterior.

    The mixture weights are the posterior's. For classification, `factor` is a temperature. For regression, the standard deviation of
    the noise is its value before tuning (`untuned_noise`), multiplied by `factor` (D,). By default, nothing is scaled.
    """
    if isinstance(prediction, RegressionPrediction):
        means = prediction.component_mean[:count]
        noise = prediction.component_noise[:count] * untuned_noise(posterior)[:count, None].to(means)
        if factor is not None:
            noise = noise * factor.to(means).square()
        fields: dict[str, Field] = {"component_mean": means, "component_variance": noise, "component_noise": noise}
        # Plain networks have no outlier score of their own; the variance of the prediction serves as a score for every method.
        fields["ood_score"] = means.new_zeros(means.shape[1])
        weights = prediction.weights[:count] / prediction.weights[:count].sum()
        return RegressionPrediction(fields, weights=weights, likelihood=prediction.likelihood)
    logits = prediction.logit_mean[:count] / (factor or 1.0)
    probs = mixed(posterior.weights, prediction.likelihood.probabilities(logits))
    return Prediction({"probs": probs, "logit_mean": logits}, likelihood=prediction.likelihood)


def _mean_of_logits(posterior: MoLA, prediction: Prediction, temperature: float) -> Prediction:
    # Return the prediction of the networks' mean logits.
    assert prediction.logit_mean is not None
    logits = mixed(posterior.weights, list(prediction.logit_mean))[None] / temperature
    (probs,) = prediction.likelihood.probabilities(logits)
    return Prediction({"probs": probs, "logit_mean": logits}, likelihood=prediction.likelihood)


def untuned_noise(posterior: MoLA) -> Tensor:
    """Return the ratio (K, D) of each network's noise variance before tuning to its current noise variance, in float64.

    The noise variance before tuning is the variance of the training residuals, the given noise, or the variance that a
    heteroscedastic network predicts.
    """
    rows = []
    for component in posterior.components:
        layer = component.require_layer("the noise")
        likelihood = component.likelihood
        assert isinstance(likelihood, Gaussian)
        width = len(layer.weights)
        before = likelihood
        if likelihood.estimated:
            before = replace(likelihood, noise=None, estimated=False).fitted(layer.sums)
        rows.append((before.deviation(width) / likelihood.deviation(width)).square())
    return torch.stack(rows) / posterior.temperature**2


def noise_factors(posterior: MoLA, held_out: HeldOut, count: int) -> Tensor:
    """Return the maximum-likelihood noise factors (D,) of the first `count` networks on the validation data of all processes."""
    predictions = []
    if len(held_out):
        prediction = posterior.make_prediction(held_out)
        predictions = [networks_alone(posterior, prediction, count)]
    alone = RegressionPrediction.gather(predictions, held_out.team)
    targets = held_out.team.gather(held_out.labels)
    return best_factors(alone.weights, alone.component_mean, alone.component_noise, targets)


@dataclass(frozen=True)
class PlainMethod:
    """A method without Laplace approximations."""

    predict: Callable[[Any], Any]
    """Function from the posterior's prediction to the method's prediction."""
    tuned: dict[str, Any] = field(default_factory=dict)
    """The temperature or the noise, if it is tuned."""


def _plain_methods(posterior: MoLA, held_out: HeldOut | None, team: Team) -> tuple[dict[str, PlainMethod], list[str]]:
    # Return the methods without Laplace approximations by name, and notes on their tuning for the report.
    count = len(posterior.components)
    members = {SINGLE: 1, ENSEMBLE: count} if count > 1 else {SINGLE: 1}
    unscaled = {name: PlainMethod(partial(networks_alone, posterior, count=size)) for name, size in members.items()}
    if held_out is None:
        return unscaled, []
    methods: dict[str, PlainMethod] = {}
    if not isinstance(posterior.likelihood, ClassificationLikelihood):
        untuned = posterior.noise[0] * posterior.temperature * untuned_noise(posterior)[0].sqrt()
        for name, size in members.items():
            factors = noise_factors(posterior, held_out, size)
            predict = partial(networks_alone, posterior, count=size, factor=factors)
            methods |= {
                name: unscaled[name],
                name + NOISE: PlainMethod(predict, {"noise": (untuned * factors).tolist()}),
            }
        return methods, []
    held_out.check_labels()
    # Logits (K, n, C) and labels (n,) of the data from all processes.
    rows = team.gather(torch.stack(list(held_out.outputs), dim=1) if len(held_out) else None)
    labels = team.gather(held_out.labels if len(held_out) else None)
    logits, labels = as_classes(rows.transpose(0, 1), labels, posterior.likelihood)
    notes: list[str] = []
    for name, size in members.items():
        with collect_warnings() as warnings:
            temperature = fit_temperature(logits[:size], labels, posterior.weights if size > 1 else None)
        predict = partial(networks_alone, posterior, count=size, factor=temperature)
        methods |= {name: unscaled[name], name + TEMPERATURE: PlainMethod(predict, {"temperature": temperature})}
        notes += [f"{name}{TEMPERATURE}: {warning}" for warning in warnings]
    if count > 1:
        with collect_warnings():  # drop these notes, because the ensemble gives the same ones
            temperature = fit_temperature(mixed(posterior.weights, list(logits)), labels)
        predict = partial(_mean_of_logits, posterior, temperature=temperature)
        methods[ENSEMBLE + LOGITS] = PlainMethod(predict, {"temperature": temperature})
    return methods, notes


# --- all methods -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComparedMethods:
    """All methods, derived from one posterior. The ensemble uses the posterior's mixture weights."""

    posterior: MoLA
    single: MoLA
    """The posterior of the first network alone, tuned with the same rule."""
    plain: Mapping[str, PlainMethod]
    """The methods without Laplace approximations, by name."""
    sets: PredictionSets | None = None
    """Conformal sets for classification, if the posterior's folder contains scores for enough validation examples."""
    intervals: Mapping[float, PredictionIntervals] = field(default_factory=dict)
    """Calibrated intervals for regression, keyed by each coverage for which there are enough validation examples."""

    @property
    def subject(self) -> str:
        """Name of the method that the posterior implements: LLLA for one network, and MoLA otherwise."""
        return LAPLACE if self.single is self.posterior else MIXTURE

    def tuned(self) -> dict[str, dict[str, Any]]:
        """Return the values tuned for each method, by name, in the order of the report."""
        tuned = {name: method.tuned for name, method in self.plain.items()}
        for name, posterior in {LAPLACE: self.single, self.subject: self.posterior}.items():
            tuned[name] = {"prior_precision": list(posterior.prior_precision)}
            if not posterior.likelihood.classification:
                tuned[name]["noise"] = posterior.noise[0].tolist()
            tuned[name] |= posterior.settings.changed()
        return tuned

    def add(self, columns: Mapping[str, PredictionColumns], batch: Any, labels: Tensor | None, where: str) -> None:
        """Add each method's predictions for a batch to its columns."""
        (posterior_prediction,) = self.posterior.predict_batches([batch])
        (single_prediction,) = (
            (posterior_prediction,) if self.single is self.posterior else self.single.predict_batches([batch])
        )
        head = self.posterior.components[0].head
        ignore_index = IGNORE_INDEX if head is None else head.ignore_index
        if isinstance(posterior_prediction, Prediction):
            labelled = Batch(as_batch(batch, where).inputs, labels)
            labels = labels_of_logits([self.posterior], labelled, posterior_prediction.probs.shape, ignore_index, where)
        flatten = partial(
            flatten_positions,
            where=where,
            ignore_index=ignore_index,
            positions=POSITIONS_PER_INPUT,
            first=columns[self.subject].count,
        )
        single_prediction, _, _ = flatten(single_prediction, labels)
        posterior_prediction, labels, dense_rows = flatten(posterior_prediction, labels)
        predictions = {name: method.predict(posterior_prediction) for name, method in self.plain.items()}
        for name, prediction in {**predictions, LAPLACE: single_prediction, self.subject: posterior_prediction}.items():
            guarantees: dict[str, Any] = {}
            if name == self.subject:
                guarantees["sets"] = None if self.sets is None else self.sets(prediction)
                guarantees["intervals"] = {level: ends(prediction) for level, ends in self.intervals.items()}
            scores = self._scores(prediction, laplace=name not in self.plain)
            columns[name].add(
                prediction, labels, scores=scores, dense_rows=dense_rows, detail=True, where=where, **guarantees
            )

    def _scores(self, prediction: Any, *, laplace: bool) -> dict[str, Tensor]:
        if isinstance(prediction, RegressionPrediction):
            return regression_scores(prediction, ood_score=laplace)
        logits = prediction.logit_mean
        weights = self.posterior.weights if len(logits) > 1 else None
        ood_score = prediction.ood_score if laplace else None
        return outlier_scores(prediction.probs, logits, weights, ood_score, prediction.likelihood)


def tune_methods(
    fitted: PosteriorFolder, held_out: HeldOut | None, outlier_loader: Loader | None, team: Team
) -> tuple[ComparedMethods, list[str]]:
    """Return the methods, tuned on the validation data with the posterior's rule, and notes for the report.

    `outlier_loader` contains the outliers that the posterior's rule needs, if any.
    """
    posterior = fitted.posterior
    single = _tune_single(fitted, held_out, outlier_loader, team)
    plain, plain_notes = _plain_methods(posterior, held_out, team)
    methods = ComparedMethods(posterior, single, plain, *_guarantees(fitted))
    posteriors = {LAPLACE: single, methods.subject: posterior}
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
    first = None
    if held_out is not None and rule.needs_data:
        parts = {name: getattr(held_out, name)[:1] for name in ("heads", "features", "outputs")}
        first = replace(held_out, **parts)
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
