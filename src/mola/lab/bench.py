"""`mola bench` as one call: from a `BenchConfig` to a plan, and from the plan to records."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from mola.compare.store import COST, Store
from mola.distributed import Team
from mola.errors import OptionError
from mola.lab.activations import Activations, Progress, open_networks
from mola.lab.comparisons import COMPARISONS, NAMED, SWEEP
from mola.lab.cost import measure_cost
from mola.lab.measures import EstimatedAccuracy
from mola.lab.networks import Training, are_names, check_networks, find_networks, open_named, train_networks
from mola.lab.runner import Plan, run_suite
from mola.lab.suite import Budget, DataOptions, Suite, changed
from mola.options import one_of

GROUPS = (*COMPARISONS, "cost")


@dataclass(frozen=True)
class BenchConfig:
    """Options of `mola bench`."""

    suite: Suite
    runs: int | None
    """None is one, or the number of folds of a cross-fit."""
    components: int
    groups: str
    """Names separated by commas; "all" is all but those that must be named."""
    networks: Path | str
    """Folder of the networks, or their names, see `mola.lab.networks`."""
    results: Path
    cache: Path
    network: str | None = None
    options: DataOptions = field(default_factory=DataOptions)
    train: bool = False
    """Train missing networks."""
    device: str = "cpu"
    stream: bool = False
    """Sum training data as they are read, instead of storing their activations."""
    fresh: bool = False
    """Replace all records."""
    swag: str = ""
    """Changes to the suite's budget of SWAG, such as "snapshots=12"."""
    mimo: str = ""
    """Changes to the suite's budget of MIMO."""

    def chosen_groups(self) -> tuple[str, ...]:
        """Return the names of the groups, each once; `OptionError` for an unknown name."""
        names = [one_of(name.strip(), (*GROUPS, "all"), "groups") for name in self.groups.split(",")]
        if "all" in names:
            names = [*(group for group in GROUPS if group not in NAMED), *(name for name in names if name in NAMED)]
        return tuple(dict.fromkeys(names))


def run_bench(config: BenchConfig, progress: Progress, team: Team | None = None) -> Path:
    """Train missing networks, if requested; run the suite; measure cost, if requested.

    Args:
        config: the options.
        progress: called with the current step and the share of the work that is done.
        team: the processes that share the work; None is this process alone.

    Returns:
        The folder of the suite's results.
    """
    groups, team, suite = config.chosen_groups(), team or Team.single(), config.suite
    budget = Budget(changed(suite.budget.swag, config.swag), changed(suite.budget.mimo, config.mimo))
    if config.options.cross_fit and suite.make_folds is None:
        raise OptionError(f"the {suite.name} suite has its own training data: leave --cross-fit out.")
    trained = 0.5 if config.train else 0.0
    if isinstance(config.networks, str) and are_names(config.networks):
        if config.train:
            raise OptionError(
                "--train makes networks in a folder: leave it out where --networks names trained networks."
            )
        # Networks that are named individually resize and normalise images themselves.
        options = replace(config.options, normalisation=config.options.normalisation or "none")
        networks = open_named(config.networks, suite.outputs)
        name = ", ".join(network.label for network in networks)
    else:
        options, folder = config.options, Path(config.networks)
        name, build = suite.builder(config.network)
        if config.train:
            count = max((config.runs or 1) * config.components, SWEEP if "components" in groups else 0)
            training = Training(suite, count, suite.recipe, config.network, options=options)
            train_networks(training, folder, lambda doing, done: progress(doing, trained * done), team)
        paths = find_networks(folder)
        check_networks(paths, suite, name, options)
        networks = open_networks(paths, build, name)
    progress(f"reading {suite.title}", trained)
    folds = suite.make_folds(options) if options.cross_fit and suite.make_folds is not None else None
    sources = suite.make_sources(options) if folds is None else folds.sources[0]
    shifted = tuple((key, len(one.types) or 1) for key, one in sources.items() if one.role == "shift")
    plan = Plan(
        suite=suite,
        network=name,
        networks=networks,
        sources=sources,
        runs=config.runs or (1 if folds is None else len(folds.sources)),
        components=config.components,
        groups=tuple(group for group in groups if group in COMPARISONS),
        options=options,
        budget=budget,
        measures=(*suite.measures(options), *((EstimatedAccuracy(shifted),) if shifted else ())),
        folds=() if folds is None else folds.sources,
        notes=() if folds is None else folds.notes,
        stream=config.stream,
    )
    store = Store(config.results)
    refused = None
    try:
        run_suite(
            plan,
            Activations(config.cache, config.device),
            store,
            lambda doing, done: progress(doing, trained + (0.95 - trained) * done),
            fresh=config.fresh,
            team=team,
        )
    except OptionError as error:
        refused = error  # the cost is measured first
    if "cost" in groups and team.first:
        document = measure_cost(
            plan.networks[: config.components],
            plan.sources["train"],
            plan.sources["test"],
            suite.budget if suite.cost_of_training else None,
            lambda doing, done: progress(doing, 0.95 + 0.05 * done),
            images=suite.cost_images,
        )
        store.write_document(suite.name, COST, document)
    if refused is not None:
        raise refused
    progress("done", 1.0)
    return config.results / suite.name
