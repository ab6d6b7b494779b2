"""`molaplace export`: export the posterior in a folder to one ONNX or torch.export file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from molaplace import export
from molaplace.cli.jobs.decisions import make_decisions
from molaplace.cli.jobs.folder import PosteriorFolder
from molaplace.cli.jobs.groups import Deciding, Opening, Reporting
from molaplace.cli.options import option, parse_names
from molaplace.errors import OptionError
from molaplace.export import Pixels, Written


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Opening, Deciding, Reporting):
    """Options for `molaplace export`."""

    posterior: Path = option(help="Folder written by `molaplace fit`", argument=True, metavar="POSTERIOR")
    onnx: Path | None = option(None, "ONNX file to write; it runs without PyTorch", metavar="FILE")
    torch: Path | None = option(None, "torch.export file to write (.pt2)", metavar="FILE")
    pixels: bool = option(False, "Accept pixels as bytes, and normalise them in the same way as the training data")
    float16: bool = option(False, "Store the networks in half precision")
    outputs: tuple[str, ...] | None = option(
        None,
        "Outputs, separated by commas: probs, label, confidence, entropy, epistemic, aleatoric, ood_score, distance; "
        "for regression: mean, variance, epistemic, aleatoric, ood_score, distance",
        metavar="NAMES",
        parse=parse_names,
        shown="all",
    )
    check: bool = option(True, "Do not check the file's outputs against PyTorch's")


def run_export(fitted: PosteriorFolder, options: ExportOptions) -> list[Written]:
    """Write the files that the options specify."""
    if options.onnx is None and options.torch is None:
        raise OptionError("no file to write. Pass --onnx FILE, --torch FILE, or both.")
    example = fitted.example
    made = make_decisions(fitted, **options.rates())
    if made.intervals is not None:
        raise OptionError(
            "--coverage: exported files output means and variances, but no calibrated intervals. Use `molaplace predict --coverage`, or "
            "mola.prediction_intervals in Python."
        )
    settings: dict[str, Any] = {
        "classes": fitted.classes,
        "outputs": options.outputs,
        "float16": options.float16,
        "check": options.check,
        "ood_threshold": made.alarm,
        "answer_threshold": None if made.answer is None else float(made.answer),
        "set_threshold": None if made.sets is None else made.sets.least_probability,
    }
    if options.pixels:
        if not isinstance(example, Tensor) or example.dim() != 4:
            raise OptionError(
                "--pixels: expected networks whose input is one tensor of images (batch, channels, height, width)."
            )
        settings["preparation"] = Pixels(fitted.intake.mean, fitted.intake.std)
        example = torch.zeros(example.shape, dtype=torch.uint8)
    written = []
    if options.onnx is not None:
        written.append(export.onnx(fitted.posterior, options.onnx, example, **settings))
    if options.torch is not None:
        written.append(export.torch_export(fitted.posterior, options.torch, example, **settings))
    return written
