"""`molaplace evaluate`: compare MAP, temperature or noise scaling, the deep ensemble, LLLA and MoLA on the user's test data.

All methods except LLLA are derived from the posterior's prediction, so the data are read once and the networks run once. LLLA
runs the first network a second time. The validation data are also read only once: temperatures, noise and LLLA are tuned on the
stored outputs.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from molaplace import __version__
from molaplace.calibration.temperature import as_classes, fit_temperature
from molaplace.cli.data.dataset import Loader, Set, SkippedInputs
from molaplace.cli.data.opening import are_same
from molaplace.cli.decisions import CERTAINTY, alarm, make_decisions, saved_calibration, saved_predictions
from molaplace.cli.fit import make_rule
from molaplace.cli.folder import PosteriorFolder
from molaplace.cli.job import RUN, Progress
from molaplace.cli.option_groups import MORE, PosteriorOptions, SummaryOptions
from molaplace.cli.options import option
from molaplace.cli.prediction_table import output_names
from molaplace.cli.regression import networks_alone, noise_factors, untuned_noise
from molaplace.decisions.intervals import PredictionIntervals, prediction_intervals
from molaplace.decisions.sets import PredictionSets, prediction_sets
from molaplace.distributed import Team
from molaplace.errors import DataError, OptionError, warn
from molaplace.evaluation.answers import Answer, outlier_scores
from molaplace.evaluation.record import AnswerResult, Comparison, DecisionResult, IntervalResult, Record, SetInfo
from molaplace.evaluation.regression import LEVELS, RegressionAnswer
from molaplace.evaluation.results import (
    differences,
    labelled_leads,
    labelled_result,
    outlier_leads,
    outlier_result,
    risk_curve,
    set_result,
)
from molaplace.evaluation.tally import Tally, rows_of
from molaplace.likelihoods import ClassificationLikelihood
from molaplace.likelihoods.base import mixed
from molaplace.network import IGNORE_INDEX
from molaplace.posterior import MoLA
from molaplace.prediction import RegressionPrediction
from molaplace.rules.class_order import check_class_order
from molaplace.rules.held_out import HeldOut
from molaplace_lab.methods import noting

ERROR_RATES, COVERAGE = (0.01, 0.02, 0.05), 0.9
"""Error rates and coverage guaranteed for the decisions in the report."""

POSITIONS = 256
"""Number of positions drawn per input for dense outputs. Neighbouring positions are correlated, so more of them would add
little information."""

SINGLE, ENSEMBLE, LAPLACE, MIXTURE = "MAP", "DE", "LLLA", "MoLA"
SCALED = {True: "-T", False: "-N"}
"""Suffix for the names of scaled methods without Laplace approximations: "-T" for temperature scaling (classes), "-N" for scaled
noise (regression)."""

LOGITS = "DE-L"
"""Name of the method that averages the networks' logits and scales the mean by a temperature."""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(PosteriorOptions, SummaryOptions):
    """Options for `molaplace evaluate`."""

    posterior: Path = option(help="Folder written by `molaplace fit`", argument=True, metavar="POSTERIOR")
    test: str = option(help="Labelled test data, in any form that `molaplace fit --train` accepts", metavar="DATA")
    ood: tuple[str, ...] = option((), "OOD data (labels are ignored); can be repeated", metavar="DATA")
    output: Path = option(
        Path("evaluation"), "Folder for the page, the figures and the numbers", flags=("--output", "-o"), metavar="DIR"
    )
    val: str | None = option(
        None,
        "Validation data for tuning temperatures, noise and LLLA",
        metavar="DATA",
        panel=MORE,
        shown="validation data of the fit",
    )
    strict: bool = option(False, "Stop at the first input that cannot be used", panel=MORE)
    seed: int = option(0, "Random seed for your own code", panel=RUN, minimum=0)


_Rows = Answer | RegressionAnswer


@dataclass(frozen=True)
class _Methods:
    # All methods, derived from one posterior. The ensemble uses the posterior's mixture weights.
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
    def own(self) -> str:
        """Name of the method that the posterior implements: LLLA for one network, and MoLA otherwise."""
        return LAPLACE if self.single is self.posterior else MIXTURE

    def chosen(self, method: str) -> dict[str, Any]:
        """Return the values tuned for a method."""
        discrete, found = self.posterior.likelihood.classification, dict[str, Any]()
        if method in self.alone:
            factor = self.alone[method]
            if factor is not None and discrete:
                found["temperature"] = factor
            elif factor is not None:
                noise = self.posterior.noise[0] * self.posterior.temperature * untuned_noise(self.posterior)[0].sqrt()
                found["noise"] = (noise * factor).tolist()
            return found
        posterior = {LAPLACE: self.single, self.own: self.posterior}[method]
        found["prior_precision"] = list(posterior.prior_precision)
        if not discrete:
            found["noise"] = posterior.noise[0].tolist()
        neutral = {"temperature": 1, "pooling": 1} if discrete else {}
        for name, value in {**neutral, "distance_exponent": 0}.items():
            if getattr(posterior, name) != value:
                found[name] = getattr(posterior, name)
        return found

    def columns(self, batch: Any, labels: Tensor | None, start: int) -> tuple[dict[str, dict[str, Tensor]], int]:
        """Return the columns that a batch adds to each method's tally, and the batch size; `start` inputs precede the batch."""
        (whole,) = self.posterior.predict_batches([batch])
        (single,) = (whole,) if self.single is self.posterior else self.single.predict_batches([batch])
        count, head = len(whole), self.posterior.components[0].head
        ignored = IGNORE_INDEX if head is None else head.ignore_index
        (whole, known, inputs), (single, _, _) = (
            rows_of(one, labels, "the labels", ignore_index=ignored, positions=POSITIONS, first=start)
            for one in (whole, single)
        )
        if not len(whole):
            return {}, count
        if known is not None:
            outputs = whole.component_mean[0] if isinstance(whole, RegressionPrediction) else whole.probs
            known = self.posterior.likelihood.check_labels(known, outputs, "the test data")
        answers = {name: self._alone(name, factor, whole, inputs) for name, factor in self.alone.items()}
        for name, prediction in {LAPLACE: single, self.own: whole}.items():
            answers[name] = self._laplace(prediction, inputs, decided=name == self.own)
        return {name: answer.columns(known) for name, answer in answers.items()}, count

    def _alone(self, method: str, factor: Any, whole: Any, inputs: Tensor | None) -> _Rows:
        count = 1 if method.startswith(SINGLE) else len(self.posterior.components)
        if isinstance(whole, RegressionPrediction):
            return RegressionAnswer(networks_alone(self.posterior, whole, count, factor), inputs=inputs)
        likelihood, logits, weights = whole.likelihood, whole.logit_mean[:count], self.posterior.weights
        if method == LOGITS:
            logits = torch.tensordot(weights.to(logits), logits, 1)[None]
        logits = logits / (factor or 1.0)
        probs = mixed(weights, likelihood.probabilities(logits))
        scores = outlier_scores(probs, logits, weights if len(logits) > 1 else None, None, likelihood)
        return Answer(probs, scores, likelihood=likelihood, inputs=inputs)

    def _laplace(self, found: Any, inputs: Tensor | None, *, decided: bool) -> _Rows:
        if isinstance(found, RegressionPrediction):
            promised = {level: intervals(found) for level, intervals in self.intervals.items()} if decided else None
            return RegressionAnswer(found, found.ood_score, promised, inputs)
        weights = self.posterior.weights if len(found.logit_mean) > 1 else None
        scores = outlier_scores(found.probs, found.logit_mean, weights, found.ood_score, found.likelihood)
        sets = self.sets(found).to(found.probs.device) if decided and self.sets is not None else None
        return Answer(found.probs, scores, sets, found.likelihood, inputs)


def run_evaluate(
    fitted: PosteriorFolder,
    options: EvaluateOptions,
    progress: Progress = lambda doing, done: None,
    team: Team | None = None,
) -> Comparison:
    """Compare the methods. Each process in a team reads its share of every set, and all processes return the same numbers."""
    began = time.perf_counter()
    test, outliers, val, posterior = options.test, options.ood, options.val, fitted.posterior
    if len({test, *outliers}) <= len(outliers):
        raise OptionError(
            f"each data set can be given only once; got {', '.join([test, *outliers])}. Remove the repeated name."
        )
    account, together, steps = SkippedInputs(), team or Team.single(), 2 + len(outliers)

    def loader(source: Set, doing: str, step: int, *, labelled: bool) -> Loader:
        def on_share(share: float) -> None:
            progress(doing, (step + share) / steps)

        on_share(0.0)
        return Loader(source, account, options.strict, labelled, on_share, together)

    seen = _seen_before(fitted, test, val)
    for note in seen:
        warn(note)
    # All sets are opened first, so that a wrong name is reported immediately.
    tuned_on = val or fitted.job.val
    sources = {name: fitted.open_dataset(name, labelled=name == test, by_user=True) for name in (test, *outliers)}
    held_out = None
    if tuned_on is not None:
        # If the folder was moved, it may refer to data that do not exist here.
        absent = None if val else "specify the validation data with --val DATA."
        source = fitted.open_dataset(tuned_on, labelled=True, by_user=val is not None, absent=absent)
        reading = loader(source, "tuning", 0, labelled=True)
        held_out = posterior.read(reading, f"validation data {source.name}", labelled=True, team=together)
    exposed = None
    if fitted.job.outliers is not None:
        exposed = loader(fitted.open_dataset(fitted.job.outliers, labelled=False), "tuning", 0, labelled=False)
    methods, notes = _tuned(fitted, held_out, exposed, together)
    tallies = {
        name: _read(methods, loader(source, Path(name).name, step, labelled=name == test), together)
        for step, (name, source) in enumerate(sources.items(), 1)
    }
    account = account.together(together)
    progress("done", 1.0)
    classes, inside, regression = output_names(fitted), tallies[test], not posterior.likelihood.classification
    return Comparison(
        title=test,
        sets={name: _set_info(posterior, name, options, found[methods.own]) for name, found in tallies.items()},
        records=tuple(
            Record(
                suite="evaluation",
                method=method,
                chosen=methods.chosen(method),
                labelled={test: labelled_result(tally, classes=classes)},
                outliers={name: outlier_result(tally, tallies[name][method]) for name in outliers},
            )
            for method, tally in inside.items()
        ),
        classes=classes,
        leads={test: labelled_leads(inside)} | {name: outlier_leads(inside, tallies[name]) for name in outliers},
        notes=(*notes, *seen),
        left_out=account.left_out,
        decisions=_decisions(fitted, methods, inside, classes),
        regression=regression,
        differences=differences(inside, methods.own),
        made={
            "components": len(posterior.components),
            "posterior": str(fitted.folder),
            "validation": tuned_on,
            "structure": posterior.structure,
            "rule": fitted.job.rule,
            "seconds": time.perf_counter() - began,
            "versions": {"molaplace": __version__, "torch": torch.__version__, "python": platform.python_version()},
        },
    )


def _set_info(posterior: MoLA, name: str, options: EvaluateOptions, tally: Tally) -> SetInfo:
    last = Path(name).name
    alone = last and [Path(other).name for other in options.ood].count(last) == 1
    found = SetInfo(name, last if alone else name, "test" if name == options.test else "outlier", tally.count)
    if tally.groups is None:
        return found
    return replace(found, parts="position" if posterior.is_dense else "label", inputs=tally.inputs)


def _tuned(
    fitted: PosteriorFolder, held_out: HeldOut | None, exposed: Loader | None, team: Team
) -> tuple[_Methods, list[str]]:
    # Return the methods, tuned on the validation data with the posterior's rule, and notes for the report.
    posterior, notes = fitted.posterior, []
    discrete = posterior.likelihood.classification
    if held_out is None:
        lacking = "temperatures" if discrete else "scaled noise"
        notes.append(
            f"The report has no {lacking}, because there are no validation data. Specify validation data with --val."
        )
    if posterior.is_dense:
        notes.append(
            f"Every number is computed over at most {POSITIONS} positions drawn at random from each input. Standard "
            f"errors treat each input as one observation, because the positions of one input are correlated."
        )
    elif discrete and not posterior.likelihood.mutually_exclusive:
        notes.append(
            "Every number is computed over labels: each known label of an input counts once. Standard errors treat "
            "each input as one observation, because the labels of one input may depend on each other."
        )
    shares = posterior.weights.tolist()
    if max(shares) - min(shares) > 1e-9:
        listed = ", ".join(f"{share:.3f}" for share in shares)
        notes.append(f"{ENSEMBLE}, {ENSEMBLE}{SCALED[discrete]} and {MIXTURE} use these weights: {listed}.")
    single = posterior
    if len(posterior.components) > 1:
        single = type(posterior)(posterior.components[:1], posterior.link)
        if (rule := make_rule(fitted.job, exposed)) is not None:
            first = None
            if held_out is not None and fitted.job.rule != "evidence":
                first = replace(held_out, phi=held_out.phi[:1], outputs=held_out.outputs[:1])
            with noting():  # the report shows the notes from tuning instead of warnings
                single = single.tune(first, rule=rule, progress=False, team=team)
    alone, remarks = _alone(posterior, held_out, team)
    methods = _Methods(posterior, single, alone, *_guarantees(fitted))
    what = "logits are divided by a power" if discrete else "standard deviations grow with a power"
    for name, one in {LAPLACE: single, methods.own: posterior}.items():
        if one.distance_exponent > 0:
            notes.append(f"{name}: {what} of the distance (exponent {one.distance_exponent:.4g}).")
        if one.tuning is not None:
            notes += [f"{name}: {note}" for note in one.tuning.notes]
    return methods, notes + remarks


def _alone(posterior: MoLA, held_out: HeldOut | None, team: Team) -> tuple[dict[str, Any], list[str]]:
    # Return the mapping for `_Methods.alone`, and notes for the report.
    count, likelihood = len(posterior.components), posterior.likelihood
    members = {SINGLE: 1, ENSEMBLE: count} if count > 1 else {SINGLE: 1}
    if held_out is None:
        return dict.fromkeys(members), []
    alone: dict[str, Any] = {}
    if not isinstance(likelihood, ClassificationLikelihood):
        for name, some in members.items():
            alone |= {name: None, f"{name}{SCALED[False]}": noise_factors(posterior, held_out, some)}
        return alone, []
    held_out.check_labels()
    # Logits (K, n, C) and labels (n,) of the data from all processes.
    rows = team.gather(torch.stack(list(held_out.outputs), dim=1) if len(held_out) else None)
    logits, labels = rows.transpose(0, 1), team.gather(held_out.labels if len(held_out) else None)
    if not likelihood.mutually_exclusive:
        logits, labels = as_classes(logits, labels, likelihood)
    notes: list[str] = []
    for name, some in members.items():
        with noting() as caught:
            scaled = fit_temperature(logits[:some], labels, posterior.weights if some > 1 else None)
        alone |= {name: None, f"{name}{SCALED[True]}": scaled}
        notes += [f"{name}{SCALED[True]}: {note}" for note in caught]
    if count > 1:
        with noting():  # drop these notes, because the ensemble gives the same ones
            alone[LOGITS] = fit_temperature(torch.tensordot(posterior.weights.to(logits), logits, 1), labels)
    return alone, notes


def _read(methods: _Methods, loader: Loader, team: Team) -> dict[str, Tally]:
    tallies: dict[str, Tally] = {}
    seen = 0
    for batch in loader:
        labels = None
        if loader.labelled:
            labels = batch["labels"] if isinstance(batch, dict) else batch[1]
        found, count = methods.columns(batch, labels, seen)
        seen += count
        for method, columns in found.items():
            tallies.setdefault(method, Tally()).add(columns)
    names = next((one for one in team.collect(list(tallies)) if one), None)  # a process may have no data
    if names is None:
        raise DataError(f"{loader.source.name} has no usable inputs. Provide data that the networks can read.")
    tallies = {method: tallies.get(method, Tally()).gather(team) for method in names}
    if loader.labelled and methods.posterior.likelihood.mutually_exclusive:
        single = tallies[SINGLE]
        check_class_order(single["label"].long(), [single["predicted"].long()], f"test data {loader.source.name}")
    return tallies


def _guarantees(fitted: PosteriorFolder) -> tuple[PredictionSets | None, dict[float, PredictionIntervals]]:
    # Return conformal sets, or calibrated intervals at each coverage for which there are enough validation data.
    intervals: dict[float, PredictionIntervals] = {}
    with suppress(OptionError, DataError):
        if fitted.posterior.likelihood.classification:
            return prediction_sets(saved_calibration(fitted, "decisions")[0], None, COVERAGE), intervals
        prediction, targets = saved_predictions(fitted, "intervals")
        for level in LEVELS:  # higher levels need more data
            intervals[level] = prediction_intervals(prediction, targets, level)
    return None, intervals


def _decisions(
    fitted: PosteriorFolder, methods: _Methods, inside: Mapping[str, Tally], classes: Sequence[str]
) -> DecisionResult | None:
    # Compare the guarantees derived from the validation data with the rates measured on the test data.
    limit, likelihood = alarm(fitted, None), fitted.posterior.likelihood
    discrete = likelihood.classification
    if limit is None or (discrete and (fitted.posterior.is_dense or not likelihood.mutually_exclusive)):
        return None
    tally = inside[methods.own]
    outlying = tally["ood score"] > limit
    intervals = []
    for level in methods.intervals:
        held, width = tally.mean(f"promised[{level}]"), tally.mean(f"promised width[{level}]")
        intervals.append(IntervalResult(level, held.value, held.error, width.value))
    shown = [name for name in (SINGLE, ENSEMBLE, LAPLACE, MIXTURE) if discrete and name in inside]
    return DecisionResult(
        false_alarm_rate=float(fitted.document["result"]["validation"]["false_alarm_rate"]),
        alarms=float(outlying.double().mean()),
        curves={name: risk_curve(inside[name]) for name in shown},
        answers=[_answers_at(fitted, rate, tally, outlying) for rate in ERROR_RATES] if discrete else [],
        sets=set_result(tally, COVERAGE, classes) if "held" in tally.columns else None,
        intervals=intervals,
    )


def _answers_at(fitted: PosteriorFolder, rate: float, tally: Tally, outlying: Tensor) -> AnswerResult:
    try:
        threshold = make_decisions(fitted, error_rate=rate).answer
    except OptionError as error:
        return AnswerResult(rate, CERTAINTY, None, why=error.message)
    assert threshold is not None
    answered = (tally["confidence"] > float(threshold)) & ~outlying
    wrong = float(1 - tally["correct"][answered].mean()) if bool(answered.any()) else None
    return AnswerResult(rate, CERTAINTY, float(threshold), float(answered.double().mean()), wrong)


def _seen_before(fitted: PosteriorFolder, test: str, val: str | None) -> list[str]:
    # Return warnings about test data that were also used for training or tuning.
    notes = []
    used = {val: "validation", fitted.job.val: "validation", fitted.job.train: "training"}
    for name, what in used.items():
        if name is not None and are_same(name, test):
            notes.append(
                f"The test data are also the {what} data, so the scores are too optimistic. Use held-out data."
            )
    return notes
