"""The last linear layer of a network, and one call of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.weight_norm import WeightNorm

from mola.errors import HeadError
from mola.networks import without_autocast

__all__ = ["Head", "LayerCall", "NamedCall", "head_by_name"]


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Head:
    """The last linear layer of a network, seen as a matrix over features that include the constant 1."""

    name: str
    layer: nn.Linear
    every_position: bool = False
    """Whether it runs at every position of a sequence, and the network picks (or averages) positions afterwards."""

    @property
    def classes(self) -> int:
        """Number of outputs C."""
        return self.layer.out_features

    @property
    def has_bias(self) -> bool:
        """Whether a column of ones joins the features."""
        return self.layer.bias is not None

    @property
    def width(self) -> int:
        """Number of features P, the constant 1 of the bias trick included."""
        return self.layer.in_features + self.has_bias

    def weights(self) -> Tensor:
        """Trained weights (C, P) in float64 on the CPU, the bias as last column.

        Read them inside `undisturbed`: under spectral normalisation in train mode, reading alone changes the layer.
        """
        return self.trained_weights().double()

    def trained_weights(self) -> Tensor:
        """The same in the layer's own precision, as a copy."""
        # Without autocast, which refuses to join tensors of another half precision than its own.
        with torch.no_grad(), without_autocast(CPU):
            weight = _weight_of(self.layer).detach().cpu()
            if self.layer.bias is None:
                return weight.clone()
            return torch.cat([weight, self.layer.bias.detach().cpu()[:, None]], dim=1)

    def lift(self, features: Tensor) -> Tensor:
        """Features (n, P) of the bias trick: a column of ones joins the layer's input."""
        if not self.has_bias:
            return features
        # Not functional.pad: it took ten times as long.
        with without_autocast(features.device):
            return torch.cat([features, features.new_ones(features.shape[0], 1)], dim=1)


def _weight_of(layer: nn.Linear) -> Tensor:
    """The weight that the layer's next pass will use: torch's older weight normalisation leaves that of the last one behind."""
    for hook in layer._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm) and hook.name == "weight":
            return hook.compute_weight(layer)
    return layer.weight


@dataclass(frozen=True)
class LayerCall:
    """One call of a linear layer during a watched pass."""

    features: Tensor
    output: Tensor
    versions: tuple[int, int]
    """How often both had been written in place when the layer was done."""

    @staticmethod
    def of(arguments: tuple[Tensor, ...], keywords: dict[str, Tensor], output: Tensor) -> LayerCall:
        """What a hook saw; the input comes by position or by name."""
        features = arguments[0] if arguments else keywords["input"]
        return LayerCall(features, output, (_version(features), _version(output)))

    def gave(self, logits: Tensor) -> bool:
        """Whether these logits are this call's output."""
        return self.output is logits or (not torch.compiler.is_compiling() and same_tensor(self.output, logits))

    def check_untouched(self, name: str) -> None:
        """Refuse a network that wrote into its head's input or output afterwards.

        Args:
            name: of the head, for the message.

        Raises:
            HeadError: if it did.
        """
        if (_version(self.features), _version(self.output)) != self.versions:
            message = (
                f"the network overwrites the input or the output of its head {name!r} in place. Pass a network that "
                f"returns the plain output of {name!r}."
            )
            raise HeadError(message)


def _version(tensor: Tensor) -> int:
    """How often a tensor was written in place; tensors of inference mode, and of a trace, do not count."""
    return 0 if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class NamedCall(LayerCall):
    """A call of a layer that may turn out to be the head."""

    name: str
    layer: nn.Linear

    def recomputed(self) -> Tensor:
        """Weight times input plus bias, in float32 or better: the network may mix precisions."""
        dtype = torch.promote_types(self.layer.weight.dtype, torch.float32)
        bias = None if self.layer.bias is None else self.layer.bias.detach().to(dtype)
        return functional.linear(self.features.detach().to(dtype), self.layer.weight.detach().to(dtype), bias)

    def is_linear(self) -> bool:
        """Whether the output is what the layer makes of its input; no numbers, or such as are not finite, do not tell."""
        if self.output.numel() == 0:
            return True
        recomputed, output = self.recomputed().to(self.output.dtype), self.output.detach()
        if not bool(torch.isfinite(output).all()) or not bool(torch.isfinite(recomputed).all()):
            return True  # not a question of structure: the pass over the data names the batch
        # Loose: only a network that overwrites its logits in place, or a layer that is more than W x + b, is this far off.
        tolerance = 1e-3 if output.dtype in (torch.float32, torch.float64) else 5e-2
        scale = float(recomputed.abs().max()) or 1.0
        return float((recomputed - output).abs().max()) <= tolerance * scale


def same_tensor(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are the same numbers in the same memory."""
    return first is second or (
        first.shape == second.shape
        and first.dtype == second.dtype
        and first.stride() == second.stride()
        and first.data_ptr() == second.data_ptr()
    )


def _bare(name: str) -> str:
    """A module's name without what `torch.compile` puts before it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def head_by_name(network: nn.Module, name: str) -> Head:
    """The linear layer of that dotted name (the empty name is the network itself).

    Args:
        network: the trained classifier.
        name: dotted name, as in `named_modules`.

    Returns:
        The head.

    Raises:
        HeadError: if there is no module of that name, or it is not an `nn.Linear`.
    """
    modules = {_bare(found): module for found, module in network.named_modules(remove_duplicate=False)}
    name = _bare(name)
    linear = [found for found, module in modules.items() if isinstance(module, nn.Linear)]
    if name not in modules:
        message = f"head={name!r}: the network has no module of that name. Its linear layers are {linear[-8:]}."
        raise HeadError(message)
    layer = modules[name]
    if not isinstance(layer, nn.Linear):
        message = f"head={name!r} is a {type(layer).__name__}, not an nn.Linear. The network's linear layers are {linear[-8:]}."
        raise HeadError(message)
    return Head(name, layer)
