"""`molaplace export`: write the posterior in a folder to a single ONNX or torch.export file."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor

import molaplace as mola
from molaplace.cli.decisions import make_decisions
from molaplace.cli.folder import PosteriorFolder
from molaplace.cli.options import (
    DecisionOptions,
    PosteriorOptions,
    RunOptions,
    as_document,
    check_writable,
    option,
    to_toml,
)
from molaplace.cli.terminal import showing_progress
from molaplace.errors import OptionError
from molaplace.export import Pixels, Written
from molaplace.saving.files import check_folder, marker_of, replacing

EXPORT = "exported model"


def _parse_names(value: Any) -> tuple[str, ...]:
    return tuple(name.strip() for name in (value.split(",") if isinstance(value, str) else value))


@dataclass(frozen=True, kw_only=True)
class ExportOptions(PosteriorOptions, DecisionOptions, RunOptions):
    """Options for `molaplace export`."""

    posterior: Path = option(help="Folder written by `molaplace fit`", argument=True)
    onnx: Path | None = option(None, "ONNX file to write; it runs without PyTorch")
    torch: Path | None = option(None, "torch.export file to write (.pt2)")
    pixels: bool = option(False, "Accept pixels as bytes, and normalise them in the same way as the training data")
    float16: bool = option(False, "Store the networks in half precision")
    outputs: tuple[str, ...] | None = option(
        None,
        "Outputs, separated by commas: probs, label, confidence, entropy, epistemic, aleatoric, ood_score, distance; "
        "for regression: mean, variance, epistemic, aleatoric, ood_score, distance",
        parse=_parse_names,
        default_text="all",
    )
    check: bool = option(True, "Check the file's outputs against PyTorch's")


def run_export(fitted: PosteriorFolder, options: ExportOptions) -> list[Written]:
    """Write the files that the options specify."""
    if options.onnx is None and options.torch is None:
        raise OptionError("no file to write. Pass --onnx FILE, --torch FILE, or both.")
    example = fitted.example
    decisions = make_decisions(fitted, **options.rates())
    if decisions.intervals is not None:
        raise OptionError(
            "--coverage: exported files output means and variances, but no calibrated intervals. Use `molaplace predict --coverage`, or "
            "mola.prediction_intervals in Python."
        )
    settings: dict[str, Any] = {
        "classes": fitted.classes,
        "outputs": options.outputs,
        "float16": options.float16,
        "check": options.check,
        "ood_threshold": decisions.alarm,
        "answer_threshold": None if decisions.answers is None else float(decisions.answers),
        "set_threshold": None if decisions.sets is None else decisions.sets.least_probability,
    }
    if options.pixels:
        if not isinstance(example, Tensor) or example.dim() != 4:
            raise OptionError(
                "--pixels: expected networks whose input is one tensor of images (batch, channels, height, width)."
            )
        settings["preparation"] = Pixels(fitted.preprocessing.mean, fitted.preprocessing.std)
        example = torch.zeros(example.shape, dtype=torch.uint8, device="cpu")
    written = []
    for path, write in ((options.onnx, mola.export.onnx), (options.torch, mola.export.torch_export)):
        if path is None:
            continue
        with replacing(path.parent, EXPORT, _names(path), marker=marker_of(path.name)) as new:
            file = write(fitted.posterior, new / path.name, example, **settings)
            run = to_toml(as_document(options, "export", path.parent))
            (new / _names(path)[1]).write_text(run, encoding="utf-8")
        written.append(replace(file, path=path))
    return written


def _names(path: Path) -> tuple[str, str]:
    # Return the names of an exported file and its run file.
    return path.name, f"{path.name}.toml"


def export(options: ExportOptions) -> None:
    """Export the networks and the Bayesian head as one model that outputs probabilities and uncertainty.

    The model accepts batches of any size. Class names, tuning settings and the thresholds for the decisions below are stored in
    the file as editable properties. The file is written only if its outputs agree with PyTorch's on random inputs.

        molaplace export posterior --onnx model.onnx
    """
    from molaplace.cli.folder import open_posterior

    for flag, path, ending in (("--onnx", options.onnx, ".onnx"), ("--torch", options.torch, ".pt2")):
        if path is not None:
            if path.suffix != ending:
                raise OptionError(f"{flag} must be a file name that ends in {ending}, got {str(path)!r}.")
            check_writable(path)
            check_folder(path.parent, EXPORT, _names(path), marker=marker_of(path.name))
    with showing_progress(quiet=options.quiet) as progress:
        progress("loading networks", 0.0)
        fitted = open_posterior(options.posterior, options.device, trust=options.trust, network=options.network)
        progress("writing the graph", 0.3)
        written = run_export(fitted, options)
        progress("done", 1.0)
    if options.as_json:
        click.echo(json.dumps([file.plain() for file in written], indent=2, ensure_ascii=False))
    elif not options.quiet:
        console = Console(highlight=False)
        for file in written:
            _show(console, file)


def _show(console: Console, written: Written) -> None:
    console.print(f"Wrote [bold]{escape(str(written.path))}[/bold] ({written.bytes / 1e6:.2f} MB).", soft_wrap=True)
    for kind, tensors in (("inputs", written.inputs), ("outputs", written.outputs)):
        described = [f"{tensor.name} ({', '.join(map(str, tensor.shape))}) {tensor.dtype}" for tensor in tensors]
        console.print(escape(f"{kind}: {', '.join(described)}"))
    if written.differences is None:
        console.print("Not compared with PyTorch.")
    else:
        console.print(f"Largest difference from PyTorch on random inputs: {max(written.differences.values()):.1e}")
