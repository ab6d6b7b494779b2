"""The plan of a benchmark, checked before any work: networks, sets, runs, and the results folder."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mola.compare.results import EXAMPLES
from mola.compare.store import SUITE, Store
from mola.errors import OptionError, StorageError
from mola.lab.activations import Activations, Network
from mola.lab.comparisons import COMPARISONS, SWEEP, SuiteMethod
from mola.lab.context import TrainingContext
from mola.lab.measures import Measure
from mola.lab.suite import Budget, DataOptions, Source, Suite, checksum


@dataclass(frozen=True)
class Plan:
    """Networks, sets, runs and methods of a benchmark."""

    suite: Suite
    network: str
    """Name of the architecture."""
    networks: Sequence[Network]
    sources: dict[str, Source]
    runs: int
    components: int
    groups: tuple[str, ...] = ("main",)
    options: DataOptions = field(default_factory=DataOptions)
    budget: Budget | None = None
    """Budget of methods that train; None is the suite's."""
    measures: tuple[Measure, ...] = ()
    """Numbers of every method of the main comparison beside the common metrics."""
    folds: tuple[dict[str, Source], ...] = ()
    """The sets of each run, where runs share their networks and differ in their data; `sources` are those of the first."""
    stream: bool = False
    """Whether training data are summed as they are read, instead of storing their activations."""
    notes: tuple[str, ...] = ()
    """Notes besides the suite's own."""

    def __post_init__(self) -> None:
        _refuse_repeats("networks", {network.label: network.checksum for network in self.networks})
        for sources in self.folds or (self.sources,):
            _refuse_repeats("sets", {name: source.checksum for name, source in sources.items()})
        if self.folds and self.runs > len(self.folds):
            raise OptionError(
                f"a cross-fit of {len(self.folds)} folds has at most as many runs, got --runs {self.runs}."
            )
        several = self.components if self.folds else self.runs * self.components
        needed = max(several, SWEEP if "components" in self.groups else 0, 1)
        if self.runs < 1 or self.components < 1 or len(self.networks) < needed:
            raise OptionError(
                f"--runs {self.runs} --components {self.components} in {', '.join(self.groups)} need {needed} networks, "
                f"found {len(self.networks)}. Train more (mola train {self.suite.name} --networks {needed}, or --train), "
                f"or choose fewer runs or components."
            )

    def members(self, group: str, run: int) -> Sequence[Network]:
        """Return the networks of a run: no two runs share a network, except in a cross-fit, whose runs differ in their data."""
        size = SWEEP if group == "components" else self.components
        first = 0 if self.folds else run * size
        return self.networks[first : first + size]

    def sources_of(self, run: int) -> dict[str, Source]:
        """Return the sets of a run."""
        return self.folds[run] if self.folds else self.sources

    def computed(self, needed: Collection[tuple[int, str]]) -> list[Source]:
        """Return the sets whose activations are computed, each once: parts share the activations of the whole.

        Args:
            needed: runs, and names of their sets.
        """
        every = [
            source.whole or source
            for run in range(self.runs)
            for name, source in self.sources_of(run).items()
            if (run, name) in needed and not (self.stream and source.role == "train")
        ]
        return list({source.checksum: source for source in every}.values())

    def runs_of(self, group: str) -> int:
        """Return the number of runs that the networks suffice for."""
        if group != "components" or self.folds:
            return self.runs
        return min(self.runs, len(self.networks) // SWEEP)

    def methods(self, group: str) -> list[SuiteMethod]:
        """Return the methods of a group."""
        return COMPARISONS[group](self.budget or self.suite.budget)

    def training_context(self, activations: Activations, run: int) -> TrainingContext:
        """Return the context of methods that need whole networks."""
        build = self.networks[0].build
        return TrainingContext(self.suite, self.network, build, self.options, self.sources_of(run), activations)

    def experiment(self) -> dict[str, Any]:
        """Return what all records of a folder share: numbers of different experiments must not be averaged."""
        every = {
            name: [self.sources_of(run)[name].checksum for run in range(len(self.folds) or 1)] for name in self.sources
        }
        return {
            "network": self.network,
            "components": self.components,
            "threshold": self.suite.threshold,
            "options": self.options.describe(),
            "data": {name: sums[0] if len(set(sums)) == 1 else checksum(sums) for name, sums in every.items()},
        }


def _refuse_repeats(what: str, checksums: Mapping[str, str]) -> None:
    first: dict[str, str] = {}
    for name, value in checksums.items():
        if value in first:
            raise OptionError(f"{first[value]} and {name} are the same: {what} must differ.")
        first[value] = name


def check_results_dir(plan: Plan, store: Store, *, fresh: bool) -> dict[str, Any] | None:
    """Return the suite's document in the results folder, if any; refuse or delete another experiment.

    Sets of outliers may come and go: a record lists the sets that it was evaluated on.

    Args:
        plan: the plan to run.
        store: the results folder.
        fresh: whether to delete another experiment.

    Raises:
        StorageError: the folder holds another experiment, and `fresh` is not set.
    """
    document = store.read_document(plan.suite.name, SUITE)
    if document is None:
        return None
    kept, now = document.get("experiment") or {}, plan.experiment()
    roles = {name: found.get("role") for name, found in document.get("sets", {}).items()}
    roles |= {name: source.role for name, source in plan.sources.items()}
    before = kept.get("data", {})
    sets = [
        name
        for name in {**before, **now["data"]}
        if before.get(name) != now["data"].get(name)
        and not (roles.get(name) == "outlier" and (name not in before or name not in now["data"]))
    ]
    names = [name for name in {**kept, **now} if name not in ("options", "data")]
    options = [{**{name: one.get(name) for name in names}, **one.get("options", {})} for one in (kept, now)]
    different = [
        f"{name}: {options[0].get(name)} in the folder, {options[1].get(name)} requested"
        for name in {**options[0], **options[1]}
        if options[0].get(name) != options[1].get(name)
    ]
    if not sets and not different:
        return document
    if fresh:
        store.forget(plan.suite.name)
        return None
    reason = "; ".join(different) or f"other data in {', '.join(sets)}"
    raise StorageError(
        f"{store.directory / plan.suite.name} holds another experiment ({reason}). Write to another folder (--results), or "
        f"replace it (--fresh)."
    )


def describe(plan: Plan, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the suite's document for reports: sets, shift, example images.

    Args:
        plan: the plan.
        before: the document in the folder, see `check_results_dir`; its other sets are kept, since records may have them.
    """
    suite, kept = plan.suite, before or {}

    def others(known: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in known.items() if name not in plan.sources}

    sets = {
        name: {"title": source.title, "role": source.role, "count": source.count, "level": source.level}
        for name, source in plan.sources.items()
    }
    examples = {}
    for name, source in plan.sources.items():
        if source.role in ("test", "shift", "outlier") and source.show is not None:
            pixels = source.show(EXAMPLES).contiguous()
            packed = base64.b64encode(pixels.numpy().tobytes()).decode()
            examples[name] = {"shape": list(pixels.shape), "pixels": packed, "label": list(source.labels)}
    experiment = plan.experiment()
    experiment["data"] |= others(kept.get("experiment", {}).get("data", {}))
    return {
        "suite": suite.name,
        "title": suite.title,
        "network": plan.network,
        "components": plan.components,
        "runs": plan.runs,
        "threshold": suite.threshold,
        "shift": None if suite.shift is None else {**asdict(suite.shift), "levels": list(suite.shift.levels)},
        "sets": sets | others(kept.get("sets", {})),
        "classes": list(suite.classes),
        "examples": examples | others(kept.get("examples", {})),
        "notes": [*suite.notes, *plan.notes],
        "experiment": experiment,
    }
