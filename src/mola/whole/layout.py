"""Which weights of a network an approximation is over, and how they lie in one vector.

A plain linear or convolutional layer is a matrix: its Jacobian is an outer product of what it takes in and of the gradients
of what it gives out, and K-FAC knows it. Its bias is the last column. A normalisation scales and shifts each channel by
itself: a matrix of a column or two. All other parameters (of embeddings, of layers with a forward pass of their own) are
the rest: their Jacobian is taken by automatic differentiation datum by datum. K-FAC treats each weight of a normalisation
and of the rest by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mola.errors import OptionError

__all__ = ["Layer", "Layout", "trainable_layout"]


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
class Layout:
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

    def with_layers(self, layers: Sequence[Layer], shapes: Mapping[str, tuple[int, ...]]) -> Layout:
        """The same weights with these layers alone; the parameters of the others join the rest.

        Args:
            layers: those that stay.
            shapes: of the parameters, by name.

        Returns:
            Another order of the same weights.
        """
        kept = {name for layer in layers for name in layer.parameters}
        moved = [(name, shapes[name]) for name in self.parameters if name not in kept and name not in dict(self.rest)]
        return Layout(tuple(layers), (*self.rest, *moved))


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


def trainable_layout(network: nn.Module) -> Layout:
    """All parameters of a network that require gradients.

    Args:
        network: a trained classifier; parameters with `requires_grad=False` stay fixed.

    Returns:
        The layout.

    Raises:
        OptionError: if there are none.
    """
    free = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    if not free:
        message = (
            f"{type(network).__name__} has no parameter that requires gradients, so that there is nothing to be uncertain "
            f"about. Call network.requires_grad_(True), or unfreeze the layers that the approximation shall be over."
        )
        raise OptionError(message)
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
    whole = Layout((), tuple((name, tuple(parameter.shape)) for name, parameter in free.items()))
    taken = {name for layer in layers for name in layer.parameters}
    return Layout(tuple(layers), tuple(entry for entry in whole.rest if entry[0] not in taken))
