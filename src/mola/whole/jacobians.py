r"""Jacobians of the logits, layer by layer, and how the weights lie in one vector.

A plain linear or convolutional layer is a matrix: its Jacobian is an outer product of what it takes in and of the gradients
of what it gives out, and K-FAC knows it. Its bias is the last column. A normalisation scales and shifts each channel by
itself: a matrix of a column or two. All other parameters (of embeddings, of layers with a forward pass of their own) are
the rest: their Jacobian is taken by automatic differentiation datum by datum. K-FAC treats each weight of a normalisation
and of the rest by itself.

A row of the Jacobian is :math:`r^\top \partial f(x) / \partial \theta` for some direction r of the C logits. R directions
take R backward passes for all data together; no pass makes gradients of weights. A layer's part of a row is the outer
product of the gradient at its output and its input, summed over positions (:math:`\sum_t g_t a_t^\top`), and stays in these
two factors until somebody needs the product.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap
from torch.utils._pytree import tree_map

from mola.errors import DataError, OptionError
from mola.likelihood import CATEGORICAL
from mola.network import Inputs, call, device_of, to_device
from mola.network.calling import Differentiable, WithTensors
from mola.numerics import exact


@dataclass(frozen=True)
class Layer:
    """A linear map whose weight, bias or both are among the weights."""

    name: str
    rows: int
    """Outputs O."""
    columns: int
    """Inputs I of the weight, or 0 if it is fixed, and 1 for the bias."""
    weight: bool
    bias: bool
    scales: bool = False
    """Whether it scales and shifts each channel by itself, as a normalisation does, instead of mixing them."""
    positions: int = 1
    """At how many places of one input the map is used: 1, or the pixels of a convolution's output."""

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.rows * self.columns

    @property
    def prefix(self) -> str:
        """What the names of its parameters begin with."""
        return f"{self.name}." if self.name else ""

    @property
    def parameters(self) -> list[str]:
        """Dotted names of its parameters."""
        return [self.prefix + kind for kind, used in (("weight", self.weight), ("bias", self.bias)) if used]

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The matrix (O, I) of parameters by name."""
        parts = [tensors[name].reshape(self.rows, -1) for name in self.parameters]
        return torch.cat(parts, dim=1)

    def split(self, matrix: Tensor) -> dict[str, Tensor]:
        """Parameters by name of a matrix (O, I); those of a convolution are not yet in their shape."""
        widths = [self.columns - self.bias] * self.weight + [1] * self.bias
        return dict(zip(self.parameters, torch.split(matrix, widths, dim=1), strict=True))


@dataclass(frozen=True)
class WeightLayout:
    """The weights in their order: matrices of layers first, then all the rest."""

    layers: tuple[Layer, ...]
    rest: tuple[tuple[str, tuple[int, ...]], ...]
    """Names and shapes of the other parameters."""

    @property
    def rest_size(self) -> int:
        """Number of weights in the rest."""
        return sum(torch.Size(shape).numel() for _, shape in self.rest)

    @property
    def size(self) -> int:
        """Number of weights."""
        return sum(layer.size for layer in self.layers) + self.rest_size

    @property
    def parameters(self) -> list[str]:
        """Dotted names of all parameters."""
        return [name for layer in self.layers for name in layer.parameters] + [name for name, _ in self.rest]

    def vector(self, network: nn.Module) -> Tensor:
        """The network's weights in one vector, in float64 on the CPU."""
        tensors = {
            name: parameter.detach().cpu().double()
            for name, parameter in network.named_parameters(remove_duplicate=False)
        }
        parts = [layer.join(tensors).flatten() for layer in self.layers]
        return torch.cat(parts + [tensors[name].flatten() for name, _ in self.rest])

    def pieces(self, vector: Tensor) -> list[Tensor]:
        """A vector (..., D) of all weights, cut into the layers' and the rest's."""
        return list(torch.split(vector, [*(layer.size for layer in self.layers), self.rest_size], dim=-1))

    def tensors(self, network: nn.Module, vector: Tensor) -> dict[str, Tensor]:
        """A vector of all weights as parameters by name, in the network's shapes, precision and place."""
        own = dict(network.named_parameters(remove_duplicate=False))
        *parts, rest = self.pieces(vector)
        made: dict[str, Tensor] = {}
        for layer, part in zip(self.layers, parts, strict=True):
            made |= layer.split(part.reshape(layer.rows, layer.columns))
        sizes = [torch.Size(shape).numel() for _, shape in self.rest]
        made |= dict(zip((name for name, _ in self.rest), torch.split(rest, sizes), strict=True))
        return {name: tensor.reshape(own[name].shape).to(own[name]) for name, tensor in made.items()}

    def with_layers(self, layers: Sequence[Layer], shapes: Mapping[str, tuple[int, ...]]) -> WeightLayout:
        """The same weights with these layers alone; the parameters of the others join the rest.

        Args:
            layers: those that stay.
            shapes: of the parameters, by name.

        Returns:
            Another order of the same weights.
        """
        kept = {name for layer in layers for name in layer.parameters}
        moved = [(name, shapes[name]) for name in self.parameters if name not in kept and name not in dict(self.rest)]
        return WeightLayout(tuple(layers), (*self.rest, *moved))


def is_normalisation(module: nn.Module) -> bool:
    """Whether a layer normalises each datum by itself, in eval mode, and then scales and shifts each channel."""
    if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        return bool(module.affine and module.running_mean is not None)
    if type(module) is nn.LayerNorm:
        return module.elementwise_affine and len(module.normalized_shape) == 1
    return type(module) is nn.GroupNorm and module.affine


def is_plain(module: nn.Module) -> bool:
    """Whether a layer is a linear map as its parameters say: subclasses may do something else."""
    if type(module) is nn.Linear:
        return True
    if type(module) is not nn.Conv2d or module.groups != 1 or module.padding_mode != "zeros":
        return False
    padding = module._reversed_padding_repeated_twice
    return padding[0] == padding[1] and padding[2] == padding[3]


def trainable_layout(network: nn.Module) -> WeightLayout:
    """All parameters of a network that require gradients.

    Args:
        network: a trained classifier; parameters with `requires_grad=False` stay fixed.

    Returns:
        The layout.
    """
    free = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    if not free:
        raise OptionError(
            f"{type(network).__name__} has no parameter that requires gradients, so that there is nothing to be uncertain "
            f"about. Call network.requires_grad_(True), or unfreeze the layers that the approximation shall be over."
        )
    uses = Counter(id(parameter) for _, parameter in network.named_parameters(remove_duplicate=False))
    layers = []
    for name, module in network.named_modules():
        own = dict(module.named_parameters(recurse=False))
        scales = is_normalisation(module)
        if not (scales or is_plain(module)) or any(uses[id(parameter)] > 1 for parameter in own.values()):
            continue
        prefix = f"{name}." if name else ""
        weight, bias = f"{prefix}weight" in free, f"{prefix}bias" in free
        if weight or bias:
            rows, columns = own["weight"].shape[0], own["weight"][0].numel() * weight + bias
            layers.append(Layer(name, rows, columns, weight, bias, scales))
    whole = WeightLayout((), tuple((name, tuple(parameter.shape)) for name, parameter in free.items()))
    taken = {name for layer in layers for name in layer.parameters}
    return WeightLayout(tuple(layers), tuple(entry for entry in whole.rest if entry[0] not in taken))


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
class JacobianRows:
    """R rows of the Jacobian for each of n data."""

    logits: Tensor
    """(n, C)"""
    layers: tuple[Piece | Product, ...]
    rest: Tensor | None
    """(n, R, P), of the parameters that are in no layer."""

    def exactly(self) -> JacobianRows:
        """The same in float64."""
        layers = tuple(
            Piece(exact(one.inputs), exact(one.gradients)) if isinstance(one, Piece) else Product(exact(one.rows))
            for one in self.layers
        )
        return JacobianRows(exact(self.logits), layers, None if self.rest is None else exact(self.rest))


def numbers(layout: WeightLayout, classes: int, dense: int = 0) -> int:
    """Numbers that the rows of one datum take, with so many columns made explicit."""
    kept = sum(layer.rows * layer.positions for layer in layout.layers)
    inputs = sum(layer.positions * layer.columns for layer in layout.layers)
    products = max((layer.size for layer in layout.layers if layer.positions > 1), default=0)
    return (classes + 1) * (kept + products + layout.rest_size + dense) + inputs


def portions(inputs: Inputs, layout: WeightLayout, classes: int, dense: int = 0) -> Iterator[tuple[slice, Inputs]]:
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
    """Number of data in a batch: the length of its first tensor."""
    leaves: list[Tensor] = []
    tree_map(lambda value: leaves.append(value) if isinstance(value, Tensor) and value.dim() > 0 else None, inputs)
    if not leaves:
        raise DataError(
            f"expected inputs with at least one tensor whose first dimension holds the data, got {type(inputs).__name__}."
        )
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


def jacobian_rows(network: nn.Module, layout: WeightLayout, inputs: Inputs, directions: Directions) -> JacobianRows:
    """Rows of the Jacobian for a batch. Call it inside `undisturbed(network)`.

    Args:
        network: in eval mode, so that data do not mix.
        layout: of the weights.
        inputs: as many as fit in memory: see `portions`.
        directions: which rows.

    Returns:
        The rows, without gradients of their own.
    """
    with torch.inference_mode(False), watched(network, layout.layers) as seen:
        inputs = usable(inputs)
        logits = call(Differentiable(network), inputs)
        wrong = [name for name, calls in seen.items() if len(calls) != 1]
        if wrong:
            raise OptionError(
                f"layer {wrong[0]!r} was called {len(seen[wrong[0]])} times in one pass, and once when this was fitted."
            )
        CATEGORICAL.check_outputs(logits)
        wanted = directions(logits.detach())
        layers = layer_rows(network, layout.layers, seen, logits, wanted)
    with torch.inference_mode(False), torch.no_grad():
        rest = _rest_rows(network, layout, inputs, wanted) if layout.rest else None
        return JacobianRows(logits.detach(), layers, rest)


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
    # A layer's part of the rows, in the form that is smaller; never below float32, as they are squared and added up.
    dtype = torch.promote_types(gradients.dtype, torch.float32)
    given, gradients = given.to(dtype), gradients.to(dtype)
    if layer.scales:
        columns = [(gradients * given[:, None]).sum(3)] if layer.weight else []
        return Product(torch.stack(columns + [gradients.sum(3)] * layer.bias, dim=3))
    piece = Piece(given, gradients)
    return Product(piece.product()) if given.shape[1] < given.shape[2] else piece


def _by_channel(module: nn.Module, values: Tensor) -> Tensor:
    # What a layer takes or gives as (n, channels, T): linear layers have the channels last, convolutions second.
    if isinstance(module, (nn.Linear, nn.LayerNorm)):
        return values.reshape(len(values), -1, values.shape[-1]).transpose(1, 2)
    return values.reshape(len(values), values.shape[1], -1)


def _unfolded(layer: Layer, module: nn.Module, given: Tensor) -> Tensor:
    # What a layer's weights multiply (n, I, T); the constant 1 of a matrix's bias comes last.
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
    if isinstance(module, nn.LayerNorm):
        return nn.functional.layer_norm(given, module.normalized_shape, None, None, module.eps)
    if isinstance(module, nn.GroupNorm):
        return nn.functional.group_norm(given, module.num_groups, None, None, module.eps)
    assert isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
    mean, variance = module.running_mean, module.running_var
    return nn.functional.batch_norm(given, mean, variance, None, None, False, 0.0, module.eps)


def _rest_rows(network: nn.Module, layout: WeightLayout, inputs: Inputs, wanted: Tensor) -> Tensor:
    # Rows (n, R, P) of parameters that are in no layer, by automatic differentiation datum by datum.
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
        raise OptionError(
            f"parameter {layout.rest[0][0]!r} and {len(layout.rest) - 1} more lie in no plain linear or convolutional layer, "
            f"and torch.func cannot differentiate {type(network).__name__} datum by datum: {error}. Freeze them with "
            f"requires_grad_(False) before fitting."
        ) from error
    joined = torch.cat([jacobian[name].flatten(2) for name, _ in layout.rest], dim=2)
    joined = joined.to(torch.promote_types(joined.dtype, torch.float32))
    return torch.einsum("rnc,ncp->nrp", wanted.to(joined), joined)
