"""Several networks with the same weights in memory: the adapters of one backbone, and the heads of one trunk.

Adapters, as in LoRA (Hu et al., 2021), add a few trained weights to the frozen layers of a backbone. `peft` switches between adapters by
a flag in each layer, so only one adapter of a model is active at a time. A view is a copy of the model's modules, but not of its tensors,
in which one adapter is always active and the others are deleted. Nothing is ever switched: a call to a view leaves the original model as
it is, and views may be called from several threads.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from molaplace.errors import DataError, OptionError, warn
from molaplace.network.calling import Branch, bare, plain_name, state_of, unwrapped
from molaplace.network.token_choice import TokenChoice
from molaplace.options import did_you_mean


class Parts(NamedTuple):
    """The two parts of a module: what several networks may share, and the rest, which belongs to one network."""

    modules: tuple[str, ...]
    """Names of the modules of the shared part."""
    shared: str
    """Name of the shared part, for messages."""
    rest: str
    """Name of the rest."""


ADAPTED = Parts(("base_layer", "original_module"), "backbone", "adapter")
"""Parts of the layers of peft."""

PARTS: dict[type, Parts] = {
    Branch: Parts(("trunk",), "trunk", "head"),
    TokenChoice: Parts(("model",), "language model", "tokens or the adapter"),
}
"""Parts of other modules, keyed by class."""


def adapters(
    model: nn.Module, names: Sequence[str] | None = None, *, heads: Sequence[nn.Module] | None = None
) -> list[nn.Module]:
    """Return one network for each adapter of a model, or for each head of a trunk. The networks share all weights of the model.

    Pass the result to `mola.fit`, `mola.ensemble` or `mola.load` like any other list of networks. With adapters, each network is a model
    of the same class in which one adapter is active; K networks hold one backbone in memory, and each runs it. With heads, each
    network computes `head(trunk(inputs))`, and a mixture of them runs the trunk once per batch.

    Args:
        model: a model with adapters: a `PeftModel`, a model of transformers to which adapters were added, or a module that contains one.
            With `heads`, the trunk: any module, which returns what the heads take.
        names: names of the adapters, in the order of the networks; by default, all adapters in the order in which they were added.
        heads: modules that end in a linear layer and map the output of the trunk to logits.

    Raises:
        OptionError: if an adapter does not exist, is listed twice, or is merged into the backbone; if the model has no adapters or they
            are disabled.
    """
    if not isinstance(model, nn.Module):
        remedy = (
            " Adapters on separate backbones need no views: pass the models to mola.fit."
            if isinstance(model, Iterable) and not isinstance(model, (str, Mapping))
            else ""
        )
        raise OptionError(f"must be one nn.Module, got {type(model).__name__}.{remedy}", argument="model")
    if heads is not None:
        return _branches(model, names, heads)
    model = unwrapped(model)
    holder = _holder(model)
    layers = _adapter_layers(model)
    prompts = [] if holder is None else [config for config in holder.peft_config.values() if config.is_prompt_learning]
    if prompts:
        raise OptionError(
            f"must be a model whose adapters are layers, such as LoRA, but {prompts[0].peft_type.value} adds prompts to the inputs. Load "
            f"a separate model for each prompt, and pass the models to mola.fit.",
            argument="model",
        )
    if holder is None or not layers:
        raise OptionError(
            f"must be a model with adapters, such as a PeftModel, but {type(model).__name__} has none. If they were merged or unloaded, "
            f"load the backbone and the adapters again. For several heads on one trunk, pass heads=[...].",
            argument="model",
        )
    if len(layers) > len(_adapter_layers(holder)):
        raise OptionError(
            f"must contain one model with adapters, but {type(model).__name__} has several. Write a view of each into the network: "
            f"mola.adapters(model.encoder, name).",
            argument="model",
        )
    known = list(holder.peft_config)
    if names is None:
        names = known
    names = list(names) if isinstance(names, Iterable) and not isinstance(names, str) else [names]
    for name in names:
        if name not in known:
            raise OptionError(
                f"must be names of the model's adapters, {', '.join(map(repr, known))}; got {name!r}.{did_you_mean(name, known)}",
                argument="names",
            )
    if not names or len(set(names)) < len(names):
        raise OptionError(
            f"must contain each adapter at most once, and at least one; got {names}. Copies always agree.",
            argument="names",
        )
    _check_layers(layers)
    _warn_of_backbones({name: holder.peft_config[name] for name in names})
    return [_view(model, name, layers) for name in names]


def _branches(trunk: nn.Module, names: object, heads: Sequence[nn.Module]) -> list[nn.Module]:
    if names is not None:
        raise OptionError(
            "must be None if heads are passed. To put heads on an adapter, pass one of its views as the trunk.",
            argument="names",
        )
    modules = list(heads) if isinstance(heads, Iterable) and not isinstance(heads, nn.Sequential) else [heads]
    if not modules or not all(isinstance(head, nn.Module) for head in modules) or len(set(modules)) < len(modules):
        raise OptionError(
            f"must be a non-empty list or nn.ModuleList of different modules, got {type(heads).__name__}.",
            argument="heads",
        )
    return [Branch(trunk, head) for head in modules]


def _holder(model: nn.Module) -> Any:
    # Return the outermost module that names its adapters and can switch between them, as peft and transformers do.
    for module in model.modules():
        if getattr(module, "peft_config", None) and hasattr(module, "set_adapter"):
            return module
    return None


def _adapter_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "adapter_layer_names")]


def _check_layers(layers: Sequence[Any]) -> None:
    if any(type(layer).__name__ == "MultiheadAttention" for layer in layers):
        raise OptionError(
            "must not have adapters on nn.MultiheadAttention, because peft merges them into the weights during each call, so that the "
            "networks cannot share these weights. Load a separate model for each adapter, and pass the models to mola.fit.",
            argument="model",
        )
    merged = _merged(layers)
    if merged:
        raise OptionError(
            f"must not have merged adapters, but {merged} is added to the weights of the backbone. Call "
            f"model.unmerge_adapter() first. A merged model without other adapters is an ordinary network for mola.fit.",
            argument="model",
        )
    if any(layer.disable_adapters for layer in layers):
        raise OptionError("must have enabled adapters. Call model.enable_adapter_layers() first.", argument="model")


def _merged(layers: Sequence[Any]) -> str:
    # Return the quoted names of the adapters that are merged into the backbone; empty if there are none.
    return ", ".join(map(repr, sorted({name for layer in layers for name in layer.merged_adapters})))


def _warn_of_backbones(configs: Mapping[str, Any]) -> None:
    # An adapter's file names the model on which it was trained. The same model may be at different paths.
    backbones = {name: getattr(config, "base_model_name_or_path", None) for name, config in configs.items()}
    if len({PurePath(path).name for path in backbones.values() if path}) > 1:
        trained_on = ", ".join(f"{name!r} on {path!r}" for name, path in backbones.items() if path)
        warn(
            f"the adapters were trained on different backbones: {trained_on}. On one backbone, an adapter that was trained on another "
            f"is meaningless."
        )


def _view(model: nn.Module, name: str, layers: Sequence[Any]) -> nn.Module:
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    view = copy.deepcopy(model, {id(tensor): tensor for tensor in _tensors(model)})
    holder = _holder(view)
    try:
        holder.set_adapter(name)
        for other in set(holder.peft_config) - {name}:
            holder.delete_adapter(other)
    finally:
        for parameter, flag in flags:  # peft freezes and unfreezes the adapters that it switches
            parameter.requires_grad_(flag)
    for layer in _adapter_layers(view):
        layer.merge = _refuse_merge
    view.register_forward_pre_hook(partial(_check_unmerged, tuple(layers)))
    return view


def _refuse_merge(*_: Any, **__: Any) -> None:
    raise DataError(
        "an adapter cannot be merged in one of several networks that share a backbone, because merging changes the backbone of all. Load "
        "the backbone again with this adapter alone, and merge it there."
    )


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    # Yield every tensor in a model, including those in plain attributes, where quantised layers hold scales and packed weights.
    visited: dict[int, Any] = {}
    remaining: list[Any] = [model]
    while remaining:
        value = remaining.pop()
        if id(value) in visited:
            continue
        visited[id(value)] = value
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            remaining.extend(value.values())
        elif isinstance(value, (list, tuple, set)):
            remaining.extend(value)
        elif hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType)):
            remaining.extend(vars(value).values())


def _check_unmerged(layers: Sequence[Any], *_: Any) -> None:
    # Merging adds an adapter to the weights that all views share.
    merged = _merged(layers)
    if merged:
        raise DataError(
            f"adapter {merged} has been merged into the backbone, so all views of the backbone compute "
            f"something else. Call unmerge_adapter() on the model, or load the backbone again."
        )


# --- checksums ----------------------------------------------------------------------------------------------------------


def checksum_of(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 checksum of the names, dtypes, shapes and bytes of all tensors in a state."""
    digest = hashlib.sha256()
    for name, value in state.items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        tensor = value.detach().cpu().resolve_conj().resolve_neg()
        tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class StateChecksums(NamedTuple):
    """Checksums of the two parts of a network's state."""

    network: str
    """Checksum of the backbone or trunk; for other networks, of everything."""
    adapter: str | None
    """Checksum of the adapter, or of the head on a trunk; None for other networks."""


def state_checksums(networks: Iterable[nn.Module]) -> list[StateChecksums]:
    """Return the checksums of the networks' states. A backbone that several networks share is read once."""
    pairs = [
        _divided_state(network) for network in networks
    ]  # all tensors live until the end, so that their addresses differ
    states = {_identity(state): state for pair in pairs for state in pair}
    checksums = {identity: checksum_of(state) for identity, state in states.items()}
    return [
        StateChecksums(checksums[_identity(shared)], checksums[_identity(rest)] if rest else None)
        for shared, rest in pairs
    ]


def changed_part(network: nn.Module, current: StateChecksums, expected: StateChecksums) -> tuple[str, str]:
    """Return which weights of a network differ, as the subject of a sentence, and the clause that names an unchanged part or is empty."""
    parts = PARTS.get(type(bare(network)), ADAPTED)
    if expected.adapter is None or current.adapter is None:
        return "the weights", ""
    if current.network == expected.network:
        return f"the weights of the {parts.rest}", f"; those of the {parts.shared} are the same"
    if current.adapter == expected.adapter:
        return f"the weights of the {parts.shared}", f"; those of the {parts.rest} are the same"
    return f"the weights of the {parts.shared} and of the {parts.rest}", ""


def _identity(state: Mapping[str, Tensor]) -> object:
    # Return the names and the memory of the tensors, which tell that two states are the same without reading them.
    return tuple(
        (name, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.layout == torch.strided
        else (name, id(tensor))
        for name, tensor in state.items()
    )


def _divided_state(network: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    # Return the states of the backbone and of the adapter, or of the trunk and of the head. Other networks have only the first.
    state = state_of(network)
    shared_modules: dict[str, tuple[str, ...]] = {}
    for module_name, module in bare(network).named_modules(remove_duplicate=False):
        name = plain_name(module_name)
        if hasattr(module, "adapter_layer_names") or type(module) in PARTS:
            shared_modules[name] = PARTS.get(type(module), ADAPTED).modules
        if "modules_to_save" in dict(module.named_children()):
            # The layer that the adapter's copy replaces is often initialised at random, and is never run.
            state = {key: tensor for key, tensor in state.items() if not key.startswith(f"{name}.original_module.")}

    def is_shared(entries: list[str]) -> bool:
        # In every module with a shared part on the way from the network to the tensor, the tensor lies in the shared part.
        prefixes = [".".join(entries[:depth]) for depth in range(len(entries))]
        return all(
            entry in shared_modules.get(prefix, entries) for prefix, entry in zip(prefixes, entries, strict=True)
        )

    shared = {name: tensor for name, tensor in state.items() if is_shared(name.split("."))}
    return shared, {name: tensor for name, tensor in state.items() if name not in shared}
