"""A posterior and an example batch as a traced program that takes batches of any size."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mola.component import Component
from mola.errors import ExportError, OptionError
from mola.export.graph import OUTPUTS, Exported
from mola.export.information import describe
from mola.export.signature import Signature
from mola.heads import head_by_name
from mola.networks import Inputs, undisturbed
from mola.posterior import MoLA

__all__ = ["Settings", "Traced", "quietly", "reason", "root_of", "trace"]


@dataclass(frozen=True)
class Settings:
    """What an export can be told, whatever the kind of file."""

    classes: Sequence[str] | None = None
    outputs: Sequence[str] = OUTPUTS
    float16: bool = False
    preparation: nn.Module | None = None
    metadata: Mapping[str, Any] | None = None
    ood_threshold: float | None = None


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

    Raises:
        OptionError: if the posterior is none, or a preparation has several inputs; `ExportError` if a network cannot be
            traced, `DataError` if the example is not what the networks take.
    """
    if not isinstance(posterior, MoLA):
        Exported(posterior, Signature("none", ()))  # says what was expected
    signature = Signature.of(example, posterior.networks[0])
    if settings.preparation is not None and len(signature.names) != 1:
        message = f"preparation: expected networks with one input, got {', '.join(signature.names)}."
        raise OptionError(message)
    posterior.check_networks()
    if settings.float16:
        posterior = in_half_precision(posterior)
    with torch.inference_mode(False), torch.no_grad(), undisturbed(*posterior.networks):
        probs = posterior.predict(
            network_inputs(example, signature, settings)
        ).probs  # every check of shapes and numbers
        graph = Exported(
            posterior, signature, settings.outputs, float16=settings.float16, preparation=settings.preparation
        )
        tensors = tuple(two_rows(tensor) for tensor in signature.tensors(example))
        graph(*tensors)  # makes the constants
        program = _program(graph, tensors)
    document = describe(posterior, graph, settings.classes, probs.shape[1], settings.ood_threshold)
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
    return MoLA(components, posterior.link, posterior.weights, posterior.tuning)


def _program(graph: Exported, tensors: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    """Trace a graph with the first axis of every input free.

    Raises:
        ExportError: with torch's reason, and what can be done.
    """
    batch = torch.export.Dim("batch", min=1)
    shapes = {"tensors": tuple({0: batch} for _ in tensors)}
    try:
        with quietly(), torch.autocast("cpu", enabled=False):
            program = torch.export.export(graph, tensors, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # it ran a moment ago: whatever went wrong has to do with tracing
        names = ", ".join(sorted({type(network).__name__ for network in graph.networks}))
        message = (
            f"torch.export cannot trace {names}: {reason(root_of(error))}. A network can be exported if its forward does "
            f"not branch on the values of tensors and takes batches of any size: use torch.where instead of `if`, and "
            f"x.shape[0] or -1 instead of a fixed batch size."
        )
        raise ExportError(message) from error
    # The example was needed to trace; a file that is given away should not hold somebody's data.
    program.example_inputs = None
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
    """Not that the optimiser could not fold a constant: it leaves the node as it is, and the graph says the same."""
    return not str(record.msg).startswith("Evaluation failed")
