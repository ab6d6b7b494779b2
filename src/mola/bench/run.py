"""From what a user asks for to a plan, and the plan carried out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mola.bench.activations import Activations, Progress, open_networks
from mola.bench.comparisons import COMPARISONS, SWEEP
from mola.bench.cost import measure_cost
from mola.bench.networks import Training, find_networks, train_networks
from mola.bench.runner import Plan, run_suite
from mola.bench.store import COST, Store
from mola.bench.suite import DataOptions, Suite
from mola.choices import one_of

__all__ = ["Order", "carry_out"]

GROUPS = (*COMPARISONS, "cost")


@dataclass(frozen=True)
class Order:
    """What a user asks for."""

    suite: Suite
    runs: int
    components: int
    groups: str
    """Names separated by commas, or "all"."""
    networks: Path
    results: Path
    cache: Path
    network: str | None = None
    options: DataOptions = field(default_factory=DataOptions)
    train: bool = False
    """Whether to train networks that are missing."""

    def chosen_groups(self) -> tuple[str, ...]:
        """The groups by name; `OptionError` for one that is not known."""
        if self.groups == "all":
            return GROUPS
        return tuple(one_of(name.strip(), (*GROUPS, "all"), "groups") for name in self.groups.split(","))


def carry_out(order: Order, progress: Progress) -> Path:
    """Train what is missing, if asked to; run the suite; measure cost, if asked to.

    Args:
        order: what the user asks for.
        progress: told what is being done, and which share is done.

    Returns:
        The folder of the suite's results.
    """
    groups = order.chosen_groups()
    name, build = order.suite.builder(order.network)
    trained = 0.0
    if order.train:
        trained = 0.5
        count = max(order.runs * order.components, SWEEP if "components" in groups else 0)
        training = Training(order.suite, count, order.suite.recipe, order.network, options=order.options)
        train_networks(training, order.networks, lambda doing, done: progress(doing, trained * done))
    networks = open_networks(find_networks(order.networks), build)
    progress(f"reading {order.suite.title}", trained)
    sources = order.suite.make_sources(order.options)
    store = Store(order.results)
    comparisons = tuple(group for group in groups if group in COMPARISONS)
    if comparisons:
        plan = Plan(order.suite, name, networks, sources, order.runs, order.components, comparisons)
        run_suite(
            plan,
            Activations(order.cache),
            store,
            lambda doing, done: progress(doing, trained + (0.95 - trained) * done),
        )
    if "cost" in groups:
        members = networks[: order.components]
        document = measure_cost(
            members, sources["train"], sources["test"], lambda doing, done: progress(doing, 0.95 + 0.05 * done)
        )
        store.write_document(order.suite.name, COST, document)
    progress("done", 1.0)
    return order.results / order.suite.name
