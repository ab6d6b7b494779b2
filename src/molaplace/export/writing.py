"""Export a posterior: trace it for batches of any size, compare the exported outputs with PyTorch's, and write the file atomically."""

from __future__ import annotations

import copy
import io
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from molaplace.component import Component
from molaplace.errors import ExportError, OptionError, StorageError
from molaplace.export.graph import PosteriorGraph, Signature, check_outputs
from molaplace.export.reading import (
    FORMAT_VERSION,
    PREFIX,
    PROPERTIES,
    THRESHOLDS,
    Run,
    quietly,
    read_onnx,
    read_program,
    reason,
    require,
)
from molaplace.fingerprints import digest
from molaplace.network import Inputs, evaluating, head_by_name
from molaplace.posterior import MoLA
from molaplace.saving.files import write_atomically

TOLERANCE = 1e-4
"""Largest accepted difference between the outputs of an exported file and those of PyTorch. The difference is relative for values
above 1 (in regression, above the standard deviation) and absolute for smaller values. Differences measured in
tests/library/test_export.py are below 1e-5."""

FLOAT16_TOLERANCE = 5e-2
"""Largest accepted difference for half-precision networks. Half precision has only three significant digits, and runtimes differ in
rounding."""

BATCHES = (1, 3, 8)
"""Batch sizes at which the file's outputs are compared with PyTorch's."""

OPSET = 18
"""Version of the ONNX operator set: the newest one that PyTorch writes without conversion."""

LARGEST = 2**31 - 1
"""Largest size of an ONNX file in bytes, a limit imposed by protobuf."""

Serialise: TypeAlias = "Callable[[torch.export.ExportedProgram, PosteriorGraph, dict[str, str]], bytes]"
"""A function that serialises a trace, given the traced module and the file's properties."""


@dataclass(frozen=True)
class NamedTensor:
    """An input or output of an exported model."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    """Size of each dimension; "batch" means any size from 1."""


@dataclass(frozen=True)
class Written:
    """Description of an exported file."""

    path: Path
    bytes: int
    inputs: tuple[NamedTensor, ...]
    outputs: tuple[NamedTensor, ...]
    differences: dict[str, float] | None
    """Largest deviation of each output from PyTorch's, relative for values above 1; None if the file was not checked."""
    document: dict[str, Any]
    """Description stored in the file."""

    def plain(self) -> dict[str, Any]:
        """Return all fields as a JSON-serialisable dictionary."""
        return asdict(self) | {"path": str(self.path)}


def onnx(
    posterior: MoLA,
    path: str | Path,
    example: Inputs,
    *,
    classes: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    float16: bool = False,
    preparation: nn.Module | None = None,
    ood_threshold: float | None = None,
    answer_threshold: float | None = None,
    set_threshold: float | None = None,
    check: bool = True,
) -> Written:
    """Export a posterior to a single ONNX file that runs without PyTorch and outputs probabilities and uncertainty.

    The outputs have the names and values of the fields that `posterior.predict` returns, and are computed with the same random draws.
    Batches may be of any size from 1, because onnxruntime cannot multiply matrices without rows. Inputs that contain NaN produce outputs
    that contain NaN. The file stores the classes, inputs, prior precisions, weights, link, structure and rule as JSON properties whose
    names begin with "molaplace.".

    Args:
        posterior: posterior from `mola.fit`, `mola.ensemble` or `mola.load`. The posterior and its networks are not changed.
        path: file to write. An existing file is replaced only once the new file is complete.
        example: one batch of inputs. A single tensor becomes the input named "input". The tensors in a tuple are named after the
            parameters of the networks' `forward` method, and the tensors in a mapping after their keys.
        classes: class names, in the order of the networks' outputs.
        outputs: fields of the prediction; by default, `mola.export.OUTPUTS`, or `mola.export.REGRESSION_OUTPUTS` for regression. The
            other available fields are "logit_mean" and "logit_variance" for classification, and "within", "between", "component_mean",
            "component_variance" and "component_noise" for regression. "epistemic" and "aleatoric" are the most expensive to compute.
        float16: whether to run the networks in half precision. Inputs and outputs remain float32, and the head computes in float64.
        preparation: a module, such as `mola.export.Pixels`, that is applied to the input first; the networks must have a single input.
        ood_threshold: OOD score above which an input counts as an outlier.
        answer_threshold: confidence above which the model answers instead of abstaining; see `mola.abstain_threshold`.
        set_threshold: lowest probability at which a class is included in a prediction set; see `mola.prediction_sets`.
        check: whether to run the exported model and compare its outputs with the posterior's before the file is written.

    Returns:
        The file's path and size, the model's inputs and outputs, and the largest deviation of each output from PyTorch's. Raises
        `ExportError` if a network cannot be traced or if the file's outputs differ from the posterior's predictions.
    """
    for package in ("onnxscript", *(["onnxruntime"] if check else [])):
        require(package)
    options: dict[str, Any] = {"classes": classes, "outputs": outputs, "float16": float16, "preparation": preparation}
    options |= dict(zip(THRESHOLDS, (ood_threshold, answer_threshold, set_threshold), strict=True))
    return _write(posterior, path, example, _as_onnx, read_onnx, check=check, **options)


def torch_export(posterior: MoLA, path: str | Path, example: Inputs, **options: Any) -> Written:
    """Export a posterior to a single `.pt2` file, to be read with `torch.export.load` or `mola.export.load(path, trust=True)`.

    The options, the result and the errors are the same as for `mola.export.onnx`.
    """
    return _write(posterior, path, example, _as_program, read_program, **options)


def _write(
    posterior: MoLA,
    path: str | Path,
    example: Inputs,
    serialise: Serialise,
    read: Callable[[bytes, object], tuple[Run, dict[str, str]]],
    *,
    check: bool = True,
    **options: Any,
) -> Written:
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise StorageError(
            f"{path} cannot be written. Pass a path to a file in an existing folder to which you have write permission."
        )
    thresholds = {name: options.pop(name, None) for name in THRESHOLDS}
    program, graph, document = trace(posterior, example, **options)
    document |= thresholds
    content = serialise(program, graph, {f"{PREFIX}{name}": json.dumps(value) for name, value in document.items()})
    differences = _compare(graph, example, read(content, path)[0]) if check else None
    write_atomically(path, content)
    nodes = {node.name: node for node in program.graph.nodes}
    signature = program.graph_signature
    inputs = _tensors_of([nodes[name] for name in signature.user_inputs], graph.signature.names)
    outputs = _tensors_of([nodes[str(name)] for name in signature.user_outputs], graph.outputs)
    return Written(path, len(content), inputs, outputs, differences, document)


def _tensors_of(nodes: Sequence[Any], names: Sequence[str]) -> tuple[NamedTensor, ...]:
    tensors = []
    for node, name in zip(nodes, names, strict=True):
        value = node.meta["val"]
        shape = tuple(size if isinstance(size, int) else "batch" for size in value.shape)
        tensors.append(NamedTensor(name, str(value.dtype).removeprefix("torch."), shape))
    return tuple(tensors)


# --- trace ------------------------------------------------------------------------------------------------------------


def trace(
    posterior: MoLA,
    example: Inputs,
    *,
    classes: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    float16: bool = False,
    preparation: nn.Module | None = None,
) -> tuple[torch.export.ExportedProgram, PosteriorGraph, dict[str, Any]]:
    """Trace a posterior for batches of any size; return the traced program, the traced module and its description.

    The posterior and its networks are not changed.
    """
    if not isinstance(posterior, MoLA):
        raise OptionError(
            f"must be a posterior from mola.fit, mola.ensemble or mola.load, got {type(posterior).__name__}. Only last-layer "
            f"posteriors can be exported; other mixtures need gradients or sampled weights to predict. Pass the networks to "
            f"mola.fit.",
            argument="posterior",
        )
    outputs = check_outputs(outputs, posterior)
    signature = Signature.of(example, posterior.networks[0])
    if preparation is not None and len(signature.names) != 1:
        raise OptionError(
            f"must be networks with a single input, got the inputs {', '.join(signature.names)}.",
            argument="preparation",
        )
    if float16:
        posterior = _in_half_precision(posterior)
    graph = PosteriorGraph(posterior, signature, outputs, float16=float16, preparation=preparation)
    with torch.inference_mode(False), torch.no_grad(), evaluating(*posterior.networks):
        tensors = signature.tensors(example)
        prediction = posterior.predict(graph.network_inputs(tensors))  # this call checks shapes and values
        point = prediction.probs if posterior.likelihood.classification else prediction.mean
        count = point.shape[prediction.axis]
        names = [str(name) for name in (range(count) if classes is None else classes)]
        if len(names) != count or len(set(names)) != count or isinstance(classes, str):
            raise OptionError(
                f"must be {count} different names, one for each output of the networks; got {classes!r}.",
                argument="classes",
            )
        # Trace with two rows, because torch.export treats a size of 1 as a constant.
        indices = [torch.arange(2, device="cpu") % len(tensor) for tensor in tensors]
        pairs = zip(tensors, indices, strict=True)
        program = _program(graph, tuple(tensor[rows].detach().clone() for tensor, rows in pairs))
    # Return the description as it will be read from the file, with tuples converted to lists.
    return (
        program,
        graph,
        json.loads(json.dumps({"classes": names, "channels_first": prediction.axis != -1, **_describe(graph)})),
    )


def _in_half_precision(posterior: MoLA) -> MoLA:
    # Convert only the networks. The head always computes in float64, regardless of the networks' precision.
    components = []
    copies: dict[int, Any] = {}  # networks that share a backbone or trunk share its copy
    for component in posterior.components:
        network = copy.deepcopy(component.network, copies).half()
        head = component.head
        if head is not None:
            head = replace(head, module=head_by_name(network, head.name).module)
        components.append(Component(network, head, component.layer, component.likelihood))
    return posterior.with_parts(components=components, weights=posterior.weights, tuning=posterior.tuning)


def _program(graph: PosteriorGraph, tensors: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    graph(*tensors)  # this call caches the random draws, so that the trace stores them as constants
    try:
        with quietly(), torch.autocast("cpu", enabled=False):
            shapes = {"tensors": tuple({0: batch} for _ in tensors)}
            program = torch.export.export(graph, tensors, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # the same code has just run without tracing, so the error must come from tracing
        names = ", ".join(sorted({type(network).__name__ for network in graph.networks}))
        raise ExportError(
            f"torch.export cannot trace {names}: {reason(error)}. A network can be exported if its forward method does not branch on "
            f"tensor values and accepts batches of any size. Use torch.where instead of `if`, and x.shape[0] or -1 instead of a "
            f"fixed batch size."
        ) from error
    program.example_inputs = None  # the exported file must not contain the user's data
    return program


def _describe(graph: PosteriorGraph) -> dict[str, Any]:
    from molaplace import __version__

    posterior = graph.held[0]
    tuning = posterior.tuning
    return {
        "format_version": FORMAT_VERSION,
        "version": __version__,
        "torch": torch.__version__,
        "signature": asdict(graph.signature),
        "outputs": list(graph.outputs),
        "networks": [type(network).__name__ for network in posterior.networks],
        "likelihood": posterior.likelihood.name,
        "structure": posterior.structure,
        "link": {"name": posterior.link.name, **posterior.link.settings()},
        **posterior.settings.as_json(),
        **({"prior_precision": None} if posterior.structure is None else {}),
        "weights": posterior.weights.tolist(),
        "weighting": posterior.weighting,
        "rule": None if tuning is None else tuning.rule,
        "tuning_notes": [] if tuning is None else list(tuning.notes),
        "ood_score": posterior.ood_score_name,
        # Scores of half-precision networks differ, so they have thresholds and watches of their own.
        "fingerprint": digest(posterior.fingerprint, "float16") if graph.float16 else posterior.fingerprint,
        "float16": graph.float16,
        "preparation": None if graph.preparation is None else repr(graph.preparation),
    }


# --- formats ----------------------------------------------------------------------------------------------------------


def _as_program(program: torch.export.ExportedProgram, _: PosteriorGraph, properties: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with quietly():
        torch.export.save(program, buffer, extra_files={PROPERTIES: json.dumps(properties)})
    return buffer.getvalue()


def _translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    from onnxscript import FLOAT, ir, opset18

    op: Any = opset18

    def scalar_tensor(value: Any, dtype: int = -1, **_: Any) -> Any:
        if isinstance(value, (bool, int, float)):
            value = op.Constant(value=ir.tensor(np.asarray(value)))
        return op.Cast(value, to=FLOAT.dtype if dtype == -1 else dtype)

    def erf(values: Any) -> Any:
        return op.CastLike(op.Erf(op.Cast(values, to=FLOAT.dtype)), values)

    # PyTorch converts scalars via float32, which rounds the smallest float64 numbers to 0. onnxruntime has no float64 version of erf.
    return {torch.ops.aten.scalar_tensor.default: scalar_tensor, torch.ops.aten.erf.default: erf}


def _as_onnx(program: torch.export.ExportedProgram, graph: PosteriorGraph, properties: dict[str, str]) -> bytes:
    names = graph.signature.names
    try:
        with quietly():
            written: Any = torch.onnx.export(
                program,
                dynamo=True,
                input_names=list(names),
                output_names=list(graph.outputs),
                opset_version=OPSET,
                dynamic_shapes={"tensors": tuple({0: "batch"} for _ in names)},
                custom_translation_table=_translations(),
                verbose=False,
            )
    except Exception as error:
        raise ExportError(
            f"a network uses an operation that ONNX does not support: {reason(error)}. Replace the operation, or use "
            f"mola.export.torch_export, which supports all PyTorch operations."
        ) from error
    model = written.model
    model.metadata_props.update(properties)
    model.producer_name = "molaplace"
    model.producer_version = json.loads(properties[f"{PREFIX}version"])
    model.doc_string = (
        "A mixture of Laplace approximations with predictive uncertainty. The molaplace.* properties describe the file."
    )
    for value in [*model.graph.inputs, *model.graph.outputs]:
        value.doc_string = None
    for node in model.graph.all_nodes():
        node.metadata_props.clear()  # remove the source lines and file paths that the exporter stores
        node.doc_string = None
    constants = [value.const_value for value in model.graph.initializers.values()]
    size = sum(constant.nbytes for constant in constants if constant is not None)
    if size > LARGEST:
        raise ExportError(
            f"the networks have {size / 1e9:.2f} GB of weights, but an ONNX file can contain at most 2 GB. Use float16=True or "
            f"mola.export.torch_export."
        )
    return bytes(written.model_proto.SerializeToString(deterministic=True))


# --- compare ----------------------------------------------------------------------------------------------------------


def _compare(graph: PosteriorGraph, example: Inputs, run: Run) -> dict[str, float]:
    limit = FLOAT16_TOLERANCE if graph.float16 else TOLERANCE
    worst = dict.fromkeys(graph.outputs, 0.0)
    for seed, rows in enumerate(BATCHES):
        tensors = [_varied(tensor, rows, seed) for tensor in graph.signature.tensors(example)]
        prediction = graph.held[0].predict(graph.network_inputs(tensors))
        outputs = run(tensors)
        for name in graph.outputs:
            worst[name] = max(worst[name], _difference(prediction, outputs[name], name, limit))
    wrong = ", ".join(f"{name} by {value:.2g}" for name, value in worst.items() if value > limit)
    if wrong:
        remedy = (
            "Check that the networks' outputs depend only on their inputs, not on random numbers or on earlier calls."
        )
        if graph.float16:
            remedy = "Half precision is not accurate enough for these networks. Export without float16."
        raise ExportError(
            f"the file's outputs differ from PyTorch's: {wrong}; differences of at most {limit:g} are accepted. The file "
            f"was not written. {remedy}"
        )
    return worst


def _varied(example: Tensor, rows: int, seed: int) -> Tensor:
    # Return rows of the example plus noise with the example's standard deviation; for bytes, return random bytes.
    generator = torch.Generator("cpu").manual_seed(seed)
    batch = example.detach().cpu()[torch.arange(seed, seed + rows, device="cpu") % len(example)]
    if batch.is_floating_point():
        noise = torch.randn(batch.shape, generator=generator, dtype=torch.float32, device="cpu")
        return batch + (noise * (float(example.detach().float().std(correction=0)) or 1.0)).to(batch.dtype)
    if batch.dtype == torch.uint8:
        return torch.randint(256, batch.shape, generator=generator, dtype=torch.uint8, device="cpu")
    return batch


def _difference(prediction: Any, actual: Tensor, name: str, limit: float) -> float:
    expected = getattr(prediction, name).double()
    if name == "label":
        best, second = prediction.distribution.choices.double().topk(2).values.unbind(-1)
        return float(((actual != expected) & prediction.in_layout(best - second >= limit)).double().max())
    unit = 1.0
    if not prediction.likelihood.classification and name not in ("ood_score", "distance"):
        deviation = float(prediction.std.max())
        unit = deviation if name in ("mean", "std", "component_mean") else deviation**2
    difference = (actual.double() - expected).abs() / expected.abs().clamp_min(unit)
    return float(difference.nan_to_num(nan=torch.inf).max())
