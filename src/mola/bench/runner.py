"""Run a suite: activations once, then every method of every run, each record written as soon as it is made."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

import mola
from mola.bench.activations import Activations, Network, Progress, Seen
from mola.bench.contestants import Contestant, Context, Outputs
from mola.bench.evaluation import METRICS, evaluate_labelled, evaluate_outliers, examples_of
from mola.bench.plan import Plan, claim, describe
from mola.bench.record import Record
from mola.bench.store import SUITE, Store
from mola.bench.suite import EXAMPLES, Source
from mola.errors import MolaError, OptionError, StorageError, warn

__all__ = ["environment", "run_suite"]

PROTOCOL = 1
"""Raised by hand when records of before would come out otherwise: a change of fitting, links, tuning or metrics."""

FIRST_PART = 0.8
"""Share of the work that activations are, as measured on images."""


def run_suite(
    plan: Plan, activations: Activations, store: Store, progress: Progress, *, fresh: bool = False
) -> list[Record]:
    """Run every method that has no record yet, and return all the records.

    A method that refuses its task does not keep the others from theirs.

    Args:
        plan: what is to be run.
        activations: where the networks' activations are kept.
        store: where the records are kept.
        progress: told what is being done, and which share is done.
        fresh: whether to make all records anew, and forget those of another experiment.

    Returns:
        The records, those that were there already included.

    Raises:
        OptionError: at the end, if methods refused their task.
        StorageError: if a file is damaged, or the folder holds another experiment.
    """
    claim(plan, store, fresh=fresh)
    store.write_document(plan.suite.name, SUITE, describe(plan))
    needed = plan.networks[: max(plan.runs_of(group) * len(plan.members(group, 0)) for group in plan.groups)]
    activations.compute(needed, list(plan.sources.values()), lambda doing, done: progress(doing, FIRST_PART * done))
    work = [
        (group, run, method)
        for group in plan.groups
        for run in range(plan.runs_of(group))
        for method in plan.methods(group)
    ]
    memory, workshop = _Memory(activations, plan.sources), plan.workshop(activations)
    records, refused = [], []
    for index, (group, run, method) in enumerate(work):
        doing = f"run {run + 1}: {method.name}"
        progress(doing, FIRST_PART + (1 - FIRST_PART) * index / len(work))
        networks = tuple(plan.members(group, run))
        used = networks if method.components is None else networks[: method.components]
        settings = {"components": len(used), "threshold": plan.suite.threshold, **method.settings()}
        settings |= {"network": plan.network, "protocol": PROTOCOL, "metrics": list(METRICS)}
        identity = (settings, [network.checksum for network in used], _checksums(plan))
        known = None if fresh else _known(store, plan.suite.name, method.name, run)
        if known is not None and (known.settings, known.networks, known.data) == identity:
            progress(f"{doing} (there already)", FIRST_PART + (1 - FIRST_PART) * index / len(work))
            records.append(known)
            continue
        context = Context(partial(memory.read, networks), plan.suite.threshold, networks, run, workshop)
        try:
            records.append(_run(plan, method, run, context, identity))
        except StorageError:
            raise  # a damaged file is everybody's
        except MolaError as error:
            refused.append(f"{method.name}, run {run + 1}: {error}")
            continue
        store.write(records[-1])
    progress("records are ready", 1.0)
    if refused:
        message = "some methods could not be run; the others' records are kept.\n  " + "\n  ".join(refused)
        raise OptionError(message)
    return records


def _known(store: Store, suite: str, method: str, run: int) -> Record | None:
    """A record that is there; one that cannot be read is made again, and said so."""
    try:
        return store.read(suite, method, run)
    except StorageError as error:
        warn(f"{error} It is made again.")
        return None


class _Memory:
    """Activations that were read last, as many as fit into a share of memory."""

    LARGEST = 4 * 2**30

    def __init__(self, activations: Activations, sources: Mapping[str, Source]) -> None:
        self.activations, self.sources = activations, sources
        self.kept: dict[tuple[tuple[Network, ...], str], Seen] = {}

    def read(self, networks: tuple[Network, ...], name: str) -> Seen:
        """What these networks make of a set."""
        key = (networks, name)
        if key in self.kept:
            self.kept[key] = self.kept.pop(key)  # the last to go
            return self.kept[key]
        seen = self.activations.read(networks, self.sources[name])
        while self.kept and sum(one.bytes for one in self.kept.values()) + seen.bytes > self.LARGEST:
            self.kept.pop(next(iter(self.kept)))
        self.kept[key] = seen
        return seen


def _run(
    plan: Plan,
    method: Contestant,
    run: int,
    context: Context,
    identity: tuple[dict[str, Any], list[str], dict[str, str]],
) -> Record:
    fitted = method.fit(context)
    seconds = 0.0

    def predict(name: str, scores: bool) -> Outputs:
        nonlocal seconds
        context.read(name)  # from disk, before the clock starts
        start = time.perf_counter()
        outputs = fitted.predict(name, scores)
        seconds += time.perf_counter() - start
        return outputs

    labelled, outliers, examples = {}, {}, {}
    inside = predict("test", any(source.role == "outlier" for source in plan.sources.values()))
    detail = method.group == "main"  # figures show no more than these
    for source in plan.sources.values():
        if source.role in ("train", "validation"):
            continue
        outputs = inside if source.role == "test" else predict(source.name, source.role == "outlier")
        if source.role == "outlier":
            pairs = {name: (inside.scores[name], scores) for name, scores in outputs.scores.items()}
            outliers[source.name] = evaluate_outliers(outputs.probs, pairs, detail=detail)
        else:
            labels = context.read(source.name).labels
            labelled[source.name] = evaluate_labelled(outputs.probs, labels, source.level, detail=detail)
        if detail:
            examples[source.name] = examples_of(outputs.probs[:EXAMPLES])
    settings, networks, data = identity
    return Record(
        suite=plan.suite.name,
        method=method.name,
        group=method.group,
        run=run,
        settings=settings,
        networks=networks,
        data=data,
        chosen=_finite(fitted.chosen),
        seconds={"fit": fitted.seconds, "predict": seconds},
        labelled=labelled,
        outliers=outliers,
        examples=examples,
        environment=environment(),
    )


def _finite(value: Any) -> Any:
    """JSON has no infinity: what is not finite becomes null."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _checksums(plan: Plan) -> dict[str, str]:
    return {name: source.checksum for name, source in plan.sources.items()}


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
