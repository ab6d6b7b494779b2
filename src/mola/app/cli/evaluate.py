"""`mola evaluate`: the methods side by side on the user's own data."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from mola.app.cli.progress import showing_progress
from mola.app.cli.run_file import Config, check_run, write_run
from mola.app.cli.shared_options import (
    RUN,
    Data,
    Device,
    Json,
    Network,
    Quiet,
    Strict,
    Threads,
    Trust,
    finish,
    set_threads,
)
from mola.app.jobs.rows import Account
from mola.compare.record import Comparison
from mola.compare.report.single_run_tables import FEW
from mola.compare.report.tables import fitting, for_terminal

DRAWING_BEGINS = 0.8
"""Share of the whole time after which figures are drawn."""

MOST_LINES = 25
"""Largest number of lines in the terminal, that of the page included."""


def evaluate(
    context: typer.Context,
    posterior: Annotated[Path, typer.Argument(help="Folder that `mola fit` wrote.")],
    test: Annotated[str, typer.Option(help="Labelled data to compare on, as for `mola fit --train`.")],
    ood: Annotated[
        list[str] | None, typer.Option(help="Data of no class; labels are not read. Can be repeated.")
    ] = None,
    val: Annotated[
        str | None,
        typer.Option(
            help="Labelled data for temperatures, scaled noise and LLLA.  [default: those the posterior was tuned on]"
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the page, the figures and the numbers.")] = Path("report"),
    data: Data = None,
    strict: Strict = False,
    network: Network = None,
    trust: Trust = False,
    seed: Annotated[int, typer.Option(min=0, help="Of your own code that draws.", rich_help_panel=RUN)] = 0,
    device: Device = "cpu",
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
    config: Config = None,
) -> None:
    """Compare MAP, temperature scaling, the deep ensemble, LLLA and MoLA on your own data.

    Accuracy, log loss, Brier score and calibration error on the test data, also class by class; on data of no class how sure each
    method is of them and how well it tells them apart, by every outlier score that it has. All with standard errors, and bold only
    what leads by more than chance. Where outputs are numbers: errors, log-likelihood, CRPS, how often intervals hold the target
    and how wide they are. Of networks with outputs at many positions, 256 of each input are compared. Writes index.html, which
    needs nothing else, numbers.json, tables.md and the figures, and run.toml, which makes the run again:
    `mola evaluate --config report/run.toml`.

        mola evaluate posterior --test images/test --ood images/strange --output report
    """
    import torch

    # Before the work rather than after it: a missing extra, and a folder that cannot be written.
    from mola.app.jobs.evaluate import run_evaluate
    from mola.app.jobs.folder import open_posterior
    from mola.compare.evaluation import evaluation_document
    from mola.compare.report.writing import prepare_folder, write_evaluation
    from mola.distributed import join

    prepare_folder(output)
    check_run(context, config, trust=trust)
    set_threads(threads)
    torch.manual_seed(seed)
    with join() as team, showing_progress(quiet=quiet or not team.first) as progress:
        progress("loading networks", 0.0)
        fitted = open_posterior(posterior, device, trust=trust, network=network or ())
        comparison = run_evaluate(
            fitted,
            test,
            tuple(ood or ()),
            lambda doing, done: progress(doing, DRAWING_BEGINS * done),
            val=val,
            strict=strict,
            directory=None if data is None else str(data),
            team=team,
        )
        numbers = evaluation_document(comparison)
        if not team.first:
            return  # one process writes and speaks for all
        page = write_evaluation(
            comparison,
            numbers,
            output,
            lambda doing, done: progress(doing, DRAWING_BEGINS + (1 - DRAWING_BEGINS) * done),
        )
    write_run(context, output / "run.toml")
    if not quiet and not as_json:
        console = Console(highlight=False)
        for line in _shown(console, comparison):
            console.print(Text.from_ansi(line), soft_wrap=True)
        console.print(f"Wrote [bold]{escape(str(page))}[/bold], with all tables, figures and numbers.", soft_wrap=True)
    # torchrun knows only success and failure: inputs that were left out are listed, but do not end the job.
    with suppress(*(typer.Exit,) if team.size > 1 else ()):
        account = Account(comparison.left_out, comparison.noted)
        finish(account, numbers, as_json=as_json, quiet=True if not as_json else quiet)


def _shown(console: Console, comparison: Comparison) -> list[str]:
    # The finding, the main table, and as much of the rest as a screen holds: the page has everything.
    from mola.compare.report.words import evaluation_findings
    from mola.compare.report.writing import shown_tables

    first, *others = [f"{escape(one.title)}: {escape(one.text)}" for one in evaluation_findings(comparison)]
    left_out = Account(comparison.left_out, comparison.noted).lines(shown=2)
    main = replace(shown_tables(comparison, FEW)[0], caption="")
    main = replace(fitting(main, console.width)[0], title=main.title)  # columns that fit the terminal
    lines: list[str] = []
    for part in (f"[bold]{first}[/bold]", for_terminal(main), *map(escape, left_out), *others):
        with console.capture() as captured:
            console.print(part)
        found = captured.get().rstrip("\n").split("\n")
        if len(lines) + len(found) < MOST_LINES:
            lines += found
    return lines
