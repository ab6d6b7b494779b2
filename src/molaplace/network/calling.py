"""Call any network on any batch.

A network is an `nn.Module` whose output is a tensor of logits, or an object or mapping that contains `logits`. A loader yields
batches. A batch is `(inputs, labels)`, inputs alone, or a mapping that holds the labels under the key "labels". Inputs are a tensor, a
tuple of positional arguments, or a mapping of keyword arguments. Inputs that are passed directly, without a loader, never include
labels, so every element of a tuple is a positional argument.
"""

from __future__ import annotations

import inspect
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map_only
from tqdm.auto import tqdm

from molaplace.errors import DataError, HeadError, MolaError

Inputs = Any
"""A tensor, a tuple of tensors (positional arguments), or a mapping of tensors (keyword arguments)."""

LABELS = "labels"

TORCH = Path(torch.__file__).parent


class Batch(NamedTuple):
    """Inputs for a network, with labels if the loader yields them."""

    inputs: Inputs
    labels: Tensor | None


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Disable autocast during the posterior's computations, because autocast is meant only for the networks."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def gradients_of(inputs: Inputs) -> AbstractContextManager[object]:
    """Disable gradients unless an input requires them, because a graph would hold the activations of every network.

    Gradients stay enabled for forward-mode differentiation and inside the transforms of `torch.func`, where a call that disables them
    would silently have derivatives of 0. A trace would record the change of the mode.
    """
    leaves = tree_leaves(dict(inputs) if isinstance(inputs, Mapping) else inputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    unchanged = (
        not torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or any(tensor.requires_grad or unpack_dual(tensor).tangent is not None for tensor in tensors)  # type: ignore[no-untyped-call]
    )
    return nullcontext() if unchanged else torch.no_grad()


# --- batches and loaders ----------------------------------------------------------------------------------------------


INPUTS = (
    "Inputs are tensors: numbers become one by torch.tensor(...), and texts by tokenizer(texts, padding=True, return_tensors='pt'). "
    "Combine several inputs in a tuple: ((first, second), labels)."
)


def as_batch(raw: Any, batch_name: str) -> Batch:
    """Split a loader's batch into inputs and labels; messages name the batch, as in "batch 3 of the loader"."""
    inputs = raw
    labels = None
    if isinstance(raw, Mapping):
        inputs = {key: value for key, value in raw.items() if key != LABELS}
        labels = raw.get(LABELS)
        if not inputs:
            raise DataError(
                f"expected a mapping that contains network inputs in addition to {LABELS!r}, got only {sorted(raw)}.",
                place=batch_name,
            )
    elif isinstance(raw, Sequence) and not isinstance(raw, str) and len(raw) in (1, 2):
        inputs = raw[0]
        labels = raw[1] if len(raw) == 2 else None
    elif not isinstance(raw, Tensor):
        raise DataError(
            f"expected (inputs, labels), inputs alone, or a mapping with the key {LABELS!r}; got {_described(raw)}. {INPUTS}",
            place=batch_name,
        )
    if any(isinstance(tensor, Tensor) and tensor.dim() > 0 and len(tensor) == 0 for tensor in tree_leaves(inputs)):
        raise DataError("the inputs have size 0. Remove empty batches from the loader.", place=batch_name)
    if labels is not None and not isinstance(labels, Tensor):
        try:
            labels = torch.as_tensor(labels, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"labels must be a tensor or array of class indices, got {_described(labels)}. Number classes that have names in the "
                f"order of the outputs.",
                place=batch_name,
            ) from error
    return Batch(inputs, labels)


def _described(value: Any) -> str:
    # Return the type and the length, as in "list of length 3 with str".
    if not isinstance(value, (list, tuple)) or not value:
        return type(value).__name__
    return f"{type(value).__name__} of length {len(value)} with {type(value[0]).__name__}"


def one_batch(inputs: Inputs) -> Inputs:
    """Return `inputs` unchanged; raise `DataError` for a list, which counts as an iterable of batches."""
    if isinstance(inputs, list):
        raise DataError(
            f"expected one batch, got a {_described(inputs)}, which counts as an iterable of batches. For several batches, use predict. "
            f"One batch is a tensor, a tuple of positional arguments or a mapping of keyword arguments; instead of [x, y], pass x. {INPUTS}"
        )
    return inputs


def check_loader(loader: Any, where: str) -> None:
    """Raise `DataError` if the object cannot be a loader; no batch is read. `where` identifies the object in messages."""
    tensors = isinstance(loader, (tuple, list)) and bool(loader) and all(isinstance(item, Tensor) for item in loader)
    # A list of tensors is accepted only if all have the same dtype and number of dimensions; in a batch [x, y], these usually
    # differ.
    batch = tensors and (isinstance(loader, tuple) or len({(item.dim(), item.dtype) for item in loader}) > 1)
    table = hasattr(loader, "to_numpy")  # iterating over a data frame would yield the names of its columns
    if batch or table or isinstance(loader, (Tensor, Mapping, str)) or not isinstance(loader, Iterable):
        raise DataError(
            f"expected an iterable of batches, got {type(loader).__name__}{' of tensors' if batch else ''}. "
            "Pass a DataLoader, or a single batch in a list: [(x, y)].",
            place=f"the {where}",
        )


def batch_count(loader: Any) -> int | None:
    """Return the number of batches in a loader, or None if the loader has no length."""
    try:
        return len(loader)
    except TypeError:
        return None


def peek(loader: Iterable[Any], where: str, *, required: bool = True) -> tuple[Any, Iterator[Any]]:
    """Return the first batch unchanged, together with an iterator over all batches, including the first.

    An empty loader raises `DataError` if `required` is True; otherwise, its first batch is None.
    """
    check_loader(loader, where)
    remaining = iter(loader)
    for batch in remaining:
        return batch, chain([batch], remaining)
    if not required:
        return None, remaining
    raise DataError(
        f"the {where} is empty: it yielded no batches. An iterator can be read only once, so pass the loader itself."
    )


def named_batches(
    networks: Sequence[nn.Module],
    loader: Iterable[Any],
    where: str,
    *,
    labelled: bool | None = None,
    progress: bool = False,
    total: int | None = None,
    first_batch: int = 0,
    required: bool = True,
) -> Iterator[tuple[str, Batch]]:
    """Yield each batch of a loader with its name in messages, such as "batch 3 of the training loader", after a check of its labels.

    The arguments are those of `stream`. The networks are those that may ignore labels under another key.
    """
    had_labels = labelled
    bar_options = {"desc": where, "total": total, "initial": first_batch, "disable": None if progress else True}
    with tqdm(peek(loader, where, required=required)[1], **bar_options, leave=False) as bar:
        for index, raw in enumerate(bar, first_batch):
            name = f"batch {index} of the {where}"
            batch = as_batch(raw, name)
            del raw  # only the batch holds the memory
            if labelled is False:
                batch = batch._replace(labels=None)
            has_labels = batch.labels is not None
            if had_labels is not None and had_labels != has_labels:
                raise DataError(
                    f"{name} has no labels. Make the loader yield (inputs, labels), or a mapping with the key 'labels'."
                    if labelled
                    else f"{name} {'has no' if had_labels else 'has'} labels, unlike the batches before it."
                )
            had_labels = has_labels
            if labelled is None:
                _check_label_key(networks, batch, name)
            yield name, batch
            del batch  # free the memory before the next batch is loaded


# --- networks ---------------------------------------------------------------------------------------------------------


class LogitsOf(nn.Module):
    """A network followed by a function, such as `lambda output: output[0]`, that extracts the logits from its output."""

    def __init__(self, network: nn.Module, logits: Callable[[Any], Any]) -> None:
        super().__init__()
        self.network = network
        self.logits: Callable[[Any], Any] = logits

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the logits."""
        return self.logits(self.network(*arguments, **keywords))


class Branch(nn.Module):
    """A head on a trunk that other networks share: it computes `head(trunk(inputs))`."""

    def __init__(self, trunk: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = head

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the logits."""
        features = self.trunk(*arguments, **keywords)
        tensors = [leaf for leaf in tree_leaves(features) if isinstance(leaf, Tensor) and not leaf.is_inference()]
        versions = [tensor._version for tensor in tensors]
        logits = self.head(features)
        if [tensor._version for tensor in tensors] != versions:
            raise HeadError(
                f"{type(self.head).__name__} changes the output of the trunk in place, but other heads read it, too. Pass heads "
                f"without in-place operations on their input."
            )
        return logits


class _TrunkOutput(nn.Module):
    # The output of a trunk for one batch, in place of the trunk.
    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output


def with_trunks_run(networks: Sequence[nn.Module], inputs: Inputs) -> list[nn.Module]:
    """Run each trunk of `Branch`es once, and return the networks with the trunks' outputs for these inputs in place of the trunks."""
    outputs: dict[nn.Module, _TrunkOutput] = {}
    for network in networks:
        if isinstance(network, Branch) and network.trunk not in outputs:
            outputs[network.trunk] = _TrunkOutput(_output(network.trunk, inputs))
    return [
        Branch(outputs[network.trunk], network.head) if isinstance(network, Branch) else network for network in networks
    ]


def unwrapped(network: nn.Module) -> nn.Module:
    """Return the network without any `torch.compile` wrapper, so that hooks on its layers run. It then runs without compilation."""
    while isinstance(inner := getattr(network, "_orig_mod", None), nn.Module):
        network = inner
    return network


def bare(network: nn.Module) -> nn.Module:
    """Return the user's network, whose names its layers and tensors have: without torch.compile and `LogitsOf`."""
    network = unwrapped(network)
    while isinstance(network, LogitsOf):
        network = unwrapped(network.network)
    return network


def signature_of(network: nn.Module) -> inspect.Signature:
    """Return the signature of the network's `forward` method."""
    network = bare(network)
    while isinstance(network, Branch):
        network = bare(network.trunk)
    return inspect.signature(network.forward)


def transformers_models(network: nn.Module) -> list[Any]:
    """Return the models of transformers in a network, the outermost first."""
    return [
        module for module in network.modules() if "PreTrainedModel" in {kind.__name__ for kind in type(module).__mro__}
    ]


def _check_label_key(networks: Iterable[nn.Module], batch: Batch, batch_name: str) -> None:
    # Raise DataError if a mapping without labels may hold them under another key: one of a collator or, in models of transformers that
    # accept any keys, integers that are not read, one or a row for each input.
    if batch.labels is not None or not isinstance(batch.inputs, Mapping):
        return
    tensors = {key: value for key, value in batch.inputs.items() if isinstance(value, Tensor)}
    of_tokenizers = ("length", "overflow_to_sample_mapping")
    for network in networks:
        models = transformers_models(network)
        kinds = {parameter.kind.name for parameter in signature_of(network).parameters.values()}
        read = {name for module in (network, *models) for name in signature_of(module).parameters}
        size = next((len(value) for key, value in tensors.items() if key in read and value.dim()), None)
        ignored = [
            key
            for key, value in tensors.items()
            if models
            and "VAR_KEYWORD" in kinds
            and value.dim() in (1, 2)
            and len(value) == size
            and not (key in read or key in of_tokenizers or key.endswith(("_mask", "token_type_ids", "position_ids")))
            and not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
        ]
        keys = [key for key in ("label", "label_ids") if key in batch.inputs] or ignored
        if keys:
            raise DataError(
                f"the mapping has no {LABELS!r}, and {type(bare(network)).__name__} would ignore its key {keys[0]!r}. Rename the key "
                f"if it holds the labels, as DataCollatorWithPadding of transformers does with 'label'. Otherwise, remove it.",
                place=batch_name,
            )


def check_network(network: nn.Module) -> None:
    """Raise `DataError` if any of the network's parameters is lazy or on the meta device."""
    kind = type(bare(network)).__name__
    for name, parameter in network.named_parameters():
        if is_lazy(parameter):
            raise DataError(
                f"{kind} has never been run: its lazy parameters, such as {name!r}, have no shape yet. Run it on one batch and load "
                f"its trained weights first."
            )
        if parameter.is_meta:
            raise DataError(
                f"{kind} is on the meta device: its weights, such as {name!r}, have no values. Allocate them with "
                f"network.to_empty(device='cpu') and load them with network.load_state_dict(...)."
            )


def plain_name(name: str) -> str:
    """Return the name of a module or tensor without the prefixes `_orig_mod.` that torch.compile adds."""
    return f"{name}.".replace("_orig_mod.", "").strip(".")


def state_of(network: nn.Module) -> dict[str, Tensor]:
    """Return all tensors in a network's state dict, keyed and sorted by name."""
    check_network(network)
    with undisturbed(network):
        state = bare(network).state_dict()
    # Skip the extra state of a module, which may be any object.
    return {plain_name(name): value for name, value in sorted(state.items()) if isinstance(value, Tensor)}


@dataclass
class _EvalMode:
    # A module in eval mode, and the number of blocks that need it there.
    module: nn.Module
    training: bool
    """Flag of the module before the first block, which the last block restores."""
    blocks: int = 0


_eval_modes: dict[int, _EvalMode] = {}  # keyed by id, because modules may compare equal or be unhashable
_eval_modes_lock = threading.Lock()


@contextmanager
def evaluating(*networks: nn.Module) -> Iterator[None]:
    """Put networks in eval mode, and restore the training flag of every module on exit, even after an exception.

    Blocks may be nested or run in several threads: the first that needs a module puts it in eval mode, and the last restores its flag.
    """
    modules = [module for network in networks for module in network.modules()]
    with _eval_modes_lock:
        # Read all flags before setting any, because setting the flag of a compiled module also sets the flag of the module it wraps.
        for module in modules:
            mode = _eval_modes.get(id(module))
            if mode is None:
                mode = _eval_modes[id(module)] = _EvalMode(module, module.training)
            mode.blocks += 1
        for module in modules:
            if module.training:
                module.training = False
    try:
        yield
    finally:
        with _eval_modes_lock:
            for module in modules:
                mode = _eval_modes[id(module)]
                mode.blocks -= 1
                if mode.blocks == 0:
                    del _eval_modes[id(module)]
                    if module.training != mode.training:
                        module.training = mode.training


_expert_adapters_lock = threading.RLock()


def undisturbed(network: nn.Module) -> AbstractContextManager[object]:
    """Exclude other threads from a network whose weights change during a call; other networks need no lock.

    Adapters of peft on expert weights (`target_parameters`) replace the weights during a call, in a cache that all networks share.
    """
    changing = any(type(module).__name__ == "ParamWrapper" for module in network.modules())
    return _expert_adapters_lock if changing else nullcontext()


def run(network: nn.Module, inputs: Inputs) -> Tensor:
    """Run a network on its own device and return its logits tensor itself, not a copy."""
    output = _output(unwrapped(network), inputs)
    if isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    elif not isinstance(output, Tensor) and hasattr(output, "logits"):
        output = output.logits
    if not isinstance(output, Tensor):
        keys = f" with the keys {', '.join(map(repr, output))}" if isinstance(output, Mapping) else ""
        key = next((repr(leaf) for leaf in output), "0") if isinstance(output, Mapping) else "0"
        remedy = f"Pass logits=lambda output: output[{key}] to mola.fit or mola.ensemble, or pass" if output else "Pass"
        raise HeadError(
            f"expected the network to return a tensor of logits, or an object or mapping that contains 'logits'; got "
            f"{type(output).__name__}{keys}. {remedy} a network that returns the logits."
        )
    return output


def _output(network: nn.Module, inputs: Inputs) -> Any:
    # Run a module on its own device. Errors about the inputs become a DataError; others get the inputs and the layer as a note.
    if isinstance(inputs, Mapping):
        inputs = {key: value for key, value in inputs.items() if key != LABELS}
    parameter = next(chain(network.parameters(), network.buffers()), None)
    try:
        if parameter is not None:
            inputs = tree_map_only(Tensor, lambda leaf: leaf.to(parameter.device, non_blocking=True), inputs)
        with undisturbed(network):
            if isinstance(inputs, dict) and takes(network, (), inputs):
                return network(**inputs)
            return network(*inputs) if isinstance(inputs, (tuple, list)) else network(inputs)
    except (MolaError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        failed = (
            f"{type(bare(network)).__name__} failed on inputs of {_describe(inputs)}{_failed_layer(network, error)}"
        )
        remedy, unsuitable = _remedy(network, inputs)
        if not unsuitable and not _raised_by_torch(error):
            error.add_note(f"{failed}.{remedy}")
            raise
        raise DataError(
            f"{failed}: {error}. Pass inputs of the shape and type on which the network was trained.{remedy}"
        ) from error


# inference_mode is not used, because a network that caches a tensor during the forward pass must remain trainable.
call = torch.no_grad()(run)
"""Run a network as `run` does, but without gradients."""


def takes(network: nn.Module, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Return whether `forward` accepts these arguments. If keys are not its keywords, as in transformers, it takes the whole mapping."""
    try:
        signature_of(network).bind(*arguments, **keywords)
    except TypeError:  # keys may be no strings
        return False
    return True


def _raised_by_torch(error: Exception) -> bool:
    # Whether an operation of torch refused its arguments, as opposed to any other error in the network's code.
    last = traceback.extract_tb(error.__traceback__)[-1]
    path = Path(last.filename)
    raised = (last.line or "").startswith("raise")
    if path.is_relative_to(TORCH) and path != TORCH / "nn/modules/module.py":  # which calls `forward`
        return type(error) in (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError)
    return type(error) in (RuntimeError, NotImplementedError) and not raised


def _failed_layer(network: nn.Module, error: Exception) -> str:
    # Return the innermost module of the network that was running, as in ", in its layer 'body.0'"; empty if it is the network itself.
    names = {id(module): plain_name(name) for name, module in bare(network).named_modules()}
    running = [names.get(id(frame.f_locals.get("self")), "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    layer = next((name for name in reversed(running) if name), "")
    return f", in its layer {layer!r}" if layer else ""


def _remedy(network: nn.Module, inputs: Inputs) -> tuple[str, bool]:
    # Return what to do about inputs on which a network failed, and whether their type or number explains any error.
    leaves = tree_leaves(inputs)
    if any(isinstance(leaf, np.ndarray) or hasattr(leaf, "to_numpy") for leaf in leaves):
        return (
            " Convert arrays with torch.from_numpy(inputs), and data frames with torch.tensor(inputs.to_numpy()).",
            True,
        )
    input_dtypes = [leaf.dtype for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    weight_dtypes = [leaf.dtype for leaf in network.parameters() if leaf.is_floating_point()]
    if input_dtypes and weight_dtypes and not set(input_dtypes) & set(weight_dtypes):
        return (
            f" The weights are {weight_dtypes[0]}, but the inputs are {input_dtypes[0]}. Use inputs.to({weight_dtypes[0]}) or "
            f"network.to({input_dtypes[0]})."
        ), True
    parameters = list(signature_of(network).parameters)
    if isinstance(inputs, Mapping):
        unknown = [key for key in inputs if key not in parameters]
        keys = f" Keys become keyword arguments of forward, which accepts {parameters} but not {unknown}. Pass labels under {LABELS!r}."
        return "" if takes(network, (), inputs) else keys, False
    several = (
        " The elements of a tuple are passed as separate arguments, as in network(x, ids). If the last element holds the labels, pass "
        "only the inputs."
        if isinstance(inputs, tuple) and len(inputs) > 1
        else ""
    )
    if takes(network, inputs if isinstance(inputs, (tuple, list)) else (inputs,), {}):
        return several, False
    return f" Its forward accepts {parameters}.{several}", True


def _describe(inputs: Inputs) -> str:
    kinds = (Tensor, np.ndarray)
    described = tree_map_only(
        kinds, lambda array: f"shape {tuple(array.shape)} and type {str(array.dtype).removeprefix('torch.')}", inputs
    )
    text = described if isinstance(described, (str, tuple, list, dict)) else f"type {type(described).__name__}"
    return str(text).replace("'", "")[:500]
