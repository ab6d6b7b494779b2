r"""Jacobians of the logits with respect to a network's weights, datum by datum.

For a linear or convolutional layer that is called once, with inputs :math:`a_t` (the constant 1 of the bias included) at T
positions of a datum and gradients :math:`g_t` of a logit at its outputs, the Jacobian is :math:`\sum_t g_t a_t^\top`. Its
factors are all that K-FAC needs, and rotating them costs next to nothing beside rotating their product. Every other
parameter (normalisation layers, layers called twice, free parameters) takes `torch.func`. Which layers are of the first
kind is tested against automatic differentiation on a few data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from mola.errors import DataError, OptionError
from mola.likelihoods import Likelihood
from mola.network import Inputs, run, without_autocast
from mola.numerics import to_float64

NUMBERS_AT_ONCE = 2**21
"""Numbers of Jacobians and their factors that are held at once: 16 MB in float64. Larger blocks are new memory every time, and twice
as slow on a LeNet."""

FEW = 3
"""Data on which layers are tested."""

Directions = Callable[[Tensor], Tensor]
"""From logits (n, C) to directions (R, n, C) of the output space, both in float64."""


def each_logit(logits: Tensor) -> Tensor:
    """Directions (C, n, C) of the single logits."""
    return torch.eye(logits.shape[1]).to(logits)[:, None].expand(-1, *logits.shape)


def curvature_roots(likelihood: Likelihood) -> Directions:
    r"""Directions whose outer products sum to the output curvature of each datum.

    With :math:`u = s q` and :math:`1^\top q = 1`, the Laplacian of :math:`u u^\top` is :math:`s^2 (\mathrm{diag}(q) - q q^\top)`, and
    the rows of a root of it are :math:`s \sqrt{q_r} (e_r - q)`.
    """

    def roots(logits: Tensor) -> Tensor:
        curvature, parts = likelihood.curvature(logits), []
        if curvature.coupling is not None:
            total = curvature.coupling.sum(1, keepdim=True)
            share = curvature.coupling / total
            parts.append((total * share.sqrt()).T[:, :, None] * (each_logit(logits) - share))
        if curvature.separate is not None:
            parts.append(torch.diag_embed(curvature.separate.sqrt()).transpose(0, 1))
        return torch.cat(parts)

    return roots


@dataclass(frozen=True)
class Layer:
    """A linear or convolutional layer, whose uncertain parameters make one matrix (rows, columns), the bias as last column."""

    name: str
    weight: bool
    bias: bool
    rows: int
    columns: int
    positions: int = 1
    """T: how often the layer is applied to one datum."""

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.rows * self.columns

    @property
    def parameters(self) -> list[str]:
        """Names of the uncertain parameters."""
        kinds = [kind for kind, used in (("weight", self.weight), ("bias", self.bias)) if used]
        return [f"{self.name}.{kind}" if self.name else kind for kind in kinds]

    def matrix(self, parameters: Sequence[Tensor]) -> Tensor:
        """Weight and bias as one matrix (rows, columns), in float64."""
        return torch.cat([to_float64(one.detach()).reshape(self.rows, -1) for one in parameters], 1)

    def inputs(self, module: nn.Module, given: Tensor) -> Tensor:
        """Factor a (n, columns, T), in float64."""
        if isinstance(module, nn.Conv2d):
            options: Any = (module.kernel_size, module.dilation, module.padding, module.stride)
            features = nn.functional.unfold(given, *options)
        else:
            features = given.flatten(1, -2).mT if given.dim() > 2 else given[:, :, None]
        constant = features.new_ones(len(features), 1, features.shape[2])
        return to_float64(torch.cat([features] * self.weight + [constant] * self.bias, 1))

    def gradients(self, module: nn.Module, given: Tensor) -> Tensor:
        """Factor g (n, rows, T) from gradients at the layer's output."""
        if isinstance(module, nn.Conv2d):
            return given.flatten(2)
        return given.flatten(1, -2).mT if given.dim() > 2 else given[:, :, None]


class Factors(NamedTuple):
    """Jacobian rows of one layer, `sum_t g_t a_t'`."""

    gradients: Tensor
    """g (n, R, O, T)"""
    inputs: Tensor
    """a (n, I, T)"""

    def product(self, left: Tensor | None = None, right: Tensor | None = None) -> Tensor:
        """`left' (sum_t g_t a_t') right` (n, R, O, I); None is the identity."""
        gradients = self.gradients if left is None else left.T @ self.gradients
        inputs = self.inputs if right is None else right.T @ self.inputs
        return gradients @ inputs[:, None].mT

    def squares(self) -> Tensor:
        """Sum (O, I) of the squared rows over data and directions."""
        if self.inputs.shape[2] > 1:
            return self.product().square().sum((0, 1))
        return self.gradients[..., 0].square().sum(1).T @ self.inputs[..., 0].square()

    def columns(self, places: Tensor) -> Tensor:
        """Some columns (n, R, S) of the flattened rows."""
        if self.inputs.shape[2] > 1:
            return self.product().flatten(2)[:, :, places]
        width = self.inputs.shape[1]
        return self.gradients[:, :, places // width, 0] * self.inputs[:, None, places % width, 0]


class JacobianRows(NamedTuple):
    """Rows `d' J` of the Jacobians of n data along R directions, in float64."""

    outputs: Tensor
    """Logits (n, C)."""
    layers: list[Factors]
    rest: Tensor
    """(n, R, S), of all parameters outside the layers."""


@dataclass(frozen=True)
class Layout:
    """The uncertain weights of a network as one vector: the matrices of the layers, then all other parameters."""

    layers: tuple[Layer, ...]
    rest: tuple[str, ...]
    sizes: tuple[int, ...]
    """Sizes of the parameters in `rest`."""

    @property
    def size(self) -> int:
        """Number of weights D."""
        return sum(layer.size for layer in self.layers) + sum(self.sizes)

    def vector(self, network: nn.Module) -> Tensor:
        """The trained weights (D,) in float64."""
        parts = [layer.matrix([network.get_parameter(name) for name in layer.parameters]) for layer in self.layers]
        rest = [to_float64(network.get_parameter(name).detach()) for name in self.rest]
        return torch.cat([part.flatten() for part in (*parts, *rest)])

    def tensors(self, network: nn.Module, vector: Tensor) -> dict[str, Tensor]:
        """A vector (D,) as tensors in the shapes of the parameters."""
        *matrices, rest = self.split(vector)
        parts = list(zip(self.rest, torch.split(rest, list(self.sizes)), strict=True)) if self.rest else []
        for layer, matrix in zip(self.layers, matrices, strict=True):
            widths = [layer.columns - layer.bias] * layer.weight + [1] * layer.bias
            parts += zip(layer.parameters, torch.split(matrix, widths, 1), strict=True)
        return {name: part.reshape(network.get_parameter(name).shape) for name, part in parts}

    def split(self, vector: Tensor) -> list[Tensor]:
        """Parts of a vector (D,): the matrix (O, I) of each layer, and the rest (S,)."""
        *parts, rest = torch.split(vector, [*(layer.size for layer in self.layers), sum(self.sizes)])
        pairs = zip(parts, self.layers, strict=True)
        return [*(part.view(layer.rows, layer.columns) for part, layer in pairs), rest]

    def data_at_once(self, outputs: int, columns: int) -> int:
        """Number of data whose factors and multiplied rows with this many columns fit into `NUMBERS_AT_ONCE`."""
        factors = sum((outputs * layer.rows + layer.columns) * layer.positions for layer in self.layers)
        return max(1, NUMBERS_AT_ONCE // (factors + outputs * (sum(self.sizes) + columns)))


# --- passes -----------------------------------------------------------------------------------------------------------


class _Logits(nn.Module):
    # The network with one argument, for torch.func.functional_call.
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Inputs) -> Tensor:
        return run(self.network, inputs)


def _call(network: nn.Module, tensors: dict[str, Tensor], inputs: Inputs) -> Tensor:
    named = {f"network.{name}": value for name, value in tensors.items()}
    with without_autocast(next(iter(tensors.values())).device):
        return functional_call(_Logits(network), named, (inputs,))


def _single(value: Any) -> Any:
    # At least float32, and a tensor that autograd may save, also if the given one was made in inference mode.
    if not isinstance(value, Tensor):
        return value
    value = value.clone() if value.is_inference() else value.detach()
    return value.to(torch.promote_types(value.dtype, torch.float32)) if value.is_floating_point() else value


def _parameters(network: nn.Module) -> dict[str, Tensor]:
    return {name: _single(value).requires_grad_() for name, value in network.named_parameters()}


def _buffers(network: nn.Module) -> dict[str, Tensor]:
    return {name: _single(value) for name, value in network.named_buffers()}


@torch.inference_mode(False)
@torch.no_grad()
def run_with(network: nn.Module, changed: dict[str, Tensor], inputs: Inputs) -> Tensor:
    """Logits (n, C) of the network with some parameters replaced, in float64. Call it inside `evaluating(network)`."""
    own = _parameters(network) | _buffers(network)
    own |= {name: value.to(own[name]) for name, value in changed.items()}
    return to_float64(_call(network, own, tree_map(_single, inputs)))


def size_of(inputs: Inputs) -> int:
    """Number of data in a batch: the length of its first tensor."""
    sizes = [len(leaf) for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not sizes:
        raise DataError("expected a batch with at least one tensor whose first dimension counts the data.")
    return sizes[0]


def _is_batched(value: Any, size: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == size


def some_of(inputs: Inputs, part: slice, size: int) -> Inputs:
    """A part of the data in a batch of `size`."""
    return tree_map(lambda value: value[part] if _is_batched(value, size) else value, inputs)


Calls = list[tuple[Tensor, Tensor]]
"""Inputs and outputs of a layer in each of its calls."""


def _watched_pass(
    network: nn.Module, layers: Sequence[Layer], tensors: dict[str, Tensor], inputs: Inputs
) -> tuple[Tensor, list[Calls]]:
    seen: list[Calls] = [[] for _ in layers]

    def watch(calls: Calls) -> Callable[..., Tensor]:
        def hook(_: nn.Module, given: tuple[Any, ...], output: Tensor) -> Tensor:
            if given:
                calls.append((given[0].detach().clone(), output))
            return output.clone()  # what follows may change it in place, and gradients are those of the original

        return hook

    modules = [network.get_submodule(layer.name) for layer in layers]
    handles = [module.register_forward_hook(watch(calls)) for module, calls in zip(modules, seen, strict=True)]
    try:
        return _call(network, tensors, inputs), seen
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode(False)
@torch.enable_grad()
def jacobian_rows(network: nn.Module, layout: Layout, inputs: Inputs, directions: Directions) -> JacobianRows:
    """Differentiate the outputs of a few data along some directions. Call it inside `evaluating(network)`.

    The network runs in its own precision, and at least in float32.
    """
    inputs, own = tree_map(_single, inputs), _parameters(network) | _buffers(network)
    logits, seen = _watched_pass(network, layout.layers, own, inputs)
    for layer, calls in zip(layout.layers, seen, strict=True):
        if len(calls) != 1:
            raise DataError(f"layer {layer.name!r} was called {len(calls)} times in this pass, and once in the fit.")
    outputs = to_float64(logits.detach())
    along = directions(outputs)
    layers = _factors(network, layout.layers, [calls[0] for calls in seen], logits, along)
    rest = along.new_zeros(len(outputs), len(along), 0)
    if layout.rest:
        frozen = {name: value.detach() for name, value in own.items()}
        rest = torch.einsum(
            "rnc,ncs->nrs", along, to_float64(_by_func(network, frozen, layout.rest, inputs, len(outputs)))
        )
    return JacobianRows(outputs, layers, rest)


def _factors(network: nn.Module, layers: Sequence[Layer], calls: Calls, logits: Tensor, along: Tensor) -> list[Factors]:
    outputs = [output for _, output in calls]
    rows = [
        torch.autograd.grad(
            logits, outputs, one.to(logits), retain_graph=True, allow_unused=True, materialize_grads=True
        )
        for one in (along if layers else ())
    ]
    found = []
    for index, layer in enumerate(layers):
        module = network.get_submodule(layer.name)
        gradients = torch.stack([layer.gradients(module, row[index]) for row in rows], 1)
        found.append(Factors(to_float64(gradients), layer.inputs(module, calls[index][0])))
    return found


def _by_func(network: nn.Module, tensors: dict[str, Tensor], names: Sequence[str], inputs: Inputs, size: int) -> Tensor:
    # Jacobian (n, C, S) with respect to some parameters.
    leaves, form = tree_flatten(inputs)
    batched = [_is_batched(leaf, size) for leaf in leaves]

    def logits(free: dict[str, Tensor], *rows: Any) -> Tensor:
        given = [row[None] if many else row for row, many in zip(rows, batched, strict=True)]
        return _call(network, tensors | free, tree_unflatten(given, form))[0]

    free = {name: tensors[name] for name in names}
    try:
        found = vmap(jacrev(logits), (None, *(0 if many else None for many in batched)))(free, *leaves)
    except (RuntimeError, ValueError, DataError) as error:
        raise DataError(
            f"{type(network).__name__} cannot be differentiated datum by datum with respect to {names[0]!r}: {error}. Freeze such "
            f"parameters with requires_grad_(False), or use mola.fit, which needs the last layer alone."
        ) from error
    return torch.cat([found[name].detach().flatten(2) for name in names], 2)


# --- layouts ----------------------------------------------------------------------------------------------------------


def find_layout(network: nn.Module, inputs: Inputs, size: int) -> Layout:
    """The weights that require gradients, found on a few data of a batch. Call it inside `evaluating(network)`."""
    free = {name: value for name, value in network.named_parameters() if value.requires_grad}
    if not free:
        raise OptionError(
            f"{type(network).__name__} has no parameter that requires gradients: all are frozen. Call requires_grad_(True) on those "
            f"that are to be uncertain."
        )
    candidates = [one for name, module in network.named_modules() if (one := _layer(name, module)) is not None]
    # A parameter that is tied to one of another name has no name of its own.
    candidates = [layer for layer in candidates if all(name in free for name in layer.parameters)]
    layers = _exact_layers(network, candidates, some_of(inputs, slice(min(FEW, size)), size))
    taken = {name for layer in layers for name in layer.parameters}
    rest = tuple(name for name in free if name not in taken)
    return Layout(tuple(layers), rest, tuple(free[name].numel() for name in rest))


def _layer(name: str, module: nn.Module) -> Layer | None:
    if type(module) is nn.Conv2d:
        if module.groups > 1 or module.padding_mode != "zeros" or isinstance(module.padding, str):
            return None
    elif type(module) is not nn.Linear:
        return None
    assert isinstance(module, (nn.Linear, nn.Conv2d))
    weight, bias = module.weight.requires_grad, module.bias is not None and module.bias.requires_grad
    columns = weight * module.weight[0].numel() + bias
    return Layer(name, weight, bias, len(module.weight), columns) if columns else None


@torch.inference_mode(False)
@torch.enable_grad()
def _exact_layers(network: nn.Module, candidates: Sequence[Layer], inputs: Inputs) -> list[Layer]:
    # Those whose rows are right for the first and the last datum. A layer may be called twice or not at all, its weight used by hand,
    # or the data may lie in another dimension than the first.
    own, kept = _parameters(network), []
    logits, seen = _watched_pass(network, candidates, own | _buffers(network), tree_map(_single, inputs))
    both = zip(candidates, seen, strict=True)
    pairs = [(layer, calls[0]) for layer, calls in both if _is_called_once(network, layer, calls, len(logits))]
    # Not the sum of the logits, which is 0 where a network centres them.
    direction = torch.arange(1, logits.shape[1] + 1, device=logits.device).cos().to(logits)
    layers = [layer for layer, _ in pairs]
    found = _factors(network, layers, [calls for _, calls in pairs], logits, direction.expand_as(logits)[None])
    for layer, factors in zip(layers, found, strict=True):
        rows, wanted = factors.product()[:, 0], [own[name] for name in layer.parameters]
        for datum in (0, len(logits) - 1):
            exact = torch.autograd.grad(
                logits[datum] @ direction, wanted, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            expected = layer.matrix(exact)
            if not torch.allclose(rows[datum], expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())):
                break
        else:
            kept.append(replace(layer, positions=factors.inputs.shape[2]))
    return kept


def _is_called_once(network: nn.Module, layer: Layer, calls: Calls, count: int) -> bool:
    dimensions = 4 if isinstance(network.get_submodule(layer.name), nn.Conv2d) else 2
    return len(calls) == 1 and calls[0][0].dim() >= dimensions and len(calls[0][0]) == count
