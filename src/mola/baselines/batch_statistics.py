"""BatchNorm statistics of a network as it is: one pass over the data, in train mode, every datum with equal weight."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mola.features import peek
from mola.networks import as_batch, call

__all__ = ["has_statistics", "recompute_statistics"]


def _normalisations(network: nn.Module) -> dict[str, _NormBase]:
    return {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, _NormBase) and module.running_mean is not None
    }


def has_statistics(network: nn.Module) -> bool:
    """Whether a network keeps running statistics of its activations."""
    return bool(_normalisations(network))


def recompute_statistics(network: nn.Module, loader: Iterable[Any]) -> dict[str, Tensor]:
    """Reset the running statistics, run over the data in train mode, and average: batch i of size b counts b.

    The network is changed: pass one of your own. Dropout stays active during the pass, as in training.

    Args:
        network: with the weights whose statistics are wanted.
        loader: training data; labels are not read.

    Returns:
        The running means and variances by name of the buffer, as copies.
    """
    norms = _normalisations(network)
    momenta = {name: module.momentum for name, module in norms.items()}
    seen = 0
    network.train()
    try:
        for module in norms.values():
            module.reset_running_stats()
        for index, raw in enumerate(peek(loader, "the training loader")[1]):
            inputs = as_batch(raw, f"batch {index} of the training loader").inputs
            size = _rows(inputs)
            for module in norms.values():
                module.momentum = size / (seen + size)
            call(network, inputs)
            seen += size
    finally:
        for name, module in norms.items():
            module.momentum = momenta[name]
        network.eval()
    buffers = dict(network.named_buffers())
    names = [f"{name}.{kind}" if name else kind for name in norms for kind in ("running_mean", "running_var")]
    return {name: buffers[name].detach().clone() for name in names}


def _rows(inputs: Any) -> int:
    """Size of a batch: that of its first tensor."""
    if isinstance(inputs, Tensor):
        return len(inputs)
    return _rows(next(iter(inputs.values() if hasattr(inputs, "values") else inputs)))
