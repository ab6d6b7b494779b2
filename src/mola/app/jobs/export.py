"""`mola export`: a posterior's folder as one file, ONNX or a program of torch.export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mola import export
from mola.app.jobs.decisions import make_decisions
from mola.app.jobs.folder import PosteriorFolder
from mola.app.jobs.preparation import Intake
from mola.errors import OptionError
from mola.export import Pixels, Written


def run_export(
    fitted: PosteriorFolder,
    *,
    onnx: Path | None = None,
    torch_program: Path | None = None,
    outputs: Sequence[str] | None = None,
    float16: bool = False,
    pixels: bool = False,
    check: bool = True,
    false_alarm_rate: float | None = None,
    error_rate: float | None = None,
    certainty: float | None = None,
    coverage: float | None = None,
) -> list[Written]:
    """Write the files that were asked for."""
    if onnx is None and torch_program is None:
        raise OptionError("nothing to write: expected --onnx FILE, --torch FILE, or both.")
    example = fitted.example
    made = make_decisions(
        fitted, false_alarm_rate=false_alarm_rate, error_rate=error_rate, certainty=certainty, coverage=coverage
    )
    if made.intervals is not None:
        raise OptionError(
            "--coverage: exported files give means and variances, and no calibrated intervals: `mola predict --coverage` does, and in "
            "Python mola.prediction_intervals."
        )
    told: dict[str, Any] = {
        "classes": fitted.classes,
        "outputs": outputs,
        "float16": float16,
        "check": check,
        "ood_threshold": made.alarm,
        "answer_threshold": None if made.answer is None else float(made.answer),
        "set_threshold": None if made.sets is None else made.sets.least_probability,
    }
    if pixels:
        if not isinstance(example, Tensor) or example.dim() != 4:
            raise OptionError(
                "--pixels: expected networks that take images, as one tensor (batch, channels, height, width)."
            )
        intake = Intake.from_plain(fitted.preparation)
        told["preparation"] = Pixels(intake.mean, intake.std)
        example = torch.zeros(example.shape, dtype=torch.uint8)
    written = []
    if onnx is not None:
        written.append(export.onnx(fitted.posterior, onnx, example, **told))
    if torch_program is not None:
        written.append(export.torch_export(fitted.posterior, torch_program, example, **told))
    return written
