"""`molaplace evaluate`: compare methods on the user's data."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from molaplace.cli.command import write_run
from molaplace.cli.data.dataset import SkippedInputs
from molaplace.cli.evaluate_job import EvaluateOptions, run_evaluate
from molaplace.cli.progress import showing_progress
from molaplace.cli.shared import check_report_folder, finish
from molaplace.evaluation.record import Comparison
from molaplace.report.single_run_tables import evaluation_tables
from molaplace.report.tables import Table, print_table

DRAWING_BEGINS = 0.8
"""Fraction of the total time that passes before the figures are drawn."""

MOST_LINES = 25
"""Maximum number of lines printed to the terminal, including the line with the report's path."""


def evaluate(options: EvaluateOptions) -> None:
    """Compare MAP, temperature scaling, the deep ensemble, LLLA and MoLA on your own data.

    Classification, including multi-label: accuracy, NLL, Brier score and calibration (ECE), overall and for each class, plus
    selective prediction and conformal sets. Regression: RMSE, NLL, CRPS, and the coverage and width of intervals. With --ood: OOD
    detection using every score of each method. All numbers come with standard errors. Dense outputs are evaluated at up to 256
    positions in each input. Writes a self-contained index.html, numbers.json, tables.md, the figures, and a run.toml file for
    --config.

        molaplace evaluate posterior --test images/test --ood images/strange
    """
    import torch

    # Imported before any work begins, so that a missing package is reported early.
    from molaplace.cli.folder import open_posterior
    from molaplace.distributed import join
    from molaplace.report.writing import write_evaluation

    output, quiet, as_json = options.output, options.quiet, options.as_json
    check_report_folder(output)
    torch.manual_seed(options.seed)
    with join() as team, showing_progress(quiet=quiet or not team.first) as progress:
        progress("loading networks", 0.0)
        fitted = open_posterior(options.posterior, options.device, trust=options.trust, network=options.network)
        comparison = run_evaluate(fitted, options, lambda doing, done: progress(doing, DRAWING_BEGINS * done), team)
        numbers = comparison.document()
        if not team.first:
            return  # only rank 0 writes and prints
        page = write_evaluation(
            comparison,
            numbers,
            output,
            lambda doing, done: progress(doing, DRAWING_BEGINS + (1 - DRAWING_BEGINS) * done),
        )
    write_run(options, "evaluate", output / "run.toml")
    if not quiet and not as_json:
        console = Console(highlight=False)
        for line in _shown(console, comparison):
            console.print(Text.from_ansi(line), soft_wrap=True)
        console.print(
            f"Wrote [bold]{escape(str(page))}[/bold], with all tables, figures and numbers in the same folder.",
            soft_wrap=True,
        )
    account = SkippedInputs(comparison.left_out)
    finish(account, numbers, team, as_json=as_json, quiet=True if not as_json else quiet)


def _shown(console: Console, comparison: Comparison) -> list[str]:
    # Return the main finding, the main table, and as many other results as fit on one screen. The report contains all results.
    from molaplace.report.words import evaluation_findings

    first, *others = [f"{escape(one.title)}: {escape(one.text)}" for one in evaluation_findings(comparison)]
    left_out = SkippedInputs(comparison.left_out).lines(shown=2)
    main = replace(evaluation_tables(comparison)[0], caption="")
    lines: list[str] = []
    for part in (f"[bold]{first}[/bold]", main, *map(escape, left_out), *others):
        with console.capture() as captured:
            print_table(console, part) if isinstance(part, Table) else console.print(part)
        found = captured.get().rstrip("\n").split("\n")
        if len(lines) + len(found) < MOST_LINES:
            lines += found
    return lines
