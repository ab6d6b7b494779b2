"""`molaplace info`: show the contents of a posterior's folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from molaplace.cli.folder import read_information
from molaplace.cli.job import NAME, job_of
from molaplace.cli.options import option
from molaplace.options import counted, listed
from molaplace.saving.schema import from_json
from molaplace.settings import Settings


@dataclass(frozen=True, kw_only=True)
class InfoOptions:
    """Options for `molaplace info`."""

    posterior: Path = option(help="Folder written by `molaplace fit` or posterior.save", argument=True)
    as_json: bool = option(False, "Print the posterior's document as JSON", flags=("--json",))


def info(options: InfoOptions) -> None:
    """Show the tuning, contents and history of a posterior without loading its networks.

    Also verifies the checksums of the files.

        molaplace info posterior
    """
    information = read_information(options.posterior)
    if options.as_json:
        click.echo(json.dumps(information, indent=2, ensure_ascii=False))
        return
    print_information(Console(highlight=False), information)


def print_information(console: Console, information: dict[str, Any]) -> None:
    """Print what `read_information` returned as a table."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, words in [*_posterior_lines(information), *_job_lines(information)]:
        table.add_row(name, escape(words))
    console.print(table)


def _posterior_lines(information: dict[str, Any]) -> list[tuple[str, str]]:
    first = information["components"][0]
    head = first["head"]
    settings = from_json(Settings, information["settings"])
    precisions = ", ".join(dict.fromkeys(f"{value:.4g}" for value in information["settings"]["prior_precision"]))
    changed = {name.replace("_", " "): value for name, value in settings.changed().items()}
    scaling = ", ".join(f"{name} {value:.4g}" for name, value in changed.items()) or "none"
    weights = ", ".join(f"{weight:.3g}" for weight in information["weights"])
    if len(set(information["weights"])) == 1:
        weights = "uniform"
    distances = "distances from the training classes"
    if not information["has_distances"]:
        distances = "no distances (--no-distances)"
    counts_positions = head["dense_axes"] > 0 and head["positions"] != "average"
    tuning = information["tuning"]
    summary = "not tuned: the given prior precision is used" if tuning is None else tuning["summary"]
    rule = "given value" if tuning is None else f"rule {tuning['rule']}"
    width = f"{counted(head['width'], 'weight')} for each of {_outputs(first)}"
    return [
        ("tuning", summary),
        *([("stale", "the training data have changed since tuning. Tune again")] if information["stale"] else []),
        *[("note", note) for note in (tuning or {}).get("notes", [])],
        ("folder", information["folder"]),
        ("networks", str(len(information["components"]))),
        ("last layer", f"{head['name']!r}, {width}"),
        ("structure", f"{information['structure']['name']}, link {information['link']['name']}, weights {weights}"),
        ("prior precision", f"{precisions}, {rule}"),
        ("scaling", f"{scaling}; {distances}"),
        ("fitted on", counted(first["sums"]["count"], "position" if counts_positions else "input")),
        ("files", f"{information['bytes']:,} bytes, intact"),
    ]


def _job_lines(information: dict[str, Any]) -> list[tuple[str, str]]:
    if "job" not in information:
        return [("job", "none: saved from Python. Load it with mola.load")]
    path = Path(information["folder"]) / NAME
    job = job_of(information["job"], path)
    result = information["job"]["result"]
    tensors = [
        f"{tensor['name'] or 'tensor'} {tuple(tensor['shape'])} of {tensor['dtype']}" for tensor in result["inputs"]
    ]
    data = f"training data {job.train}, validation data {job.val or 'none'}, inputs left out: {result['left_out']}"
    lines = [
        ("classes", listed(result["classes"], 12) or f"{result['outputs']} outputs, unnamed"),
        ("inputs", ", ".join(tensors)),
        *([("images", result["images"])] if result["images"] else []),
        ("made from", ", ".join(job.network)),
        ("weight files", ", ".join(job.weights) or "none"),
        ("data", data),
    ]
    validation = result["validation"]
    if validation is not None:
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in validation["metrics"].items())
        lines.append(("validation", metrics))
        rate = f"at most {100 * validation['false_alarm_rate']:.2g} % false alarms"
        lines.append(("OOD alarm", f"scores above {validation['outlier_threshold']:.4g}, with {rate}"))
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return [*lines, ("made with", versions), ("fit again", f"molaplace fit --config {path}")]


def _outputs(component: dict[str, Any]) -> str:
    outputs = component["head"]["outputs"]
    likelihood = component["likelihood"]
    if likelihood["name"] == "categorical":
        return f"{outputs} classes"
    variances = ""
    if likelihood.get("heteroscedastic"):
        variances = f" (means and variances of {counted(outputs // 2, 'target')})"
    return f"{counted(outputs, 'output')}{variances}, likelihood {likelihood['name']}"
