"""Save network weights as safetensors, and load them from safetensors or PyTorch files without running code.

Training scripts often save weights in a dictionary that also holds the epoch and the optimiser's state. Wrappers (`DataParallel`,
`torch.compile`, a Lightning module) add a prefix to each name. This module handles both cases.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from molaplace.errors import OptionError, StorageError
from molaplace.saving.files import open_file, write_atomically

ENTRIES = ("state_dict", "model_state_dict", "model", "net", "network", "weights")
"""Keys under which training scripts save the weights."""
WRAPPERS = frozenset({"module", "_orig_mod"})
"""Parts of names that DataParallel and torch.compile insert at any level."""
PREFIXES = ("model", "net", "network")
"""Attributes in which Lightning modules and other wrappers store the network."""
MAX_LISTED = 3
"""Number of names that a message lists for each kind of mismatch."""


def save_weights(network: nn.Module, path: str | Path, metadata: Mapping[str, str] | None = None) -> Path:
    """Write a network's parameters and buffers atomically as safetensors. The folder is created if it does not exist.

    Args:
        network: any module whose `state_dict` contains only tensors.
        path: the file to write.
        metadata: short strings to store with the weights, such as the network's name.
    """
    state = network.state_dict()
    unsavable = [name for name, value in state.items() if not isinstance(value, Tensor) or is_lazy(value)]
    if unsavable:
        raise OptionError(
            f"the entries {_listed(unsavable)} of the network's state dict cannot be saved as weights, because they are not tensors "
            f"with a known shape."
        )
    # Clone the tensors, because safetensors rejects tensors that share memory, such as tied weights.
    values = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in state.items()}
    write_atomically(Path(path), save_tensors(values, {"format": "pt", **(metadata or {})}))
    return Path(path)


def read_metadata(path: str | Path) -> dict[str, str]:
    """Read the metadata stored with the weights in a safetensors file."""
    with open_file(path):
        try:
            with safe_open(path, framework="pt") as file:
                return dict(file.metadata() or {})
        except (SafetensorError, ValueError) as error:
            raise StorageError(
                f"{path} is damaged or not a safetensors file ({error}). Only safetensors files contain metadata."
            ) from error


def read_state(path: str | Path) -> dict[str, Any]:
    """Read a weights file into CPU memory; return its named tensors, or the training checkpoint (a dictionary) that contains them.

    The format, safetensors or `torch.save`, is detected from the file's content.
    """
    with open_file(path) as file:
        # The first eight bytes of a safetensors file hold the length of its header, which is JSON.
        is_safetensors = file.read(9)[8:] == b"{"
    try:
        if is_safetensors:
            return dict(load_file(path))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about pickles that it did not write, which it then rejects
            # weights_only=True prevents code in the file from running
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # both readers raise many kinds of errors for damaged files
        raise StorageError(_why_unreadable(path, error)) from error
    if not isinstance(content, Mapping):
        raise StorageError(
            f"expected a file of named weights, but {path} contains a {type(content).__name__}. Save the network's "
            f"state_dict(), not the network itself or a single tensor."
        )
    return dict(content)


def load_weights(network: nn.Module, path: str | Path) -> None:
    """Load the weights from a file into a network. If an error occurs, the network is left unchanged.

    Names must match exactly, either as they are or without the prefixes that wrappers add (`module.`, `_orig_mod.`, a leading
    `model.`). Values are converted to the network's precision and moved to its device.

    Args:
        network: network whose architecture matches the weights; it is changed in place.
        path: file written by safetensors or `torch.save`; it is read without running code.
    """
    content = read_state(path)
    full = network.state_dict()
    tensors = {name: value for name, value in full.items() if isinstance(value, Tensor)}
    lazy = [name for name, value in tensors.items() if is_lazy(value)]
    if lazy:
        raise StorageError(
            f"the network's parameters {_listed(lazy)} have no shape yet. Call the network on one batch before loading {path}."
        )
    mismatches = []
    for state in _states(content):
        values, mismatch = _match(state, tensors)
        if not mismatch:
            network.load_state_dict({**full, **values})
            return
        mismatches.append(mismatch)
    if not mismatches:
        raise StorageError(
            f"{path} contains no weights; found {_listed(list(map(str, content)))}. Expected weights at the top level or under "
            f"{', '.join(ENTRIES)}."
        )
    raise StorageError(
        f"the weights in {path} do not match this network. {mismatches[0]}. Check that the architecture, depth, width "
        f"and number of classes are the same. The network has not been changed."
    )


def _why_unreadable(path: str | Path, error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    refused = next((line.strip() for line in lines if "GLOBAL" in line or "Unsupported class" in line), None)
    if refused is not None or "TorchScript" in lines[0]:
        return (
            f"{path} contains more than tensors, such as a whole network, which could run code when read "
            f"({refused or lines[0]}). If you trust the file, load it yourself and save only model.state_dict()."
        )
    # The first line of torch's message is advice to load files without weights_only, which would run their code.
    reason = type(error).__name__ if "weights_only" in lines[0] else lines[0][:200]
    return (
        f"{path} is damaged, truncated or not a file of weights written by safetensors or torch.save ({reason}). Copy or download "
        f"it again, or save the weights with torch.save(network.state_dict(), file)."
    )


def _states(content: Mapping[Any, Any]) -> Iterator[Mapping[str, Tensor]]:
    # Yield the weights found at any depth in a training script's dictionary.
    if content and all(isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()):
        yield content
        return
    for name in ENTRIES:
        if isinstance(inner := content.get(name), Mapping):
            yield from _states(inner)


def _plain_names(names: Collection[str]) -> dict[str, str]:
    # Map each name, stripped of wrapper prefixes, to its full name. If two names become equal, keep the prefixes.
    plain = {".".join(part for part in name.split(".") if part not in WRAPPERS): name for name in names}
    for prefix in PREFIXES:
        if all(name.startswith(f"{prefix}.") for name in plain):
            plain = {name.removeprefix(f"{prefix}."): full for name, full in plain.items()}
    return plain if len(plain) == len(names) else {name: name for name in names}


def _match(state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    # Return the values keyed by the network's names of its tensors, and a description of all mismatches.
    saved_names = {name: name for name in state}
    network_names = {name: name for name in tensors}
    if state.keys() != tensors.keys():
        saved_names = _plain_names(state)
        network_names = _plain_names(tensors)
    # torch.optim.swa_utils.AveragedModel saves the number of averaged models along with the weights.
    saved_names = {name: full for name, full in saved_names.items() if name in network_names or name != "n_averaged"}
    values = {network_names[name]: state[full] for name, full in saved_names.items() if name in network_names}
    shapes = [
        f"{name} has shape {tuple(value.shape)} and type {value.dtype} (expected {tuple(tensors[name].shape)} and "
        f"{tensors[name].dtype})"
        for name, value in sorted(values.items())
        if value.shape != tensors[name].shape or value.is_floating_point() != tensors[name].is_floating_point()
    ]
    mismatches = {
        "missing": sorted(name for name in tensors.keys() - values.keys() if not name.endswith("num_batches_tracked")),
        "unexpected": sorted(saved_names[name] for name in saved_names.keys() - network_names.keys()),
        "with a different shape or type": shapes,
    }
    return values, "; ".join(
        f"{len(names)} {mismatch}: {_listed(names)}" for mismatch, names in mismatches.items() if names
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more if names else "nothing"
