"""Trace a posterior into a program for batches of any size, compare the written file with PyTorch, and put it in place in one step."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mola.component import Component
from mola.errors import ExportError, OptionError, StorageError
from mola.export.graph import Exported, Signature
from mola.export.information import Thresholds, describe
from mola.network import Inputs, head_by_name, undisturbed
from mola.posterior import MoLA
from mola.saving.storage import write_atomically


@dataclass(frozen=True)
class Settings:
    """What an export can be told, whatever the kind of file."""

    classes: Sequence[str] | None = None
    outputs: Sequence[str] | None = None
    float16: bool = False
    preparation: nn.Module | None = None
    metadata: Mapping[str, Any] | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)


@dataclass(frozen=True)
class Traced:
    """A program and what it is a program of."""

    program: torch.export.ExportedProgram
    graph: Exported
    posterior: MoLA
    """What the file must agree with: in half precision, if the file is."""
    document: dict[str, Any]


def trace(posterior: MoLA, example: Inputs, settings: Settings) -> Traced:
    """Write a posterior as a program.

    Args:
        posterior: made by `mola.fit`, `mola.ensemble` or `mola.load`; it and its networks are not changed.
        example: one batch of inputs, of any size; all others may have other sizes.
        settings: outputs, names and precision.

    Returns:
        The program.
    """
    if not isinstance(posterior, MoLA):
        Exported(posterior, Signature("none", ()))  # says what was expected
    signature = Signature.of(example, posterior.networks[0])
    if settings.preparation is not None and len(signature.names) != 1:
        raise OptionError(f"preparation: expected networks with one input, got {', '.join(signature.names)}.")
    posterior.check_networks()
    if settings.float16:
        posterior = in_half_precision(posterior)
    with torch.inference_mode(False), torch.no_grad(), undisturbed(*posterior.networks):
        # Every check of shapes and numbers.
        said: Any = posterior.predict(network_inputs(example, signature, settings))
        width = (said.probs if posterior.likelihood.discrete else said.mean).shape[said.axis]
        graph = Exported(
            posterior, signature, settings.outputs, float16=settings.float16, preparation=settings.preparation
        )
        tensors = tuple(two_rows(tensor) for tensor in signature.tensors(example))
        graph(*tensors)  # makes the constants
        program = _program(graph, tensors)
    document = describe(posterior, graph, settings.classes, width, settings.thresholds)
    return Traced(program, graph, posterior, document)


def network_inputs(example: Inputs, signature: Signature, settings: Settings | Exported) -> Inputs:
    """What the networks get of a batch: prepared, and in half precision if they are."""
    tensors = signature.tensors(example)
    if settings.preparation is not None:
        tensors = [settings.preparation(tensor) for tensor in tensors]
    if settings.float16:
        tensors = [tensor.half() if tensor.is_floating_point() else tensor for tensor in tensors]
    return signature.inputs(tensors)


def two_rows(tensor: Tensor) -> Tensor:
    """Two rows of a batch: a size of 1 would be taken for a constant."""
    return tensor[torch.arange(2) % len(tensor)].detach().clone()


def in_half_precision(posterior: MoLA) -> MoLA:
    """The same posterior on copies of the networks in float16; its own arithmetic stays in float32."""
    components = []
    for component in posterior.components:
        network = copy.deepcopy(component.network).half()
        head = component.head
        if head is not None:
            head = replace(head, layer=head_by_name(network, head.name).layer)
        components.append(Component(network, head, component.curvature, component.precision))
    return posterior._with(components=components)


def _program(graph: Exported, tensors: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    shapes = {"tensors": tuple({0: batch} for _ in tensors)}
    try:
        with quietly(), torch.autocast("cpu", enabled=False):
            program = torch.export.export(graph, tensors, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # it ran a moment ago: whatever went wrong has to do with tracing
        names = ", ".join(sorted({type(network).__name__ for network in graph.networks}))
        raise ExportError(
            f"torch.export cannot trace {names}: {reason(root_of(error))}. A network can be exported if its forward does "
            f"not branch on the values of tensors and takes batches of any size: use torch.where instead of `if`, and "
            f"x.shape[0] or -1 instead of a fixed batch size."
        ) from error
    # The example was needed to trace; a file that is given away should not hold somebody's data.
    program.example_inputs = None
    return _without_unused(program)


def _without_unused(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder" and not node.users}
    specs = program.graph_signature.input_specs
    for spec in [one for one in specs if one.arg.name in nodes and (one.target or "").startswith("constants.")]:
        specs.remove(spec)
        program.constants.pop(spec.target, None)
        program.graph.erase_node(nodes[spec.arg.name])
    program.graph_module.recompile()
    return program


def root_of(error: BaseException) -> BaseException:
    """What was raised first."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def reason(error: BaseException) -> str:
    """What went wrong, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


@contextmanager
def quietly() -> Iterator[None]:
    """Torch's own warnings and notes about its exporters are not for the user of ours.

    Yields:
        Nothing.
    """
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    folding = logging.getLogger("onnxscript.optimizer._constant_folding")
    folding.addFilter(_is_news)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        folding.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    # Not that the optimiser could not fold a constant: it leaves the node as it is, and the graph says the same.
    return not str(record.msg).startswith("Evaluation failed")


TOLERANCE = 1e-4
"""Largest difference of any output at which a file is kept; relative to values above 1, as outlier scores and distances have no upper
end. Measured ones are below 1e-5, see tests/library/test_export.py."""

FLOAT16_TOLERANCE = 5e-2
"""The same for networks in half precision, whose numbers have three digits: runtimes round at other places than PyTorch."""

BATCHES = (1, 3, 8)
"""Sizes of the batches that are compared."""


def expected_outputs(traced: Traced, example: Inputs) -> dict[str, Tensor]:
    """What `posterior.predict` says of a batch, by the names of a file's outputs."""
    prediction = traced.posterior.predict(network_inputs(example, traced.graph.signature, traced.graph))
    names = {"probabilities": "probs"}
    return {name: getattr(prediction, names.get(name, name)) for name in traced.graph.outputs}


def probing_inputs(traced: Traced, example: Inputs, rows: int, seed: int) -> Inputs:
    """A random batch like the example: its rows, floating-point ones with noise of their own size; bytes are all random."""
    generator = torch.Generator("cpu").manual_seed(seed)
    tensors = []
    for tensor in traced.graph.signature.tensors(example):
        picked = tensor.detach().cpu()[torch.arange(seed, seed + rows) % len(tensor)]
        if tensor.is_floating_point():
            noise = torch.randn(picked.shape, generator=generator, dtype=torch.float32, device="cpu")
            scale = float(tensor.detach().float().std(correction=0)) or 1.0
            picked = picked + (noise * scale).to(picked.dtype)
        elif tensor.dtype == torch.uint8:
            picked = torch.randint(256, picked.shape, generator=generator, dtype=torch.uint8, device="cpu")
        tensors.append(picked)
    return traced.graph.signature.inputs(tensors)


def check_agreement(
    traced: Traced, example: Inputs, run: Callable[[Sequence[Tensor]], Mapping[str, Tensor]], runtime: str
) -> dict[str, float]:
    """Compare a file with PyTorch on random batches of several sizes.

    Args:
        traced: what was exported.
        example: a batch to make others of.
        run: the file, from tensors to outputs by name.
        runtime: what runs the file, for the message.

    Returns:
        Largest difference of each output, relative where its value is above 1. A label counts as different (1) only where the two
        best classes are not tied.
    """
    worst = dict.fromkeys(traced.graph.outputs, 0.0)
    for seed, rows in enumerate(BATCHES):
        inputs = probing_inputs(traced, example, rows, seed)
        expected = expected_outputs(traced, inputs)
        found = run(traced.graph.signature.tensors(inputs))
        for name, value in expected.items():
            difference = (found[name].double() - value.double()).abs() / value.double().abs().clamp_min(1)
            if name == "label":
                difference = (difference > 0).double() * (~_tied(traced, inputs)).double()
            worst[name] = max(worst[name], float(difference.nan_to_num(nan=torch.inf).max()))
    limit = FLOAT16_TOLERANCE if traced.graph.float16 else TOLERANCE
    wrong = {name: value for name, value in worst.items() if value > limit}
    if wrong:
        told = ", ".join(f"{name} by {value:.2g}" for name, value in wrong.items())
        raise ExportError(
            f"the file disagrees with PyTorch in {runtime}: {told}, and at most {limit:g} is expected. It was not written. "
            f"{_remedy(traced)}"
        )
    return worst


def _remedy(traced: Traced) -> str:
    if traced.graph.float16:
        return "These networks need more than half precision: export without float16."
    return "Does a network depend on more than its inputs, such as random numbers or how often it was called?"


def _tied(traced: Traced, inputs: Inputs) -> Tensor:
    prediction = traced.posterior.predict(network_inputs(inputs, traced.graph.signature, traced.graph))
    first, second = prediction._answers.double().topk(2).values.unbind(-1)
    first, second = prediction._placed(first), prediction._placed(second)
    return first - second < (FLOAT16_TOLERANCE if traced.graph.float16 else TOLERANCE)


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
    """Largest difference of each output from PyTorch's, relative where its value is above 1; None where it was not checked."""
    document: dict[str, Any]
    """What the file says of itself."""

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"path": str(self.path)}


def _named(nodes: Sequence[Any], names: Sequence[str]) -> tuple[NamedTensor, ...]:
    found = []
    for node, name in zip(nodes, names, strict=True):
        value = node.meta["val"]
        shape = tuple(size if isinstance(size, int) else "batch" for size in value.shape)
        found.append(NamedTensor(name, str(value.dtype).removeprefix("torch."), shape))
    return tuple(found)


def check_path(path: str | Path) -> Path:
    """A path that can be written, found out before the work.

    Args:
        path: of the file.

    Returns:
        The same.
    """
    path = Path(path)
    if path.is_dir():
        raise StorageError(f"{path} is a folder; expected the name of a file to write.")
    if not path.parent.is_dir():
        raise StorageError(f"{path} cannot be written: there is no folder {path.parent}. Make it first.")
    if not os.access(path.parent, os.W_OK):
        raise StorageError(f"{path} cannot be written: no permission for folder {path.parent}.")
    return path


def write_file(path: Path, content: bytes, traced: Traced, differences: dict[str, float] | None) -> Written:
    """Write all of a file or nothing.

    Args:
        path: of the file.
        content: all of it.
        traced: what it was made of.
        differences: from PyTorch.

    Returns:
        What was written.
    """
    try:
        write_atomically(path, content)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}. Nothing was left behind.") from error
    nodes, graph = {node.name: node for node in traced.program.graph.nodes}, traced.graph
    signature = traced.program.graph_signature
    inputs = _named([nodes[name] for name in signature.user_inputs], graph.signature.names)
    outputs = _named([nodes[name] for name in signature.user_outputs], graph.outputs)
    return Written(path, len(content), inputs, outputs, differences, traced.document)
