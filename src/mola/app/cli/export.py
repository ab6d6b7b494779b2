"""`mola export`: a posterior as one file that runs without this library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mola.app.cli.progress import showing_progress
from mola.app.cli.run_file import Config, check_run, write_run
from mola.app.cli.shared_options import (
    Certainty,
    Coverage,
    Device,
    ErrorRate,
    FalseAlarmRate,
    Json,
    Network,
    Quiet,
    Threads,
    Trust,
    set_threads,
)
from mola.export import Written


def export(
    context: typer.Context,
    posterior: Annotated[Path, typer.Argument(help="Folder that `mola fit` wrote.")],
    onnx: Annotated[Path | None, typer.Option("--onnx", help="ONNX file to write: runs without PyTorch.")] = None,
    torch: Annotated[Path | None, typer.Option("--torch", help="Program of torch.export (.pt2) to write.")] = None,
    outputs: Annotated[
        str | None,
        typer.Option(
            help="Outputs, separated by commas: probs, label, confidence, entropy, epistemic, aleatoric, ood_score, distance; "
            "of numbers mean, variance, epistemic, aleatoric, ood_score, distance.  "
            "[default: all that the posterior has]"
        ),
    ] = None,
    float16: Annotated[bool, typer.Option("--float16", help="Store the networks in half precision.")] = False,
    pixels: Annotated[
        bool, typer.Option("--pixels", help="Take pixels as bytes and normalise them inside, as for the training data.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Compare the file with PyTorch before keeping it.")
    ] = True,
    network: Network = None,
    false_alarm_rate: FalseAlarmRate = None,
    error_rate: ErrorRate = None,
    certainty: Certainty = None,
    coverage: Coverage = None,
    trust: Trust = False,
    device: Device = "cpu",
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
    config: Config = None,
) -> None:
    """Write the networks and the Bayesian head as one file that takes inputs and gives probabilities and uncertainty.

    The file takes batches of any size and holds class names, tuning, and the thresholds for what is asked for (--false-alarm-rate,
    --error-rate, --coverage) as properties that can be changed. It is compared with PyTorch on random
    inputs first, and is not kept if it disagrees.

        mola export posterior --onnx model.onnx
    """
    from mola.app.jobs.export import run_export
    from mola.app.jobs.folder import open_posterior

    check_run(context, config, trust=trust)
    set_threads(threads)
    with showing_progress(quiet=quiet) as progress:
        progress("loading networks", 0.0)
        fitted = open_posterior(posterior, device, trust=trust, network=network or ())
        progress("writing the graph", 0.3)
        written = run_export(
            fitted,
            onnx=onnx,
            torch_program=torch,
            outputs=None if outputs is None else [name.strip() for name in outputs.split(",")],
            float16=float16,
            pixels=pixels,
            check=check,
            false_alarm_rate=false_alarm_rate,
            error_rate=error_rate,
            certainty=certainty,
            coverage=coverage,
        )
        for one in written:
            write_run(context, one.path.with_name(f"{one.path.name}.toml"))
        progress("done", 1.0)
    if as_json:
        typer.echo(json.dumps([one.plain() for one in written], indent=2, ensure_ascii=False))
    elif not quiet:
        console = Console(highlight=False)
        for one in written:
            _show(console, one)


def _show(console: Console, written: Written) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("", "name", "type", "shape", "difference"):
        table.add_column(title, no_wrap=True)
    for kind, tensors in (("input", written.inputs), ("output", written.outputs)):
        for one in tensors:
            difference = (written.differences or {}).get(one.name) if kind == "output" else None
            shape = ", ".join(map(str, one.shape))
            table.add_row(
                kind, escape(one.name), one.dtype, f"({shape})", "" if difference is None else f"{difference:.1e}"
            )
    console.print(
        f"Wrote [bold]{escape(str(written.path))}[/bold], {written.bytes / 1e6:.2f} MB, "
        f"{len(written.document['classes'])} classes.",
        soft_wrap=True,
    )
    console.print(table)
    if written.differences is None:
        console.print("Not compared with PyTorch.")
    else:
        console.print(f"Largest difference from PyTorch on random inputs: {max(written.differences.values()):.1e}")
