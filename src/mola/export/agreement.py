"""Whether a file gives the numbers that PyTorch gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mola.errors import ExportError
from mola.export.tracing import Traced, network_inputs
from mola.networks import Inputs

__all__ = ["FLOAT16_TOLERANCE", "TOLERANCE", "check_agreement", "expected_outputs", "probing_inputs"]

TOLERANCE = 1e-4
"""Largest difference of any output at which a file is kept. Measured ones are below 1e-5, see tests/test_export.py."""

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
        Largest difference of each output. A label counts as different (1) only where the two best classes are not tied.

    Raises:
        ExportError: if a difference is too large, or an output is not a number.
    """
    worst = dict.fromkeys(traced.graph.outputs, 0.0)
    for seed, rows in enumerate(BATCHES):
        inputs = probing_inputs(traced, example, rows, seed)
        expected = expected_outputs(traced, inputs)
        found = run(traced.graph.signature.tensors(inputs))
        for name, value in expected.items():
            difference = (found[name].double() - value.double()).abs()
            if name == "label":
                difference = (difference > 0).double() * (~_tied(traced, inputs)).double()
            worst[name] = max(worst[name], float(difference.nan_to_num(nan=torch.inf).max()))
    limit = FLOAT16_TOLERANCE if traced.graph.float16 else TOLERANCE
    wrong = {name: value for name, value in worst.items() if value > limit}
    if wrong:
        told = ", ".join(f"{name} by {value:.2g}" for name, value in wrong.items())
        message = (
            f"the file disagrees with PyTorch in {runtime}: {told}, and at most {limit:g} is expected. It was not written. "
            f"{_remedy(traced)}"
        )
        raise ExportError(message)
    return worst


def _remedy(traced: Traced) -> str:
    if traced.graph.float16:
        return "These networks need more than half precision: export without float16."
    return "Does a network depend on more than its inputs, such as random numbers or how often it was called?"


def _tied(traced: Traced, inputs: Inputs) -> Tensor:
    """Whether the two most probable classes differ by no more than rounding."""
    probs = traced.posterior.predict(network_inputs(inputs, traced.graph.signature, traced.graph)).probs
    first, second = probs.double().topk(2).values.T
    return first - second < (FLOAT16_TOLERANCE if traced.graph.float16 else TOLERANCE)
