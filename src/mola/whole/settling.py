"""Which layers of a network are the linear maps that they look like, by trying them on a few data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mola.features import check_finite
from mola.heads import check_logits
from mola.networks import Inputs, call
from mola.networks.passes import Differentiable
from mola.whole.jacobians import layer_rows, size_of, some_of, usable, watched
from mola.whole.layout import Layer, Layout

__all__ = ["settled"]


def settled(network: nn.Module, layout: Layout, inputs: Inputs) -> tuple[Layout, int]:
    """Keep the layers whose rows are right; the parameters of others join the rest.

    A layer may be called twice, not at all (its weight used by hand), or with the data in another dimension than the first.
    Its rows for the first and the last datum are compared with what automatic differentiation says.

    Args:
        network: in eval mode.
        layout: as `trainable_layout` found it.
        inputs: one batch; a few of its data are looked at.

    Returns:
        The layout with the layers' positions, and the number of classes C.
    """
    size = size_of(inputs)
    count = min(3, size)
    own = dict(network.named_parameters(remove_duplicate=False))
    shapes = {name: tuple(parameter.shape) for name, parameter in own.items()}
    kept = []
    with torch.inference_mode(False), torch.enable_grad(), watched(network, layout.layers) as seen:
        few = usable(tree_map(lambda value: some_of(value, slice(count), size), inputs))
        logits = call(Differentiable(network), few)
        check_logits(logits)
        check_finite(logits.detach())
        fitting = [layer for layer in layout.layers if _fits(seen[layer.name], network, layer, count)]
        # Not the sum of the logits: that of centred ones is 0, and says nothing.
        direction = torch.arange(1, logits.shape[1] + 1, device=logits.device).cos().to(logits)
        found = layer_rows(network, tuple(fitting), seen, logits, direction.expand_as(logits)[None], keep_graph=True)
        score = logits @ direction
        for layer, piece in zip(fitting, found, strict=True):
            rows = piece.product()[:, 0]
            if all(_agrees(rows[datum], layer, score[datum], own) for datum in (0, count - 1)):
                kept.append(replace(layer, positions=seen[layer.name][0][1][0].numel() // layer.rows))
    return layout.with_layers(kept, shapes), logits.shape[1]


def _agrees(row: Tensor, layer: Layer, score: Tensor, parameters: Mapping[str, Tensor]) -> bool:
    """Whether a layer's part of one row is the gradient of a combination of one datum's logits."""
    wanted = [parameters[name] for name in layer.parameters]
    exact = torch.autograd.grad(score, wanted, retain_graph=True, allow_unused=True, materialize_grads=True)
    joined = layer.join(dict(zip(layer.parameters, exact, strict=True)))
    # In half precision both are rounded a few times on the way.
    rounding = 16 * torch.finfo(joined.dtype).eps
    largest = float(joined.abs().max())
    return torch.allclose(row, joined.to(row), rtol=max(1e-3, rounding), atol=max(1e-4, rounding) * largest)


def _fits(calls: list[tuple[Tensor, Tensor]], network: nn.Module, layer: Layer, count: int) -> bool:
    """Whether a layer was called once, with one datum a row."""
    dimensions = 4 if isinstance(network.get_submodule(layer.name), nn.Conv2d) else 2
    return len(calls) == 1 and len(calls[0][0]) == count and calls[0][0].dim() >= dimensions
