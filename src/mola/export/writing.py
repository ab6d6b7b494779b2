"""Trace a posterior for batches of any size, compare the result with PyTorch, and write the file in one step."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from mola.component import Component
from mola.errors import ExportError, OptionError, StorageError
from mola.export.document import as_properties, check_classes, describe, user_properties
from mola.export.graph import PosteriorGraph, Signature, check_outputs
from mola.network import Inputs, evaluating, head_by_name
from mola.posterior import MoLA
from mola.saving.files import write_atomically

TOLERANCE = 1e-4
"""Largest difference at which a file is kept, relative to values above 1 (regression: above the standard deviation). Measured
differences are below 1e-5: tests/library/test_export.py."""

FLOAT16_TOLERANCE = 5e-2
"""The same for networks in half precision, which has three digits: runtimes round at different places than PyTorch."""

BATCHES = (1, 3, 8)
"""Sizes of the batches that are compared."""

Run: TypeAlias = "Callable[[Sequence[Tensor]], Mapping[str, Tensor]]"
"""A file: from input tensors to outputs by name."""


@dataclass(frozen=True)
class Options:
    """Options of both kinds of file; see `mola.export.onnx`."""

    classes: Sequence[str] | None = None
    outputs: Sequence[str] | None = None
    float16: bool = False
    preparation: nn.Module | None = None
    metadata: Mapping[str, Any] | None = None
    thresholds: Mapping[str, float | None] = field(default_factory=dict)
    check: bool = True


@dataclass(frozen=True)
class Traced:
    """A traced program, the module that was traced, and the document of the file."""

    program: torch.export.ExportedProgram
    graph: PosteriorGraph
    document: dict[str, Any]


@dataclass(frozen=True)
class NamedTensor:
    """An input or output of a file."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    """Sizes; "batch" is any."""


@dataclass(frozen=True)
class Written:
    """A file that was exported."""

    path: Path
    bytes: int
    inputs: tuple[NamedTensor, ...]
    outputs: tuple[NamedTensor, ...]
    differences: dict[str, float] | None
    """Largest difference of each output from PyTorch's, relative to values above 1; None if it was not checked."""
    document: dict[str, Any]
    """The description that the file contains."""

    def plain(self) -> dict[str, Any]:
        """Return all fields as JSON."""
        return asdict(self) | {"path": str(self.path)}


def write(
    posterior: MoLA,
    path: str | Path,
    example: Inputs,
    options: Options,
    serialise: Callable[[Traced, dict[str, str]], bytes],
    runner: Callable[[bytes], Run],
    runtime: str,
) -> Written:
    """Trace, serialise, compare with PyTorch, and write all of the file or nothing.

    `serialise` makes the content of the file from a trace and the file's properties, and `runner` makes something that
    runs it from that content; `runtime` is its name in messages.
    """
    path = _checked_path(path)
    properties = user_properties(options.metadata)  # refused before the work, which takes longer
    traced = trace(posterior, example, options)
    content = serialise(traced, properties | as_properties(traced.document))
    differences = _compare(traced.graph, example, runner(content), runtime) if options.check else None
    try:
        write_atomically(path, content)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}. Nothing was left behind.") from error
    nodes, signature = {node.name: node for node in traced.program.graph.nodes}, traced.program.graph_signature
    inputs = _named([nodes[name] for name in signature.user_inputs], traced.graph.signature.names)
    outputs = _named([nodes[str(name)] for name in signature.user_outputs], traced.graph.outputs)
    return Written(path, len(content), inputs, outputs, differences, traced.document)


def _checked_path(path: str | Path) -> Path:
    path = Path(path)
    if path.is_dir():
        raise StorageError(f"{path} is a folder; expected the name of a file to write.")
    if not path.parent.is_dir():
        raise StorageError(f"{path} cannot be written: there is no folder {path.parent}. Make it first.")
    if not os.access(path.parent, os.W_OK):
        raise StorageError(f"{path} cannot be written: no permission for folder {path.parent}.")
    return path


def _named(nodes: Sequence[Any], names: Sequence[str]) -> tuple[NamedTensor, ...]:
    found = []
    for node, name in zip(nodes, names, strict=True):
        value = node.meta["val"]
        shape = tuple(size if isinstance(size, int) else "batch" for size in value.shape)
        found.append(NamedTensor(name, str(value.dtype).removeprefix("torch."), shape))
    return tuple(found)


# --- trace ------------------------------------------------------------------------------------------------------------


def trace(posterior: MoLA, example: Inputs, options: Options) -> Traced:
    """Trace a posterior for batches of any size. It and its networks are not changed."""
    if not isinstance(posterior, MoLA):
        raise OptionError(
            f"export takes a posterior of mola.fit, mola.ensemble or mola.load, got {type(posterior).__name__}. Over last layers a "
            f"prediction is a closed form of constants; other mixtures need gradients, drawn weights or networks of their own. Pass "
            f"the networks to mola.fit, and a trained Mimo to mola.baselines.mimo_mola."
        )
    outputs = check_outputs(options.outputs, posterior)
    signature = Signature.of(example, posterior.networks[0])
    if options.preparation is not None and len(signature.names) != 1:
        raise OptionError(f"preparation: expected networks with one input, got {', '.join(signature.names)}.")
    if options.float16:
        posterior = _in_half_precision(posterior)
    graph = PosteriorGraph(posterior, signature, outputs, float16=options.float16, preparation=options.preparation)
    with torch.inference_mode(False), torch.no_grad(), evaluating(*posterior.networks):
        tensors = signature.tensors(example)
        prediction = posterior.predict(graph.network_inputs(tensors))  # checks shapes and values
        point = prediction.probs if posterior.likelihood.classification else prediction.mean
        classes = check_classes(options.classes, point.shape[prediction.axis])
        # Two rows: a size of 1 would be taken for a constant.
        program = _program(
            graph, tuple(one[torch.arange(2, device="cpu") % len(one)].detach().clone() for one in tensors)
        )
    return Traced(program, graph, describe(graph, classes, options.thresholds))


def _in_half_precision(posterior: MoLA) -> MoLA:
    # The networks alone: the head computes in float64 whatever their precision.
    components = []
    for one in posterior.components:
        network, head = copy.deepcopy(one.network).half(), one.head
        if head is not None:
            head = replace(head, layer=head_by_name(network, head.name).layer)
        components.append(Component(network, head, one.layer, one.prior_precision, one.likelihood))
    return posterior.with_parts(components=components, weights=posterior.weights, tuning=posterior.tuning)


def _program(graph: PosteriorGraph, tensors: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    graph(*tensors)  # draws that are kept: a trace takes them as constants
    try:
        with quietly(), torch.autocast("cpu", enabled=False):
            shapes = {"tensors": tuple({0: batch} for _ in tensors)}
            program = torch.export.export(graph, tensors, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # the same code ran a moment ago: whatever went wrong has to do with tracing
        names = ", ".join(sorted({type(network).__name__ for network in graph.networks}))
        raise ExportError(
            f"torch.export cannot trace {names}: {reason(error)}. A network can be exported if its forward does not branch on the "
            f"values of tensors and accepts batches of any size: use torch.where instead of `if`, and x.shape[0] or -1 instead of a "
            f"fixed batch size."
        ) from error
    program.example_inputs = None  # a file that is given away should not contain anyone's data
    return program


def reason(error: BaseException) -> str:
    """Return the first line of the original error."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


@contextmanager
def quietly() -> Iterator[None]:
    """Silence the warnings and notes of torch's exporters, which are not for users of this library."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# --- compare ----------------------------------------------------------------------------------------------------------


def _compare(graph: PosteriorGraph, example: Inputs, run: Run, runtime: str) -> dict[str, float]:
    limit = FLOAT16_TOLERANCE if graph.float16 else TOLERANCE
    worst = dict.fromkeys(graph.outputs, 0.0)
    for seed, rows in enumerate(BATCHES):
        tensors = [_varied(one, rows, seed) for one in graph.signature.tensors(example)]
        prediction, found = graph.held[0].predict(graph.network_inputs(tensors)), run(tensors)
        for name in graph.outputs:
            worst[name] = max(worst[name], _difference(prediction, found[name], name, limit))
    wrong = ", ".join(f"{name} by {value:.2g}" for name, value in worst.items() if value > limit)
    if wrong:
        remedy = "Does a network depend on more than its inputs, such as random numbers or how often it was called?"
        if graph.float16:
            remedy = "These networks need more than half precision: export without float16."
        raise ExportError(
            f"the file disagrees with PyTorch in {runtime}: {wrong}, and at most {limit:g} is accepted. It was not written. {remedy}"
        )
    return worst


def _varied(example: Tensor, rows: int, seed: int) -> Tensor:
    # Rows of the example, with noise of the example's own scale; bytes are all random.
    generator = torch.Generator("cpu").manual_seed(seed)
    picked = example.detach().cpu()[torch.arange(seed, seed + rows, device="cpu") % len(example)]
    if picked.is_floating_point():
        noise = torch.randn(picked.shape, generator=generator, dtype=torch.float32, device="cpu")
        return picked + (noise * (float(example.detach().float().std(correction=0)) or 1.0)).to(picked.dtype)
    if picked.dtype == torch.uint8:
        return torch.randint(256, picked.shape, generator=generator, dtype=torch.uint8, device="cpu")
    return picked


def _difference(prediction: Any, found: Tensor, name: str, limit: float) -> float:
    expected = getattr(prediction, name).double()
    if name == "label":
        best, second = prediction._choices.double().topk(2).values.unbind(-1)
        return float(((found != expected) & prediction._placed(best - second >= limit)).double().max())
    unit = 1.0
    if not prediction.likelihood.classification and name not in ("ood_score", "distance"):
        deviation = float(prediction.std.max())
        unit = deviation if name in ("mean", "std", "component_mean") else deviation**2
    difference = (found.double() - expected).abs() / expected.abs().clamp_min(unit)
    return float(difference.nan_to_num(nan=torch.inf).max())
