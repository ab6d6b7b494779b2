"""`molaplace evaluate`: compare MAP, temperature or noise scaling, the deep ensemble, LLLA and MoLA on the user's test data."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from torch import Tensor

from molaplace.cli.decisions import CERTAINTY, default_alarm, make_decisions, outlier_threshold
from molaplace.cli.folder import PosteriorFolder
from molaplace.data.dataset import Dataset, Loader, SkippedInputs
from molaplace.data.opening import are_same
from molaplace.decisions.intervals import PredictionIntervals
from molaplace.decisions.sets import PredictionSets
from molaplace.distributed import Team
from molaplace.errors import OptionError, warn
from molaplace.evaluation import Columns, Evaluation, PredictionColumns, SetInfo, baselines, collect, compare, set_info
from molaplace.evaluation.baselines import ENSEMBLE, LAPLACE, MIXTURE, SINGLE
from molaplace.evaluation.columns import LEVELS
from molaplace.evaluation.comparison import AnswerResult, DecisionResult
from molaplace.evaluation.evaluate import made_by
from molaplace.evaluation.results import interval_result, risk_curve, set_result
from molaplace.network import IGNORE_INDEX
from molaplace.posterior import MoLA
from molaplace.progress import Progress, no_progress
from molaplace.report.comparison_tables import evaluation_tables
from molaplace.report.tables import print_table
from molaplace.report.words import evaluation_findings
from molaplace.rules.held_out import POSITIONS_PER_INPUT, HeldOut
from molaplace.rules.label_checks import check_class_order
from molaplace.saving.bundle import SCORE

COVERAGE = 0.9
"""Coverage guaranteed for the prediction sets in the report."""

ERROR_RATES = (0.01, 0.02, 0.05)
"""Error rates guaranteed for the decisions in the report."""


def print_summary(evaluation: Evaluation, page: Path) -> None:
    """Print the findings and the main table; the page contains all results."""
    console = Console(highlight=False)
    for title, finding in evaluation_findings(evaluation).items():
        console.print(f"[bold]{escape(title)}:[/bold] {escape(finding)}", soft_wrap=True)
    print_table(console, replace(evaluation_tables(evaluation)[0], caption=""))
    where = f"Wrote [bold]{escape(str(page))}[/bold], with all tables, figures and numbers in the same folder."
    console.print(where, soft_wrap=True)


# --- the comparison --------------------------------------------------------------------------------------------------


def run_evaluate(
    fitted: PosteriorFolder,
    test: str,
    ood: Sequence[str] = (),
    *,
    val: str | None = None,
    strict: bool = False,
    progress: Progress = no_progress,
    team: Team | None = None,
) -> Evaluation:
    """Compare the methods. Each process in a team reads its share of every set, and all processes return the same numbers."""
    began = time.perf_counter()
    names = [test, *ood]
    posterior = fitted.posterior
    if len(set(names)) < len(names):
        raise OptionError(f"each data set can be given only once; got {', '.join(names)}. Remove the repeated name.")
    skipped = SkippedInputs()
    team = team or Team.single()

    def loader(source: Dataset, doing: str, step: int, *, labelled: bool) -> Loader:
        def on_share(share: float) -> None:
            progress(doing, (step + share) / (1 + len(names)))

        on_share(0.0)
        return Loader(source, skipped, strict, labelled, on_share, team)

    warnings = _repeated_data(fitted, test, val)
    for warning in warnings:
        warn(warning)
    # All sets are opened first, so that a wrong name is reported immediately.
    sources = {name: fitted.open_dataset(name, labelled=name == test, by_user=True) for name in names}
    tuned_on = val or fitted.job.val
    held_out = None
    if tuned_on is not None:
        source = fitted.open_dataset(tuned_on, labelled=True, by_user=val is not None)
        validation = loader(source, "tuning", 0, labelled=True)
        held_out = posterior.read(validation, f"validation data {source.name}", labelled=True, team=team)
    outlier_loader = None
    if fitted.job.outliers is not None:
        outlier_loader = loader(fitted.open_dataset(fitted.job.outliers, labelled=False), "tuning", 0, labelled=False)
    subject = MIXTURE if len(posterior.components) > 1 else LAPLACE
    methods = baselines(posterior, held_out, rule=fitted.job.make_rule(outlier_loader), team=team)
    methods[subject] = posterior
    guarantees = Guarantees(*_guarantees(fitted))
    head = posterior.components[0].head
    columns = {
        name: collect(
            methods,
            loader(source, Path(name).name, step, labelled=name == test),
            source.name,
            labelled=name == test,
            positions=POSITIONS_PER_INPUT,
            ignore_index=IGNORE_INDEX if head is None else head.ignore_index,
            guarantees={subject: guarantees.of},
            team=team,
        )
        for step, (name, source) in enumerate(sources.items(), 1)
    }
    on_test = columns[test]
    if posterior.likelihood.mutually_exclusive:
        single = on_test[SINGLE].data
        check_class_order(single["label"].long(), [single["predicted"].long()], f"test data {sources[test].name}")
    return compare(
        test,
        [_set_info(name, test, ood, by_method[subject]) for name, by_method in columns.items()],
        columns,
        methods,
        subject=subject,
        classes=fitted.output_names,
        notes=(*_notes_on_data(posterior, held_out), *warnings),
        left_out=skipped.together(team).left_out,
        decisions=_decisions(fitted, subject, guarantees, on_test),
        made=made_by(
            f"molaplace evaluate {fitted.folder}",
            time.perf_counter() - began,
            components=len(posterior.components),
            posterior=str(fitted.folder),
            validation=tuned_on,
            structure=posterior.structure,
            rule=fitted.job.rule,
        ),
    )


def _set_info(name: str, test: str, ood: Sequence[str], columns: PredictionColumns) -> SetInfo:
    last = Path(name).name
    unique = [Path(other).name for other in ood].count(last) == 1
    return set_info(name, last if last and unique else name, "test" if name == test else "outlier", columns)


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
        scaled = ENSEMBLE + ("-T" if classification else "-N")
        notes.append(f"{ENSEMBLE}, {scaled} and {MIXTURE} use these weights: {listed}.")
    return notes


def _repeated_data(fitted: PosteriorFolder, test: str, val: str | None) -> list[str]:
    # Return warnings about test data that were also used for training or tuning.
    warnings = []
    used = {val: "validation", fitted.job.val: "validation", fitted.job.train: "training"}
    for name, role in used.items():
        if name is not None and are_same(name, test):
            warnings.append(
                f"The test data are also the {role} data, so the scores are too optimistic. Use held-out data."
            )
    return warnings


# --- decisions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Guarantees:
    """Prediction sets or intervals, calibrated on the validation data in the posterior's folder."""

    sets: PredictionSets | None
    """Conformal sets for classification; None if there are too few validation data."""
    intervals: Mapping[float, PredictionIntervals]
    """Calibrated intervals for regression, keyed by each coverage for which there are enough validation data."""

    def of(self, prediction: Any) -> dict[str, Any]:
        """Return the sets and intervals of a batch."""
        return {
            "sets": None if self.sets is None else self.sets(prediction),
            "intervals": {level: ends(prediction) for level, ends in self.intervals.items()},
        }


def _guarantees(fitted: PosteriorFolder) -> tuple[PredictionSets | None, dict[float, PredictionIntervals]]:
    intervals: dict[float, PredictionIntervals] = {}
    with suppress(OptionError):
        if fitted.posterior.likelihood.classification:
            return make_decisions(fitted, coverage=COVERAGE).sets, intervals
        for level in LEVELS:  # higher levels need more data
            calibrated = make_decisions(fitted, coverage=level).intervals
            assert calibrated is not None
            intervals[level] = calibrated
    return None, intervals


def _decisions(
    fitted: PosteriorFolder, subject: str, guarantees: Guarantees, on_test: Mapping[str, PredictionColumns]
) -> DecisionResult | None:
    # Compare the guarantees derived from the validation data with the rates measured on the test data.
    limit = outlier_threshold(fitted, None)
    likelihood = fitted.posterior.likelihood
    if limit is None or (
        likelihood.classification and (fitted.posterior.is_dense or not likelihood.mutually_exclusive)
    ):
        return None
    data = on_test[subject].data
    outlying = on_test[subject].scores["ood score"] > limit
    curves: dict[str, list[list[float]]] = {}
    answers: list[AnswerResult] = []
    if likelihood.classification:
        unscaled = [method for method in (SINGLE, ENSEMBLE, LAPLACE, MIXTURE) if method in on_test]
        curves = {method: risk_curve(on_test[method].data) for method in unscaled}
        answers = [_answers_at(fitted, rate, data, outlying) for rate in ERROR_RATES]
    return DecisionResult(
        false_alarm_rate=default_alarm(fitted.columns[SCORE])[1],
        alarms=float(outlying.double().mean()),
        curves=curves,
        answers=answers,
        sets=set_result(data, COVERAGE, fitted.output_names) if "set size" in data else None,
        intervals=[interval_result(data, level) for level in guarantees.intervals],
    )


def _answers_at(fitted: PosteriorFolder, rate: float, data: Columns, outlying: Tensor) -> AnswerResult:
    try:
        threshold = make_decisions(fitted, error_rate=rate).answers
    except OptionError as error:
        return AnswerResult(rate, CERTAINTY, None, why=error.message)
    assert threshold is not None
    answered = (data["confidence"] > float(threshold)) & ~outlying
    wrong = float(1 - data["correct"][answered].mean()) if bool(answered.any()) else None
    return AnswerResult(rate, CERTAINTY, float(threshold), float(answered.double().mean()), wrong)
