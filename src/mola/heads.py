"""Find and check the last linear layer of any network, by watching one forward pass.

The head is the linear layer whose output *is* the network's output: not the last one defined, not the last one that
ran. A network that changes the logits after its last linear layer has no head in this sense, and the error says which
layer came closest and what the network does to its output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from mola.errors import HeadError
from mola.networks import Inputs, call

__all__ = ["Head", "LayerCall", "check_logits", "find_head", "first_pass", "head_by_name"]


@dataclass(frozen=True)
class Head:
    """The last linear layer of a network, seen as a matrix over features that include the constant 1."""

    name: str
    layer: nn.Linear

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
        with torch.no_grad():
            weight = self.layer.weight.detach().to("cpu", torch.float64)
            if self.layer.bias is None:
                return weight
            return torch.cat([weight, self.layer.bias.detach().to("cpu", torch.float64)[:, None]], dim=1)

    def lift(self, features: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Features (n, P) of the bias trick, in another precision if asked for: a column of ones joins the layer's input."""
        if not self.has_bias:
            return features.to(dtype or features.dtype)
        # Not functional.pad: it took ten times as long. torch.cat converts in passing.
        return torch.cat([features, features.new_ones(features.shape[0], 1, dtype=dtype or features.dtype)], dim=1)


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
class _Call(LayerCall):
    """A call of a layer that may turn out to be the head."""

    name: str
    layer: nn.Linear

    def recomputed(self) -> Tensor:
        """Weight times input plus bias, in float32 or better: the network may mix precisions."""
        dtype = torch.promote_types(self.layer.weight.dtype, torch.float32)
        bias = None if self.layer.bias is None else self.layer.bias.detach().to(dtype)
        return functional.linear(self.features.to(dtype), self.layer.weight.detach().to(dtype), bias)


def same_tensor(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are the same numbers in the same memory."""
    return first is second or (
        first.shape == second.shape
        and first.dtype == second.dtype
        and first.stride() == second.stride()
        and first.data_ptr() == second.data_ptr()
    )


def find_head(network: nn.Module, inputs: Inputs, name: str | None = None) -> Head:
    """The layer whose output is the network's output; see `first_pass`."""
    return first_pass(network, inputs, name)[0]


def first_pass(network: nn.Module, inputs: Inputs, name: str | None = None) -> tuple[Head, Tensor, Tensor]:
    """Watch one forward pass and find the layer whose output is the network's output.

    Call it inside `undisturbed(network)`.

    Args:
        network: the trained classifier.
        inputs: one batch of its inputs.
        name: dotted name of the layer that must be the head, to insist on one.

    Returns:
        The head, and what this pass gave: the head's input (n, P) and output (n, C).

    Raises:
        HeadError: if there is no such layer.
    """
    expected = None if name is None else head_by_name(network, name).layer
    calls, ran, logits = _watch(network, inputs)
    check_logits(logits, ran)
    matches = [seen for seen in calls if seen.gave(logits)]
    if not matches:
        raise HeadError(_explain(network, logits, calls, ran))
    found = matches[-1]
    _check_linear(found, logits)
    return _insist(found, expected, name), found.features, logits


def _check_linear(found: _Call, logits: Tensor) -> None:
    """Refuse logits that are not what the layer makes of its input.

    Raises:
        HeadError: if they are not.
    """
    recomputed = found.recomputed().to(logits.dtype)
    if not bool(torch.isfinite(logits).all()) or not bool(torch.isfinite(recomputed).all()):
        return  # not a question of structure: the pass over the data names the batch
    # Loose: only a network that overwrites its logits in place, or a layer that is more than W x + b, is this far off.
    tolerance = 1e-3 if logits.dtype in (torch.float32, torch.float64) else 5e-2
    scale = float(recomputed.abs().max()) or 1.0
    if float((recomputed - logits).abs().max()) > tolerance * scale:
        message = (
            f"the network's output lies in the memory of layer {found.name!r} but is not its weight times its input plus "
            f"bias: the logits are overwritten in place after the layer, or the layer computes something else. "
            f"Pass a network that returns the plain output of {found.name!r}."
        )
        raise HeadError(message)
    found.check_untouched(found.name)


def _insist(found: _Call, expected: nn.Linear | None, name: str | None) -> Head:
    if expected is not None and found.layer is not expected:
        message = (
            f"head={name!r} was given, but the network's output is the output of layer {found.name!r}. "
            f"Pass head={found.name!r}, or None to have it found."
        )
        raise HeadError(message)
    return Head(name or found.name, found.layer)


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


def _watch(network: nn.Module, inputs: Inputs) -> tuple[list[_Call], list[tuple[str, torch.Size]], Tensor]:
    """Calls of linear layers with a matrix as output; names and output shapes of all of them; the network's output."""
    calls: list[_Call] = []
    ran: list[tuple[str, torch.Size]] = []

    def record(name: str, layer: nn.Linear) -> Callable[..., None]:
        def hook(_: nn.Module, arguments: tuple[Tensor, ...], keywords: dict[str, Tensor], output: object) -> None:
            if isinstance(output, Tensor):
                ran.append((name, output.shape))
                # Only matrices are kept: hidden states of a transformer (3-d) cannot be the logits and would fill memory.
                if output.dim() == 2:
                    seen = LayerCall.of(arguments, keywords, output)
                    calls.append(_Call(seen.features, output, seen.versions, name, layer))

        return hook

    handles = []
    try:
        for name, module in network.named_modules():
            if isinstance(module, nn.Linear):
                handles.append(module.register_forward_hook(record(name, module), with_kwargs=True))
        return calls, ran, call(network, inputs)
    finally:
        for handle in handles:
            handle.remove()


def check_logits(logits: Tensor, ran: Sequence[tuple[str, torch.Size]] = ()) -> None:
    """Refuse outputs that are not the logits of a classifier.

    Args:
        logits: a network's output.
        ran: names and output shapes of the linear layers that ran, to name the last.

    Raises:
        HeadError: unless they are (batch, classes) with at least two classes.
    """
    if logits.dim() != 2:
        near = f" Its last linear layer, {ran[-1][0]!r}, gives shape {tuple(ran[-1][1])}." if ran else ""
        message = (
            f"expected logits of shape (batch, classes), got shape {tuple(logits.shape)}.{near} "
            f"Pass a network that returns the output of its last linear layer as it is, without reshaping."
        )
        raise HeadError(message)
    if logits.shape[1] < 2:
        message = (
            f"expected at least 2 classes, got a network with {logits.shape[1]} output. A binary classifier with one "
            f"logit z becomes a two-class one with logits (0, z)."
        )
        raise HeadError(message)


def _explain(network: nn.Module, logits: Tensor, calls: list[_Call], ran: Sequence[tuple[str, torch.Size]]) -> str:
    """Say which layer came closest to being the head, and what the network does to its output."""
    if not calls:
        other = f" Layer {ran[-1][0]!r} ran, with an output of shape {tuple(ran[-1][1])}." if ran else ""
        compiled = (
            " A compiled network hides its layers: pass the module you compiled."
            if hasattr(network, "_orig_mod")
            else ""
        )
        return (
            f"no nn.Linear layer with a 2-d output ran in the forward pass of {type(network).__name__}, so there is no last "
            f"linear layer to put a posterior on.{compiled}{other} End the network in an nn.Linear that maps features to logits."
        )
    sized = [seen for seen in calls if seen.output.shape == logits.shape]
    near = sized[-1] if sized else calls[-1]
    return (
        f"the network's output is not the output of its last linear layer: {near.name!r} gives shape "
        f"{tuple(near.output.shape)}, and the network {_change(near.output, logits)}. "
        f"Pass a network whose forward returns the output of {near.name!r} itself."
    )


def _change(before: Tensor, after: Tensor) -> str:
    if before.shape != after.shape:
        verb = "reshapes" if before.numel() == after.numel() else "changes"
        return f"{verb} it to {tuple(after.shape)}"
    if before.dtype != after.dtype and torch.equal(before.to(after.dtype), after):
        return f"converts it from {before.dtype} to {after.dtype}"
    before, after = before.double(), after.double()
    if torch.equal(before, after):
        return "copies it"
    if torch.allclose(before.softmax(1), after, atol=1e-3):
        return "applies a softmax to it"
    if torch.allclose(before.log_softmax(1), after, rtol=1e-3, atol=1e-3):
        return "applies a log-softmax to it"
    scale = float((before * after).sum() / (before * before).sum().clamp_min(1e-300))
    if torch.allclose(scale * before, after, rtol=1e-3, atol=1e-6):
        return f"scales it by {scale:.4g} (a temperature?)"
    return "computes something else from it"
