"""Running a suite: compute the activations once, then apply every method in every run.

Each record is written as soon as it is complete.
"""

from __future__ import annotations

import base64
import math
import platform
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import molaplace as mola
from molaplace.demo import LabelledData
from molaplace.distributed import Team
from molaplace.errors import MolaError, OptionError, StorageError, warn
from molaplace.evaluation import (
    METRICS,
    labelled_result,
    outlier_result,
)
from molaplace.progress import Progress, part
from molaplace_lab.activations import ActivationCache, Network
from molaplace_lab.activations_file import StoredActivations
from molaplace_lab.checksums import checksum
from molaplace_lab.comparisons import LONG, methods_of
from molaplace_lab.context import Context
from molaplace_lab.examples import NUM_EXAMPLES, examples_of
from molaplace_lab.measures import BatchPrediction, Measure, columns_of
from molaplace_lab.methods import Method
from molaplace_lab.records import SUITE, Record, Store
from molaplace_lab.suite import Budget, DataOptions, Source, Suite, TrainingData

PROTOCOL = 1
"""Version of the protocol. Increase it after any change to fitting, links, tuning or metrics that alters the results."""

ACTIVATIONS_SHARE = 0.8
"""Share of the total time that is spent on activations, as measured on image suites."""


@dataclass(frozen=True)
class Plan:
    """The networks, sets, runs and methods of a benchmark, which are checked before the computation starts."""

    suite: Suite
    network: str
    """Name of the architecture."""
    networks: Sequence[Network]
    folds: Sequence[dict[str, Source]]
    """The sets, keyed by name: one mapping for all runs, or one for each run of a cross-fit."""
    runs: int
    components: int
    groups: tuple[str, ...] = ("main",)
    options: DataOptions = field(default_factory=DataOptions)
    budget: Budget | None = None
    """Budget for methods that train networks; the suite's budget if None."""
    measures: Mapping[str, Measure] = field(default_factory=dict)
    """Additional measures, under the keys used in the records, that are computed for every method in the main comparison."""

    def __post_init__(self) -> None:
        first: dict[str, Network] = {}
        for network in self.networks:
            if (other := first.setdefault(network.checksum, network)) is not network:
                raise OptionError(f"{other.label} and {network.label} are the same network. Pass different networks.")
        if self.crossed and self.runs > len(self.folds):
            raise OptionError(
                f"a cross-fit with {len(self.folds)} folds has at most {len(self.folds)} runs; got --runs {self.runs}."
            )
        several = self.components if self.crossed else self.runs * self.components
        needed = max(several, self.suite.sweep if "components" in self.groups else 0, 1)
        if self.runs < 1 or self.components < 1 or len(self.networks) < needed:
            raise OptionError(
                f"--runs {self.runs} and --components {self.components} in {', '.join(self.groups)} require {needed} networks, "
                f"but there are {len(self.networks)}. Train more networks "
                f"(python -m molaplace_lab train {self.suite.name} --networks {needed}, or --train), or choose fewer runs or components."
            )

    @property
    def crossed(self) -> bool:
        """True for a cross-fit."""
        return len(self.folds) > 1

    @property
    def sources(self) -> dict[str, Source]:
        """The sets of the first run."""
        return self.folds[0]

    def sources_of(self, run: int) -> dict[str, Source]:
        """Return the sets of a run."""
        return self.folds[run if self.crossed else 0]

    def members(self, group: str, run: int) -> tuple[Network, ...]:
        """Return the networks of a run.

        Different runs use different networks, except in a cross-fit, whose runs differ only in their data.
        """
        size = self.suite.sweep if group == "components" else self.components
        first = 0 if self.crossed else run * size
        return tuple(self.networks[first : first + size])

    def methods(self, group: str) -> list[Method]:
        """Return the methods of a group."""
        return methods_of(group, self.budget or self.suite.budget, self.suite.sweep)

    def read_training(self, device: str) -> TrainingData:
        """Load the training data of the suite's networks onto a device."""
        if self.suite.training_data is None:
            raise OptionError(f"the {self.suite.name} suite has no data for training SWAG or MIMO.")
        training = self.suite.training_data(self.options, self.suite.recipe)
        return TrainingData(
            LabelledData(training.data.inputs.to(device), training.data.labels.to(device)), training.prepare
        )

    def experiment(self) -> dict[str, Any]:
        """Return the settings that all records in a folder must share, so that results of different experiments are not averaged."""
        every = {name: [sources[name].checksum for sources in self.folds] for name in self.sources}
        return {
            "network": self.network,
            "components": self.components,
            "threshold": self.suite.threshold,
            "options": self.options.describe(),
            "data": {name: sums[0] if len(set(sums)) == 1 else checksum(sums) for name, sums in every.items()},
        }


# --- the results folder


def _check_results_dir(plan: Plan, store: Store, *, fresh: bool) -> dict[str, Any]:
    # Return the suite's document from the results folder, or an empty one. If `fresh`, delete any other experiment in the folder;
    # otherwise, raise an error if there is one.
    document = store.read_document(plan.suite.name, SUITE) or {}
    if not document:
        return {}
    roles = {name: entry.get("role") for name, entry in document.get("sets", {}).items()}
    roles |= {name: source.role for name, source in plan.sources.items()}
    stored, requested = (
        {**entry, **entry.get("options", {})} for entry in (document.get("experiment") or {}, plan.experiment())
    )
    different = [
        f"{name}: {stored.get(name)} in the folder, {requested.get(name)} requested"
        for name in {**stored, **requested}
        if name not in ("options", "data") and stored.get(name) != requested.get(name)
    ]
    outliers = {name for name, role in roles.items() if role == "outlier"}
    different += [f"other data in {name}" for name in _other_data(stored.get("data", {}), requested["data"], outliers)]
    if different and fresh:
        store.forget(plan.suite.name)
        return {}
    if different:
        raise StorageError(
            f"{store.directory / plan.suite.name} contains another experiment ({'; '.join(different)}). Write to another folder "
            f"(--results), or replace that experiment (--fresh)."
        )
    return document


def _other_data(before: Mapping[str, str], after: Mapping[str, str], outliers: Collection[str]) -> list[str]:
    # Return the sets whose checksums differ. Outlier sets may be added or removed, because each record lists its own.
    return [
        name
        for name in {**before, **after}
        if before.get(name) != after.get(name) and not (name in outliers and (name not in before or name not in after))
    ]


def describe(plan: Plan, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document that describes the suite in reports.

    Sets that occur only in the folder's existing document are kept, because records may refer to them.
    """
    suite = plan.suite

    def others(entries: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in entries.items() if name not in plan.sources}

    sets = {
        name: {"title": source.title, "role": source.role, "count": source.count, "level": source.level}
        for name, source in plan.sources.items()
    }
    examples = {}
    for name, source in plan.sources.items():
        if source.role in ("test", "shift", "outlier") and source.show is not None:
            images = source.show(range(min(NUM_EXAMPLES, source.count)))
            labels = [] if source.role == "outlier" else images.labels.tolist()
            packed = base64.b64encode(images.pixels.contiguous().numpy().tobytes()).decode()
            examples[name] = {"shape": list(images.pixels.shape), "pixels": packed, "label": labels}
    experiment = plan.experiment()
    experiment["data"] |= others(stored.get("experiment", {}).get("data", {}))
    return {
        "suite": suite.name,
        "title": suite.title,
        "network": plan.network,
        "components": plan.components,
        "threshold": suite.threshold,
        "shift": suite.shift,
        "sets": sets | others(stored.get("sets", {})),
        "classes": list(suite.classes),
        "examples": examples | others(stored.get("examples", {})),
        "notes": [*suite.notes, *(suite.fold_notes if plan.crossed else ())],
        "experiment": experiment,
    }


# --- the work


class _Job(NamedTuple):
    # A method to run, its group, and the index of the run.
    group: str
    run: int
    method: Method


def run_suite(
    plan: Plan,
    activations: ActivationCache,
    store: Store,
    progress: Progress,
    *,
    fresh: bool = False,
    team: Team | None = None,
) -> None:
    """Run every method that has no valid record, or all methods if `fresh`; if any fail, raise an `OptionError` that lists them.

    Each record is computed by a single process of the team, so that results do not depend on the number of processes.
    """
    team = team or Team.single()
    jobs: list[_Job] = []
    if team.first:
        store.write_document(plan.suite.name, SUITE, describe(plan, _check_results_dir(plan, store, fresh=fresh)))
        jobs = _open_jobs(plan, store, fresh=fresh)
    jobs = team.share(jobs)
    members = {network.checksum: network for job in jobs for network in plan.members(job.group, job.run)}
    # Compute the activations of each set only once; its subsets reuse them.
    needed = {
        (source.whole or source).checksum: source.whole or source
        for run in sorted({job.run for job in jobs})
        for source in plan.sources_of(run).values()
    }
    activations.compute([*members.values()], [*needed.values()], part(progress, 0.0, ACTIVATIONS_SHARE), team)

    @cache
    def read(networks: tuple[Network, ...], run: int, name: str) -> StoredActivations:
        return activations.read(networks, plan.sources_of(run)[name])

    training = cache(partial(plan.read_training, str(activations.device)))
    methods_progress = part(progress, ACTIVATIONS_SHARE, 1.0)
    failures: list[str] = []
    for index, job in enumerate(jobs):
        # Within a run, methods that train networks share these networks, so they are all assigned to the same process.
        if (job.run if job.group in LONG else index) % team.size != team.rank:
            continue
        methods_progress(f"run {job.run + 1}: {job.method.name}", index / len(jobs))
        networks = plan.members(job.group, job.run)
        context = Context(
            read=partial(read, networks, job.run),
            threshold=plan.suite.threshold,
            suite=plan.suite,
            network=plan.network,
            networks=networks,
            run=job.run,
            sources=plan.sources_of(job.run),
            activations=activations,
            training=training,
        )
        try:
            store.write(_run(plan, job, context))
        except StorageError:
            raise  # a damaged file affects every method
        except MolaError as error:
            failures.append(f"{job.method.name}, run {job.run + 1}: {error}")
    refusals = [message for messages in team.collect(failures) for message in messages]
    progress("records are ready", 1.0)
    if refusals:
        raise OptionError(
            "some methods could not be run; the records of the others are kept.\n  " + "\n  ".join(refusals)
        )


def _identity(plan: Plan, job: _Job) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    # Return the settings and the checksums of the networks and the data. A record is valid if all of them match.
    used = plan.members(job.group, job.run)[: job.method.components]
    settings = {"components": len(used), "threshold": plan.suite.threshold, **job.method.settings()}
    settings |= {"network": plan.network, "protocol": PROTOCOL, "metrics": list(METRICS)}
    data = {name: source.checksum for name, source in plan.sources_of(job.run).items()}
    return settings, [network.checksum for network in used], data


def _open_jobs(plan: Plan, store: Store, *, fresh: bool) -> list[_Job]:
    # Return the methods and runs that have no valid record. A record is valid if its settings, networks and data match those of the
    # plan, except that it may have fewer or more outlier sets.
    sweeps = plan.runs if plan.crossed else min(plan.runs, len(plan.networks) // plan.suite.sweep)
    jobs = [
        _Job(group, run, method)
        for group in plan.groups
        for run in range(sweeps if group == "components" else plan.runs)
        for method in plan.methods(group)
    ]
    if fresh:
        return jobs
    open_jobs: list[_Job] = []
    lacking: dict[str, None] = {}
    for job in jobs:
        try:
            record = store.read(plan.suite.name, job.method.name, job.run)
        except StorageError as error:
            warn(f"{error} It will be recomputed.")
            record = None
        settings, networks, data = _identity(plan, job)
        titles = {name: source.title for name, source in plan.sources_of(job.run).items() if source.role == "outlier"}
        if (
            record is None
            or (record.settings, record.networks) != (settings, networks)
            or _other_data(record.data, data, {*record.outliers, *titles})
        ):
            open_jobs.append(job)
        else:
            lacking |= {title: None for name, title in titles.items() if name not in record.outliers}
    if lacking:
        warn(
            f"some records contain no results for {', '.join(lacking)}, so the corresponding cells in reports stay empty. "
            f"Pass --fresh to recompute these records."
        )
    return open_jobs


def _run(plan: Plan, job: _Job, context: Context) -> Record:
    fitted = job.method.fit(context)
    seconds = {"fit": fitted.seconds, "predict": 0.0}

    def predictions(name: str, all_scores: bool) -> Iterator[tuple[BatchPrediction, Tensor]]:
        for batch, labels in fitted.batches(name):
            start = time.perf_counter()
            prediction = fitted.predict(batch, all_scores)
            seconds["predict"] += time.perf_counter() - start
            yield prediction, labels

    labelled = {}
    outliers = {}
    examples = {}
    detail = job.method.group == "main"  # figures show only this group
    inside = columns_of(predictions("test", any(source.role == "outlier" for source in context.sources.values())))
    for source in context.sources.values():
        if source.role in ("train", "validation"):
            continue
        outlying = source.role == "outlier"
        columns = inside
        if source.role != "test":
            columns = columns_of(predictions(source.name, outlying), labelled=not outlying)
        if outlying:
            outliers[source.name] = outlier_result(inside, columns, detail=detail)
        else:
            types = source.types if detail else ()
            labelled[source.name] = labelled_result(columns, source.level, detail=detail, types=types)
        if detail:
            examples[source.name] = examples_of(columns)
    settings, networks, data = _identity(plan, job)
    return Record(
        suite=plan.suite.name,
        method=job.method.name,
        group=job.method.group,
        run=context.run,
        settings=settings,
        networks=networks,
        data=data,
        chosen=_finite(fitted.chosen),
        seconds=dict(seconds),  # copy before the measures add their own time
        labelled=labelled,
        outliers=outliers,
        examples=examples,
        measures={name: measure(predictions) for name, measure in plan.measures.items()} if detail else {},
        environment=environment(),
    )


def _finite(value: Any) -> Any:
    # Replace non-finite values with None, because JSON cannot represent them.
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def environment() -> dict[str, Any]:
    """Return the versions of the packages and the properties of the machine that may affect results."""
    return {
        "molaplace": mola.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
