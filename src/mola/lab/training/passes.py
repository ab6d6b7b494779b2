"""Passes in train mode over any loader: with gradients, from a seed, and for BatchNorm statistics."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from mola.errors import DataError
from mola.network import Inputs, batches, call


class WithGradients(nn.Module):
    """A network whose outputs have gradients although `mola.network.call` disables them."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

        @functools.wraps(network.forward)  # its signature determines how mappings are passed
        def forward(*arguments: Any, **keywords: Any) -> Any:
            with torch.enable_grad():
                return network(*arguments, **keywords)

        self.forward = forward


@contextmanager
def seeded(network: nn.Module, seed: int) -> Iterator[None]:
    """Seed torch's random state of the CPU and of the network's devices; it is restored at the end."""
    devices = {tensor.device for tensor in network.parameters()}
    cards = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    with torch.random.fork_rng(devices=cards):
        # One by one: torch.manual_seed would also seed devices whose state is not restored.
        torch.default_generator.manual_seed(seed)
        for card in cards:
            with torch.cuda.device(card):
                torch.cuda.manual_seed(seed)
        if any(device.type == "mps" for device in devices):
            torch.mps.manual_seed(seed)
        yield


def check_inputs(inputs: Inputs, place: str) -> None:
    """Raise `DataError` if inputs are NaN or infinite: then the data, not the learning rate, make the loss NaN."""
    if any(isinstance(one, Tensor) and not bool(torch.isfinite(one).all()) for one in tree_leaves(inputs)):
        raise DataError(f"{place}: the inputs hold NaN or infinite values. Clean or leave out those data.")


def _norms(network: nn.Module) -> dict[str, _NormBase]:
    return {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, _NormBase) and module.running_mean is not None
    }


def has_statistics(network: nn.Module) -> bool:
    """Return whether a network keeps running statistics of its activations, as BatchNorm does."""
    return bool(_norms(network))


def recompute_statistics(network: nn.Module, loader: Iterable[Any]) -> dict[str, Tensor]:
    """Average the statistics of all batches, weighted by their size, in one pass in train mode; dropout is active.

    Args:
        network: a copy, whose statistics are overwritten.
        loader: training data; labels are not read.

    Returns:
        Copies of the running means and variances, by name of the buffer.
    """
    norms = _norms(network)
    momenta = {name: module.momentum for name, module in norms.items()}
    seen = 0
    network.train()
    try:
        for module in norms.values():
            module.reset_running_stats()
        for batch in batches(loader, "training loader"):
            size = next(len(one) for one in tree_leaves(batch.inputs) if isinstance(one, Tensor))
            seen += size
            for module in norms.values():
                module.momentum = size / seen
            call(network, batch.inputs)
    finally:
        for name, module in norms.items():
            module.momentum = momenta[name]
        network.eval()
    buffers = dict(network.named_buffers())
    names = [f"{name}.{kind}" if name else kind for name in norms for kind in ("running_mean", "running_var")]
    return {name: buffers[name].detach().clone() for name in names}
