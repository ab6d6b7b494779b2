"""`mola bench` as one call: from an `Order` to a plan, and the plan carried out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from mola.compare.store import COST, SUITE, Store
from mola.distributed import Team
from mola.errors import OptionError
from mola.lab.activations import Activations, Progress, open_networks
from mola.lab.comparisons import COMPARISONS, NAMED, SWEEP
from mola.lab.cost import measure_cost
from mola.lab.measures import EstimatedAccuracy
from mola.lab.named_networks import are_names, open_named
from mola.lab.networks import Training, check_networks, find_networks, train_networks
from mola.lab.plan import Plan, claim, describe
from mola.lab.runner import run_suite
from mola.lab.suite import Budget, DataOptions, Suite, changed
from mola.options import one_of

GROUPS = (*COMPARISONS, "cost")


@dataclass(frozen=True)
class Order:
    """What a user asks for."""

    suite: Suite
    runs: int | None
    """None is one, or as many as a cross-fit has folds."""
    components: int
    groups: str
    """Names separated by commas; "all" is all but those that must be named."""
    networks: Path | str
    """Their folder, or their names, see `mola.lab.named_networks`."""
    results: Path
    cache: Path
    network: str | None = None
    options: DataOptions = field(default_factory=DataOptions)
    train: bool = False
    """Whether to train networks that are missing."""
    device: str = "cpu"
    """Where the networks are run."""
    stream: bool = False
    """Whether training data go into sums as they are read, and are stored nowhere."""
    fresh: bool = False
    """Whether to make all records anew."""
    swag: str = ""
    """Changes to the suite's budget of SWAG, such as "snapshots=12"."""
    mimo: str = ""
    """The same of MIMO."""

    def budget(self) -> Budget:
        """What methods that train may spend."""
        given = self.suite.budget
        return Budget(changed(given.swag, self.swag), changed(given.mimo, self.mimo))

    def chosen_groups(self) -> tuple[str, ...]:
        """The groups by name, each once; `OptionError` for one that is not known."""
        names = [one_of(name.strip(), (*GROUPS, "all"), "groups") for name in self.groups.split(",")]
        if "all" in names:
            names = [*(group for group in GROUPS if group not in NAMED), *(name for name in names if name in NAMED)]
        return tuple(dict.fromkeys(names))


def carry_out(order: Order, progress: Progress, team: Team | None = None) -> Path:
    """Train what is missing, if asked to; run the suite; measure cost, if asked to.

    Args:
        order: what the user asks for.
        progress: told what is being done, and which share is done.
        team: the processes that divide the work among them; the records are those of one process. None is this one alone.

    Returns:
        The folder of the suite's results.
    """
    groups, budget, together = order.chosen_groups(), order.budget(), Team.single() if team is None else team
    if order.options.cross_fit and order.suite.make_folds is None:
        raise OptionError(f"the {order.suite.name} suite has training data of its own: leave --cross-fit out.")
    named = isinstance(order.networks, str) and are_names(order.networks)
    # Networks that are named one by one bring images to their own size, and normalise them.
    options = replace(order.options, normalisation=order.options.normalisation or "none") if named else order.options
    name, build = order.suite.builder(None if named else order.network)
    trained = 0.0
    if order.train:
        if named:
            raise OptionError("--train makes networks in a folder: leave it out where --networks names trained ones.")
        trained = 0.5
        count = max((order.runs or 1) * order.components, SWEEP if "components" in groups else 0)
        training = Training(order.suite, count, order.suite.recipe, order.network, options=order.options)
        train_networks(training, Path(order.networks), lambda doing, done: progress(doing, trained * done), together)
    if named:
        networks = open_named(str(order.networks), order.suite.outputs)
        name = ", ".join(network.label for network in networks)
    else:
        paths = find_networks(Path(order.networks))
        check_networks(paths, order.suite, name, order.options)
    progress(f"reading {order.suite.title}", trained)
    make_folds = order.suite.make_folds if options.cross_fit else None
    folds = None if make_folds is None else make_folds(options)
    sources = order.suite.make_sources(options) if folds is None else folds.sources[0]
    if not named:
        networks = open_networks(paths, build, name)
    runs = order.runs or (1 if folds is None else len(folds.sources))
    comparisons = tuple(group for group in groups if group in COMPARISONS)
    shifted = tuple((key, len(one.types) or 1) for key, one in sources.items() if one.role == "shift")
    estimates = (EstimatedAccuracy(shifted),) if shifted else ()
    plan = Plan(
        suite=order.suite,
        network=name,
        networks=networks,
        sources=sources,
        runs=runs,
        components=order.components,
        groups=comparisons,
        options=options,
        budget=budget,
        measures=(*order.suite.measures(options), *estimates),
        folds=() if folds is None else folds.sources,
        notes=() if folds is None else folds.notes,
        stream=order.stream,
    )
    store = Store(order.results)
    if together.first and not comparisons:  # else `run_suite` does it
        before = claim(plan, store, fresh=order.fresh)
        store.write_document(order.suite.name, SUITE, describe(plan, before))
    refused = None
    if comparisons:
        try:
            run_suite(
                plan,
                Activations(order.cache, order.device),
                store,
                lambda doing, done: progress(doing, trained + (0.95 - trained) * done),
                fresh=order.fresh,
                team=together,
            )
        except OptionError as error:
            refused = error  # what can still be done is done first
    if "cost" in groups and together.first:
        document = measure_cost(
            plan.networks[: order.components],
            plan.sources["train"],
            plan.sources["test"],
            order.suite.budget if order.suite.cost_of_training else None,
            lambda doing, done: progress(doing, 0.95 + 0.05 * done),
            images=order.suite.cost_images,
        )
        store.write_document(order.suite.name, COST, document)
    if refused is not None:
        raise refused
    progress("done", 1.0)
    return order.results / order.suite.name
