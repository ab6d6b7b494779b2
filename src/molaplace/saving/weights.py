"""Save network weights as safetensors, and load them from safetensors or PyTorch files without running code.

Training scripts often save weights in a dictionary that also holds the epoch and the optimiser's state. Wrappers (`DataParallel`,
`torch.compile`, a Lightning module) add a prefix to each name. This module handles both cases.
"""

from __future__ import annotations

import re
import warnings
import zipfile
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
from molaplace.saving.files import write_atomically

ENTRIES = (
    "state_dict",
    "model_state_dict",
    "model",
    "net",
    "network",
    "weights",
)  # keys under which training scripts save the weights
WRAPPERS = frozenset({"module", "_orig_mod"})  # name parts that DataParallel and torch.compile insert at any level
PREFIXES = ("model", "net", "network")  # attributes in which Lightning modules and other wrappers store the network
MAX_COMPRESSION = (
    20  # largest accepted ratio of unpacked to packed size; torch.save does not compress, and TorchScript hardly does
)
MAGIC = b"l\xfc\x9cF\xf9"  # first bytes of the magic number at the start of files written by PyTorch before 1.6
SHOWN = 3  # number of names listed for each kind of mismatch


def save_weights(network: nn.Module, path: str | Path, metadata: Mapping[str, str] | None = None) -> Path:
    """Write a network's parameters and buffers atomically as safetensors. The folder is created if it does not exist.

    Args:
        network: any module whose `state_dict` contains only tensors.
        path: the file to write.
        metadata: short strings to store with the weights, such as the network's name.
    """
    state = network.state_dict()
    foreign = [name for name, value in state.items() if not isinstance(value, Tensor) or is_lazy(value)]
    if foreign:
        raise OptionError(
            f"the entries {_some(foreign)} of the network's state dict cannot be saved as weights, because they are not tensors "
            f"with a known shape."
        )
    # Clone the tensors, because safetensors rejects tensors that share memory, such as tied weights.
    values = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in state.items()}
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, save_tensors(values, {"format": "pt", **(metadata or {})}))
    return target


def read_metadata(path: str | Path) -> dict[str, str]:
    """Read the metadata stored with the weights in a safetensors file."""
    if not _is_safetensors(Path(path)):
        raise StorageError(f"{path} is not a safetensors file. Only safetensors files contain metadata.")
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, ValueError) as error:
        raise StorageError(_unreadable(path, error)) from error


def read_state(path: str | Path) -> dict[str, Any]:
    """Read a weights file into CPU memory; return its named tensors, or the training checkpoint (a dictionary) that contains them.

    The format, safetensors or `torch.save`, is detected from the file's content.
    """
    source = Path(path)
    try:
        if _is_safetensors(source):
            return dict(load_file(source))
        _refuse_bomb(source)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about pickles that it did not write, which are rejected below
            # weights_only=True prevents code in the file from running
            content = torch.load(source, map_location="cpu", weights_only=True)
    except StorageError:
        raise
    except Exception as error:  # both readers raise many kinds of errors for damaged files
        raise StorageError(_unreadable(path, error)) from error
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
    own = {name: value for name, value in full.items() if isinstance(value, Tensor)}
    lazy = [name for name, value in own.items() if is_lazy(value)]
    if lazy:
        raise StorageError(
            f"the network's parameters {_some(lazy)} have no shape yet. Call the network on one batch before loading {path}."
        )
    problems = ""
    for state in _states(content):
        values, found = _match(state, own)
        if not found:
            network.load_state_dict({**full, **values})
            return
        problems = problems or found
    if not problems:
        raise StorageError(
            f"{path} contains no weights; found {_some(list(map(str, content)))}. Expected weights at the top level or under "
            f"{', '.join(ENTRIES)}."
        )
    raise StorageError(
        f"the weights in {path} do not match this network. {problems}. Check that the architecture, depth, width "
        f"and number of classes are the same. The network has not been changed."
    )


def _is_safetensors(path: Path) -> bool:
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise StorageError(f"{path} {problem}; expected a file of weights written by safetensors or torch.save.")
    with open(path, "rb") as file:
        start = file.read(9)
    if len(start) < 9:
        raise StorageError(f"{path} is truncated: it contains only {len(start)} bytes. Copy or download it again.")
    if start[8:9] == b"{":  # the first eight bytes hold the length of the header, which is JSON
        return True
    if not start.startswith((b"PK", b"\x80")):  # a zip archive, or a pickle written by a PyTorch version before 1.6
        raise StorageError(
            f"{path} is neither a safetensors file nor a torch.save file. Pass a file of either kind that contains a state_dict()."
        )
    return False


def _refuse_bomb(path: Path) -> None:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            unpacked, size = sum(part.file_size for part in archive.infolist()), path.stat().st_size
        if unpacked > MAX_COMPRESSION * size:
            raise StorageError(
                f"{path} is {size:,} bytes long but declares an unpacked size of {unpacked:,} bytes. Weights do not compress "
                f"this well, so the file must be damaged. Copy or download it again."
            )


def _unreadable(path: str | Path, error: Exception) -> str:
    text = str(error)
    refused = next((line.strip() for line in text.splitlines() if "GLOBAL" in line or "Unsupported class" in line), "")
    if refused or "TorchScript" in text:
        found = re.search(r"(?:GLOBAL|class) ([\w.]+)", refused)
        return (
            f"{path} contains a pickled model or other objects that could run code when read: "
            f"{found[1] if found else 'TorchScript'}. If you trust the file, load it yourself and save only model.state_dict()."
        )
    with open(path, "rb") as file:
        start = file.read(64)
    if start.startswith(b"\x80") and start[8:9] != b"{" and MAGIC not in start:
        return (
            f"{path} is a pickle file that was not written by torch.save. Save the weights with "
            f"torch.save(network.state_dict(), file)."
        )
    reason = text.splitlines()[0][:200] if text and "weights_only" not in text else "no reason given"
    return f"{path} is truncated or corrupt ({type(error).__name__}: {reason}). Copy or download it again."


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


def _match(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    # Return the values keyed by the network's own names, and a description of all mismatches.
    theirs, ours = {name: name for name in state}, {name: name for name in own}
    if state.keys() != own.keys():
        theirs, ours = _plain_names(state), _plain_names(own)
    # torch.optim.swa_utils.AveragedModel saves the number of averaged models along with the weights.
    theirs = {name: full for name, full in theirs.items() if name in ours or name != "n_averaged"}
    values = {ours[name]: state[full] for name, full in theirs.items() if name in ours}
    shapes = [
        f"{name} has shape {tuple(value.shape)} and type {value.dtype} (expected {tuple(own[name].shape)} and {own[name].dtype})"
        for name, value in sorted(values.items())
        if value.shape != own[name].shape or value.is_floating_point() != own[name].is_floating_point()
    ]
    problems = {
        "missing": sorted(name for name in own.keys() - values.keys() if not name.endswith("num_batches_tracked")),
        "unexpected": sorted(theirs[name] for name in theirs.keys() - ours.keys()),
        "with a different shape or type": shapes,
    }
    return values, "; ".join(f"{len(names)} {kind}: {_some(names)}" for kind, names in problems.items() if names)


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest if names else "nothing"
