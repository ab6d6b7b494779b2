r"""Rows of the Jacobian of the logits with respect to the weights, one set for each datum.

A row is :math:`r^\top \partial f(x) / \partial \theta` for some direction r of the C logits. R directions take R backward
passes for all data together; no pass makes gradients of weights. A layer's part of a row is the outer product of the
gradient at its output and its input, summed over positions (:math:`\sum_t g_t a_t^\top`), and stays in these two factors
until somebody needs the product.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap
from torch.utils._pytree import tree_map

from mola.errors import DataError, OptionError
from mola.exactness import exact
from mola.heads import check_logits
from mola.networks import Inputs, call, device_of, to_device
from mola.networks.passes import Differentiable, WithTensors
from mola.whole.layout import Layer, Layout

__all__ = [
    "Directions",
    "Piece",
    "Product",
    "Rows",
    "jacobian_rows",
    "layer_rows",
    "portions",
    "size_of",
    "some_of",
    "usable",
    "watched",
]

Directions = Callable[[Tensor], Tensor]
"""From logits (n, C) to directions (R, n, C) of logit space."""

NUMBERS_AT_ONCE = 2**23
"""Numbers of all the rows held at once; more data are taken in turns."""

_door = threading.RLock()
"""Hooks stand on the user's layers for the duration of a pass: one thread at a time."""


@dataclass(frozen=True)
class Piece:
    """One layer's part of the rows, in two factors: `J[n, r] = gradients[n, r] @ inputs[n].T`."""

    inputs: Tensor
    """(n, I, T)"""
    gradients: Tensor
    """(n, R, O, T)"""

    @property
    def single(self) -> bool:
        """Whether the layer is used once for each datum: the rows have rank 1."""
        return self.inputs.shape[2] == 1

    def product(self) -> Tensor:
        """The rows (n, R, O, I)."""
        count, directions, outputs, positions = self.gradients.shape
        flat = self.gradients.reshape(count, directions * outputs, positions)
        return torch.bmm(flat, self.inputs.mT).view(count, directions, outputs, -1)


@dataclass(frozen=True)
class Product:
    """One layer's part of the rows, multiplied out: smaller than its factors where positions outnumber inputs."""

    rows: Tensor
    """(n, R, O, I)"""
    single = False

    def product(self) -> Tensor:
        """The rows (n, R, O, I)."""
        return self.rows


@dataclass(frozen=True)
class Rows:
    """R rows of the Jacobian for each of n data."""

    logits: Tensor
    """(n, C)"""
    layers: tuple[Piece | Product, ...]
    rest: Tensor | None
    """(n, R, P), of the parameters that are in no layer."""

    def exactly(self) -> Rows:
        """The same in float64."""
        layers = tuple(
            Piece(exact(one.inputs), exact(one.gradients)) if isinstance(one, Piece) else Product(exact(one.rows))
            for one in self.layers
        )
        return Rows(exact(self.logits), layers, None if self.rest is None else exact(self.rest))


def numbers(layout: Layout, classes: int, dense: int = 0) -> int:
    """Numbers that the rows of one datum take, with so many columns made explicit."""
    kept = sum(layer.rows * layer.positions for layer in layout.layers)
    inputs = sum(layer.positions * layer.columns for layer in layout.layers)
    products = max((layer.size for layer in layout.layers if layer.positions > 1), default=0)
    return (classes + 1) * (kept + products + layout.rest_size + dense) + inputs


def portions(inputs: Inputs, layout: Layout, classes: int, dense: int = 0) -> Iterator[tuple[slice, Inputs]]:
    """Inputs in portions whose rows fit in memory.

    Args:
        inputs: of a network: a tensor, a tuple or a mapping of them.
        layout: of the weights.
        classes: C.
        dense: columns of the rows that will be made explicit.

    Yields:
        Which data, and their inputs.
    """
    count = size_of(inputs)
    step = max(1, NUMBERS_AT_ONCE // numbers(layout, classes, dense))
    for start in range(0, count, step):
        part = slice(start, start + step)
        yield part, inputs if step >= count else tree_map(lambda value: some_of(value, part, count), inputs)  # noqa: B023


def some_of(value: Any, part: slice, count: int) -> Any:
    """Some of the data, of a tensor that holds all of them; anything else as it is."""
    return value[part] if isinstance(value, Tensor) and value.dim() > 0 and len(value) == count else value


def size_of(inputs: Inputs) -> int:
    """Number of data in a batch: the length of its first tensor.

    Raises:
        DataError: if there is no tensor.
    """
    leaves: list[Tensor] = []
    tree_map(lambda value: leaves.append(value) if isinstance(value, Tensor) and value.dim() > 0 else None, inputs)
    if not leaves:
        message = f"expected inputs with at least one tensor whose first dimension holds the data, got {type(inputs).__name__}."
        raise DataError(message)
    return len(leaves[0])


def usable(inputs: Inputs) -> Inputs:
    """The same inputs as ordinary tensors, if called outside of inference mode: autograd saves what it is given."""
    return tree_map(
        lambda value: value.clone() if isinstance(value, Tensor) and value.is_inference() else value, inputs
    )


Watch = dict[str, list[tuple[Tensor, Tensor]]]
"""What each layer took in and gave out, call by call."""


@contextmanager
def watched(network: nn.Module, layers: tuple[Layer, ...]) -> Iterator[Watch]:
    """Hooks on the layers that keep inputs and outputs; always removed.

    Yields:
        What was kept, by the layer's name.
    """
    seen: Watch = {layer.name: [] for layer in layers}

    def keep(name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
        def hook(_: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
            kept = output if output.requires_grad else output.detach().requires_grad_()
            seen[name].append((arguments[0].detach(), kept))
            return kept.clone()  # what comes next may work in place, and the gradient is wanted before that

        return hook

    with _door:
        handles = [network.get_submodule(layer.name).register_forward_hook(keep(layer.name)) for layer in layers]
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()


def jacobian_rows(network: nn.Module, layout: Layout, inputs: Inputs, directions: Directions) -> Rows:
    """Rows of the Jacobian for a batch. Call it inside `undisturbed(network)`.

    Args:
        network: in eval mode, so that data do not mix.
        layout: of the weights.
        inputs: as many as fit in memory: see `portions`.
        directions: which rows.

    Returns:
        The rows, without gradients of their own.

    Raises:
        OptionError: if a layer was not called once, as it was when the approximation was made.
    """
    with torch.inference_mode(False), watched(network, layout.layers) as seen:
        inputs = usable(inputs)
        logits = call(Differentiable(network), inputs)
        wrong = [name for name, calls in seen.items() if len(calls) != 1]
        if wrong:
            message = (
                f"layer {wrong[0]!r} was called {len(seen[wrong[0]])} times in one pass, and once when this was fitted."
            )
            raise OptionError(message)
        check_logits(logits)
        wanted = directions(logits.detach())
        layers = layer_rows(network, layout.layers, seen, logits, wanted)
    with torch.inference_mode(False), torch.no_grad():
        rest = _rest_rows(network, layout, inputs, wanted) if layout.rest else None
        return Rows(logits.detach(), layers, rest)


def layer_rows(
    network: nn.Module,
    layers: tuple[Layer, ...],
    seen: Watch,
    logits: Tensor,
    wanted: Tensor,
    *,
    keep_graph: bool = False,
) -> tuple[Piece | Product, ...]:
    """Every layer's part of the rows, by one backward pass for each direction."""
    modules = [network.get_submodule(layer.name) for layer in layers]
    with torch.no_grad():
        inputs = [
            _unfolded(layer, module, seen[layer.name][0][0]) for layer, module in zip(layers, modules, strict=True)
        ]
    outputs = [seen[layer.name][0][1] for layer in layers]
    parts: list[list[Tensor]] = [[] for _ in layers]
    for index, direction in enumerate(wanted.to(logits.dtype) if layers else ()):
        found = torch.autograd.grad(
            logits,
            outputs,
            direction,
            retain_graph=keep_graph or index + 1 < len(wanted),
            allow_unused=True,
            materialize_grads=True,
        )
        for part, module, gradient in zip(parts, modules, found, strict=True):
            part.append(_by_channel(module, gradient))
    with torch.no_grad():
        return tuple(
            _combined(layer, given, torch.stack(part, dim=1))
            for layer, given, part in zip(layers, inputs, parts, strict=True)
        )


def _combined(layer: Layer, given: Tensor, gradients: Tensor) -> Piece | Product:
    """A layer's part of the rows, in the form that is smaller; never below float32, as they are squared and added up."""
    dtype = torch.promote_types(gradients.dtype, torch.float32)
    given, gradients = given.to(dtype), gradients.to(dtype)
    if layer.scales:
        columns = [(gradients * given[:, None]).sum(3)] if layer.weight else []
        return Product(torch.stack(columns + [gradients.sum(3)] * layer.bias, dim=3))
    piece = Piece(given, gradients)
    return Product(piece.product()) if given.shape[1] < given.shape[2] else piece


def _by_channel(module: nn.Module, values: Tensor) -> Tensor:
    """What a layer takes or gives as (n, channels, T): linear layers have the channels last, convolutions second."""
    if isinstance(module, (nn.Linear, nn.LayerNorm)):
        return values.reshape(len(values), -1, values.shape[-1]).transpose(1, 2)
    return values.reshape(len(values), values.shape[1], -1)


def _unfolded(layer: Layer, module: nn.Module, given: Tensor) -> Tensor:
    """What a layer's weights multiply (n, I, T); the constant 1 of a matrix's bias comes last."""
    if layer.scales:
        return _by_channel(module, _normalised(module, given))
    if isinstance(module, nn.Conv2d):
        padded = nn.functional.pad(given, module._reversed_padding_repeated_twice)
        places = nn.functional.unfold(padded, module.kernel_size, module.dilation, 0, module.stride)
    else:
        places = _by_channel(module, given)
    parts = [places] if layer.weight else []
    if layer.bias:
        parts.append(places.new_ones(len(places), 1, places.shape[2]))
    return torch.cat(parts, dim=1)


def _normalised(module: nn.Module, given: Tensor) -> Tensor:
    """What a normalisation makes of its inputs before it scales and shifts them."""
    if isinstance(module, nn.LayerNorm):
        return nn.functional.layer_norm(given, module.normalized_shape, None, None, module.eps)
    if isinstance(module, nn.GroupNorm):
        return nn.functional.group_norm(given, module.num_groups, None, None, module.eps)
    assert isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
    mean, variance = module.running_mean, module.running_var
    return nn.functional.batch_norm(given, mean, variance, None, None, False, 0.0, module.eps)


def _rest_rows(network: nn.Module, layout: Layout, inputs: Inputs, wanted: Tensor) -> Tensor:
    """Rows (n, R, P) of parameters that are in no layer, by automatic differentiation datum by datum.

    Raises:
        OptionError: if the network cannot be differentiated so.
    """
    own = dict(network.named_parameters(remove_duplicate=False))
    free = {name: own[name].detach() for name, _ in layout.rest}
    device = device_of(network)

    def logits_of(parameters: Mapping[str, Tensor], one: Inputs) -> Tensor:
        alone = tree_map(lambda value: value[None] if isinstance(value, Tensor) else value, one)
        return call(Differentiable(WithTensors(network, parameters)), alone)[0]

    try:
        jacobian = vmap(jacrev(logits_of), in_dims=(None, 0))(
            free, inputs if device is None else to_device(inputs, device)
        )
    except (DataError, RuntimeError, ValueError) as error:
        message = (
            f"parameter {layout.rest[0][0]!r} and {len(layout.rest) - 1} more lie in no plain linear or convolutional layer, "
            f"and torch.func cannot differentiate {type(network).__name__} datum by datum: {error}. Freeze them with "
            f"requires_grad_(False) before fitting."
        )
        raise OptionError(message) from error
    joined = torch.cat([jacobian[name].flatten(2) for name, _ in layout.rest], dim=2)
    joined = joined.to(torch.promote_types(joined.dtype, torch.float32))
    return torch.einsum("rnc,ncp->nrp", wanted.to(joined), joined)
