"""`molaplace bench`: create a plan from networks and options, run it, and write records."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from molaplace.cli.option_groups import Device, RunOptions
from molaplace.cli.options import option, parse_names
from molaplace.distributed import Team
from molaplace.errors import OptionError
from molaplace.options import one_of
from molaplace_lab.activations import Activations, Progress, open_networks
from molaplace_lab.comparisons import COMPARISONS, NAMED, SWEEP
from molaplace_lab.cost import measure_cost
from molaplace_lab.networks import Training, are_names, check_networks, find_networks, open_named, train_networks
from molaplace_lab.runner import Plan, run_suite
from molaplace_lab.store import COST, Store
from molaplace_lab.suite import Budget, DataOptions, changed
from molaplace_lab.suites.registry import find_suite

NETWORKS, DATA, TRAINED, UCI = "Networks", "Data", "Methods that train", "Suite uci (regression)"


@dataclass(frozen=True, kw_only=True)
class BenchOptions(RunOptions, Device):
    """Options for `molaplace bench`."""

    suite: str = option(
        help="digits, mnist, cifar10, imagenet, clinc, or uci for regression", argument=True, metavar="SUITE"
    )
    runs: int | None = option(None, "Number of runs, each with its own networks", minimum=1, shown="1, or all folds")
    components: int | None = option(None, "Number of networks in each mixture", minimum=1, shown="the paper's")
    groups: str = option(
        "main",
        "Comparisons, separated by commas: main, variants, structures, components, rules, weights, cost, or all. 'all' does "
        "not include tempered (temperature scaling first), many-classes (1000 classes), beyond (SWAG and MIMO) or whole (all layers)",
        metavar="NAMES",
    )
    results: Path = option(
        Path("results"), "Folder for the results, with one JSON file per method and run", metavar="DIR"
    )
    cache: Path = option(
        Path("activations"), "Folder for activations (or set MOLAPLACE_CACHE)", metavar="DIR", envvar="MOLAPLACE_CACHE"
    )
    data: Path | None = option(
        None,
        "Folder that contains the data sets (or set MOLAPLACE_DATA); not needed for digits",
        metavar="DIR",
        envvar="MOLAPLACE_DATA",
    )
    download: bool = option(False, "Download missing data sets")
    fresh: bool = option(False, "Replace existing records of these comparisons and runs")
    networks: str | None = option(
        None,
        "Folder of trained networks, or a comma-separated list: package.module:function, timm:NAME=FILE, torchvision:NAME=FILE",
        panel=NETWORKS,
        metavar="NAMES",
        shown="networks/SUITE",
    )
    network: str | None = option(None, "Architecture", panel=NETWORKS, metavar="NAME", shown="the paper's")
    train: bool = option(False, "Train missing networks first", panel=NETWORKS)
    normalisation: str | None = option(
        None, "none, cifar10 or imagenet", panel=DATA, metavar="NAME", shown="the suite's"
    )
    corruptions: str = option(
        "paper", "Corruptions of CIFAR-10-C: paper (16 types) or all (19 types)", panel=DATA, metavar="WHICH"
    )
    train_images: int | None = option(None, "Fit on at most N inputs", panel=DATA, minimum=1)
    test_images: int | None = option(None, "Test on at most N inputs from each test set", panel=DATA, minimum=1)
    outliers: int | None = option(None, "Use at most N inputs from each OOD set", panel=DATA, minimum=1)
    shifted_images: int | None = option(None, "Use at most N inputs from each shifted test set", panel=DATA, minimum=1)
    types: tuple[str, ...] = option(
        (),
        "Corruptions of ImageNet-C, separated by commas",
        panel=DATA,
        metavar="NAMES",
        parse=parse_names,
        shown="all",
    )
    image_size: int | None = option(None, "ImageNet: side length of the images in pixels", panel=DATA, minimum=8)
    cross_fit: bool = option(
        False, "Without ImageNet training images, use five folds of the validation images", panel=DATA
    )
    stream: bool = option(
        False, "Do not store training activations (saves disk space, but allows fewer ablations)", panel=DATA
    )
    swag: str = option(
        "",
        "snapshots=, images= (between snapshots), batch_size=, learning_rate=, samples=",
        panel=TRAINED,
        metavar="SETTINGS",
    )
    mimo: str = option("", "epochs=, members=, batch_repetition=", panel=TRAINED, metavar="SETTINGS")
    sets: tuple[str, ...] = option(
        (), "Data sets, separated by commas", panel=UCI, metavar="NAMES", parse=parse_names, shown="all"
    )
    splits: int | None = option(None, "Use at most N published splits of each set", panel=UCI, minimum=1)
    gaps: bool = option(
        False, "Also run gap splits, each of which tests on the middle third of one feature's values", panel=UCI
    )


def run_bench(options: BenchOptions, progress: Progress, team: Team) -> Path:
    """Run a suite and return the folder with its results. If requested, train missing networks first and measure the cost last."""
    suite, groups = find_suite(options.suite), _groups(options.groups)
    components, runs = options.components or suite.components, options.runs or 1
    budget = Budget(changed(suite.budget.swag, options.swag), changed(suite.budget.mimo, options.mimo))
    data = DataOptions(
        directory=options.data,
        train=options.train_images,
        outliers=options.outliers,
        test=options.test_images,
        shifted=options.shifted_images,
        image_size=options.image_size,
        types=options.types,
        cross_fit=options.cross_fit,
        download=options.download,
        normalisation=options.normalisation,
        corruptions=options.corruptions,
    )
    if data.cross_fit and suite.make_folds is None:
        raise OptionError(f"the {suite.name} suite has training data, so it needs no cross-fitting. Omit --cross-fit.")
    trained = 0.5 if options.train else 0.0
    given = options.networks or str(Path("networks") / suite.name)
    if are_names(given):
        if options.train:
            raise OptionError(
                "--train needs a folder of networks, but --networks lists trained networks. Omit --train."
            )
        # Networks given by name, such as timm:NAME=FILE, resize and normalise images themselves.
        data = replace(data, normalisation=data.normalisation or "none")
        networks = open_named(given, suite.outputs)
        name = ", ".join(network.label for network in networks)
    else:
        name, build = suite.builder(options.network)
        if options.train:
            count = max(runs * components, SWEEP if "components" in groups else 0)
            training = Training(suite, count, suite.recipe, options.network, options=data, device=options.device)
            train_networks(training, Path(given), lambda doing, done: progress(doing, trained * done), team)
        paths = find_networks(Path(given))
        check_networks(paths, suite, name, data)
        networks = open_networks(paths, build, name)
    progress(f"reading {suite.title}", trained)
    folds = [suite.make_sources(data)] if suite.make_folds is None or not data.cross_fit else suite.make_folds(data)
    plan = Plan(
        suite=suite,
        network=name,
        networks=networks,
        folds=folds,
        runs=options.runs or len(folds),
        components=components,
        groups=tuple(group for group in groups if group in COMPARISONS),
        options=data,
        budget=budget,
        measures=suite.measures(data),
        stream=options.stream,
    )
    store = Store(options.results)
    refused = None
    try:
        run_suite(
            plan,
            Activations(options.cache, options.device),
            store,
            lambda doing, done: progress(doing, trained + (0.95 - trained) * done),
            fresh=options.fresh,
            team=team,
        )
    except OptionError as error:
        refused = error  # raise this error only after measuring the cost
    if "cost" in groups and team.first:
        document = measure_cost(
            plan.networks[:components],
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
    return options.results / suite.name


def _groups(text: str) -> list[str]:
    every = (*COMPARISONS, "cost")
    names = [one_of(name.strip(), (*every, "all"), "groups") for name in text.split(",")]
    if "all" in names:
        names = [*(group for group in every if group not in NAMED), *(name for name in names if name in NAMED)]
    return list(dict.fromkeys(names))
