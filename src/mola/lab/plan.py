"""What is to be run, checked before any work: networks, sets, runs, and the folder they may be written to."""

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
from mola.lab.measures import Measure
from mola.lab.suite import Budget, DataOptions, Source, Suite, checksum
from mola.lab.workshop import Workshop


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
    options: DataOptions = field(default_factory=DataOptions)
    budget: Budget | None = None
    """For methods that train; None is the suite's."""
    measures: tuple[Measure, ...] = ()
    """What is asked of every method of the main comparison beside the common metrics."""
    folds: tuple[dict[str, Source], ...] = ()
    """The sets of each run, where runs differ in their data and not in their networks; `sources` are those of the first."""
    stream: bool = False
    """Whether training data go into sums as they are read, and are stored nowhere."""
    notes: tuple[str, ...] = ()
    """What readers must know besides the suite's own notes."""

    def __post_init__(self) -> None:
        _refuse_repeats("networks", {network.label: network.checksum for network in self.networks})
        for sources in self.folds or (self.sources,):
            _refuse_repeats("sets", {name: source.checksum for name, source in sources.items()})
        if self.folds and self.runs > len(self.folds):
            raise OptionError(
                f"a cross-fit of {len(self.folds)} folds has at most as many runs, got --runs {self.runs}."
            )
        several = self.components if self.folds else self.runs * self.components
        needed = max(several, SWEEP if "components" in self.groups else 0)
        if self.runs < 1 or self.components < 1 or len(self.networks) < needed:
            raise OptionError(
                f"--runs {self.runs} --components {self.components} in {', '.join(self.groups)} need {max(needed, 1)} networks, "
                f"found {len(self.networks)}. Train more (mola train {self.suite.name} --networks {max(needed, 1)}, or --train), "
                f"or ask for fewer runs or components."
            )

    def members(self, group: str, run: int) -> Sequence[Network]:
        """The networks of a run: no two runs share one, except in a cross-fit, whose runs differ in their data."""
        size = SWEEP if group == "components" else self.components
        first = 0 if self.folds else run * size
        return self.networks[first : first + size]

    def sources_of(self, run: int) -> dict[str, Source]:
        """The sets of a run."""
        return self.folds[run] if self.folds else self.sources

    def computed(self, needed: Collection[tuple[int, str]]) -> list[Source]:
        """The sets that networks are run over, each once: parts share what was computed for the whole.

        Args:
            needed: runs, and names of their sets.

        Returns:
            The sets, in the order of the suite; without those that are streamed.
        """
        every = [
            source.whole or source
            for run in range(self.runs)
            for name, source in self.sources_of(run).items()
            if (run, name) in needed and not (self.stream and source.role == "train")
        ]
        return list({source.checksum: source for source in every}.values())

    def runs_of(self, group: str) -> int:
        """How many runs there are networks for."""
        if self.folds:
            return self.runs
        return min(self.runs, len(self.networks) // SWEEP) if group == "components" else self.runs

    def methods(self, group: str) -> list[SuiteMethod]:
        """The methods of a group."""
        return COMPARISONS[group](self.budget or self.suite.budget)

    def workshop(self, activations: Activations, run: int) -> Workshop:
        """Where methods of a run work that need whole networks."""
        build = self.networks[0].build
        return Workshop(self.suite, self.network, build, self.options, self.sources_of(run), activations)

    def experiment(self) -> dict[str, Any]:
        """What all records of a folder have in common: numbers of different experiments are not to be averaged."""
        return {
            "network": self.network,
            "components": self.components,
            "threshold": self.suite.threshold,
            "options": self.options.describe(),
            "data": {name: self._checksum(name) for name in self.sources},
        }

    def _checksum(self, name: str) -> str:
        every = [self.sources_of(run)[name].checksum for run in range(len(self.folds) or 1)]
        return every[0] if len(set(every)) == 1 else checksum(every)


def _refuse_repeats(what: str, checksums: Mapping[str, str]) -> None:
    first: dict[str, str] = {}
    for name, value in checksums.items():
        if value in first:
            raise OptionError(f"{first[value]} and {name} are the same: {what} must differ.")
        first[value] = name


def claim(plan: Plan, store: Store, *, fresh: bool) -> dict[str, Any] | None:
    """Refuse a folder that holds another experiment, or forget that one.

    Sets of outliers may come and go: a record says which it was evaluated on, and those that it has are not affected.

    Args:
        plan: what is to be run.
        store: where its records are to be kept.
        fresh: whether to forget another experiment.

    Returns:
        What the folder says of the suite so far, if there is anything.
    """
    before = store.read_document(plan.suite.name, SUITE)
    if before is None:
        return None
    kept = before.get("experiment")
    kept = kept if isinstance(kept, dict) else {}
    now = plan.experiment()
    if _without_outliers(plan, before, kept, now) == _without_outliers(plan, before, now, kept):
        return before
    if fresh:
        store.forget(plan.suite.name)
        return None
    changed = _differences(kept, now)
    raise StorageError(
        f"{store.directory / plan.suite.name} holds another experiment ({changed}). Write to another folder (--results), or "
        f"replace it (--fresh)."
    )


def _without_outliers(
    plan: Plan, before: Mapping[str, Any], one: dict[str, Any], other: dict[str, Any]
) -> dict[str, Any]:
    roles = {name: found.get("role") for name, found in before.get("sets", {}).items()}
    roles |= {name: source.role for name, source in plan.sources.items()}
    there = other.get("data", {})
    data = {name: value for name, value in one.get("data", {}).items() if name in there or roles.get(name) != "outlier"}
    return {**one, "data": data}


def _differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    # What differs, in words: the values of options, and no more than the names of data, whose checksums say nothing.
    flat = [
        {**{name: value for name, value in one.items() if name not in ("options", "data")}, **one.get("options", {})}
        for one in (before, now)
    ]
    named = [
        f"{name}: {flat[0].get(name)} there, {value} asked"
        for name, value in flat[1].items()
        if flat[0].get(name) != value
    ]
    sets = [name for name, value in now["data"].items() if before.get("data", {}).get(name) != value]
    return "; ".join(named or [f"other data in {', '.join(sets)}"])


def describe(plan: Plan, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the suite is, for the report: sets, shift, example images.

    Args:
        plan: what is to be run.
        before: what the folder says so far, see `claim`; its sets of outliers are kept, since records may have them.

    Returns:
        The document.
    """
    suite = plan.suite
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
    experiment, kept = plan.experiment(), {} if before is None else before
    experiment["data"] = {**experiment["data"], **_others(plan, kept.get("experiment", {}).get("data", {}))}
    return {
        "suite": suite.name,
        "title": suite.title,
        "network": plan.network,
        "components": plan.components,
        "runs": plan.runs,
        "threshold": suite.threshold,
        "shift": None if suite.shift is None else {**asdict(suite.shift), "levels": list(suite.shift.levels)},
        "sets": {**sets, **_others(plan, kept.get("sets", {}))},
        "classes": list(suite.classes),
        "examples": {**examples, **_others(plan, kept.get("examples", {}))},
        "notes": [*suite.notes, *plan.notes],
        "experiment": experiment,
    }


def _others(plan: Plan, known: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in known.items() if name not in plan.sources}
