"""`molaplace fit`: fit a posterior to the user's networks and data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from molaplace.cli.jobs.groups import Reporting
from molaplace.cli.jobs.job import RUN, Job
from molaplace.cli.jobs.rows import Account
from molaplace.cli.options import in_flags, option
from molaplace.cli.progress import showing_progress
from molaplace.cli.shared import finish, rule_name, scaling_words
from molaplace.options import counted
from molaplace.report.tables import Column, make_table, print_table

DISCRETE = [
    ("accuracy", "accuracy %", 100, 2),
    ("nll", "NLL", 1, 4),
    ("ece", "ECE %", 100, 2),
    ("confidence", "mean conf. %", 100, 2),
]
REGRESSION = [
    ("rmse", "RMSE", 1, 4),
    ("nll", "NLL", 1, 4),
    ("crps", "CRPS", 1, 4),
    ("std", "mean std.", 1, 4),
    ("coverage", "in 90 % intervals %", 100, 1),
]
"""Metric, heading, factor and number of decimal places for each column of the table."""


@dataclass(frozen=True, kw_only=True)
class FitOptions(Reporting, Job):
    """Options for `molaplace fit`: the job's options, plus options that do not affect the posterior."""

    output: Path = option(
        Path("posterior"), "Folder for the posterior", flags=("--output", "-o"), metavar="DIR", kept=False
    )
    bundle: bool = option(False, "Copy the weights into the folder, so that it can be moved", panel=RUN, kept=False)
    checkpoint: Path | None = option(
        None, "Folder for checkpoints, from which an interrupted fit can resume", metavar="DIR", panel=RUN, kept=False
    )


def fit(options: FitOptions) -> None:
    """Fit a posterior to calibrate the confidence of trained networks.

    Fits a Laplace approximation to the last layer of each network in one pass over the training data and tunes it on the
    validation data. Writes a folder that the other commands open. Supports classification, multi-label classification, regression
    and dense outputs. The validation data are also used to calibrate OOD alarms, selective prediction and conformal sets. The
    networks are neither retrained nor changed.

        molaplace fit a.pt b.pt --network my:net --train train.npz --val val.npz
    """
    from molaplace.cli.jobs.fit import run_fit
    from molaplace.distributed import join

    with join() as team:
        # Only one process writes and prints.
        quiet, as_json = options.quiet or not team.first, options.as_json and team.first
        with showing_progress(quiet=quiet) as progress:
            summary = run_fit(
                options, options.output, progress, bundle=options.bundle, team=team, checkpoint=options.checkpoint
            )
    if not quiet and not as_json:
        _show(options, summary)
    finish(Account(summary["left_out"]), summary, team, as_json=as_json, quiet=quiet)


def _show(options: FitOptions, summary: dict[str, Any]) -> None:
    console = Console(highlight=False)
    found = summary["result"]
    networks = len(found["prior_precision"])
    outputs = counted(found["outputs"], "class", "classes")
    if options.likelihood != "categorical":
        outputs = counted(found["outputs"], "output")
    if options.heteroscedastic:
        outputs += f", means and variances of {counted(found['outputs'] // 2, 'target')},"
    part = "position" if found["has_positions"] else "input"
    datum = "input" if options.positions == "average" else part
    precisions = ", ".join(dict.fromkeys(f"{value:.3g}" for value in found["prior_precision"]))
    rule = f", rule {rule_name(found['rule'])}" if found["rule"] else ""
    console.print(
        f"Fitted {counted(networks, 'network')} with {outputs} on {counted(found['train_count'], datum)}: structure "
        f"{options.structure}, prior precision {precisions}{''.join(f', {words}' for words in scaling_words(found))}{rule}."
    )
    if found["images"]:
        console.print(f"Images: {found['images']}.")
    measured = found["validation"]
    if measured:
        columns = REGRESSION if options.likelihood == "gaussian" else DISCRETE
        # The first row uses the same mixture weights as the posterior, but no covariances.
        rows = {"network" if networks == 1 else "ensemble": measured["networks"], "posterior": measured["posterior"]}
        values = {name: [factor * one[key] for key, _, factor, _ in columns] for name, one in rows.items()}
        caption = f"{counted(measured['count'], part)}, also used for tuning. For other data, use `molaplace evaluate`."
        headings = [Column(heading, digits=digits) for _, heading, _, digits in columns]
        print_table(console, make_table("On the validation data", caption, headings, values))
    first, *notes = summary["notes"] or ["Not tuned: the given prior precision is used."]
    for note in notes:
        console.print(f"Note: {escape(in_flags(note))}")
    console.print(f"[bold]{escape(in_flags(first))}[/bold]")
    place = escape(str(options.output))
    instead = ", which replaces the earlier posterior" if summary["replaced"] else ""
    console.print(
        f"Wrote [bold]{place}[/bold]{instead}. Next: molaplace predict {place} DATA -o predictions.csv", soft_wrap=True
    )
