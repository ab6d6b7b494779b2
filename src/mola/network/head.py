"""The last linear layer of any network, found and checked by watching one forward pass.

The head is the linear layer whose output *is* the network's output: not the last one defined, not the last one that
ran. A network that changes the logits after its last linear layer has no head in this sense, and the error says which
layer came closest and what the network does to its output.

One change is allowed: a layer that runs at every position of a sequence, of which the network then picks one for each input or
averages several. Language models classify in this way: their last layer gives scores (n, T, C) at all positions, and those at the last
token of each text are returned. What the layer received there is found by sending it along: during one pass the layer's input is
appended to its output as further columns, so whatever picks or averages positions does it to both alike.

A network may also return what its last layer gives at every position: pixels of an image, by a 1x1 convolution, or tokens of a text,
by a linear layer. Then each position is a datum (`layout.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.weight_norm import WeightNorm

from mola.errors import DataError, HeadError
from mola.likelihood import CATEGORICAL, Likelihood
from mola.network.calling import Inputs, call, without_autocast
from mola.network.layout import Layout, Positions

CPU = torch.device("cpu")

CONVOLUTIONS = {nn.Conv1d: functional.conv1d, nn.Conv2d: functional.conv2d, nn.Conv3d: functional.conv3d}
"""Layers that are linear on every position if their kernel has size 1, and what they compute."""

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


@dataclass(frozen=True)
class Head:
    """The last linear layer of a network, seen as a matrix over features that include the constant 1."""

    name: str
    layer: nn.Linear | Convolution
    every_position: bool = False
    """Whether it runs at every position of a sequence, and the network picks (or averages) positions afterwards."""
    positions: Positions | None = None
    """Where the network returns outputs at many positions of each input: each is a datum then."""

    @property
    def classes(self) -> int:
        """Number of outputs C."""
        return self.layer.out_features if isinstance(self.layer, nn.Linear) else self.layer.out_channels

    @property
    def inputs(self) -> int:
        """Number of features that the layer takes, without the constant 1."""
        return self.layer.in_features if isinstance(self.layer, nn.Linear) else self.layer.in_channels

    @property
    def axis(self) -> int:
        """Where classes stand in the outputs, and features in what the layer takes: 1 for a convolution, else last."""
        return -1 if isinstance(self.layer, nn.Linear) else 1

    @property
    def has_bias(self) -> bool:
        """Whether a column of ones joins the features."""
        return self.layer.bias is not None

    @property
    def width(self) -> int:
        """Number of features P, the constant 1 of the bias trick included."""
        return self.inputs + self.has_bias

    def weights(self) -> Tensor:
        """Trained weights (C, P) in float64 on the CPU, the bias as last column.

        Read them inside `undisturbed`: under spectral normalisation in train mode, reading alone changes the layer.
        """
        return self.trained_weights().double()

    def trained_weights(self) -> Tensor:
        """The same in the layer's own precision, as a copy."""
        # Without autocast, which refuses to join tensors of another half precision than its own.
        with torch.no_grad(), without_autocast(CPU):
            weight = _weight_of(self.layer).detach().flatten(1).cpu()
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


def _weight_of(layer: nn.Linear | Convolution) -> Tensor:
    # The weight that the layer's next pass will use: torch's older weight normalisation leaves that of the last one
    # behind.
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
        """
        if (_version(self.features), _version(self.output)) != self.versions:
            raise HeadError(
                f"the network overwrites the input or the output of its head {name!r} in place. Pass a network that "
                f"returns the plain output of {name!r}."
            )


def _version(tensor: Tensor) -> int:
    # How often a tensor was written in place; tensors of inference mode, and of a trace, do not count.
    return 0 if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class NamedCall(LayerCall):
    """A call of a layer that may turn out to be the head."""

    name: str
    layer: nn.Linear | Convolution

    def recomputed(self) -> Tensor:
        """Weight times input plus bias, in float32 or better: the network may mix precisions."""
        dtype = torch.promote_types(self.layer.weight.dtype, torch.float32)
        bias = None if self.layer.bias is None else self.layer.bias.detach().to(dtype)
        kinds = (compute for kind, compute in CONVOLUTIONS.items() if isinstance(self.layer, kind))
        compute: Callable[..., Tensor] = next(kinds, functional.linear)
        return compute(self.features.detach().to(dtype), self.layer.weight.detach().to(dtype), bias)

    def of_first_input(self) -> NamedCall:
        """The same call as if one input had been in the batch."""
        return replace(self, features=self.features[:1], output=self.output[:1])

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
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def head_by_name(network: nn.Module, name: str) -> Head:
    """The linear layer of that dotted name (the empty name is the network itself).

    Args:
        network: the trained classifier.
        name: dotted name, as in `named_modules`.

    Returns:
        The head.
    """
    modules = {_bare(found): module for found, module in network.named_modules(remove_duplicate=False)}
    name = _bare(name)
    linear = [found for found, module in modules.items() if isinstance(module, nn.Linear)]
    if name not in modules:
        raise HeadError(f"head={name!r}: the network has no module of that name. Its linear layers are {linear[-8:]}.")
    layer = modules[name]
    if isinstance(layer, Convolution):
        reason = why_not_linear(layer)
        if reason is not None:
            raise HeadError(f"head={name!r} {reason}")
        return Head(name, layer)
    if not isinstance(layer, nn.Linear):
        raise HeadError(
            f"head={name!r} is a {type(layer).__name__}, not an nn.Linear. The network's linear layers are {linear[-8:]}."
        )
    return Head(name, layer)


def why_not_linear(layer: Convolution) -> str | None:
    """Why a convolution is not a linear layer on every position, and what to do; None if it is."""
    found = {
        "kernel size": (tuple(layer.kernel_size), 1),
        "stride": (tuple(layer.stride), 1),
        "padding": (layer.padding if isinstance(layer.padding, str) else tuple(layer.padding), 0),
        "groups": (layer.groups, 1),
    }
    odd = [
        f"{name} {value}"
        for name, (value, plain) in found.items()
        if not isinstance(value, str) and value != plain and value != (plain,) * len(layer.kernel_size)
    ]
    if not odd:
        return None
    return (
        f"is a {type(layer).__name__} with {', '.join(odd)}. A posterior needs a last layer that is linear on every position by "
        f"itself: a 1x1 convolution with kernel size 1, stride 1, no padding and groups=1. End the network in one, as in "
        f"nn.Conv2d(features, classes, 1), and train it."
    )


class Carried:
    """A head whose input is carried along with its output.

    A context: the hook is on the head inside, and is removed afterwards, whatever happens.

    Args:
        head: a layer that runs at every position.
    """

    def __init__(self, head: Head) -> None:
        self.head = head
        self._thread: int | None = None
        self._dtype: torch.dtype | None = None

    def __enter__(self) -> Self:
        self._handle = self.head.layer.register_forward_hook(self._join, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _join(self, _: nn.Module, arguments: tuple[Tensor, ...], *rest: Any) -> Tensor | None:
        # Another thread may run the same network at the same time: its pass has hooks of its own.
        if self._thread != threading.get_ident():
            return None
        *keywords, output = rest
        features = arguments[0] if arguments else keywords[0]["input"]
        self._dtype = output.dtype
        with without_autocast(output.device):  # which refuses to join tensors of another half precision than its own
            return torch.cat([output, features], dim=-1)

    def pass_of(self, network: nn.Module, inputs: Inputs, device: torch.device | None = None) -> Tensor:
        """One forward pass of the network, without gradients: what it returns, with what is carried."""
        self._thread = threading.get_ident()
        try:
            return call(network, inputs, device)
        finally:
            self._thread = None

    def apart(self, joined: Tensor) -> tuple[Tensor, Tensor]:
        """Take apart what the network returned.

        Args:
            joined: (n, C + the layer's number of inputs).

        Returns:
            The head's input (n, P) and output (n, C) at the positions that the network took.
        """
        classes, width = self.head.classes, self.head.inputs
        if joined.dim() != 2 or joined.shape[1] != classes + width:
            raise HeadError(
                f"the network does more to the output of its head {self.head.name!r} than to pick or average positions: "
                f"expected {classes + width} columns, got shape {tuple(joined.shape)}."
            )
        return joined[:, classes:], joined[:, :classes].to(self._dtype)


def explain(
    network: nn.Module, logits: Tensor, calls: Sequence[NamedCall], ran: Sequence[tuple[str, torch.Size]]
) -> str:
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
    if torch.allclose(before.sigmoid(), after, atol=1e-3):
        return "applies a sigmoid to it"
    scale = float((before * after).sum() / (before * before).sum().clamp_min(1e-300))
    if torch.allclose(scale * before, after, rtol=1e-3, atol=1e-6):
        return f"scales it by {scale:.4g} (a temperature?)"
    return "computes something else from it"


def find_head(
    network: nn.Module, inputs: Inputs, name: str | None = None, likelihood: Likelihood = CATEGORICAL
) -> Head:
    """The layer whose output is the network's output; see `first_pass`."""
    return first_pass(network, inputs, name, likelihood)[0]


def first_pass(
    network: nn.Module, inputs: Inputs, name: str | None = None, likelihood: Likelihood = CATEGORICAL
) -> tuple[Head, Tensor, Tensor]:
    """Watch one forward pass and find the layer whose output is the network's output.

    Call it inside `undisturbed(network)`.

    Args:
        network: the trained classifier.
        inputs: one batch of its inputs.
        name: dotted name of the layer that must be the head, to insist on one.
        likelihood: what the outputs mean; refuses those that do not fit.

    Returns:
        The head, and what this pass gave: the head's input (n, P) and output (n, C), or both at many positions, in the network's
        own layout.
    """
    expected = None if name is None else head_by_name(network, name).layer
    watched = _watch(network, inputs)
    if watched.outputs.dim() > 2:
        found, outputs = _at_positions(network, inputs, watched)
        head = replace(_insist(found, expected, name), positions=Positions(outputs.dim() - 2))
        likelihood.check_outputs(_some_rows(outputs, head.axis), [(head.name, outputs.shape)])
        return head, found.features, outputs
    calls, ran = watched.calls, watched.ran
    logits = likelihood.check_outputs(watched.outputs, ran)
    matches = [seen for seen in calls if seen.gave(logits)]
    if not matches:
        found_along = _along_a_sequence(network, inputs, logits, ran)
        if found_along is None:
            raise HeadError(explain(network, logits, calls, ran))
        return _insist(found_along, expected, name, every_position=True), found_along.features, found_along.output
    found = matches[-1]
    _check_linear(found)
    return _insist(found, expected, name), found.features, logits


def _check_linear(found: NamedCall) -> None:
    if not found.is_linear():
        raise HeadError(
            f"the network's output lies in the memory of layer {found.name!r} but is not its weight times its input plus "
            f"bias: the logits are overwritten in place after the layer, or the layer computes something else. "
            f"Pass a network that returns the plain output of {found.name!r}."
        )
    found.check_untouched(found.name)


def _along_a_sequence(
    network: nn.Module, inputs: Inputs, logits: Tensor, ran: Sequence[tuple[str, torch.Size]]
) -> NamedCall | None:
    rows, classes = logits.shape
    names = [name for name, shape in ran if len(shape) > 2 and (shape[0], shape[-1]) == (rows, classes)]
    if not names:
        return None
    head = head_by_name(network, names[-1])
    with Carried(head) as carried:
        try:
            features, again = carried.apart(carried.pass_of(network, inputs))
        except (DataError, HeadError):  # the network does more than to pick positions
            return None
    found = NamedCall(features, again, (0, 0), head.name, head.layer)
    return found if torch.allclose(again, logits, rtol=1e-3, atol=1e-3, equal_nan=True) and found.is_linear() else None


SOME = 4096
"""Positions that are looked at to tell logits from other outputs."""


def _some_rows(outputs: Tensor, axis: int) -> Tensor:
    # Some of the outputs (m, C) of the first input.
    first = outputs[:1]
    return Layout.of(first, axis).by_position(first)[:, :SOME].flatten(0, 1)


def _at_positions(network: nn.Module, inputs: Inputs, seen: WatchedPass) -> tuple[NamedCall, Tensor]:
    found, outputs = seen.last, seen.outputs
    if found is None or not found.gave(outputs):
        # Another layer may run after the head, such as one for an auxiliary loss: look at those with outputs of this shape again.
        again = _watch(network, inputs, {name for name, shape in seen.at_positions if shape == outputs.shape})
        outputs = again.outputs
        found = next((one for one in reversed(again.calls) if one.gave(outputs)), None)
        if found is None:
            raise HeadError(_explain_positions(network, again))
    reason = why_not_linear(found.layer) if isinstance(found.layer, Convolution) else None
    if reason is not None:
        raise HeadError(f"the network's output is that of layer {found.name!r}, which {reason}")
    found.check_untouched(found.name)
    _check_linear(found.of_first_input())
    return found, outputs


def _explain_positions(network: nn.Module, seen: WatchedPass) -> str:
    shape = tuple(seen.outputs.shape)
    if seen.calls:
        near = seen.calls[-1]
        return (
            f"the network's output of shape {shape} is not the output of its last layer: {near.name!r} gives this shape, and the "
            f"network {_change(near.output, seen.outputs)}. Pass a network whose forward returns the output of {near.name!r} itself."
        )
    ran = [*seen.ran, *seen.at_positions][-1:]
    last = f" Its last linear layer or convolution, {ran[0][0]!r}, gives shape {tuple(ran[0][1])}." if ran else ""
    return (
        f"expected outputs of shape (batch, classes), or at many positions: (batch, classes, height, width) of a 1x1 convolution or "
        f"(batch, positions, classes) of a linear layer; got shape {shape} from {type(network).__name__}.{last} Pass a network that "
        f"returns the output of its last layer as it is, without reshaping or resizing it."
    )


def _insist(
    found: NamedCall, expected: nn.Linear | Convolution | None, name: str | None, *, every_position: bool = False
) -> Head:
    if expected is not None and found.layer is not expected:
        raise HeadError(
            f"head={name!r} was given, but the network's output is the output of layer {found.name!r}. "
            f"Pass head={found.name!r}, or None to have it found."
        )
    return Head(name or found.name, found.layer, every_position)


class WatchedPass(NamedTuple):
    """What was seen of linear layers and convolutions in one pass of a network."""

    outputs: Tensor
    """Of the network."""
    calls: list[NamedCall]
    """Of linear layers with a matrix as output, or of the layers that were named."""
    ran: list[tuple[str, torch.Size]]
    """Names and output shapes of the linear layers that ran."""
    at_positions: list[tuple[str, torch.Size]]
    """The same of all layers with outputs at many positions."""
    last: NamedCall | None
    """Of these, the last call. Those before are not kept: a transformer's hidden states, or a U-Net's maps, would fill memory."""


def _watch(network: nn.Module, inputs: Inputs, names: Collection[str] | None = None) -> WatchedPass:
    # `names`: of layers to keep every call of; None: linear layers whose output is a matrix.
    calls: list[NamedCall] = []
    ran: list[tuple[str, torch.Size]] = []
    at_positions: list[tuple[str, torch.Size]] = []
    last: list[NamedCall] = []

    def record(name: str, layer: nn.Linear | Convolution) -> Callable[..., None]:
        def hook(_: nn.Module, arguments: tuple[Tensor, ...], keywords: dict[str, Tensor], output: object) -> None:
            if not isinstance(output, Tensor):
                return
            linear, seen = isinstance(layer, nn.Linear), LayerCall.of(arguments, keywords, output)
            named = NamedCall(seen.features, output, seen.versions, name, layer)
            if linear:
                ran.append((name, output.shape))
            if output.dim() > 2:
                at_positions.append((name, output.shape))
                last[:] = [named]
            if name in names if names is not None else linear and output.dim() == 2:
                calls.append(named)

        return hook

    handles = []
    try:
        for name, module in network.named_modules():
            if isinstance(module, nn.Linear | Convolution):
                handles.append(module.register_forward_hook(record(name, module), with_kwargs=True))
        outputs = call(network, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return WatchedPass(outputs, calls, ran, at_positions, last[0] if last else None)
