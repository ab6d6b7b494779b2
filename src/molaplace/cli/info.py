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
from molaplace.cli.shared import rule_name, scaling_words
from molaplace.options import counted


@dataclass(frozen=True, kw_only=True)
class InfoOptions:
    """Options for `molaplace info`."""

    posterior: Path = option(
        help="Folder written by `molaplace fit` or posterior.save", argument=True, metavar="POSTERIOR"
    )
    as_json: bool = option(False, "Print everything as JSON", flags=("--json",))


def info(options: InfoOptions) -> None:
    """Show the tuning, contents and history of a posterior without loading its networks.

    Also verifies the checksums of the files.

        molaplace info posterior
    """
    from molaplace.cli.folder import read_information

    found = read_information(options.posterior)
    if options.as_json:
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    console = Console(highlight=False)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, words in _lines(found):
        table.add_row(name, escape(words))
    console.print(table)


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    precisions = ", ".join(dict.fromkeys(f"{value:.4g}" for value in found["prior_precision"]))
    tuning, *notes = found["notes"] or ["not tuned: the given prior precision is used"]
    scaling = ", ".join(scaling_words(found)) or "none"
    weights = "uniform" if len(set(found["weights"])) == 1 else ", ".join(f"{one:.3g}" for one in found["weights"])
    distances = "distances from the training classes" if found["has_distances"] else "no distances (--no-distances)"
    positions = found["has_positions"] and found.get("positions") != "average"
    rule = f"rule {rule_name(found['rule'])}" if found["rule"] else "given value"
    lines = [
        ("tuning", tuning),
        *[("note", note) for note in notes],
        ("folder", found["folder"]),
        ("networks", str(found["components"])),
        (
            "last layer",
            f"{found['heads'][0]!r}, {counted(found['features'][0], 'weight')} for each of {_outputs(found)}",
        ),
        ("structure", f"{found['structure']}, link {found['link']}, weights {weights}"),
        ("prior precision", f"{precisions}, {rule}"),
        ("scaling", f"{scaling}; {distances}"),
        ("fitted on", counted(found["train_count"], "position" if positions else "input")),
        ("files", f"{found['bytes']:,} bytes, intact; checksum {found['sha256'][:16]}"),
    ]
    if found["job"] is None:
        return [*lines, ("job", "none: saved from Python. Load it with mola.load")]
    names = found["classes"]
    shapes = ", ".join(f"{one['name'] or 'tensor'} {tuple(one['shape'])} of {one['dtype']}" for one in found["inputs"])
    lines += [
        (
            "classes" if found["likelihood"] == "categorical" else "outputs",
            ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else f"{found['outputs']}, unnamed",
        ),
        ("inputs", shapes),
        *([("images", found["images"])] if found["images"] else []),
        ("made from", ", ".join(found["networks"])),
        ("weight files", ", ".join(found["weight_files"]) or "none"),
        (
            "data",
            f"training data {found['train']}, validation data {found['val'] or 'none'}, inputs left out: {found['left_out']}",
        ),
    ]
    validation = found["validation"]
    if validation:
        for name, key in (("networks alone", "networks"), ("with the posterior", "posterior")):
            one = validation[key]
            words = f"NLL {one['nll']:.4f}, "
            if found["likelihood"] == "gaussian":
                words += f"RMSE {one['rmse']:.4g}, {100 * one['coverage']:.1f} % in 90 % intervals"
            else:
                words += f"ECE {100 * one['ece']:.2f} %, accuracy {100 * one['accuracy']:.2f} %"
            lines.append((name, f"{words} on the validation data"))
        rate = f"at most {100 * validation['false_alarm_rate']:.2g} % false alarms"
        lines.append(("OOD alarm", f"scores above {validation['outlier_threshold']:.4g}, with {rate}"))
    made = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return [*lines, ("made with", made), ("fit again", f"molaplace fit --config {found['job']}")]


def _outputs(found: dict[str, Any]) -> str:
    if found["likelihood"] == "categorical":
        return f"{found['outputs']} classes"
    variances = ""
    if found["likelihood_settings"].get("heteroscedastic"):
        variances = f" (means and variances of {counted(found['outputs'] // 2, 'target')})"
    return f"{counted(found['outputs'], 'output')}{variances}, likelihood {found['likelihood']}"
