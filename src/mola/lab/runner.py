"""Run a suite: activations once, then every method of every run, each record written as soon as it is made."""

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
from mola.compare.activations_file import HeadOnly, Stored
from mola.compare.methods import Fitted
from mola.compare.record import Record
from mola.compare.results import METRICS, examples_of, labelled_result, outlier_result
from mola.compare.store import SUITE, Store
from mola.compare.tally import Answer, Tally, tally_set
from mola.distributed import Team
from mola.errors import MolaError, OptionError, StorageError, warn
from mola.lab.activations import Activations, Network, Progress
from mola.lab.comparisons import LONG, SuiteMethod
from mola.lab.detectors import feature_scores
from mola.lab.measures import Answers, Measure
from mola.lab.plan import Plan, claim, describe
from mola.lab.streamed_sums import StreamedSums
from mola.lab.suite import Source
from mola.lab.workshop import Context

PROTOCOL = 1
"""Raised by hand when records of before would come out otherwise: a change of fitting, links, tuning or metrics."""

FIRST_PART = 0.8
"""Share of the work that activations are, as measured on images."""


def run_suite(
    plan: Plan,
    activations: Activations,
    store: Store,
    progress: Progress,
    *,
    fresh: bool = False,
    team: Team | None = None,
) -> list[Record]:
    """Run every method that has no record yet, and return all the records.

    A method that refuses its task does not keep the others from theirs.

    Args:
        plan: what is to be run.
        activations: where the networks' activations are kept.
        store: where the records are kept.
        progress: told what is being done, and which share is done.
        fresh: whether to make all records anew, and forget those of another experiment.
        team: the processes that divide the work among them: a record is the work of one, so that its numbers do not depend on
            how many there are. None is this one alone.

    Returns:
        The records, those that were there already included.
    """
    together = Team.single() if team is None else team
    _check_same_data(plan, together)
    if together.first:
        before = claim(plan, store, fresh=fresh)
        store.write_document(plan.suite.name, SUITE, describe(plan, before))
    together.collect(None)  # nobody reads records before the folder is claimed
    work = [
        (group, run, method)
        for group in plan.groups
        for run in range(plan.runs_of(group))
        for method in plan.methods(group)
    ]
    # Methods that train share what they trained for the same run.
    mine = {
        index: _examine(plan, store, job, fresh=fresh)
        for index, job in enumerate(work)
        if (job[1] if job[0] in LONG else index) % together.size == together.rank
    }
    wanted = [(index, job.needs(plan)) for index, job in mine.items() if not job.done]
    unfinished = sorted(one for some in together.collect(wanted) for one in some)
    jobs = [work[index] for index, _ in unfinished]
    members = [network for group, run, _ in jobs for network in plan.members(group, run)]
    needed = list({network.checksum: network for network in members}.values())
    sets = plan.computed({(work[index][1], name) for index, names in unfinished for name in names})
    activations.compute(needed, sets, lambda doing, done: progress(doing, FIRST_PART * done), together)
    sums = StreamedSums(activations.directory / "sums", activations.device)
    if plan.stream:
        _stream(plan, jobs, sums, progress, together)

    @cache
    def read(networks: tuple[Network, ...], run: int, name: str) -> Stored:
        return activations.read(networks, plan.sources_of(run)[name])

    workshops = [plan.workshop(activations, run) for run in range(plan.runs)]
    refused: list[str] = []
    older: list[list[str]] = []
    for index, job in mine.items():
        run, method, there, unasked = job.run, job.method, job.there, job.unasked
        doing, done = f"run {run + 1}: {method.name}", FIRST_PART + (1 - FIRST_PART) * index / len(work)
        progress(doing, done)
        if there is not None and not unasked:
            progress(f"{doing} (there already)", done)
            older.append(_lacking(there, plan.sources_of(run)))
            continue
        networks = tuple(plan.members(job.group, run))
        threshold = plan.suite.threshold
        given = partial(_given, sums, networks, plan.sources_of(run)["train"]) if plan.stream else None
        read_run = partial(read, networks, run)
        context = Context(read_run, threshold, feature_scores, networks, run, workshops[run], sums=given)
        try:
            # The same settings, networks and data give the same method: what is new is asked, and the rest is kept.
            made = (
                _run(plan, method, context, job.identity) if there is None else _asked(there, method, context, unasked)
            )
            store.write(made)
        except StorageError:
            raise  # a damaged file is everybody's
        except MolaError as error:
            refused.append(f"{method.name}, run {run + 1}: {error}")
    progress("records are ready", 1.0)
    everyone = together.collect((refused, older))
    refusals = [one for some, _ in everyone for one in some]
    _tell_older([one for _, some in everyone for one in some])
    if refusals:
        raise OptionError("some methods could not be run; the others' records are kept.\n  " + "\n  ".join(refusals))
    found = (store.read(plan.suite.name, method.name, run) for _, run, method in work)
    return [record for record in found if record is not None]


def _check_same_data(plan: Plan, team: Team) -> None:
    # Refuse processes that read different files, before hours of passes are stored under names that others do not know.
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


def _stream(
    plan: Plan, jobs: Sequence[tuple[str, int, SuiteMethod]], sums: StreamedSums, progress: Progress, team: Team
) -> None:
    # The sums that methods ask for: one pass over the training data for each structure and run.
    asked = {
        (run, tuple(plan.members(group, run)), structure): None
        for group, run, method in jobs
        if (structure := method.settings().get("structure")) is not None
    }
    for run, networks, structure in asked:
        sums.compute(networks, plan.sources_of(run)["train"], structure, progress, team)


def _given(
    sums: StreamedSums, networks: tuple[Network, ...], source: Source, structure: str, heads: Sequence[HeadOnly]
) -> mola.MoLA:
    return sums.read(networks, source, structure, heads)


Identity = tuple[dict[str, Any], list[str], dict[str, str]]
"""Settings, checksums of networks and checksums of data: what a record that is there must agree in."""


@dataclass(frozen=True)
class _Job:
    group: str
    run: int
    method: SuiteMethod
    identity: Identity
    there: Record | None
    """The record of before, if it counts."""
    unasked: list[Measure]
    """What it was not asked yet."""

    @property
    def done(self) -> bool:
        return self.there is not None and not self.unasked

    def needs(self, plan: Plan) -> list[str]:
        """Names of the sets that networks must have seen: all of them, or for a few questions more those that these are about."""
        sources = plan.sources_of(self.run)
        if self.there is None:
            return list(sources)
        asked = {name for measure in self.unasked for name in measure.sets}
        return [name for name, source in sources.items() if source.role in ("train", "validation") or name in asked]


def _examine(plan: Plan, store: Store, job: tuple[str, int, SuiteMethod], *, fresh: bool) -> _Job:
    group, run, method = job
    identity = _identity(plan, method, tuple(plan.members(group, run)), run)
    known = None if fresh else _known(store, plan.suite.name, method.name, run)
    there = known if known is not None and _counts(known, identity, plan.sources_of(run)) else None
    return _Job(group, run, method, identity, there, [] if there is None else _unasked(there, plan))


def _identity(plan: Plan, method: SuiteMethod, networks: tuple[Network, ...], run: int) -> Identity:
    used = networks if method.components is None else networks[: method.components]
    settings = {"components": len(used), "threshold": plan.suite.threshold, **method.settings()}
    settings |= {"network": plan.network, "protocol": PROTOCOL, "metrics": list(METRICS)}
    data = {name: source.checksum for name, source in plan.sources_of(run).items()}
    return settings, [network.checksum for network in used], data


def _known(store: Store, suite: str, method: str, run: int) -> Record | None:
    # The record, if it is there; one that cannot be read is made again, and said so.
    try:
        return store.read(suite, method, run)
    except StorageError as error:
        warn(f"{error} It is made again.")
        return None


def _counts(known: Record, identity: Identity, sources: Mapping[str, Source]) -> bool:
    # Whether a record is of the same method, networks and data; it may lack sets of outliers, or have more of them.
    settings, networks, data = identity
    optional = {*known.outliers, *(name for name, source in sources.items() if source.role == "outlier")}
    return (known.settings, known.networks) == (settings, networks) and all(
        known.data.get(name) == data.get(name) or (name in optional and (name not in known.data or name not in data))
        for name in {*known.data, *data}
    )


def _lacking(known: Record, sources: Mapping[str, Source]) -> list[str]:
    # What the record of today would have more.
    outliers = [source for source in sources.values() if source.role == "outlier"]
    found = [source.title for source in outliers if source.name not in known.outliers]
    scores = [numbers for result in known.outliers.values() for numbers in result.scores.values()]
    if any("fpr95_out" not in numbers for numbers in scores):
        found.append("FPR95 with outliers as positives and the scores that came with it")
    typed = [name for name, source in sources.items() if source.types and name in known.labelled]
    if known.group == "main" and any(not known.labelled[name].types for name in typed):
        found.append("results by type of shift")
    return found


def _unasked(known: Record, plan: Plan) -> list[Measure]:
    # Measures of the suite that a record lacks; methods that would have to be trained again are not asked.
    trained = {method.name for group in LONG for method in plan.methods(group)}
    if known.group != "main" or known.method in trained:
        return []
    return [measure for measure in plan.measures if measure.name not in known.measures]


def _asked(known: Record, method: SuiteMethod, context: Context, measures: list[Measure]) -> Record:
    answers = _answers(method.fit(context))
    return replace(known, measures=known.measures | {measure.name: measure(answers) for measure in measures})


def _tell_older(lacking: list[list[str]]) -> None:
    some = [one for one in lacking if one]
    if some:
        what = ", ".join(dict.fromkeys(name for one in some for name in one))
        warn(
            f"{len(some)} of {len(lacking)} records that were there already were made without {what}. They count, and reports leave "
            f"these cells empty; --fresh makes them anew."
        )


def _run(plan: Plan, method: SuiteMethod, context: Context, identity: Identity) -> Record:
    fitted = method.fit(context)
    clock = [0.0]
    labelled, outliers, examples = {}, {}, {}
    detail = method.group == "main"  # figures show no more than these
    sources = plan.sources_of(context.run)
    scored = any(source.role == "outlier" for source in sources.values())
    inside = _tally(fitted, sources["test"], scored, clock)
    for source in sources.values():
        if source.role in ("train", "validation"):
            continue
        tally = inside if source.role == "test" else _tally(fitted, source, source.role == "outlier", clock)
        if source.role == "outlier":
            outliers[source.name] = outlier_result(inside, tally, detail=detail)
        else:
            types = source.types if detail else ()
            labelled[source.name] = labelled_result(tally, source.level, detail=detail, types=types)
        if detail:
            examples[source.name] = examples_of(tally)
    settings, networks, data = identity
    measured = {measure.name: measure(_answers(fitted)) for measure in plan.measures if detail}
    return Record(
        suite=plan.suite.name,
        method=method.name,
        group=method.group,
        run=context.run,
        settings=settings,
        networks=networks,
        data=data,
        chosen=_finite(fitted.chosen),
        seconds={"fit": fitted.seconds, "predict": clock[0]},
        labelled=labelled,
        outliers=outliers,
        examples=examples,
        measures=measured,
        environment=environment(),
    )


def _tally(fitted: Fitted, source: Source, scores: bool, clock: list[float]) -> Tally:
    # What a method says of a set; the time that its answers take is added to the clock.

    def answers() -> Iterator[tuple[dict[str, Answer], Tensor | None]]:
        for batch, labels in fitted.batches(source.name):
            start = time.perf_counter()
            answer = fitted.answer(batch, scores)
            clock[0] += time.perf_counter() - start
            yield {"": answer}, None if source.role == "outlier" else labels

    return tally_set(answers(), what=source.title)[""]


def _answers(fitted: Fitted) -> Answers:
    def answers(name: str, *, scores: bool = True) -> Iterator[tuple[Answer, Tensor]]:
        return ((fitted.answer(batch, scores), labels) for batch, labels in fitted.batches(name))

    return answers


def _finite(value: Any) -> Any:
    # JSON has no infinity: what is not finite becomes null.
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def environment() -> dict[str, Any]:
    """Versions that the numbers were made with."""
    return {
        "mola": mola.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
