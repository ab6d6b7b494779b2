"""A fitted posterior as a plain ONNX file: the networks, the Bayesian head and what is known of both, for any runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mola.errors import ExportError, MissingExtraError, OptionError
from mola.export.information import Thresholds, as_properties
from mola.export.tracing import (
    Settings,
    Traced,
    Written,
    check_agreement,
    check_path,
    quietly,
    reason,
    root_of,
    trace,
    write_file,
)
from mola.network import Inputs
from mola.posterior import MoLA

OPSET = 18
"""The newest version of ONNX's operators that torch writes without converting."""

LARGEST = 2**31 - 1
"""Bytes of one ONNX file: what protobuf can hold."""


def export_onnx(
    posterior: MoLA,
    path: str | Path,
    example: Inputs,
    *,
    classes: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    float16: bool = False,
    opset: int = OPSET,
    preparation: nn.Module | None = None,
    metadata: Mapping[str, Any] | None = None,
    ood_threshold: float | None = None,
    answer_threshold: float | None = None,
    set_threshold: float | None = None,
    check: bool = True,
) -> Written:
    """Write a posterior as one ONNX file, from inputs to probabilities and uncertainty, that runs without PyTorch.

    Outputs are those of `posterior.predict`, the epistemic part on the same draws included. The batch may have any size.
    Numbers that are not finite are not refused in a file: NaN in gives NaN out. Class names, inputs, prior precisions,
    weights, link, structure and rule are inside, as JSON under names that begin with "mola.".

    Args:
        posterior: made by `mola.fit`, `mola.ensemble` or `mola.load`; it and its networks are not changed.
        path: of the file; what was there before stays until all is written.
        example: one batch of inputs: a tensor (its input is called "input"), a tuple (inputs are called as in the
            network's `forward`), or a mapping (as its keys).
        classes: names, in the order of the networks' outputs.
        outputs: which of `mola.export.OUTPUTS`, or of `mola.export.NUMBERS` where outputs are numbers; None: all that the posterior
            has. "mutual_information" is the one that costs something, and "distance" is there where distances from the training
            classes are known.
        float16: networks in half precision. Inputs and outputs stay in float32, and so does the Bayesian head.
        opset: version of ONNX's operators.
        preparation: a module that the input goes through first, such as `mola.export.Pixels`.
        metadata: of your own: strings, or JSON.
        ood_threshold: score above which you call an input an outlier.
        answer_threshold: confidence above which you answer, of `mola.abstain_threshold`.
        set_threshold: probability from which on classes are in a set, `least_probability` of `mola.prediction_sets`.
        check: run the file in onnxruntime against PyTorch before it is written.

    Returns:
        Path, size, inputs, outputs and the largest differences.
    """
    path = check_path(path)
    onnx = _require("onnx")
    _require("onnxscript")
    if check:
        _require("onnxruntime")
    thresholds = Thresholds(ood_threshold, answer_threshold, set_threshold)
    settings = Settings(classes, outputs, float16, preparation, metadata, thresholds)
    properties = as_properties({}, metadata)  # before the work, which takes longer
    traced = trace(posterior, example, settings)
    properties |= as_properties(traced.document, None)
    content = _serialised(traced, opset, properties)
    try:
        onnx.checker.check_model(content, full_check=True)
    except Exception as error:
        raise ExportError(
            f"torch wrote an ONNX graph that is not valid: {reason(error)}. Try another opset, or export_torch."
        ) from error
    differences = None
    if check:
        session = onnx_session(content)
        differences = check_agreement(traced, example, lambda tensors: run_session(session, tensors), "onnxruntime")
    return write_file(path, content, traced, differences)


def _require(package: str) -> Any:
    try:
        return __import__(package)
    except ImportError as error:
        raise MissingExtraError(feature="ONNX export", package=package, extra="export") from error


def _serialised(traced: Traced, opset: int, properties: Mapping[str, str]) -> bytes:
    if not isinstance(opset, int) or not OPSET <= opset <= 23:
        raise OptionError(f"opset: expected a version from {OPSET} to 23, got {opset!r}.")
    names = traced.graph.signature.names
    shapes = {"tensors": tuple({0: "batch"} for _ in names)}
    try:
        with quietly():
            written = torch.onnx.export(
                traced.program,
                dynamo=True,
                input_names=list(names),
                output_names=list(traced.graph.outputs),
                opset_version=opset,
                dynamic_shapes=shapes,
                verbose=False,
            )
    except Exception as error:
        raise ExportError(
            f"a network has a step that ONNX cannot express: {reason(root_of(error))}. Replace that step, or export with "
            f"mola.export_torch, which takes all of PyTorch's."
        ) from error
    model = written.model  # type: ignore[union-attr]
    model.metadata_props.update(properties)
    model.producer_name, model.producer_version = "mola", str(traced.document["version"])
    model.doc_string = (
        "Probabilities and uncertainty of a mixture of Laplace approximations; see the mola.* properties."
    )
    for value in [*model.graph.inputs, *model.graph.outputs]:
        value.doc_string = None
    for node in model.graph.all_nodes():
        node.metadata_props.clear()  # source lines and paths of the machine it was made on
        node.doc_string = None
    numbers = sum(
        value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None
    )
    if numbers > LARGEST:
        raise ExportError(
            f"the networks have {numbers / 1e9:.2f} GB of weights, and one ONNX file holds 2 GB. Use float16=True, or "
            f"mola.export_torch."
        )
    return written.model_proto.SerializeToString(deterministic=True)  # type: ignore[union-attr]


def onnx_session(content: bytes | str) -> Any:
    """An onnxruntime session on the CPU, of a file's path or bytes."""
    runtime = _require("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    try:
        return runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ExportError(
            f"onnxruntime cannot run the file: {reason(error)}. A newer onnxruntime may, or another opset."
        ) from error


def run_session(session: Any, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Outputs by name."""
    feeds = {
        one.name: np.ascontiguousarray(tensor.detach().cpu().numpy())
        for one, tensor in zip(session.get_inputs(), tensors, strict=True)
    }
    names = [one.name for one in session.get_outputs()]
    return {name: torch.from_numpy(value) for name, value in zip(names, session.run(names, feeds), strict=True)}
