"""A fitted posterior as a file of torch.export: all of PyTorch's operations, without the networks' Python code.

PyTorch's reader does more than read: it unpickles constants and old kinds of weights, evaluates the expressions of sizes, and
compiles guards and names as Python. So a file is read back only where the user trusts whoever made it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mola.errors import StorageError
from mola.export.information import Thresholds, as_properties
from mola.export.tracing import Settings, Written, check_agreement, check_path, quietly, reason, trace, write_file
from mola.network import Inputs
from mola.posterior import MoLA

PROPERTIES = "mola.json"
"""Name of the file inside the file that holds its properties."""


def export_torch(
    posterior: MoLA,
    path: str | Path,
    example: Inputs,
    *,
    classes: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    float16: bool = False,
    preparation: nn.Module | None = None,
    metadata: Mapping[str, Any] | None = None,
    ood_threshold: float | None = None,
    answer_threshold: float | None = None,
    set_threshold: float | None = None,
    check: bool = True,
) -> Written:
    """Write a posterior as one `.pt2` file, for `torch.export.load` or `mola.load_exported(path, trust=True)`; see `mola.export_onnx`.

    Args:
        posterior: made by `mola.fit`, `mola.ensemble` or `mola.load`; it and its networks are not changed.
        path: of the file; what was there before stays until all is written.
        example: one batch of inputs: a tensor, a tuple or a mapping.
        classes: names, in the order of the networks' outputs.
        outputs: which of `mola.export.OUTPUTS`; None: all that the posterior has.
        float16: networks in half precision. Inputs and outputs stay in float32, and so does the Bayesian head.
        preparation: a module that the input goes through first, such as `mola.export.Pixels`.
        metadata: of your own: strings, or JSON.
        ood_threshold: score above which you call an input an outlier.
        answer_threshold: confidence above which you answer, of `mola.abstain_threshold`.
        set_threshold: probability from which on classes are in a set, `least_probability` of `mola.prediction_sets`.
        check: run the file against the posterior before it is written.

    Returns:
        Path, size, inputs, outputs and the largest differences; `ExportError` if a network cannot be traced or the file
        disagrees, `DataError` and `OptionError` for arguments, `StorageError` for the path.
    """
    path = check_path(path)
    thresholds = Thresholds(ood_threshold, answer_threshold, set_threshold)
    settings = Settings(classes, outputs, float16, preparation, metadata, thresholds)
    properties = as_properties({}, metadata)
    traced = trace(posterior, example, settings)
    properties |= as_properties(traced.document, None)
    buffer = io.BytesIO()
    with quietly():
        torch.export.save(traced.program, buffer, extra_files={PROPERTIES: json.dumps(properties)})
    content = buffer.getvalue()
    differences = None
    if check:
        module = read_program(content, path)[0].module()
        differences = check_agreement(traced, example, lambda tensors: run_program(module, tensors), "torch.export")
    return write_file(path, content, traced, differences)


def run_program(module: nn.Module, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Outputs by name."""
    with torch.no_grad():
        outputs: dict[str, Tensor] = module(*tensors)
    return {name: value.cpu() for name, value in outputs.items()}


def read_program(content: bytes, path: object) -> tuple[torch.export.ExportedProgram, dict[str, str]]:
    """A program and its properties, from the bytes of a `.pt2` file that is trusted: reading it can run code.

    Args:
        content: all of the file.
        path: where it came from, for the message.

    Returns:
        The program, and strings by name (none for a program of somebody else).
    """
    extra = {PROPERTIES: ""}
    try:
        with quietly():
            program = torch.export.load(io.BytesIO(content), extra_files=extra)
        properties = json.loads(extra[PROPERTIES] or "{}")
    except Exception as error:  # the reader raises a dozen kinds on damaged files
        raise StorageError(
            f"{path} is not a program of torch.export that this torch reads: {reason(error)}."
        ) from error
    return program, properties
