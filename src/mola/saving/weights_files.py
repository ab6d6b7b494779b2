"""Weights of networks in files: written as safetensors, read from safetensors or PyTorch's own, never running code.

Files from elsewhere wrap the weights: in a dictionary beside optimisers and epochs, and under names that a wrapper
(`DataParallel`, `torch.compile`, a Lightning module) has put before each. Both are undone here. Either all of a network's
weights are read or none.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mola.errors import OptionError, StorageError
from mola.saving.storage import write_atomically

ENTRIES = ("state_dict", "model_state_dict", "model", "net", "network", "weights")
"""Where training scripts put the weights among other things."""

WRAPPERS = frozenset({"module", "_orig_mod"})
"""Parts of names that `DataParallel` and `torch.compile` insert, in front or further in."""

OUTER = ("model", "net", "network")
"""Names under which Lightning modules and other shells hold the network, in front of every name."""

GROWTH = 20
"""How many times larger than the file its parts may be: torch.save does not compress, TorchScript does a little."""

SHOWN = 3
"""Names listed of each kind of disagreement."""


def save_weights(network: nn.Module, path: str | Path, metadata: Mapping[str, str] | None = None) -> Path:
    """Write a network's parameters and buffers as safetensors, in one step: readers see the old file or the new.

    Args:
        network: anything with a `state_dict` of tensors.
        path: file to write; its folder is made if missing.
        metadata: short texts to keep with the weights, such as the network's name.

    Returns:
        The path.
    """
    texts = dict(metadata or {})
    if any(not isinstance(text, str) for pair in texts.items() for text in pair):
        raise OptionError(
            f"metadata must be texts by name (str to str), got {texts!r}. Use str() or json.dumps() on the values."
        )
    state = network.state_dict()
    foreign = [name for name, value in state.items() if not isinstance(value, Tensor) or is_lazy(value)]
    if foreign:
        raise OptionError(
            f"{_some(foreign)} of the network hold no tensor yet or at all, so they cannot be saved as weights."
        )
    # Cloned: safetensors refuses tensors that share memory, as tied weights do.
    values = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in state.items()}
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, save_tensors(values, {"format": "pt", **texts}))
    return target


def read_metadata(path: str | Path) -> dict[str, str]:
    """The texts kept with the weights in a safetensors file.

    Args:
        path: a safetensors file.

    Returns:
        Texts by name, with "format" = "pt" among them if `save_weights` or PyTorch wrote it.
    """
    if not _is_safetensors(Path(path)):
        raise StorageError(f"{path} is not a safetensors file; only these hold metadata.")
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, ValueError) as error:
        raise StorageError(_unreadable(path, error)) from error


def read_state(path: str | Path) -> dict[str, Any]:
    """What a weights file holds, as it is: tensors by name, or a training script's dictionary around them.

    Args:
        path: safetensors, or a file of `torch.save`; told apart by their content.

    Returns:
        The content, on the CPU.
    """
    source = Path(path)
    try:
        if _is_safetensors(source):
            return dict(load_file(source))
        _refuse_bomb(source)
        # Weights only: nothing in the file is executed.
        content = torch.load(source, map_location="cpu", weights_only=True)
    except StorageError:
        raise
    except Exception as error:  # the two readers raise a dozen kinds on damaged files
        raise StorageError(_unreadable(path, error)) from error
    if not isinstance(content, Mapping):
        raise StorageError(
            f"{path} holds a {type(content).__name__}; expected weights by name. "
            f"Save the network's state_dict(), not the network or a tensor."
        )
    return dict(content)


def _refuse_bomb(path: Path) -> None:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            claimed, held = sum(one.file_size for one in archive.infolist()), path.stat().st_size
        if claimed > GROWTH * held:
            raise StorageError(
                f"{path} has {held:,} bytes and claims to hold {claimed:,}: weights cannot be packed so well, so it is damaged."
            )


def load_weights(network: nn.Module, path: str | Path, *, entry: str | None = None) -> None:
    """Put the weights of a file into a network, all of them or, on any error, none.

    Names are matched exactly, or else without what wrappers add (`module.`, `_orig_mod.`, a leading `model.`), on either
    side. Numbers are converted to the network's precision and device. BatchNorm's count of batches may be missing, as in
    files of old: evaluation does not use it.

    Args:
        network: of the architecture that the weights belong to; changed in place.
        path: safetensors, or a file of `torch.save`, read without running code.
        entry: under which name the file holds the weights; None looks under the usual ones.
    """
    content = read_state(path)
    full = network.state_dict()
    own = {name: value for name, value in full.items() if isinstance(value, Tensor)}
    lazy = [name for name, value in own.items() if is_lazy(value)]
    if lazy:
        raise StorageError(f"{_some(lazy)} of the network have no shape yet. Call it on one batch, then load {path}.")
    if entry is not None and not isinstance(content.get(entry), Mapping):
        raise StorageError(f"{path} has no weights under {entry!r}; it holds {_some(list(map(str, content)))}.")
    states = dict(_states(content if entry is None else content[entry], entry or ""))
    if not states:
        raise StorageError(
            f"{path} holds no weights: {_some(list(map(str, content)))}. Looked at the top and under {', '.join(ENTRIES)}; "
            f"pass entry= if they have another name."
        )
    matched = {place: _match(state, own) for place, state in states.items()}
    fitting = {place: values for place, (values, problems) in matched.items() if not problems}
    if len(fitting) > 1:
        raise StorageError(
            f"{path} holds several sets of weights that fit: {', '.join(fitting)}. Choose one with entry=."
        )
    if not fitting:
        _, problems = min(matched.values(), key=lambda match: len(match[1]))
        raise StorageError(_disagreement(path, problems, sum(map(_needed, own))))
    (values,) = fitting.values()
    network.load_state_dict({**full, **values})


def _is_safetensors(path: Path) -> bool:
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise StorageError(f"{path} {kind}; expected a file with weights (safetensors, or made by torch.save).")
    with open(path, "rb") as file:
        start = file.read(9)
    if len(start) < 9:
        raise StorageError(f"{path} is truncated: it has only {len(start)} bytes. Copy or download it again.")
    if start[8:9] == b"{":  # eight bytes of length, then JSON
        return True
    if not start.startswith((b"PK", b"\x80")):  # torch.save writes a zip archive; before PyTorch 1.6, bare records
        raise StorageError(f"{path} is neither safetensors nor made by torch.save: it starts with {start!r}.")
    return False


def _unreadable(path: str | Path, error: Exception) -> str:
    text = str(error)
    refused = next((line.strip() for line in text.splitlines() if "GLOBAL" in line or "Unsupported class" in line), "")
    if refused or "TorchScript" in text:
        return (
            f"{path} holds more than weights, and what it holds could run code when read: {refused[:200] or 'TorchScript'} "
            f"Where you trust it, load it yourself and save only the state_dict() as safetensors."
        )
    reason = text.splitlines()[0][:200] if text else "no reason given"
    return f"{path} is truncated or corrupt ({type(error).__name__}: {reason}). Copy or download it again."


def _states(content: Mapping[Any, Any], place: str) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    # Every set of weights in a file: at the top, or under the usual names, at any depth.
    if content and all(isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()):
        yield place or "the top", content
        return
    for name in ENTRIES:
        inner = content.get(name)
        if isinstance(inner, Mapping):
            yield from _states(inner, f"{place}.{name}" if place else name)


def _plain_names(names: list[str]) -> dict[str, str]:
    # Names without what wrappers add, to the names as they are; empty if two would become one.
    plain = {".".join(part for part in name.split(".") if part not in WRAPPERS): name for name in names}
    for outer in OUTER:
        if plain and all(name.startswith(f"{outer}.") for name in plain):
            plain = {name.removeprefix(f"{outer}."): whole for name, whole in plain.items()}
    return plain if len(plain) == len(names) else {}


def _needed(name: str) -> bool:
    return not name.endswith("num_batches_tracked")


def _match(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[tuple[str, str]]]:
    # AveragedModel of torch.optim.swa_utils keeps its count of models beside the weights.
    state = {name: value for name, value in state.items() if name in own or name != "n_averaged"}
    theirs, ours = {name: name for name in state}, {name: name for name in own}
    if state.keys() != own.keys():
        theirs, ours = _plain_names(list(state)) or theirs, _plain_names(list(own)) or ours
    problems = [("unexpected", theirs[name]) for name in theirs.keys() - ours.keys()]
    values = {}
    for name, whole in ours.items():
        if name not in theirs:
            if _needed(name):
                problems.append(("missing", whole))
            continue
        value, wanted = state[theirs[name]], own[whole]
        if value.shape != wanted.shape or value.is_floating_point() != wanted.is_floating_point():
            kinds = f"{tuple(value.shape)} of {value.dtype}, expected {tuple(wanted.shape)} of {wanted.dtype}"
            problems.append(("misshapen", f"{whole} is {kinds}"))
        values[whole] = value
    return values, sorted(problems)


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest if names else "nothing"


def _disagreement(path: str | Path, problems: list[tuple[str, str]], total: int) -> str:
    kinds = {
        kind: [text for other, text in problems if other == kind] for kind in ("missing", "unexpected", "misshapen")
    }
    listed = "; ".join(f"{len(texts)} {kind}: {_some(texts)}" for kind, texts in kinds.items() if texts)
    if len(kinds["missing"]) == total:
        hint = "Not one name agrees: these are weights of another kind of network, or under an unknown prefix."
    elif kinds["missing"] or kinds["unexpected"]:
        hint = "Is it the same architecture, depth included?"
    else:
        hint = "Is it the same width and number of classes?"
    return f"{path} does not hold this network's weights. {listed}. {hint} The network is unchanged."
