"""Run a suite: activations once, then every method of every run, each record written as soon as it is made."""

from __future__ import annotations

import base64
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch

import mola
from mola.bench.activations import Activations, Network, Progress, Seen
from mola.bench.comparisons import COMPARISONS, SWEEP
from mola.bench.contestants import Contestant, Context
from mola.bench.evaluation import evaluate_labelled, evaluate_outliers, examples_of
from mola.bench.record import Record
from mola.bench.store import SUITE, Store
from mola.bench.suite import EXAMPLES, Source, Suite
from mola.errors import OptionError

__all__ = ["Plan", "environment", "run_suite"]

FIRST_PART = 0.8
"""Share of the work that activations are, as measured on images."""


@dataclass(frozen=True)
class Plan:
    """What is to be run."""

    suite: Suite
    network: str
    """Name of the architecture."""
    networks: Sequence[Network]
    sources: dict[str, Source]
    runs: int
    components: int
    groups: tuple[str, ...] = ("main",)

    def __post_init__(self) -> None:
        """Check that there are networks enough.

        Raises:
            OptionError: if there are not.
        """
        needed = max(self.runs * self.components, SWEEP if "components" in self.groups else 0)
        if self.runs < 1 or self.components < 1 or len(self.networks) < needed:
            message = (
                f"{self.runs} runs of {self.components} components in {', '.join(self.groups)} need {max(needed, 1)} networks, "
                f"found {len(self.networks)}."
            )
            raise OptionError(message)

    def members(self, group: str, run: int) -> Sequence[Network]:
        """The networks of a run: no two runs share one."""
        size = SWEEP if group == "components" else self.components
        return self.networks[run * size : (run + 1) * size]

    def runs_of(self, group: str) -> int:
        """How many runs there are networks for."""
        return min(self.runs, len(self.networks) // SWEEP) if group == "components" else self.runs


def run_suite(plan: Plan, activations: Activations, store: Store, progress: Progress) -> list[Record]:
    """Run every method that has no record yet, and return all the records.

    Args:
        plan: what is to be run.
        activations: where the networks' activations are kept.
        store: where the records are kept.
        progress: told what is being done, and which share is done.

    Returns:
        The records, those that were there already included.
    """
    needed = plan.networks[: max(plan.runs_of(group) * len(plan.members(group, 0)) for group in plan.groups)]
    store.write_document(plan.suite.name, SUITE, describe(plan))
    activations.compute(needed, list(plan.sources.values()), lambda doing, done: progress(doing, FIRST_PART * done))
    work = [
        (group, run, method)
        for group in plan.groups
        for run in range(plan.runs_of(group))
        for method in COMPARISONS[group]()
    ]

    @lru_cache(maxsize=len(plan.sources))
    def read(networks: tuple[Network, ...], name: str) -> Seen:
        return activations.read(networks, plan.sources[name])

    records = []
    for index, (group, run, method) in enumerate(work):
        progress(f"run {run + 1}: {method.name}", FIRST_PART + (1 - FIRST_PART) * index / len(work))
        networks = tuple(plan.members(group, run))
        used = networks if method.components is None else networks[: method.components]
        settings = {
            **method.settings(),
            "components": len(used),
            "network": plan.network,
            "threshold": plan.suite.threshold,
        }
        known = store.read(plan.suite.name, method.name, run)
        identity = (settings, [network.checksum for network in used], _checksums(plan))
        if known is not None and (known.settings, known.networks, known.data) == identity:
            records.append(known)
            continue
        context = Context(lambda name, networks=networks: read(networks, name), plan.suite.threshold)  # type: ignore[misc]
        records.append(_run(plan, method, run, context, identity))
        store.write(records[-1])
    progress("done", 1.0)
    return records


def _run(
    plan: Plan,
    method: Contestant,
    run: int,
    context: Context,
    identity: tuple[dict[str, Any], list[str], dict[str, str]],
) -> Record:
    fitted = method.fit(context)
    start = time.perf_counter()
    labelled, outliers, examples = {}, {}, {}
    inside = fitted.predict("test", True)
    detail = method.group == "main"  # figures show no more than these
    for source in plan.sources.values():
        if source.role in ("train", "validation"):
            continue
        outputs = inside if source.role == "test" else fitted.predict(source.name, source.role == "outlier")
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
        chosen=fitted.chosen,
        seconds={"fit": fitted.seconds, "predict": time.perf_counter() - start},
        labelled=labelled,
        outliers=outliers,
        examples=examples,
        environment=environment(),
    )


def _checksums(plan: Plan) -> dict[str, str]:
    return {name: source.checksum for name, source in plan.sources.items()}


def describe(plan: Plan) -> dict[str, Any]:
    """What the suite is, for the report: sets, shift, example images."""
    suite = plan.suite
    sets = {
        name: {"title": source.title, "role": source.role, "count": source.count, "level": source.level}
        for name, source in plan.sources.items()
    }
    examples = {}
    for name, source in plan.sources.items():
        if source.role in ("test", "shift", "outlier"):
            pixels = source.show(EXAMPLES).contiguous()
            packed = base64.b64encode(pixels.numpy().tobytes()).decode()
            examples[name] = {"shape": list(pixels.shape), "pixels": packed, "label": list(source.labels)}
    return {
        "suite": suite.name,
        "title": suite.title,
        "network": plan.network,
        "components": plan.components,
        "runs": plan.runs,
        "threshold": suite.threshold,
        "shift": {**asdict(suite.shift), "levels": list(suite.shift.levels)},
        "sets": sets,
        "classes": list(suite.classes),
        "examples": examples,
        "notes": list(suite.notes),
    }


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
