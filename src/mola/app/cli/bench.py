"""`mola bench`: a suite of the paper's experiments, from trained networks to numbers on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from mola.app.cli.progress import showing_progress
from mola.app.jobs.groups import Computing, Device
from mola.app.options import check_writable, option, parse_names
from mola.errors import OptionError

NETWORKS, DATA, TRAINED, UCI = "Networks", "Data", "Methods that train", "The suite uci (regression)"


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Computing, Device):
    """The options of `mola bench`."""

    suite: str = option(
        help="digits, mnist, cifar10, imagenet, clinc, or uci for regression", argument=True, metavar="SUITE"
    )
    runs: int | None = option(None, "Runs, each with its own networks", minimum=1, shown="1, or all folds")
    components: int | None = option(None, "Networks in each mixture", minimum=1, shown="the paper's")
    groups: str = option(
        "main",
        "Comparisons, separated by commas: main, variants, structures, components, rules, weights, cost, or all of these; "
        "only by name: tempered (temperature first), many-classes (a thousand classes), beyond (SWAG and MIMO), whole (all "
        "layers)",
        metavar="NAMES",
    )
    results: Path = option(Path("results"), "Folder for the numbers, one JSON file per method and run", metavar="DIR")
    cache: Path = option(
        Path("activations"), "Folder for activations, also MOLA_CACHE", metavar="DIR", envvar="MOLA_CACHE"
    )
    data: Path | None = option(
        None, "Folder of the data sets, also MOLA_DATA; digits need none", metavar="DIR", envvar="MOLA_DATA"
    )
    download: bool = option(False, "Download missing data sets")
    fresh: bool = option(False, "Replace all records")
    networks: str | None = option(
        None,
        "Folder of trained networks; or package.module:function, timm:NAME=FILE, torchvision:NAME=FILE, separated by commas",
        panel=NETWORKS,
        metavar="NAMES",
        shown="networks/SUITE",
    )
    network: str | None = option(None, "Architecture", panel=NETWORKS, metavar="NAME", shown="the paper's")
    train: bool = option(False, "Train missing networks first", panel=NETWORKS)
    normalisation: str | None = option(
        None, "none, cifar10 or imagenet", panel=DATA, metavar="NAME", shown="the suite's"
    )
    corruptions: str = option("paper", "CIFAR-10-C: paper (16 types) or all (19)", panel=DATA, metavar="WHICH")
    train_images: int | None = option(None, "Fit on at most N", panel=DATA, minimum=1)
    test_images: int | None = option(None, "Test on at most N, shifted or not", panel=DATA, minimum=1)
    outliers: int | None = option(None, "At most N of each OOD set", panel=DATA, minimum=1)
    shifted_images: int | None = option(None, "At most N of each shifted test set", panel=DATA, minimum=1)
    types: tuple[str, ...] = option(
        (),
        "Corruptions of ImageNet-C, separated by commas",
        panel=DATA,
        metavar="NAMES",
        parse=parse_names,
        shown="all",
    )
    image_size: int | None = option(None, "ImageNet: side of the images in pixels", panel=DATA, minimum=8)
    cross_fit: bool = option(
        False, "ImageNet without its training images: validation images in five folds and five rotations", panel=DATA
    )
    stream: bool = option(False, "Store no training activations: less disk, fewer ablations", panel=DATA)
    swag: str = option(
        "",
        "snapshots=, images= (between them), batch_size=, learning_rate=, samples=",
        panel=TRAINED,
        metavar="SETTINGS",
    )
    mimo: str = option("", "epochs=, members=, batch_repetition=", panel=TRAINED, metavar="SETTINGS")
    sets: tuple[str, ...] = option(
        (), "Data sets, separated by commas", panel=UCI, metavar="NAMES", parse=parse_names, shown="all"
    )
    splits: int | None = option(None, "At most N published splits of each set", panel=UCI, minimum=1)
    gaps: bool = option(False, "Also leave out the middle third of the rows by each feature", panel=UCI)


def bench(options: BenchOptions) -> None:
    """Run a suite of experiments on trained networks.

    Activations of the networks are computed once and kept; every method, prior and ablation reads them. Each record is
    written as soon as it is complete, and the same command resumes after the last record. `mola report` shows the results.
    """
    from mola.distributed import join
    from mola.lab.bench import BenchConfig, run_bench
    from mola.lab.suite import DataOptions
    from mola.lab.suites.registry import find_suite

    check_writable(options.results)
    if options.suite == "uci":
        _bench_uci(options)
        return
    suite = find_suite(options.suite)
    config = BenchConfig(
        suite=suite,
        runs=options.runs,
        components=options.components or suite.components,
        groups=options.groups,
        network=options.network,
        networks=options.networks or str(Path("networks") / suite.name),
        results=options.results,
        cache=options.cache,
        options=DataOptions(
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
        ),
        train=options.train,
        stream=options.stream,
        device=options.device,
        fresh=options.fresh,
        swag=options.swag,
        mimo=options.mimo,
    )
    with join() as team, showing_progress(quiet=options.quiet or not team.first) as progress:
        folder = run_bench(config, progress, team)
    if not options.quiet and team.first:
        Console(highlight=False).print(
            f"Records are in [bold]{escape(str(folder))}[/bold]. See them with: mola report {suite.name} --results "
            f"{escape(str(options.results))}",
            soft_wrap=True,
        )


def _bench_uci(options: BenchOptions) -> None:
    from mola.lab.uci import SETS, as_good, gap_table, read_records, run_uci, score_table
    from mola.options import one_of

    if options.data is None:
        raise OptionError(
            "uci: name the folder that holds the sets with --data (a folder for each, with data.txt and index_test_0.txt, ...)."
        )
    names = tuple(one_of(name, SETS, "--sets") for name in options.sets or SETS)
    with showing_progress(quiet=options.quiet) as progress:
        folder = run_uci(
            options.data,
            options.results,
            names,
            splits=options.splits,
            gaps=options.gaps,
            fresh=options.fresh,
            progress=lambda what, done, total: progress(f"{what}, split {done} of {total}", done / total),
        )
    if options.quiet:
        return
    records, console = read_records(options.results), Console(highlight=False)
    for score in ("rmse", "nll"):
        good = as_good(records, score)["MoLA"]
        console.print(f"{score.upper()}\n{score_table(records, score)}", soft_wrap=True)
        console.print(f"MoLA is the best, or within a standard error of it, in {good.sum()} of {len(good)} sets.")
    if any(one["split"].startswith("gap") for one in records):
        console.print(gap_table(records), soft_wrap=True)
    console.print(f"Records are in [bold]{escape(str(folder))}[/bold].", soft_wrap=True)
