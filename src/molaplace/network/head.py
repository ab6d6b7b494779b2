"""Find and check the last linear layer of any network by observing one forward pass.

The head is the linear layer whose output *is* the network's output. It need not be defined last or run last. If a network changes the
logits after its last linear layer, the error message identifies the layer and the change.

One kind of change is allowed: the layer may run at every position if the network then only selects, averages or interpolates
positions. For example, the last layer of a language model computes scores of shape (n, T, C), and the network returns only the scores
at the last token of each text. Similarly, segmentation networks resize the output of a 1x1 convolution to the size of the image.
During the forward pass, the head's input is appended to its output as additional columns or channels, so that the input at the
returned positions can be read. Any averaging of positions then applies to input and output alike. Averages whose weights sum to 1
commute with the layer, so the logits computed from the resized features are exact, as are their variances.

A network may also return its last layer's output at every position: at every pixel for a 1x1 convolution, or at every token for a
linear layer. In that case, each position is a datum (see `dense.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from molaplace.errors import HeadError
from molaplace.likelihoods import CATEGORICAL, Likelihood
from molaplace.network.calling import Inputs, bare, call, plain_name, run, unwrapped, without_autocast
from molaplace.network.dense import IGNORE_INDEX, Layout, Positions
from molaplace.numerics import to_float64

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Layer = nn.Linear | Convolution


@dataclass(frozen=True)
class Head:
    """The last linear layer of a network, represented as a matrix acting on features that include the constant 1.

    Args:
        name: dotted name of the layer in the network.
        module: a linear layer or a 1x1 convolution.
        every_position: whether the layer runs at every position before the network selects, averages or interpolates positions.
        dense_axes: number of position axes in the outputs: 0 for outputs of shape (n, C), 1 for a sequence and 2 for an image.
        ignore_index: label that marks positions to ignore in dense training and validation data.
        positions: positions of dense training data that are used; see `mola.fit`.
    """

    name: str
    module: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
    every_position: bool = False
    dense_axes: int = 0
    ignore_index: int = IGNORE_INDEX
    positions: Positions = "all"

    @property
    def outputs(self) -> int:
        """Number of outputs C."""
        return self.module.out_features if isinstance(self.module, nn.Linear) else self.module.out_channels

    @property
    def inputs(self) -> int:
        """Number of features, excluding the constant 1."""
        return self.module.in_features if isinstance(self.module, nn.Linear) else self.module.in_channels

    @property
    def axis(self) -> int:
        """Class axis of the layer's output and feature axis of its input: 1 for a convolution and -1 for a linear layer."""
        return -1 if isinstance(self.module, nn.Linear) else 1

    @property
    def has_bias(self) -> bool:
        """Whether the layer has a bias, in which case the features include the constant 1."""
        return self.module.bias is not None

    @property
    def width(self) -> int:
        """Number of features P, including the constant 1."""
        return self.inputs + self.has_bias

    def weights(self) -> Tensor:
        """Return the trained weights (C, P) in float64 on the CPU, with the bias in the last column.

        Call this method inside `evaluating`. In train mode, merely reading a spectrally normalised weight changes the layer.
        """
        with torch.no_grad():
            weight = self.module.weight.detach().flatten(1).cpu().double()
            bias = [] if self.module.bias is None else [self.module.bias.detach().cpu().double()[:, None]]
            return torch.cat([weight, *bias], dim=1)

    def lift(self, features: Tensor) -> Tensor:
        """Convert the layer's inputs (n, P') to float64 features (n, P), which end with the constant 1 if the layer has a bias."""
        return to_float64(
            torch.cat([features, features.new_ones(features.shape[0], 1)], 1) if self.has_bias else features
        )


def same_tensor(tensor: Tensor, other_tensor: Tensor) -> bool:
    """Return whether two tensors are identical views of one storage. Addresses are not compared, because traced tensors have none."""
    return tensor is other_tensor or (
        tensor.shape == other_tensor.shape
        and tensor.dtype == other_tensor.dtype
        and tensor.stride() == other_tensor.stride()
        and tensor.storage_offset() == other_tensor.storage_offset()
        and tensor.untyped_storage()._cdata == other_tensor.untyped_storage()._cdata
    )


# --- hooks ------------------------------------------------------------------------------------------------------------


@contextmanager
def hooked(layers: Iterable[nn.Module], hook: Callable[[nn.Module, Tensor, Any], Any]) -> Iterator[None]:
    """Inside the block, run `hook(layer, input, output)` after each call to these layers, including calls from other threads."""

    def run(layer: nn.Module, arguments: tuple[Tensor, ...], *keywords_and_output: Any) -> Any:
        # Keywords are optional, because torch may call the hook without them while another thread is registering it.
        *keywords, output = keywords_and_output
        return hook(layer, arguments[0] if arguments else keywords[0]["input"], output)

    handles = [layer.register_forward_hook(run, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def carried_pass(network: nn.Module, head: Head, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return a head's input and output at the positions of the network's output; the head itself runs at every position."""
    thread = threading.get_ident()
    dtypes = [torch.float32]

    def join(_: nn.Module, features: Tensor, output: Tensor) -> Tensor | None:
        if threading.get_ident() != thread:
            return None
        dtypes.append(output.dtype)
        with without_autocast(output.device):  # autocast cannot concatenate tensors of two half-precision dtypes
            return torch.cat([output, features], dim=head.axis)

    with hooked([head.module], join):
        joined = run(network, inputs)
    if joined.dim() != 2 + head.dense_axes or joined.shape[head.axis] != head.outputs + head.inputs:
        raise HeadError(
            f"the network may only select, average or interpolate positions in the output of its head {head.name!r}, "
            f"but it makes other changes: expected {head.outputs + head.inputs} columns, got an output of shape {tuple(joined.shape)}."
        )
    outputs, features = torch.split(joined, [head.outputs, head.inputs], dim=head.axis)
    return features, outputs.to(dtypes[-1])


# --- finding the head -------------------------------------------------------------------------------------------------


@dataclass
class _Call:
    name: str
    layer: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
    shape: torch.Size
    tensors: tuple[Tensor, Tensor] | None
    """Input and output; None for dense layers before the last, because storing all feature maps would take too much memory."""


def _named_layers(network: nn.Module) -> dict[str, nn.Module]:
    modules = bare(network).named_modules(remove_duplicate=False)
    return {plain_name(name): module for name, module in modules}


def _watch(network: nn.Module, inputs: Inputs, keep: Collection[str] = ()) -> tuple[Tensor, list[_Call]]:
    # Run one forward pass; return its output and all calls to linear and convolutional layers. Of the dense
    # layers, only the last and those in `keep` have their tensors stored.
    calls: list[_Call] = []
    layers = {name: module for name, module in _named_layers(network).items() if isinstance(module, Layer)}
    names = {id(module): name for name, module in reversed(layers.items())}  # a shared module keeps its first name

    def record(layer: Any, features: Tensor, output: object) -> None:
        if isinstance(output, Tensor):
            for earlier_call in calls:
                if len(earlier_call.shape) > 2 and output.dim() > 2 and earlier_call.name not in keep:
                    earlier_call.tensors = None
            calls.append(_Call(names[id(layer)], layer, output.shape, (features.detach(), output)))

    with hooked({id(module): module for module in layers.values()}.values(), record):
        outputs = call(network, inputs)
    return outputs, calls


def _returned(calls: Sequence[_Call], outputs: Tensor) -> _Call | None:
    # Return the call whose output is the network's output.
    for layer_call in reversed(calls):
        linear = len(layer_call.shape) > 2 or isinstance(layer_call.layer, nn.Linear)
        if linear and layer_call.tensors is not None and same_tensor(layer_call.tensors[1], outputs):
            return layer_call
    return None


def find_head(
    network: nn.Module, inputs: Inputs, name: str | None = None, likelihood: Likelihood = CATEGORICAL
) -> Head:
    """Run one forward pass and find the layer whose output is the network's output; raise `HeadError` unless it has the given name.

    Call this function inside `evaluating(network)`.
    """
    return watched_pass(network, inputs, name, likelihood)[0]


def watched_pass(
    network: nn.Module, inputs: Inputs, name: str | None, likelihood: Likelihood
) -> tuple[Head, Tensor, Tensor]:
    """Find the head as `find_head` does, and return it with its input and output at the positions of the network's output."""
    network = unwrapped(network)
    if isinstance(network, torch.jit.ScriptModule):
        raise HeadError(
            f"{type(network).__name__} is a TorchScript module, which runs outside Python, so the input of its "
            f"last layer cannot be read. Pass the original Python module that was scripted or traced."
        )
    expected = None if name is None else head_by_name(network, name).module
    outputs, calls = _watch(network, inputs)
    if outputs.dim() <= 2:
        outputs = likelihood.check_outputs(
            outputs,
            [(layer_call.name, layer_call.shape) for layer_call in calls if isinstance(layer_call.layer, nn.Linear)],
        )
    elif _returned(calls, outputs) is None:
        # Another layer, such as one for an auxiliary loss, may run after the head. Keep the tensors of all layers whose outputs have
        # the shape of the network's output.
        outputs, calls = _watch(
            network, inputs, {layer_call.name for layer_call in calls if layer_call.shape == outputs.shape}
        )
    returned = _returned(calls, outputs)
    if returned is not None:
        reason = _why_not_linear(returned.layer)
        if reason is not None:
            raise HeadError(f"the network's output is the output of layer {returned.name!r}, which {reason}")
        assert returned.tensors is not None  # `_returned` compares tensors
        features = returned.tensors[0]
        if not _is_linear(returned.layer, features, outputs):
            raise HeadError(
                f"the network's output shares memory with the output of layer {returned.name!r} but does not equal the layer's "
                f"weight times its input plus its bias. Either the logits are overwritten in place after the layer, or the layer "
                f"computes something else. Pass a network that returns the unmodified output of {returned.name!r}."
            )
        head = Head(returned.name, returned.layer, dense_axes=outputs.dim() - 2)
    else:
        carried = _carried_head(network, inputs, outputs, calls)
        if carried is None:
            raise HeadError(_explain(network, outputs, calls))
        head, features, outputs = carried
    if outputs.dim() > 2:
        rows = Layout.of(outputs[:1], head.axis).by_position(outputs[:1])[0, :4096]
        likelihood.check_outputs(rows, [(head.name, outputs.shape)])
    if expected is not None and head.module is not expected:
        raise HeadError(
            f"{name!r} was passed, but the network's output is the output of layer {head.name!r}. "
            f"Pass head={head.name!r}, or pass None to find the head automatically.",
            argument="head",
        )
    return head, features, outputs


def _is_linear(layer: Layer, features: Tensor, output: Tensor) -> bool:
    if output.numel() == 0:
        return True
    axis = -1 if isinstance(layer, nn.Linear) else 1
    selected = slice(None) if output.dim() == 2 else slice(1)  # a single input provides enough positions
    errors, tolerance = linear_errors(layer, *(values[selected].movedim(axis, -1) for values in (features, output)))
    # Accept outputs that are not finite for now; the pass over the loader will raise an error that identifies the batch.
    return not bool(errors.isfinite().all()) or float(errors.max()) <= tolerance


@torch.no_grad()
def linear_errors(layer: Layer, features: Tensor, outputs: Tensor) -> tuple[Tensor, float]:
    """Return the errors `|W x + b - f|` (..., C) of outputs f, given features x (..., P'), and the largest error due to rounding."""
    weight = to_float64(layer.weight.flatten(1))
    bias = None if layer.bias is None else to_float64(layer.bias)
    expected = functional.linear(to_float64(features), weight, bias)
    # Overwritten logits, or a layer that does not compute W x + b, cause larger errors.
    tolerance = 1e-3 if outputs.dtype in (torch.float32, torch.float64) else 5e-2
    return (expected - to_float64(outputs)).abs(), tolerance * (float(expected.abs().max()) or 1.0)


def _carried_head(
    network: nn.Module, inputs: Inputs, outputs: Tensor, calls: Sequence[_Call]
) -> tuple[Head, Tensor, Tensor] | None:
    # Return the last layer after which the network only selects, averages or interpolates positions, with its input and output there.
    dense_axes = outputs.dim() - 2
    tried: set[str] = set()
    for layer_call in reversed(calls):
        head = Head(layer_call.name, layer_call.layer, every_position=True, dense_axes=dense_axes)
        if layer_call.name in tried or not _may_carry(head, layer_call.shape, outputs.shape):
            continue
        tried.add(layer_call.name)
        try:
            with torch.no_grad():
                features, recomputed = carried_pass(network, head, inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the network makes other changes; try the next layer, and if all fail, _explain reports why
            continue
        equal = torch.allclose(recomputed, outputs, rtol=1e-3, atol=1e-3, equal_nan=True)
        if equal and _is_linear(layer_call.layer, features, recomputed):
            return head, features, recomputed
    return None


def _may_carry(head: Head, before: torch.Size, after: torch.Size) -> bool:
    # Whether the network may select or average positions of a linear layer's outputs, or interpolate those of a convolution.
    if head.dense_axes:
        fits = isinstance(head.module, Convolution) and len(before) == len(after)
    else:
        fits = isinstance(head.module, nn.Linear) and len(before) > 2
    alike = fits and before != after and before[0] == after[0] and before[head.axis] == after[head.axis]
    return alike and _why_not_linear(head.module) is None


# --- heads by name ----------------------------------------------------------------------------------------------------


def head_by_name(network: nn.Module, name: str) -> Head:
    """Return the named linear layer or 1x1 convolution as a head.

    The name is dotted, as in `named_modules`. An empty name refers to the network itself.
    """
    modules = _named_layers(network)
    layer = modules.get(name) if isinstance(name, str) else None
    if not isinstance(layer, Layer):
        kind = "not a module of the network" if layer is None else f"a {type(layer).__name__}, not an nn.Linear"
        linear = [layer_name for layer_name, module in modules.items() if isinstance(module, nn.Linear)]
        raise HeadError(f"{name!r} is {kind}. The network's linear layers are {linear[-8:]}.", argument="head")
    reason = _why_not_linear(layer)
    if reason is not None:
        raise HeadError(f"{name!r} {reason}", argument="head")
    return Head(name, layer)


def _why_not_linear(layer: Layer) -> str | None:
    if isinstance(layer, nn.Linear):
        if layer.weight.is_floating_point() and layer.weight.shape == (layer.out_features, layer.in_features):
            return None
        return (
            f"has quantised weights ({layer.weight.dtype}, shape {tuple(layer.weight.shape)}). Keep the last layer in floating point, "
            f"for example with llm_int8_skip_modules in BitsAndBytesConfig; all other layers may be quantised."
        )
    requirements = {"kernel_size": 1, "stride": 1, "padding": 0, "groups": 1}
    # Padding may also be "same" or "valid", both of which add nothing for a kernel of size 1.
    deviations = [
        f"{name}={getattr(layer, name)}"
        for name, required in requirements.items()
        if getattr(layer, name) not in (required, (required,) * len(layer.kernel_size), "same", "valid")
    ]
    if not deviations:
        return None
    return (
        f"is a {type(layer).__name__} with {', '.join(deviations)}. A posterior needs a last layer that is linear at each position: a 1x1 "
        f"convolution with stride 1, no padding and groups=1. End the network with such a layer, for example nn.Conv2d(features, "
        f"classes, 1), and train it."
    )


# --- explaining a missing head -----------------------------------------------------------------------------------------


def _explain(network: nn.Module, outputs: Tensor, calls: Sequence[_Call]) -> str:
    if not calls:
        return (
            f"no nn.Linear and no 1x1 convolution ran in the forward pass of {type(network).__name__}.{_hidden_layers(network)} "
            f"End the network with an nn.Linear that maps features to logits."
        )
    explanations = (cause(network, outputs, calls) for cause in CAUSES)
    near = next((layer_call for layer_call in reversed(calls) if layer_call.shape == outputs.shape), calls[-1])
    return next(filter(None, explanations), None) or (
        f"the network's output is not the output of its last linear layer. Layer {near.name!r} returns shape {tuple(near.shape)}, and "
        f"the network returns shape {tuple(outputs.shape)}{_change(near, outputs)}.{_hidden_layers(network)} Pass a network whose "
        f"forward method returns the output of a linear layer or 1x1 convolution, such as {near.name!r}, unchanged."
    )


def _adapted(network: nn.Module, outputs: Tensor, calls: Sequence[_Call]) -> str | None:
    # The last linear layer runs in a layer of peft.
    modules = _named_layers(network)
    prefixes = accumulate(calls[-1].name.split("."), "{}.{}".format)
    name = next((name for name in prefixes if hasattr(modules[name], "adapter_layer_names")), None)
    return name and (
        f"the last layer, {name!r}, has an adapter, so no nn.Linear computes the logits. Train the layer itself: list it in "
        f"modules_to_save, not in target_modules, of the adapter's configuration."
    )


def _rearranged(network: nn.Module, outputs: Tensor, calls: Sequence[_Call]) -> str | None:
    # The network returns some of the last layer's outputs, as a choice of tokens, or puts scores of one choice each into a row.
    last = calls[-1]
    if last.tensors is None or outputs.dim() != 2 or not isinstance(last.layer, nn.Linear):
        return None
    name = last.name
    inputs, width = outputs.shape
    of_first_input = last.tensors[1][: last.shape[0] // inputs]
    if width < 2 or not bool(torch.isin(to_float64(outputs[0]), to_float64(of_first_input)).all()):
        return None
    if len(last.shape) == 3 and last.shape[0] == inputs and last.shape[2] > width:
        return (
            f"the network returns {width} of the {last.shape[2]:,} outputs of layer {name!r} at one position, but a posterior needs "
            f"a layer with these {width} outputs alone. If {name!r} is the last layer of a language model of transformers, pass the "
            f"model itself with tokens=[...], the indices of the {width} outputs. Otherwise, end the network with an nn.Linear that "
            f"has these rows of {name!r}."
        )
    return (
        None
        if last.shape != (inputs * width, 1)
        else (
            f"layer {name!r} scores one choice at a time, and the network puts the scores of {width} choices into one row, so no "
            f"layer has {width} outputs. For a posterior, pass a network that returns the score of one choice, shape (batch, 1), "
            f"with every choice as an input of its own, labelled 1 if it is right and 0 otherwise, and likelihood='bernoulli'. "
            f"{WITHOUT_POSTERIOR}"
        )
    )


def _averaged(network: nn.Module, outputs: Tensor, calls: Sequence[_Call]) -> str | None:
    # The network returns the mean of several heads, as distilled vision transformers do in evaluation mode.
    heads = {
        layer_call.name: (layer_call.layer.in_features, to_float64(layer_call.tensors[1]))
        for layer_call in calls
        if isinstance(layer_call.layer, nn.Linear)
        and layer_call.tensors is not None
        and layer_call.shape == outputs.shape
    }
    if len(heads) < 2:
        return None
    widths, of_heads = zip(*heads.values(), strict=True)
    if not torch.allclose(torch.stack(of_heads).mean(0), to_float64(outputs), rtol=1e-3, atol=1e-3):
        return None
    return (
        f"the network returns the mean of the outputs of layers {' and '.join(map(repr, heads))}, but a posterior needs one last layer. "
        f"Together, they are one layer whose input is their joined inputs: head = nn.Linear({sum(widths)}, {outputs.shape[-1]}), with "
        f"the weights torch.cat([layer.weight for layer in layers], 1) / {len(heads)} and the mean of the biases. Return "
        f"head(torch.cat(inputs, 1)). {WITHOUT_POSTERIOR}"
    )


CAUSES = (_adapted, _rearranged, _averaged)
"""Causes that users met: functions of the network, its output and the calls of its layers, which return an explanation or None."""

WITHOUT_POSTERIOR = (
    "Without a posterior, mola.ensemble(networks) and mola.calibration.temperature_scaled accept the network as it is."
)


def _hidden_layers(network: nn.Module) -> str:
    kinds = {type(module) for module in network.modules()}
    if any(issubclass(kind, torch.jit.ScriptModule) for kind in kinds):
        return " The network contains TorchScript modules, whose layers run outside Python and cannot be hooked."
    if any(".quantized" in kind.__module__ for kind in kinds) or any(
        hasattr(module, "qweight") for module in network.modules()
    ):
        return " The network's layers are quantised, so their weights are packed integers. Keep the last layer in floating point."
    return ""


def _change(layer_call: _Call, outputs: Tensor) -> str:
    if layer_call.tensors is None or layer_call.shape != outputs.shape:
        several = outputs.dim() == len(layer_call.shape) == 2 and outputs.shape[1] > layer_call.shape[1]
        return ", perhaps the concatenated outputs of several heads" if several else ""
    axis = 1 if isinstance(layer_call.layer, Convolution) else -1
    logits = to_float64(layer_call.tensors[1])
    changes = {
        "copies or converts the layer's output": logits,
        "applies a softmax to the layer's output": logits.softmax(axis),
        "applies a log-softmax to the layer's output": logits.log_softmax(axis),
        "applies a sigmoid to the layer's output": logits.sigmoid(),
    }
    for words, changed in changes.items():
        if torch.allclose(changed, to_float64(outputs), rtol=1e-3, atol=1e-3):
            return f": it {words}"
    return ": it changes the values, for example by a temperature"
