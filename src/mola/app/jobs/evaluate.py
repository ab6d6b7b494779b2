"""`mola evaluate`: MAP, temperature scaling, deep ensemble, LLLA and MoLA side by side, on a user's own test data.

All methods but LLLA follow from the logits that predicting with the posterior gives anyway, so the data are read once and the
networks run once; LLLA runs the first network once more. The validation data are read once, too: temperatures and LLLA are tuned
on what the networks made of them. What differs where outputs are numbers is in `mola.app.jobs.evaluate_numbers`.
"""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mola import __version__
from mola.app.jobs.decisions import CERTAINTY, kept_calibration, make_decisions
from mola.app.jobs.evaluate_numbers import (
    ENSEMBLE_N,
    NumbersContest,
    interval_decisions,
    promised_intervals,
    scaled_noise,
)
from mola.app.jobs.fit import make_rule
from mola.app.jobs.folder import PosteriorFolder
from mola.app.jobs.job import Progress
from mola.app.jobs.numbers import untuned_noise
from mola.app.jobs.positions import COMPARED, DrawnRows, draw_rows, layout_of
from mola.app.jobs.rows import Account, Loader
from mola.app.jobs.sets import UserSet, divided, overlap
from mola.baselines.temperature import as_classes, fit_temperature
from mola.compare import Answer, Tally, TallyRows, tally_set
from mola.compare.evaluation import short
from mola.compare.record import AnswerResult, Comparison, DecisionResult, Record, SetInfo
from mola.compare.regression import differences, regression_leads, regression_result
from mola.compare.results import (
    labelled_leads,
    labelled_result,
    outlier_leads,
    outlier_result,
    risk_curve,
    set_result,
)
from mola.decisions.sets import PredictionSets, prediction_sets
from mola.distributed import Team
from mola.errors import DataError, MolaWarning, OptionError
from mola.likelihoods import CATEGORICAL, DiscreteLikelihood, Gaussian
from mola.posterior import MoLA
from mola.prediction import Prediction
from mola.tuning.class_order import check_class_order
from mola.tuning.held_out import HeldOut

ERROR_RATES, COVERAGE = (0.01, 0.02, 0.05), 0.9
"""What the report shows of decisions."""

SINGLE, SINGLE_T, ENSEMBLE, ENSEMBLE_T, LAPLACE, MIXTURE = "MAP", "MAP-T", "DE", "DE-T", "LLLA", "MoLA"


@dataclass(frozen=True)
class _Contest:
    posterior: MoLA
    single: MoLA
    """The first component alone."""
    temperatures: dict[str, float]
    sets: PredictionSets | None = None
    """Of the posterior, where its folder has what they need."""

    def chosen(self, method: str) -> dict[str, Any]:
        """What was tuned of a method."""
        if method in self.temperatures:
            return {"temperature": self.temperatures[method]}
        own = {LAPLACE: self.single, MIXTURE: self.posterior}.get(method)
        if own is None:
            return {}
        scaled = {} if own.temperature == 1 else {"temperature": own.temperature}
        scaled |= {} if own.pooling == 1 else {"pooling": own.pooling}
        scaled |= {} if own.distance_exponent == 0 else {"distance_exponent": own.distance_exponent}
        return {"prior_precision": list(own.prior_precision), **scaled}

    def ask(self, batch: Any, labels: Tensor | None, start: int) -> tuple[dict[str, TallyRows], Tensor | None, int]:
        """What every method says of a batch; the plain ensemble has the posterior's weights.

        Args:
            batch: as a loader yields it.
            labels: its labels, where there are any.
            start: how many inputs came before.

        Returns:
            Answers by method, the labels of their rows, and the number of inputs.
        """
        (whole,) = self.posterior.predict_batches([batch])
        (one,) = (whole,) if self.single is self.posterior else self.single.predict_batches([batch])
        mine, other, inputs = _Row.of(whole), _Row.of(one), None
        if self.posterior.is_dense:
            layout = layout_of(whole, whole.probs)
            outputs = whole.probs.shape[whole.axis]
            given = None if labels is None else layout.labels(labels, outputs, "the labels")
            ignored = self.posterior.components[0].head.ignore_index  # type: ignore[union-attr]
            drawn = draw_rows(layout, given, ignored, start)
            mine, other, inputs = mine.at(drawn), other.at(drawn), drawn.inputs
            if labels is not None:
                labels = drawn.of_outputs(labels) if labels.dim() == len(layout.sizes) + 2 else drawn.of_map(labels)
                labels = self.posterior.likelihood.check_labels(labels, mine.probs, "the labels")
            if not len(inputs):
                return {}, None, len(whole)
        return self._answers(mine, other, whole, inputs), labels, len(whole)

    def _answers(self, mine: _Row, one: _Row, whole: Prediction, inputs: Tensor | None) -> dict[str, TallyRows]:
        logits, weights, meaning = mine.logits, self.posterior.weights, self.posterior.likelihood
        assert isinstance(meaning, DiscreteLikelihood)
        answers: dict[str, TallyRows] = {SINGLE: _mixed(logits[:1], None, meaning, inputs)}
        if SINGLE_T in self.temperatures:
            answers[SINGLE_T] = _mixed(logits[:1] / self.temperatures[SINGLE_T], None, meaning, inputs)
        sets = None if self.sets is None else self.sets(whole).to(whole.probs.device)
        if len(logits) == 1:
            own = Answer(mine.probs, logits, None, mine.score, sets, likelihood=meaning, inputs=inputs)
            return {**answers, LAPLACE: own}
        answers[ENSEMBLE] = _mixed(logits, weights, meaning, inputs)
        if ENSEMBLE_T in self.temperatures:
            answers[ENSEMBLE_T] = _mixed(logits / self.temperatures[ENSEMBLE_T], weights, meaning, inputs)
        answers[LAPLACE] = Answer(one.probs, one.logits, None, one.score, likelihood=meaning, inputs=inputs)
        own = Answer(mine.probs, logits, weights, mine.score, sets, likelihood=meaning, inputs=inputs)
        return {**answers, MIXTURE: own}


@dataclass(frozen=True)
class _Row:
    probs: Tensor
    logits: Tensor
    score: Tensor

    @staticmethod
    def of(said: Prediction) -> _Row:
        """All of it."""
        assert said.logit_mean is not None  # a mixture of Laplace approximations has logits
        return _Row(said.probs, said.logit_mean, said.ood_score)

    def at(self, drawn: DrawnRows) -> _Row:
        """At some positions alone."""
        return _Row(drawn.of_outputs(self.probs), drawn.of_outputs(self.logits), drawn.of_map(self.score))


def _mixed(
    logits: Tensor, weights: Tensor | None, likelihood: DiscreteLikelihood = CATEGORICAL, inputs: Tensor | None = None
) -> Answer:
    # Networks without a posterior, by their logits (K, n, C); without weights, one network.
    shares = [1.0] if weights is None else weights.tolist()
    members = [share * likelihood.probabilities(one) for share, one in zip(shares, logits, strict=True)]
    return Answer(torch.stack(members).sum(0), logits, weights, likelihood=likelihood, inputs=inputs)


def run_evaluate(
    fitted: PosteriorFolder,
    test: str,
    outliers: Sequence[str] = (),
    progress: Progress = lambda doing, done: None,
    *,
    val: str | None = None,
    strict: bool = False,
    directory: str | None = None,
    team: Team | None = None,
) -> Comparison:
    """Compare the methods.

    Args:
        fitted: an opened posterior.
        test: labelled data, as the user names them.
        outliers: data that belong to no class.
        progress: told what is being done, and which share of the work is done.
        val: labelled data to tune temperatures and LLLA on; None takes those that the posterior was tuned on.
        strict: whether an input that cannot be used is an error.
        directory: that holds the built-in sets.
        team: the processes that do it together, each on its own part of every set. None is this one alone.

    Returns:
        The numbers, the same for every process.
    """
    began = time.perf_counter()
    if len({test, *outliers}) <= len(outliers):
        raise OptionError(f"each set can be named once, got {', '.join([test, *outliers])}.")
    account, together = Account(), Team.single() if team is None else team
    steps = 2 + len(outliers)

    def loader(source: UserSet, doing: str, step: int, *, labelled: bool) -> Loader:
        progress(doing, step / steps)

        def tell(share: float) -> None:
            progress(doing, (step + share) / steps)

        return Loader(divided(source, together), account, strict, labelled, tell, whole=together.size == 1)

    # All opened first: a name that is wrong is told before any work.
    tuned_on = val or fitted.job.val
    sources = {
        name: fitted.open_set(name, labelled=index == 0, directory=directory, said=True)
        for index, name in enumerate([test, *outliers])
    }
    # A folder that was moved may name data that stayed behind.
    absent = None if val else "name the validation data with --val DATA."
    held = None
    if tuned_on is not None:
        held = fitted.open_set(tuned_on, labelled=True, directory=directory, said=val is not None, absent=absent)
    exposed = None if fitted.job.outliers is None else fitted.open_set(fitted.job.outliers, labelled=False)
    contest, notes = _contest(
        fitted,
        None if held is None else loader(held, "tuning", 0, labelled=True),
        None if exposed is None else loader(exposed, "tuning", 0, labelled=False),
        together,
    )
    tallies: dict[str, dict[str, Tally]] = {}
    for step, (name, source) in enumerate(sources.items(), 1):
        tallies[name] = _read(contest, loader(source, Path(name).name, step, labelled=name == test), together)
    account = account.together(together)
    progress("done", 1.0)
    inside = tallies[test]
    numbers, own = isinstance(contest, NumbersContest), list(inside)[-1]
    classes = _names(fitted)
    seconds = time.perf_counter() - began
    return Comparison(
        title=test,
        sets={
            name: SetInfo(
                name,
                short(name, tuple(outliers)),
                "test" if name == test else "outlier",
                (first := next(iter(found.values()))).count,
                parts="" if first.groups is None else "position" if fitted.posterior.is_dense else "label",
                inputs=None if first.groups is None else first.inputs,
            )
            for name, found in tallies.items()
        },
        records=tuple(
            Record(
                suite="evaluation",
                method=method,
                group="main",
                run=0,
                settings={},
                networks=[],
                data={},
                chosen=contest.chosen(method),
                seconds={},
                labelled={
                    test: regression_result(tally, classes)
                    if numbers
                    else labelled_result(tally, errors=True, classes=classes)
                },
                outliers={name: outlier_result(tally, tallies[name][method], errors=True) for name in outliers},
            )
            for method, tally in inside.items()
        ),
        classes=classes,
        leads={test: regression_leads(inside) if numbers else labelled_leads(inside)}
        | {name: outlier_leads(inside, tallies[name]) for name in outliers},
        notes=(*notes, *_warnings(fitted, test, tuned_on)),
        left_out=account.left_out,
        noted=account.noted,
        decisions=interval_decisions(fitted, inside[own], tuple(contest.intervals))
        if isinstance(contest, NumbersContest)
        else _decided(fitted, inside, classes),
        regression=numbers,
        differences=differences(inside, own) if numbers else {},
        made={
            "components": len(fitted.posterior.components),
            "posterior": str(fitted.folder),
            "validation": tuned_on,
            "structure": fitted.posterior.structure,
            "rule": fitted.job.rule,
            "seconds": seconds,
            "versions": {"mola": __version__, "torch": torch.__version__, "python": platform.python_version()},
        },
    )


def _names(fitted: PosteriorFolder) -> tuple[str, ...]:
    count, likelihood = fitted.outputs, fitted.posterior.likelihood
    if isinstance(likelihood, Gaussian):
        count = likelihood.num_uncertain(count)
    return tuple((fitted.classes or tuple(str(index) for index in range(count)))[:count])


def _contest(
    fitted: PosteriorFolder, val: Loader | None, exposed: Loader | None, team: Team
) -> tuple[_Contest | NumbersContest, list[str]]:
    posterior, notes = fitted.posterior, []
    held: HeldOut | None = None
    if val is None:
        lacking = "temperatures" if posterior.likelihood.discrete else "scaled noise"
        notes.append(f"There are no validation data, so no {lacking}: name some with --val.")
    else:
        held = posterior.read(val, f"validation data {val.source.name}", labelled=True, team=team)
    if posterior.is_dense:
        notes.append(
            f"Every number is over positions, at most {COMPARED} of each input, drawn at random. Standard errors count inputs, whose "
            f"positions are alike."
        )
    elif posterior.likelihood.discrete and not posterior.likelihood.mutually_exclusive:
        notes.append(
            "Every number is over labels: each known label of an input counts as one. Standard errors count inputs, whose labels may "
            "depend on each other."
        )
    shares = posterior.weights.tolist()
    if max(shares) - min(shares) > 1e-9:
        listed = ", ".join(f"{share:.3f}" for share in shares)
        others = f"{ENSEMBLE_T} and {MIXTURE}" if posterior.likelihood.discrete else f"{ENSEMBLE_N} and {MIXTURE}"
        notes.append(f"The networks have the same weights in {ENSEMBLE}, {others}: {listed}.")
    single = posterior
    if len(posterior.components) > 1:
        single = type(posterior)(posterior.components[:1], posterior.link)
        rule = make_rule(fitted.job, exposed)
        if rule is not None:
            with warnings.catch_warnings():
                # What tuning warns of is kept in its notes, which the report shows.
                warnings.simplefilter("ignore", MolaWarning)
                first = held and replace(held, phi=held.phi[:1], outputs=held.outputs[:1])
                single = single.tune(
                    None if fitted.job.rule == "evidence" else first, rule=rule, progress=False, team=team
                )
    what = "logits are cooled" if posterior.likelihood.discrete else "standard deviations grow"
    for name, one in ((LAPLACE, single), (MIXTURE, posterior)):
        if one is single and name != LAPLACE:
            continue
        if one.distance_exponent > 0:
            notes.append(f"{name}: {what} by distance, with exponent {one.distance_exponent:.4g}.")
        if one.tuning is not None:
            notes += [f"{name}: {note}" for note in one.tuning.notes]
    if not posterior.likelihood.discrete:
        factors: dict[str, Tensor] = {}
        if held is not None:
            factors = scaled_noise(posterior, held, team)
        promised = promised_intervals(fitted)
        return NumbersContest(posterior, single, untuned_noise(posterior), factors, promised), notes
    temperatures, told = ({}, []) if held is None else _temperatures(posterior, held, team)
    return _Contest(posterior, single, temperatures, _usual_sets(fitted)), [*notes, *told]


def _temperatures(posterior: MoLA, held: HeldOut, team: Team) -> tuple[dict[str, float], list[str]]:
    temperatures: dict[str, float] = {}
    notes: list[str] = []
    assert isinstance(posterior.likelihood, DiscreteLikelihood)
    held.check_labels()
    logits, labels = _logits(held, team)
    if not posterior.likelihood.mutually_exclusive:
        logits, labels = as_classes(logits, labels, posterior.likelihood)
    wanted = {SINGLE_T: logits[:1]} | ({ENSEMBLE_T: logits} if len(logits) > 1 else {})
    for name, some in wanted.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", MolaWarning)
            temperatures[name] = fit_temperature(some, labels, posterior.weights if len(some) > 1 else None)
        notes += [f"{name}: {one.message}" for one in caught]
    return temperatures, notes


def _logits(held: HeldOut, team: Team) -> tuple[Tensor, Tensor]:
    # Logits (K, n, C) and labels (n,) of the data of all processes.
    rows = team.gather(torch.stack(list(held.outputs), dim=1) if len(held) else None)
    return rows.transpose(0, 1), team.gather(held.labels if len(held) else None)


def _read(contest: _Contest | NumbersContest, loader: Loader, team: Team) -> dict[str, Tally]:
    def answers() -> Iterator[tuple[dict[str, TallyRows], Tensor | None]]:
        seen = 0
        for batch in loader:
            labels = None
            if loader.labelled:
                labels = batch["labels"] if isinstance(batch, dict) else batch[1]
            said, own, count = contest.ask(batch, labels, seen)
            seen += count
            yield said, own

    tallies = tally_set(answers(), team, loader.source.name)
    if loader.labelled and contest.posterior.likelihood.mutually_exclusive:
        assert isinstance(contest, _Contest)
        single = tallies[SINGLE]
        check_class_order(single["label"].long(), [single["predicted"].long()], f"test data {loader.source.name}")
    return tallies


def _usual_sets(fitted: PosteriorFolder) -> PredictionSets | None:
    if not fitted.posterior.likelihood.mutually_exclusive:
        return None
    try:
        known, _ = kept_calibration(fitted, "decisions")
        return prediction_sets(known, None, COVERAGE)
    except (OptionError, DataError):
        return None


def _decided(fitted: PosteriorFolder, inside: Mapping[str, Tally], classes: Sequence[str]) -> DecisionResult | None:
    try:
        kept_calibration(fitted, "decisions")
    except OptionError:
        return None
    names = list(inside)
    tally = inside[names[-1]]
    alarm = make_decisions(fitted).alarm
    assert alarm is not None  # there were validation data
    rings = tally["ood score"] > alarm
    answers = []
    for rate in ERROR_RATES:
        try:
            threshold = make_decisions(fitted, error_rate=rate).answer
        except OptionError as error:
            answers.append(AnswerResult(rate, CERTAINTY, None, why=str(error).removeprefix("--error-rate: ")))
            continue
        assert threshold is not None
        side = (tally["confidence"] > float(threshold)) & ~rings
        wrong = float(1 - tally["correct"][side].mean()) if bool(side.any()) else None
        answers.append(AnswerResult(rate, CERTAINTY, float(threshold), float(side.double().mean()), wrong))
    validation = fitted.document["result"]["validation"]
    shown = [name for name in names if name in (SINGLE, ENSEMBLE, LAPLACE, MIXTURE)]
    return DecisionResult(
        false_alarm_rate=float(validation["false_alarm_rate"]),
        alarms=float(rings.double().mean()),
        curves={name: risk_curve(inside[name]) for name in shown},
        answers=answers,
        sets=set_result(tally, COVERAGE, classes) if "held" in tally.columns else None,
    )


def _warnings(fitted: PosteriorFolder, test: str, tuned_on: str | None) -> list[str]:
    notes = []
    for what, name in (("training", fitted.job.train), ("validation", tuned_on)):
        if name is not None and _same(name, test):
            notes.append(f"The test data are the {what} data: the scores flatter.")
        elif name is not None and overlap(name, test):
            base = test.partition(":")[0]
            notes.append(f"{name}, the {what} data, and {test} share images: {base}:val and {base}:report do not.")
    return notes


def _same(one: str, other: str) -> bool:
    places = [Path(name).expanduser() for name in (one, other)]
    return one == other or (all(place.exists() for place in places) and places[0].samefile(places[1]))
