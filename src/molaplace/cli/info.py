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

from molaplace.cli.options import option
from molaplace.options import counted
from molaplace.settings import Settings


@dataclass(frozen=True, kw_only=True)
class InfoOptions:
    """Options for `molaplace info`."""

    posterior: Path = option(help="Folder written by `molaplace fit` or posterior.save", argument=True)
    as_json: bool = option(False, "Print everything as JSON", flags=("--json",))


def info(options: InfoOptions) -> None:
    """Show the tuning, contents and history of a posterior without loading its networks.

    Also verifies the checksums of the files.

        molaplace info posterior
    """
    from molaplace.cli.folder import read_information

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
    for name, words in _lines(information):
        table.add_row(name, escape(words))
    console.print(table)


def _lines(information: dict[str, Any]) -> list[tuple[str, str]]:
    precisions = ", ".join(dict.fromkeys(f"{value:.4g}" for value in information["prior_precision"]))
    tuning, *notes = information["notes"] or ["not tuned: the given prior precision is used"]
    changed = Settings.from_json(information).changed()
    scaling = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in changed.items()) or "none"
    weights = (
        "uniform"
        if len(set(information["weights"])) == 1
        else ", ".join(f"{weight:.3g}" for weight in information["weights"])
    )
    distances = (
        "distances from the training classes" if information["has_distances"] else "no distances (--no-distances)"
    )
    positions = information["has_positions"] and information.get("positions") != "average"
    rule = f"rule {information['rule']}" if information["rule"] else "given value"
    lines = [
        ("tuning", tuning),
        *[("note", note) for note in notes],
        ("folder", information["folder"]),
        ("networks", str(information["components"])),
        (
            "last layer",
            f"{information['heads'][0]!r}, {counted(information['features'][0], 'weight')} for each of {_outputs(information)}",
        ),
        ("structure", f"{information['structure']}, link {information['link']}, weights {weights}"),
        ("prior precision", f"{precisions}, {rule}"),
        ("scaling", f"{scaling}; {distances}"),
        ("fitted on", counted(information["train_count"], "position" if positions else "input")),
        ("files", f"{information['bytes']:,} bytes, intact; checksum {information['sha256'][:16]}"),
    ]
    if information["job"] is None:
        return [*lines, ("job", "none: saved from Python. Load it with mola.load")]
    names = information["classes"]
    shapes = ", ".join(
        f"{tensor['name'] or 'tensor'} {tuple(tensor['shape'])} of {tensor['dtype']}"
        for tensor in information["inputs"]
    )
    lines += [
        (
            "classes" if information["likelihood"] == "categorical" else "outputs",
            ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
            if names
            else f"{information['outputs']}, unnamed",
        ),
        ("inputs", shapes),
        *([("images", information["images"])] if information["images"] else []),
        ("made from", ", ".join(information["networks"])),
        ("weight files", ", ".join(information["weight_files"]) or "none"),
        (
            "data",
            f"training data {information['train']}, validation data {information['val'] or 'none'}, inputs left out: "
            f"{information['left_out']}",
        ),
    ]
    validation = information["validation"]
    if validation:
        for name, key in (("networks alone", "networks"), ("with the posterior", "posterior")):
            metrics = ", ".join(f"{metric} {value:.4g}" for metric, value in validation[key].items())
            lines.append((name, f"{metrics} on the validation data"))
        rate = f"at most {100 * validation['false_alarm_rate']:.2g} % false alarms"
        lines.append(("OOD alarm", f"scores above {validation['outlier_threshold']:.4g}, with {rate}"))
    versions = ", ".join(f"{name} {version}" for name, version in information["versions"].items())
    return [*lines, ("made with", versions), ("fit again", f"molaplace fit --config {information['job']}")]


def _outputs(information: dict[str, Any]) -> str:
    if information["likelihood"] == "categorical":
        return f"{information['outputs']} classes"
    variances = ""
    if information["likelihood_settings"].get("heteroscedastic"):
        variances = f" (means and variances of {counted(information['outputs'] // 2, 'target')})"
    return f"{counted(information['outputs'], 'output')}{variances}, likelihood {information['likelihood']}"
