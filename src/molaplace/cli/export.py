"""`molaplace export`: write a posterior to a single file that runs without this library."""

from __future__ import annotations

import json

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from molaplace.cli.command import write_run
from molaplace.cli.jobs.export import ExportOptions, run_export
from molaplace.cli.options import check_writable
from molaplace.cli.progress import showing_progress
from molaplace.errors import OptionError
from molaplace.export import Written


def export(options: ExportOptions) -> None:
    """Export the networks and the Bayesian head as one model that outputs probabilities and uncertainty.

    The model accepts batches of any size. Class names, tuning settings and the thresholds for the decisions below are stored in
    the file as editable properties. The file is written only if its outputs agree with PyTorch's on random inputs.

        molaplace export posterior --onnx model.onnx
    """
    from molaplace.cli.jobs.folder import open_posterior

    for flag, path, ending in (("--onnx", options.onnx, ".onnx"), ("--torch", options.torch, ".pt2")):
        if path is not None:
            if path.suffix != ending:
                raise OptionError(f"{flag} must be a file name that ends in {ending}, got {str(path)!r}.")
            check_writable(path)
    with showing_progress(quiet=options.quiet) as progress:
        progress("loading networks", 0.0)
        fitted = open_posterior(options.posterior, options.device, trust=options.trust, network=options.network)
        progress("writing the graph", 0.3)
        written = run_export(fitted, options)
        for one in written:
            write_run(options, "export", one.path.with_name(f"{one.path.name}.toml"))
        progress("done", 1.0)
    if options.as_json:
        typer.echo(json.dumps([one.plain() for one in written], indent=2, ensure_ascii=False))
    elif not options.quiet:
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
        f"Wrote [bold]{escape(str(written.path))}[/bold] ({written.bytes / 1e6:.2f} MB, "
        f"{len(written.document['classes'])} {'classes' if written.document['likelihood'] == 'categorical' else 'outputs'}).",
        soft_wrap=True,
    )
    console.print(table)
    if written.differences is None:
        console.print("Not compared with PyTorch.")
    else:
        console.print(f"Largest difference from PyTorch on random inputs: {max(written.differences.values()):.1e}")
