"""`molaplace export`: write the posterior in a folder to a single ONNX or torch.export file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor

import molaplace as mola
from molaplace.cli.decisions import Decisions
from molaplace.cli.folder import PosteriorFolder
from molaplace.errors import OptionError
from molaplace.export import Pixels, Written
from molaplace.saving.files import check_folder, check_writable, marker_of, replacing

EXPORT = "exported model"


def run_export(
    fitted: PosteriorFolder,
    decisions: Decisions,
    *,
    onnx: Path | None = None,
    torch_file: Path | None = None,
    pixels: bool = False,
    run: str = "",
    **settings: Any,
) -> list[Written]:
    """Write the files, each with the run file beside it; `settings` are those of `mola.export.onnx`."""
    if onnx is None and torch_file is None:
        raise OptionError("no file to write. Pass --onnx FILE, --torch FILE, or both.")
    example = fitted.example
    if decisions.intervals is not None:
        raise OptionError(
            "--coverage: exported files output means and variances, but no calibrated intervals. Use `molaplace predict --coverage`, or "
            "mola.prediction_intervals in Python."
        )
    settings |= {
        "classes": fitted.classes,
        "ood_threshold": decisions.alarm,
        "answer_threshold": None if decisions.answers is None else float(decisions.answers),
        "set_threshold": None if decisions.sets is None else decisions.sets.least_probability,
    }
    if pixels:
        if not isinstance(example, Tensor) or example.dim() != 4:
            raise OptionError(
                "--pixels: expected networks whose input is one tensor of images (batch, channels, height, width)."
            )
        settings["preparation"] = Pixels(fitted.preprocessing.mean, fitted.preprocessing.std)
        example = torch.zeros(example.shape, dtype=torch.uint8, device="cpu")
    written = []
    for path, write in ((onnx, mola.export.onnx), (torch_file, mola.export.torch_export)):
        if path is None:
            continue
        with replacing(path.parent, EXPORT, _names(path), marker=marker_of(path.name)) as new:
            file = write(fitted.posterior, new / path.name, example, **settings)
            (new / _names(path)[1]).write_text(run, encoding="utf-8")
        written.append(replace(file, path=path))
    return written


def _names(path: Path) -> tuple[str, str]:
    # Return the names of an exported file and its run file.
    return path.name, f"{path.name}.toml"


def check_export(onnx: Path | None, torch_file: Path | None) -> None:
    """Raise an error before any work begins if a file cannot be written."""
    for flag, path, ending in (("--onnx", onnx, ".onnx"), ("--torch", torch_file, ".pt2")):
        if path is not None:
            if path.suffix != ending:
                raise OptionError(f"{flag} must be a file name that ends in {ending}, got {str(path)!r}.")
            check_writable(path)
            check_folder(path.parent, EXPORT, _names(path), marker=marker_of(path.name))


def show(console: Console, written: Written) -> None:
    """Print what was written."""
    console.print(f"Wrote [bold]{escape(str(written.path))}[/bold] ({written.bytes / 1e6:.2f} MB).", soft_wrap=True)
    for kind, tensors in (("inputs", written.inputs), ("outputs", written.outputs)):
        described = [f"{tensor.name} ({', '.join(map(str, tensor.shape))}) {tensor.dtype}" for tensor in tensors]
        console.print(escape(f"{kind}: {', '.join(described)}"))
    if written.differences is None:
        console.print("Not compared with PyTorch.")
    else:
        console.print(f"Largest difference from PyTorch on random inputs: {max(written.differences.values()):.1e}")
