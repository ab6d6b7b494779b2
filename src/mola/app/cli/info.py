"""`mola info`: what a posterior's folder holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mola.app.cli.shared_options import Json, scaling_words
from mola.options import counted


def info(
    posterior: Annotated[Path, typer.Argument(help="Folder that `mola fit` or posterior.save wrote.")],
    as_json: Json = False,
) -> None:
    """Show what a posterior is and how it was made, without loading networks.

    Also checks the files against their checksums.

        mola info posterior
    """
    from mola.app.jobs.folder import read_information

    found = read_information(posterior)
    if as_json:
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    console = Console(highlight=False)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, words in _lines(found):
        table.add_row(name, escape(words))
    console.print(table)


def _fitted_on(found: dict[str, Any]) -> str:
    if not found["has_positions"] or found.get("positions") == "average":
        return counted(found["train_count"], "input")
    if found["job"] is None:  # saved from Python, which does not say what was counted
        return f"{found['train_count']:,} positions, or inputs where positions were averaged"
    return counted(found["train_count"], "position")


def _features(found: dict[str, Any]) -> str:
    width, bias, name = found["features"][0], found["bias"][0], found["heads"][0]
    layer = f"'{name}': " if name else ""  # a network may be a single layer
    return f"{layer}{counted(width - bool(bias), 'feature')}{' with the bias, if it has one' if bias is None else ''}"


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    precisions = ", ".join(dict.fromkeys(f"{value:.4g}" for value in found["prior_precision"]))
    lines = [
        ("posterior", found["folder"]),
        ("networks", str(found["components"])),
        ("last layer", f"{_features(found)}, {_outputs(found)}"),
        ("structure", f"{found['structure']}, link {found['link']}, weights {found['weighting']}"),
        ("lambda", f"{precisions}, {'by ' + found['rule'] if found['rule'] else 'as given'}"),
        ("scaling", _scaling(found)),
        *[("note", note) for note in found["notes"]],
        ("fitted on", _fitted_on(found)),
        ("files", f"{found['bytes']:,} bytes, intact; checksum {found['sha256'][:16]}"),
    ]
    if found["job"] is None:
        return [*lines, ("job", "none: saved from Python; load it with mola.load")]
    names = found["classes"]
    shapes = ", ".join(f"{one['name'] or 'tensor'} {tuple(one['shape'])} of {one['dtype']}" for one in found["inputs"])
    lines += [
        ("classes", ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else "without names"),
        ("inputs", shapes),
        ("made of", ", ".join(found["networks"])),
        *[("weights", f"{one['state']}: {one['path']}") for one in found["weight_files"]],
        ("data", f"train {found['train']}, validation {found['val'] or 'none'}, {found['left_out']} left out"),
    ]
    if found["validation"]:
        before, after = found["validation"]["networks"], found["validation"]["posterior"]
        if found["likelihood"] == "gaussian":
            lines += [
                (
                    name,
                    f"RMSE {one['rmse']:.4g}, NLL {one['nll']:.4f}, {one['coverage']:.1%} in 90 % intervals (validation data)",
                )
                for name, one in (("networks alone", before), ("posterior", after))
            ]
        else:
            lines += [
                ("networks alone", f"NLL {before['nll']:.4f}, ECE {before['ece']:.2%} on the validation data"),
                (
                    "posterior",
                    f"NLL {after['nll']:.4f}, ECE {after['ece']:.2%}, accuracy {after['accuracy']:.2%} on the validation data",
                ),
            ]
        lines.append(("outlying", _alarm(found["validation"])))
    made = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return [*lines, ("made with", made), ("again", f"mola fit --config {found['job']}")]


def _outputs(found: dict[str, Any]) -> str:
    if found["likelihood"] == "categorical":
        return f"{found['outputs']} classes"
    variances = ""
    if found["likelihood_settings"].get("heteroscedastic"):
        variances = f" (means and variances of {counted(found['outputs'] // 2, 'target')})"
    return f"{counted(found['outputs'], 'output')}{variances}, likelihood {found['likelihood']}"


def _scaling(found: dict[str, Any]) -> str:
    words = " and ".join(scaling_words(found))
    if found["has_distances"]:
        return words or "none; distances from the training classes are known"
    return f"{words or 'none'}; no distances: fitted with --no-distances"


def _alarm(validation: dict[str, Any]) -> str:
    rate = validation.get("false_alarm_rate")
    words = "" if rate is None else f", with at most {100 * rate:.2g} % false alarms"
    return f"scores above {validation['outlier_threshold']:.4g}{words}"
