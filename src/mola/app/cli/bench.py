"""`mola bench`: a suite of the paper's experiments, from trained networks to numbers on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from mola.app.cli.progress import showing_progress


def bench(
    suite: Annotated[str, typer.Argument(help="digits, mnist, cifar10, imagenet or clinc; or uci, for regression.")],
    runs: Annotated[
        int | None, typer.Option(min=1, help="Runs, each with networks of its own.  [default: 1, or all folds]")
    ] = None,
    components: Annotated[
        int | None, typer.Option(min=1, help="Networks in each mixture.  [default: the paper's]")
    ] = None,
    groups: Annotated[
        str,
        typer.Option(
            help="What to compare, separated by commas: main, variants, structures, components, rules, weights, cost, or all "
            "of these; by name alone: tempered (a temperature first, then Laplace), many-classes (structures and links for a "
            "thousand classes), beyond (SWAG and MIMO, which train) and whole (all layers), which take long."
        ),
    ] = "main",
    networks: Annotated[
        str | None,
        typer.Option(
            help="Folder of trained networks; or their names, separated by commas: package.module:function, timm:NAME=FILE, "
            "torchvision:NAME=FILE.  [default: networks/SUITE]"
        ),
    ] = None,
    network: Annotated[str | None, typer.Option(help="Their architecture.  [default: the paper's]")] = None,
    data: Annotated[
        Path | None, typer.Option(envvar="MOLA_DATA", help="Folder that holds the data sets; digits need none.")
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder for the numbers: one JSON a method and run.")] = Path("results"),
    cache: Annotated[
        Path, typer.Option(envvar="MOLA_CACHE", help="Folder for the networks' activations, made once.")
    ] = Path("activations"),
    normalisation: Annotated[
        str | None, typer.Option(help="Of the images: none, cifar10 or imagenet.  [default: the suite's]")
    ] = None,
    corruptions: Annotated[str, typer.Option(help="Of CIFAR-10-C: paper (16 types) or all (19).")] = "paper",
    conventions: Annotated[
        str, typer.Option(help="consistent, or authors: outliers normalised and chosen as in the paper's scripts.")
    ] = "consistent",
    train_images: Annotated[int | None, typer.Option(min=1, help="Fit on at most so many.")] = None,
    test_images: Annotated[int | None, typer.Option(min=1, help="Test on at most so many, shifted or not.")] = None,
    outliers: Annotated[int | None, typer.Option(min=1, help="At most so many of each outlier set.")] = None,
    shifted_images: Annotated[int | None, typer.Option(min=1, help="At most so many of each shifted test set.")] = None,
    types: Annotated[
        str, typer.Option(help="Corruptions of ImageNet-C to use, separated by commas.  [default: all that are there]")
    ] = "",
    image_size: Annotated[
        int | None, typer.Option(min=8, help="Pixels of the side of ImageNet's images as networks are given them.")
    ] = None,
    cross_fit: Annotated[
        bool,
        typer.Option(
            "--cross-fit",
            help="ImageNet without its training images: each class's validation images in five folds, two for the sums, one to "
            "tune, two to test, in five rotations.",
        ),
    ] = False,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream",
            help="Put training data into sums as they are read, and store nothing of them: less disk, fewer ablations.",
        ),
    ] = False,
    train: Annotated[bool, typer.Option("--train", help="Train networks that are missing first.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Make all records anew, in place of what is there.")] = False,
    swag: Annotated[
        str,
        typer.Option(help="Of SWAG: snapshots=, images= (between snapshots), batch_size=, learning_rate=, samples=."),
    ] = "",
    mimo: Annotated[str, typer.Option(help="Of MIMO: epochs=, members=, batch_repetition=.")] = "",
    device: Annotated[str, typer.Option(help="Where to run the networks, such as cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads to compute with.  [default: torch's]")] = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch missing data sets.")] = False,
    sets: Annotated[
        str | None, typer.Option(help="Of uci: names of sets, separated by commas.  [default: all]")
    ] = None,
    splits: Annotated[
        int | None, typer.Option(min=1, help="Of uci: at most so many published splits of a set.")
    ] = None,
    gaps: Annotated[
        bool, typer.Option("--gaps", help="Of uci: also leave out the middle third of the rows by each feature.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show nothing.")] = False,
) -> None:
    """Run a suite of experiments on trained networks.

    What the networks make of the data is computed once and kept; every method, prior and ablation reads it. Each record is
    written as soon as it is made: the same command goes on where it stopped. `mola report` shows what was found.
    """
    import torch

    from mola.distributed import join
    from mola.lab.bench import BenchConfig, run_bench
    from mola.lab.suite import DataOptions
    from mola.lab.suites.registry import find_suite

    if threads is not None:
        torch.set_num_threads(threads)
    if suite == "uci":
        _bench_uci(data, results, sets, splits, gaps=gaps, fresh=fresh, quiet=quiet)
        return
    chosen = find_suite(suite)
    config = BenchConfig(
        suite=chosen,
        runs=runs,
        components=components or chosen.components,
        groups=groups,
        network=network,
        networks=networks or str(Path("networks") / chosen.name),
        results=results,
        cache=cache,
        options=DataOptions(
            directory=data,
            train=train_images,
            outliers=outliers,
            test=test_images,
            shifted=shifted_images,
            image_size=image_size,
            types=tuple(filter(None, (name.strip() for name in types.split(",")))),
            cross_fit=cross_fit,
            download=download,
            normalisation=normalisation,
            corruptions=corruptions,
            conventions=conventions,
        ),
        train=train,
        stream=stream,
        device=device,
        fresh=fresh,
        swag=swag,
        mimo=mimo,
    )
    with join() as team, showing_progress(quiet=quiet or not team.first) as progress:
        folder = run_bench(config, progress, team)
    if not quiet and team.first:
        Console(highlight=False).print(
            f"Records are in [bold]{escape(str(folder))}[/bold]. See them with: mola report {chosen.name} --results "
            f"{escape(str(results))}",
            soft_wrap=True,
        )


def _bench_uci(
    data: Path | None, results: Path, sets: str | None, splits: int | None, *, gaps: bool, fresh: bool, quiet: bool
) -> None:
    from mola.errors import OptionError
    from mola.lab.uci import SETS, UciConfig, as_good, estimates, gap_table, read_records, run_uci, score_table
    from mola.options import one_of

    if data is None:
        raise OptionError(
            "uci: name the folder that holds the sets with --data (a folder for each, with data.txt and index_test_0.txt, ...)."
        )
    names = SETS if sets is None else tuple(one_of(name.strip(), SETS, "--sets") for name in sets.split(","))
    with showing_progress(quiet=quiet) as progress:
        config = UciConfig(data, results, names, splits, gaps, fresh)
        folder = run_uci(config, lambda what, done, total: progress(f"{what}, split {done} of {total}", done / total))
    if quiet:
        return
    records, console = read_records(results), Console(highlight=False)
    for score in ("rmse", "nll"):
        found = estimates(records, score)
        good = as_good({name: one for name, one in found.items() if "MoLA" in one}, "MoLA")
        console.print(f"{score.upper()}\n{score_table(records, score)}", soft_wrap=True)
        console.print(f"MoLA is the best, or within a standard error of it, in {len(good)} of {len(found)} sets.")
    if any(one["split"].startswith("gap") for one in records):
        console.print(gap_table(records), soft_wrap=True)
    console.print(f"Records are in [bold]{escape(str(folder))}[/bold].", soft_wrap=True)
