"""Run a suite: activations once, then every method of every run; each record is written as soon as it is complete."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

import mola
from mola.compare.activations_file import Stored
from mola.compare.methods import Fitted
from mola.compare.record import Record
from mola.compare.results import METRICS, examples_of, labelled_result, outlier_result
from mola.compare.store import SUITE, Store
from mola.compare.tally import Answer, Tally, tally_set
from mola.distributed import Team
from mola.errors import MolaError, OptionError, StorageError, warn
from mola.lab.activations import Activations, Network, Progress
from mola.lab.comparisons import LONG, SuiteMethod
from mola.lab.context import Context
from mola.lab.detectors import feature_scores
from mola.lab.measures import Answers, Measure
from mola.lab.plan import Plan, check_results_dir, describe
from mola.lab.streamed_sums import StreamedSums
from mola.lab.suite import Source

PROTOCOL = 1
"""Increased by hand when fitting, links, tuning or metrics change such that older records would differ."""

ACTIVATIONS_SHARE = 0.8
"""Share of the time that activations take, as measured on images."""


@dataclass(frozen=True)
class _Job:
    # A method in a run. `record` and `missing` (names of measures) are what the results folder holds.
    group: str
    run: int
    method: SuiteMethod
    record: Record | None = None
    missing: tuple[str, ...] = ()

    @property
    def done(self) -> bool:
        return self.record is not None and not self.missing


def run_suite(
    plan: Plan,
    activations: Activations,
    store: Store,
    progress: Progress,
    *,
    fresh: bool = False,
    team: Team | None = None,
) -> list[Record]:
    """Run every method that has no record yet, and return all records.

    Args:
        plan: the plan.
        activations: the cache of activations.
        store: the results folder.
        progress: called with the current step and the share of the work that is done.
        fresh: whether to replace all records.
        team: the processes that share the work; each record is made by one process, so that its numbers do not depend on
            their number. None is this process alone.

    Raises:
        OptionError: some methods could not be run; the records of the others are kept.
    """
    team = team or Team.single()
    _check_same_data(plan, team)
    jobs: list[_Job] = []
    if team.first:
        before = check_results_dir(plan, store, fresh=fresh)
        store.write_document(plan.suite.name, SUITE, describe(plan, before))
        jobs = [
            _with_record(plan, store, _Job(group, run, method), fresh=fresh)
            for group in plan.groups
            for run in range(plan.runs_of(group))
            for method in plan.methods(group)
        ]
        _warn_of_missing_outliers(plan, jobs)
    jobs = team.share(jobs)
    waiting = [job for job in jobs if not job.done]
    members = [network for job in waiting for network in plan.members(job.group, job.run)]
    needed = plan.computed({(job.run, name) for job in waiting for name in _sets(plan, job)})
    unique = list({network.checksum: network for network in members}.values())
    activations.compute(unique, needed, lambda doing, done: progress(doing, ACTIVATIONS_SHARE * done), team)
    sums = StreamedSums(activations.directory / "sums", activations.device) if plan.stream else None
    if sums is not None:
        _compute_sums(plan, waiting, sums, progress, team)

    @cache
    def read(networks: tuple[Network, ...], run: int, name: str) -> Stored:
        return activations.read(networks, plan.sources_of(run)[name])

    training = [plan.training_context(activations, run) for run in range(plan.runs)]
    refused: list[str] = []
    for index, job in enumerate(jobs):
        # Methods that train share their networks within a run: one process takes all of them.
        if (job.run if job.group in LONG else index) % team.size != team.rank:
            continue
        doing = f"run {job.run + 1}: {job.method.name}" + (" (there already)" if job.done else "")
        progress(doing, ACTIVATIONS_SHARE + (1 - ACTIVATIONS_SHARE) * index / len(jobs))
        if job.done:
            continue
        networks = tuple(plan.members(job.group, job.run))
        source = plan.sources_of(job.run)["train"]
        context = Context(
            partial(read, networks, job.run),
            plan.suite.threshold,
            feature_scores,
            networks,
            job.run,
            training[job.run],
            sums=None if sums is None else partial(sums.read, networks, source),
        )
        try:
            store.write(_run(plan, job, context))
        except StorageError:
            raise  # a damaged file concerns every method
        except MolaError as error:
            refused.append(f"{job.method.name}, run {job.run + 1}: {error}")
    refusals = [one for some in team.collect(refused) for one in some]
    progress("records are ready", 1.0)
    if refusals:
        raise OptionError("some methods could not be run; the other records are kept.\n  " + "\n  ".join(refusals))
    found = (store.read(plan.suite.name, job.method.name, job.run) for job in jobs)
    return [record for record in found if record is not None]


def _check_same_data(plan: Plan, team: Team) -> None:
    # Refuse processes that read different files, before hours of passes are stored under different checksums.
    seen = {
        f"{source.title} ({name}, run {run + 1})": source.checksum
        for run in range(plan.runs if team.size > 1 else 0)
        for name, source in plan.sources_of(run).items()
    }
    documents = team.collect(seen)
    for rank, theirs in enumerate(documents):
        other = next((title for title, checksum in documents[0].items() if theirs.get(title) != checksum), None)
        if other is not None:
            raise OptionError(
                f"rank {rank} does not see the same data as rank 0: {other} differs in files, sizes or dates. Let all nodes read one "
                f"folder, or copy it with its dates (cp -p, rsync -t)."
            )


def _identity(plan: Plan, job: _Job) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    # Settings, checksums of networks and checksums of data: a record counts if it agrees in all.
    used = plan.members(job.group, job.run)[: job.method.components]
    settings = {"components": len(used), "threshold": plan.suite.threshold, **job.method.settings()}
    settings |= {"network": plan.network, "protocol": PROTOCOL, "metrics": list(METRICS)}
    data = {name: source.checksum for name, source in plan.sources_of(job.run).items()}
    return settings, [network.checksum for network in used], data


def _with_record(plan: Plan, store: Store, job: _Job, *, fresh: bool) -> _Job:
    if fresh:
        return job
    try:
        record = store.read(plan.suite.name, job.method.name, job.run)
    except StorageError as error:
        warn(f"{error} It is made again.")
        return job
    if record is None or not _counts(record, _identity(plan, job), plan.sources_of(job.run)):
        return job
    # Methods that train are not trained again for a new measure.
    complete = record.group != "main" or job.group in LONG
    missing = () if complete else tuple(one.name for one in plan.measures if one.name not in record.measures)
    return replace(job, record=record, missing=missing)


def _counts(
    record: Record, identity: tuple[dict[str, Any], list[str], dict[str, str]], sources: Mapping[str, Source]
) -> bool:
    # Whether a record is of the same method, networks and data; sets of outliers may be missing or additional.
    settings, networks, data = identity
    outliers = {*record.outliers, *(name for name, source in sources.items() if source.role == "outlier")}
    return (record.settings, record.networks) == (settings, networks) and all(
        record.data.get(name) == data.get(name) or (name in outliers and (name not in record.data or name not in data))
        for name in {*record.data, *data}
    )


def _warn_of_missing_outliers(plan: Plan, jobs: Sequence[_Job]) -> None:
    lacking = [
        source.title
        for job in jobs
        if job.record is not None
        for source in plan.sources_of(job.run).values()
        if source.role == "outlier" and source.name not in job.record.outliers
    ]
    if lacking:
        warn(
            f"some records were made without {', '.join(dict.fromkeys(lacking))}: reports leave these cells empty; --fresh makes all "
            f"records again."
        )


def _sets(plan: Plan, job: _Job) -> list[str]:
    # All sets; for a few measures, those that the measures need.
    sources = plan.sources_of(job.run)
    if job.record is None:
        return list(sources)
    needed = {name for measure in plan.measures if measure.name in job.missing for name in measure.sets}
    return [name for name, source in sources.items() if source.role in ("train", "validation") or name in needed]


def _compute_sums(plan: Plan, jobs: Sequence[_Job], sums: StreamedSums, progress: Progress, team: Team) -> None:
    # One pass over the training data for each structure and run.
    needed = {
        (job.run, tuple(plan.members(job.group, job.run)), structure): None
        for job in jobs
        if (structure := job.method.settings().get("structure")) is not None
    }
    for run, networks, structure in needed:
        sums.compute(networks, plan.sources_of(run)["train"], structure, progress, team)


def _run(plan: Plan, job: _Job, context: Context) -> Record:
    fitted = job.method.fit(context)
    if job.record is not None:
        measured = {one.name: one(_answers(fitted)) for one in plan.measures if one.name in job.missing}
        return replace(job.record, measures=job.record.measures | measured)
    seconds = {"fit": fitted.seconds, "predict": 0.0}
    labelled, outliers, examples = {}, {}, {}
    detail = job.method.group == "main"  # figures show nothing else
    sources = plan.sources_of(context.run)
    scored = any(source.role == "outlier" for source in sources.values())
    inside = _tally(fitted, sources["test"], scored, seconds)
    for source in sources.values():
        if source.role in ("train", "validation"):
            continue
        tally = inside if source.role == "test" else _tally(fitted, source, source.role == "outlier", seconds)
        if source.role == "outlier":
            outliers[source.name] = outlier_result(inside, tally, detail=detail)
        else:
            types = source.types if detail else ()
            labelled[source.name] = labelled_result(tally, source.level, detail=detail, types=types)
        if detail:
            examples[source.name] = examples_of(tally)
    settings, networks, data = _identity(plan, job)
    measures: Sequence[Measure] = plan.measures if detail else ()
    return Record(
        suite=plan.suite.name,
        method=job.method.name,
        group=job.method.group,
        run=context.run,
        settings=settings,
        networks=networks,
        data=data,
        chosen=_finite(fitted.chosen),
        seconds=seconds,
        labelled=labelled,
        outliers=outliers,
        examples=examples,
        measures={measure.name: measure(_answers(fitted)) for measure in measures},
        environment=environment(),
    )


def _tally(fitted: Fitted, source: Source, scores: bool, seconds: dict[str, float]) -> Tally:
    # The time of predictions is added to `seconds`.

    def answers() -> Iterator[tuple[dict[str, Answer], Tensor | None]]:
        for batch, labels in fitted.batches(source.name):
            start = time.perf_counter()
            answer = fitted.answer(batch, scores)
            seconds["predict"] += time.perf_counter() - start
            yield {"": answer}, None if source.role == "outlier" else labels

    return tally_set(answers(), what=source.title)[""]


def _answers(fitted: Fitted) -> Answers:
    def answers(name: str, *, scores: bool = True) -> Iterator[tuple[Answer, Tensor]]:
        return ((fitted.answer(batch, scores), labels) for batch, labels in fitted.batches(name))

    return answers


def _finite(value: Any) -> Any:
    # JSON has no infinity: values that are not finite become null.
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def environment() -> dict[str, Any]:
    """Return the versions that numbers are made with."""
    return {
        "mola": mola.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
