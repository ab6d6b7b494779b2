"""`molaplace bench`: run a suite of the paper's experiments on trained networks and save the results."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from molaplace.cli.jobs.bench import BenchOptions, run_bench
from molaplace.cli.options import check_folder
from molaplace.cli.progress import showing_progress
from molaplace.distributed import join
from molaplace.errors import OptionError
from molaplace.options import one_of
from molaplace_lab.suites.registry import SUITES
from molaplace_lab.uci import SETS, as_good, gap_table, read_records, run_uci, score_table


def bench(options: BenchOptions) -> None:
    """Run a suite of experiments on trained networks.

    The networks' activations are computed once, stored, and reused for every method, prior and ablation. Each record is written
    as soon as it is complete. Running the same command again resumes after the last record. `molaplace report` shows the results.
    """
    one_of(options.suite, (*SUITES, "uci"), "suite")
    check_folder(options.results)
    if options.suite == "uci":
        _bench_uci(options)
        return
    check_folder(options.cache)
    with join() as team, showing_progress(quiet=options.quiet or not team.first) as progress:
        folder = run_bench(options, progress, team)
    if not options.quiet and team.first:
        Console(highlight=False).print(
            f"Records are in [bold]{escape(str(folder))}[/bold]. To show them, run: molaplace report {folder.name} "
            f"--results {escape(str(options.results))}",
            soft_wrap=True,
        )


def _bench_uci(options: BenchOptions) -> None:
    if options.data is None:
        raise OptionError(
            "the uci suite needs a folder of data sets. Pass it with --data. Each set needs a subfolder with data.txt, "
            "index_test_0.txt, ..."
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
        console.print(
            f"MoLA is the best method, or within one standard error of the best, on {good.sum()} of {len(good)} data sets."
        )
    if any(one["split"].startswith("gap") for one in records):
        console.print(gap_table(records), soft_wrap=True)
    console.print(f"Records are in [bold]{escape(str(folder))}[/bold].", soft_wrap=True)
