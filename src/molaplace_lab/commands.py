"""The commands of the laboratory: `train`, `bench` and `report`."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from molaplace.distributed import join
from molaplace.errors import OptionError
from molaplace.options import one_of
from molaplace.progress import Progress, part
from molaplace_lab.activations import ActivationCache, Network, open_networks
from molaplace_lab.comparisons import COMPARISONS, SEPARATE
from molaplace_lab.cost import measure_cost
from molaplace_lab.networks import Training, are_names, check_networks, find_networks, open_named, train_networks
from molaplace_lab.records import COST, Store
from molaplace_lab.runner import Plan, run_suite
from molaplace_lab.suite import Budget, DataOptions, Suite, changed
from molaplace_lab.suites.registry import SUITES
from molaplace_lab.uci.comparison import read_records, run_uci
from molaplace_lab.uci.data import SETS
from molaplace_lab.uci.tables import as_good, gap_table, score_table

app = typer.Typer(
    name="python -m molaplace_lab", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)

Data = Annotated[Path | None, typer.Option(metavar="DIR", envvar="MOLAPLACE_DATA", help="Folder of the data sets")]
Download = Annotated[bool, typer.Option("--download", help="Download missing data sets")]
Architecture = Annotated[str | None, typer.Option(metavar="NAME", help="Architecture; by default the paper's")]
TrainImages = Annotated[int | None, typer.Option(min=1, help="Use at most N training inputs")]
Device = Annotated[str, typer.Option(metavar="NAME", help="Device to compute on, such as cuda")]
Threads = Annotated[int | None, typer.Option(min=1, help="Number of threads")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing")]
Results = Annotated[Path, typer.Option(metavar="DIR", help="Folder of the records: one JSON file per method and run")]


@app.callback()
def _about() -> None:
    """The paper's experiments: train the networks of a suite, compare methods on them, and report the results.

    With torchrun, several processes share the work of train and bench: torchrun --nproc-per-node=4 -m molaplace_lab bench ...
    """


@app.command()
def train(
    suite: Annotated[str, typer.Argument(help="digits, mnist, cifar10, clinc, clinc-lora or questions-lora")],
    networks: Annotated[int, typer.Option(min=1, help="Number of networks")] = 5,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Folder; by default networks/SUITE")
    ] = None,
    data: Data = None,
    download: Download = False,
    network: Architecture = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Number of epochs")] = None,
    train_images: TrainImages = None,
    seed: Annotated[int, typer.Option(min=0, help="Base seed, from which each network's seed is derived")] = 0,
    device: Device = "cpu",
    threads: Threads = None,
    quiet: Quiet = False,
) -> None:
    """Train the networks of a suite, each with its own seed.

    Finished networks are saved as NN.safetensors; unfinished networks are saved after every epoch. Running the same command
    again resumes training and gives the same weights as an uninterrupted run.
    """
    _set_threads(threads)
    trainable = [name for name, definition in SUITES.items() if definition.training_data is not None]
    chosen = SUITES[suite] if suite in SUITES else SUITES[one_of(suite, trainable, "suite")]
    recipe = replace(chosen.recipe, epochs=epochs or chosen.recipe.epochs)
    options = DataOptions(directory=data, train=train_images, download=download)
    folder = output or Path("networks") / chosen.name
    names = [path.name for path in folder.glob("[!.]*")]
    if names and not any(re.fullmatch(r"\d+\.(safetensors|training)", name) for name in names):
        raise OptionError(f"{folder} contains other files but no networks. Choose another --output.")
    training = Training(chosen, networks, recipe, network, seed, options, device)
    with join() as team:
        paths = train_networks(training, folder, _progress(quiet=quiet or not team.first), team)
        if not quiet and team.first:
            typer.echo(f"The trained networks ({len(paths)}) are in {folder}.")


@app.command()
def bench(
    suite: Annotated[
        str,
        typer.Argument(
            help="digits, mnist, cifar10, imagenet, clinc, clinc-lora, questions-lora, or uci for regression"
        ),
    ],
    runs: Annotated[
        int | None, typer.Option(min=1, help="Number of runs, each with its own networks; by default 1, or all folds")
    ] = None,
    components: Annotated[
        int | None, typer.Option(min=1, help="Networks in each mixture; by default the paper's")
    ] = None,
    groups: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Comparisons, separated by commas: main, variants, structures, components, rules, weights, cost, or all. 'all' "
            "does not include scaling (JUCAL, structured scaling), tempered (temperature scaling first), many-classes (1000 classes), "
            "beyond (SWAG and MIMO), whole (all layers) or dropout (Monte Carlo dropout)",
        ),
    ] = "main",
    results: Results = Path("results"),
    cache: Annotated[
        Path, typer.Option(metavar="DIR", envvar="MOLAPLACE_CACHE", help="Folder of the networks' activations")
    ] = Path("activations"),
    data: Data = None,
    download: Download = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Replace existing records of these comparisons and runs")
    ] = False,
    networks: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Folder of trained networks (by default networks/SUITE), or a comma-separated list: package.module:function, "
            "package.module:function=FILE",
        ),
    ] = None,
    network: Architecture = None,
    train: Annotated[bool, typer.Option("--train", help="Train missing networks first")] = False,
    normalisation: Annotated[str | None, typer.Option(metavar="NAME", help="none, cifar10 or imagenet")] = None,
    train_images: TrainImages = None,
    test_images: Annotated[int | None, typer.Option(min=1, help="Use at most N inputs of each test set")] = None,
    outliers: Annotated[int | None, typer.Option(min=1, help="Use at most N inputs of each OOD set")] = None,
    shifted_images: Annotated[int | None, typer.Option(min=1, help="Use at most N inputs of each shifted set")] = None,
    types: Annotated[str, typer.Option(help="Corruptions of ImageNet-C, separated by commas; by default all")] = "",
    image_size: Annotated[int | None, typer.Option(min=8, help="ImageNet: side length of the images")] = None,
    cross_fit: Annotated[
        bool, typer.Option("--cross-fit", help="ImageNet without training images: five folds of the validation images")
    ] = False,
    swag: Annotated[
        str, typer.Option(help="snapshots=, images= (between snapshots), batch_size=, learning_rate=, samples=")
    ] = "",
    mimo: Annotated[str, typer.Option(help="epochs=, members=, batch_repetition=")] = "",
    sets: Annotated[str, typer.Option(help="uci: data sets, separated by commas; by default all")] = "",
    splits: Annotated[int | None, typer.Option(min=1, help="uci: at most N published splits of each set")] = None,
    gaps: Annotated[
        bool, typer.Option("--gaps", help="uci: also test on the middle third of each feature's values")
    ] = False,
    device: Device = "cpu",
    threads: Threads = None,
    quiet: Quiet = False,
) -> None:
    """Compare methods on the trained networks of a suite, and write one record per method and run.

    The networks' activations are computed once, stored, and reused for every method, prior and ablation. Running the same
    command again resumes after the last record. `report` shows the results.
    """
    _set_threads(threads)
    one_of(suite, (*SUITES, "uci"), "suite")
    if suite == "uci":
        _bench_uci(data, results, _names(sets), splits, gaps=gaps, fresh=fresh, quiet=quiet)
        return
    definition = SUITES[suite]
    options = DataOptions(
        directory=data,
        train=train_images,
        outliers=outliers,
        test=test_images,
        shifted=shifted_images,
        image_size=image_size,
        types=_names(types),
        cross_fit=cross_fit,
        download=download,
        normalisation=normalisation,
    )
    definition.check_options(options)
    comparisons = _comparisons(groups)
    budget = Budget(changed(definition.budget.swag, swag), changed(definition.budget.mimo, mimo))
    count = components or definition.components
    names = networks or str(Path("networks") / suite)
    if are_names(names):
        # Networks given by name resize and normalise images themselves.
        options = replace(options, normalisation=normalisation or "none")
    with join() as team:
        progress = _progress(quiet=quiet or not team.first)
        if train:
            if are_names(names):
                raise OptionError("--train needs a folder, but --networks lists trained networks. Omit --train.")
            needed = max((runs or 1) * count, definition.sweep if "components" in comparisons else 0)
            training = Training(definition, needed, definition.recipe, network, options=options, device=device)
            train_networks(training, Path(names), part(progress, 0.0, 0.5), team)
        progress = part(progress, 0.5 if train else 0.0, 1.0)
        name, opened = _open_networks(definition, names, network, options)
        progress(f"reading {definition.title}", 0.0)
        folds = definition.make_folds if options.cross_fit else None
        sources = [definition.make_sources(options)] if folds is None else folds(options)
        plan = Plan(
            suite=definition,
            network=name,
            networks=opened,
            folds=sources,
            runs=runs or len(sources),
            components=count,
            groups=tuple(comparison for comparison in comparisons if comparison in COMPARISONS),
            options=options,
            budget=budget,
            measures=definition.measures(options),
        )
        store = Store(results)
        failure: OptionError | None = None
        try:
            run_suite(plan, ActivationCache(cache, device), store, part(progress, 0.0, 0.95), fresh=fresh, team=team)
        except OptionError as error:
            failure = error  # raise this error only after measuring the cost
        if "cost" in comparisons and team.first:
            store.write_document(suite, COST, _measure_cost(plan, part(progress, 0.95, 1.0)))
        if failure is not None:
            raise failure
        progress("done", 1.0)
        if not quiet and team.first:
            typer.echo(f"Records are in {results / suite}. To show them: report {suite} --results {results}")


@app.command()
def report(
    suites: Annotated[
        list[str] | None,
        typer.Argument(help="Suites; by default all with results. `bench uci` prints the tables of uci"),
    ] = None,
    results: Results = Path("results"),
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the page, the figures and the tables")
    ] = Path("report"),
    quiet: Quiet = False,
) -> None:
    """Present the records as tables, figures and a web page, beside the paper's numbers.

    Writes a self-contained index.html, tables.md and the figures. Needs neither networks nor data.
    """
    # Imported here because matplotlib is slow to import.
    from rich.console import Console

    from molaplace.report.tables import print_table
    from molaplace_lab.report.reading import read_suites
    from molaplace_lab.report.tables import TERMINAL, suite_tables
    from molaplace_lab.report.writing import write_report

    results_of_suites = read_suites(results, suites or ())
    page = write_report(results_of_suites, output, _progress(quiet=quiet))
    if quiet:
        return
    console = Console(highlight=False, markup=False)
    for suite in results_of_suites:
        tables = suite_tables(suite)
        for name in TERMINAL:
            if name in tables:
                print_table(console, tables[name])
    console.print(f"Wrote {page}, with tables and figures in the same folder.", soft_wrap=True)


def _open_networks(suite: Suite, names: str, network: str | None, options: DataOptions) -> tuple[str, list[Network]]:
    # Return the name of the architecture and the trained networks, which are listed by name or stored in a folder.
    if are_names(names):
        networks = open_named(names)
        return ", ".join(network.label for network in networks), networks
    name, build = suite.builder(network)
    paths = find_networks(Path(names))
    check_networks(paths, suite, name, options)
    return name, open_networks(paths, build, name)


def _measure_cost(plan: Plan, progress: Progress) -> dict[str, object]:
    return measure_cost(
        plan.networks[: plan.components],
        plan.sources["train"],
        plan.sources["test"],
        plan.suite.budget if plan.suite.cost_of_training else None,
        progress,
        images=plan.suite.cost_images,
    )


def _bench_uci(
    data: Path | None,
    results: Path,
    sets: tuple[str, ...],
    splits: int | None,
    *,
    gaps: bool,
    fresh: bool,
    quiet: bool,
) -> None:
    if data is None:
        raise OptionError(
            "the uci suite needs a folder of data sets. Pass it with --data. Each set needs a subfolder with data.txt, "
            "index_test_0.txt, ..."
        )
    names = tuple(one_of(name, SETS, "sets") for name in sets or SETS)
    show = _progress(quiet=quiet)

    def progress(doing: str, done: int, total: int) -> None:
        show(f"{doing}, split {done} of {total}", done / total)

    folder = run_uci(data, results, names, splits=splits, gaps=gaps, fresh=fresh, progress=progress)
    if quiet:
        return
    records = read_records(results)
    for score in ("rmse", "nll"):
        typer.echo(f"{score.upper()}\n{score_table(records, score)}")
        best = as_good(records, score)["MoLA"]
        typer.echo(f"MoLA is best, or within one standard error of the best, on {best.sum()} of {len(best)} data sets.")
    if any(record["split"].startswith("gap") for record in records):
        typer.echo(gap_table(records))
    typer.echo(f"Records are in {folder}.")


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def _comparisons(text: str) -> list[str]:
    known = (*COMPARISONS, "cost")
    names = [one_of(name, (*known, "all"), "groups") for name in _names(text)]
    if "all" in names:
        names = [*(name for name in known if name not in SEPARATE), *(name for name in names if name in SEPARATE)]
    return list(dict.fromkeys(names))


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)


def _progress(*, quiet: bool) -> Progress:
    # Print one line per step on stderr; of steps that differ only in numbers, one line per tenth of the work.
    printed: set[tuple[str, int]] = set()

    def show(doing: str, done: float) -> None:
        step = re.sub(r"\d+", "", doing), int(10 * done)
        if not quiet and step not in printed:
            printed.add(step)
            sys.stderr.write(f"{round(100 * done):3d} % {doing}\n")

    return show
