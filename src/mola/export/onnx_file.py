"""A posterior as one ONNX file: networks, Bayesian head and their description, for any runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mola.errors import ExportError, MissingExtraError, OptionError
from mola.export.writing import Options, Run, Traced, Written, quietly, reason, write
from mola.network import Inputs
from mola.posterior import MoLA

OPSET, NEWEST_OPSET = 18, 23
"""Versions of ONNX's operators: the newest that torch writes without converting, and the newest that it converts to."""

LARGEST = 2**31 - 1
"""Bytes of one ONNX file: what protobuf can hold."""


def onnx(
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

    Outputs are named as the fields of `posterior.predict` and equal them, draws included. The batch may have any size.
    NaN in gives NaN out. Classes, inputs, prior precisions, weights, link, structure and rule are in the file as JSON,
    under names that begin with "mola.".

    Args:
        posterior: made by `mola.fit`, `mola.ensemble` or `mola.load`; it and its networks are not changed.
        path: file to write; an existing file stays until the new file is complete.
        example: one batch of inputs: a tensor (the input is named "input"), a tuple (inputs are named as in the
            networks' `forward`), or a mapping (as its keys).
        classes: names, in the order of the networks' outputs.
        outputs: fields of the prediction; None is `mola.export.OUTPUTS`, or `mola.export.REGRESSION_OUTPUTS`.
            "logit_mean" and "logit_variance", or "within", "between" and the fields of the components, can be added.
            "epistemic" and "aleatoric" cost most.
        float16: networks in half precision. Inputs and outputs stay in float32, and the head computes in float64.
        opset: version of ONNX's operators.
        preparation: a module that the one input goes through first, such as `mola.export.Pixels`.
        metadata: your own metadata: strings, or JSON.
        ood_threshold: score above which an input is an outlier.
        answer_threshold: confidence above which to answer, of `mola.abstain_threshold`.
        set_threshold: probability from which on classes are in a set, of `mola.prediction_sets`.
        check: run the file and compare it with the posterior before it is written.

    Returns:
        Path, size, inputs, outputs and the largest differences. `ExportError` if a network cannot be traced or the file
        disagrees with the posterior.
    """
    for package in ("onnx", "onnxscript", *(["onnxruntime"] if check else [])):
        _require(package)
    if not isinstance(opset, int) or not OPSET <= opset <= NEWEST_OPSET:
        raise OptionError(f"opset: expected a version from {OPSET} to {NEWEST_OPSET}, got {opset!r}.")
    thresholds = {"ood_threshold": ood_threshold, "answer_threshold": answer_threshold, "set_threshold": set_threshold}
    options = Options(classes, outputs, float16, preparation, metadata, thresholds, check)
    return write(
        posterior, path, example, options, partial(_serialise, opset=opset), lambda one: read(one)[0], "onnxruntime"
    )


def _require(package: str) -> Any:
    try:
        return __import__(package)
    except ImportError as error:
        raise MissingExtraError(feature="ONNX export", package=package, extra="export") from error


def _translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    from onnxscript import FLOAT, ir, opset18

    op: Any = opset18

    def scalar_tensor(value: Any, dtype: int = -1, **_: Any) -> Any:
        if isinstance(value, (bool, int, float)):
            value = op.Constant(value=ir.tensor(np.asarray(value)))
        return op.Cast(value, to=FLOAT.dtype if dtype == -1 else dtype)

    def erf(values: Any) -> Any:
        return op.CastLike(op.Erf(op.Cast(values, to=FLOAT.dtype)), values)

    # torch writes scalars by way of float32, where the smallest float64 is 0; onnxruntime has no erf in float64.
    return {torch.ops.aten.scalar_tensor.default: scalar_tensor, torch.ops.aten.erf.default: erf}


def _serialise(traced: Traced, properties: dict[str, str], opset: int) -> bytes:
    names = traced.graph.signature.names
    try:
        with quietly():
            written: Any = torch.onnx.export(
                traced.program,
                dynamo=True,
                input_names=list(names),
                output_names=list(traced.graph.outputs),
                opset_version=opset,
                dynamic_shapes={"tensors": tuple({0: "batch"} for _ in names)},
                custom_translation_table=_translations(),
                verbose=False,
            )
    except Exception as error:
        raise ExportError(
            f"a network has a step that ONNX cannot express: {reason(error)}. Replace that step, or use mola.export.torch_export, "
            f"which has all of PyTorch's."
        ) from error
    model = written.model
    model.metadata_props.update(properties)
    model.producer_name, model.producer_version = "mola", str(traced.document["version"])
    model.doc_string = (
        "Probabilities and uncertainty of a mixture of Laplace approximations; see the mola.* properties."
    )
    for value in [*model.graph.inputs, *model.graph.outputs]:
        value.doc_string = None
    for node in model.graph.all_nodes():
        node.metadata_props.clear()  # source lines and paths of the machine where it was made
        node.doc_string = None
    size = sum(one.const_value.nbytes for one in model.graph.initializers.values() if one.const_value is not None)
    if size > LARGEST:
        raise ExportError(
            f"the networks have {size / 1e9:.2f} GB of weights, and one ONNX file can hold 2 GB. Use float16=True, or "
            f"mola.export.torch_export."
        )
    content: bytes = written.model_proto.SerializeToString(deterministic=True)
    try:
        _require("onnx").checker.check_model(content, full_check=True)
    except Exception as error:
        raise ExportError(
            f"torch wrote an ONNX graph that is not valid: {reason(error)}. Try another opset, or mola.export.torch_export."
        ) from error
    return content


def read(content: bytes) -> tuple[Run, dict[str, str]]:
    """Return the graph, in onnxruntime on the CPU, and the properties of an ONNX file."""
    runtime = _require("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ExportError(
            f"onnxruntime cannot run the file: {reason(error)}. Try a newer onnxruntime, or another opset."
        ) from error
    inputs, outputs = ([one.name for one in found] for found in (session.get_inputs(), session.get_outputs()))

    def run(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        arrays = [np.ascontiguousarray(tensor.detach().cpu().numpy()) for tensor in tensors]
        found = session.run(outputs, dict(zip(inputs, arrays, strict=True)))
        return {name: torch.from_numpy(value) for name, value in zip(outputs, found, strict=True)}

    return run, session.get_modelmeta().custom_metadata_map
