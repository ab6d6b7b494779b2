"""A posterior as a program of torch.export: all of PyTorch's operations, without the networks' Python code.

PyTorch's reader does more than read: it unpickles constants and old kinds of weights, evaluates the expressions of sizes, and
compiles guards and names as Python. So a file is read only if the user trusts its author.
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
from mola.export.writing import Options, Run, Traced, Written, quietly, reason, write
from mola.network import Inputs
from mola.posterior import MoLA

PROPERTIES = "mola.json"
"""Name of the entry of the archive that has the properties."""


def torch_export(
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
    """Write a posterior as one `.pt2` file, for `torch.export.load` or `mola.export.load(path, trust=True)`.

    Arguments, result and errors are the same as for `mola.export.onnx`.
    """
    thresholds = {"ood_threshold": ood_threshold, "answer_threshold": answer_threshold, "set_threshold": set_threshold}
    options = Options(classes, outputs, float16, preparation, metadata, thresholds, check)
    return write(posterior, path, example, options, _serialise, lambda content: read(content, path)[0], "torch.export")


def _serialise(traced: Traced, properties: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with quietly():
        torch.export.save(traced.program, buffer, extra_files={PROPERTIES: json.dumps(properties)})
    return buffer.getvalue()


def read(content: bytes, path: object) -> tuple[Run, dict[str, str]]:
    """Return the program and the properties of a `.pt2` file that is trusted: reading it can run code."""
    extra = {PROPERTIES: ""}
    try:
        with quietly():
            module = torch.export.load(io.BytesIO(content), extra_files=extra).module()
        properties = json.loads(extra[PROPERTIES] or "{}")
    except Exception as error:  # the reader raises a dozen kinds on damaged files
        raise StorageError(
            f"{path} is not a program of torch.export that this torch reads: {reason(error)}."
        ) from error

    def run(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            return {name: value.cpu() for name, value in module(*tensors).items()}

    return run, properties
