"""Networks as a user names them: by registry, by import path, by folder or file, with weights from files.

| name | network |
|---|---|
| `lenet`, `resnet-20`, ... | one of `mola.lab.models`, with weights from files |
| `package.module:function` | what the function makes, with weights from files, or as it is |
| `timm:NAME` | one of timm's architectures, with weights from files; nothing is downloaded |
| a folder with `config.json` | a classifier of Hugging Face transformers, with the weights that lie in the folder |
| `model.pt2` | a program of `torch.export.save`; needs `trust`, since PyTorch unpickles it |

One name with K files of weights gives K networks; so do K names. Nothing but `.pt2` and the user's own functions can run code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from mola.app.jobs.exported import load_exported
from mola.app.jobs.hub import folder_hints, load_transformers, timm_builder, timm_hints
from mola.app.jobs.preparation import Hints
from mola.errors import MolaError, OptionError, StorageError
from mola.lab.imported import import_builder, is_path
from mola.lab.models import MODELS, build_network
from mola.options import counted, did_you_mean
from mola.saving.weights_files import load_weights, read_state

__all__ = ["Built", "build_networks", "check_unchanged", "checksum", "is_imported", "is_whole", "weight_files"]

ENDINGS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""Of files that hold weights, where a whole folder of them is named."""

EXPORTED = ".pt2"
TIMM = "timm:"


@dataclass(frozen=True)
class Built:
    """Networks, ready to be fitted."""

    networks: list[nn.Module]
    files: list[Path]
    """Where their weights come from."""
    hints: Hints
    """What the networks say of their inputs and classes."""


def weight_files(names: Sequence[str]) -> list[Path]:
    """The files that were named, those of a folder in the order of their names.

    Args:
        names: files and folders.

    Returns:
        Files that exist.

    Raises:
        OptionError: if one is missing, or a folder holds none.
    """
    found: list[Path] = []
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.suffix in ENDINGS and file.is_file())
            if not inside:
                message = f"the folder {path} holds no weights: expected files that end in {', '.join(ENDINGS)}."
                raise OptionError(message)
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            message = f"the weights {path} do not exist: expected a file (safetensors, or made by torch.save), or a folder of them."
            raise OptionError(message)
    return found


def checksum(path: Path) -> str:
    """The SHA-256 sum of a file."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def build_networks(
    names: Sequence[str], weights: Sequence[str] = (), *, classes: int | None = None, trust: bool = False
) -> Built:
    """Build the networks and load their weights.

    Args:
        names: one or several, as in the table above.
        weights: files; as many networks are made of a single name, or one name goes with each.
        classes: number of outputs, for names that need it; None reads it from the weights.
        trust: whether files that can run code when read may be read.

    Returns:
        The networks in evaluation mode.

    Raises:
        OptionError: if the names and the weights do not fit together, or a name is none of these.
    """
    if not names:
        message = (
            "no network: name one with --network, such as lenet, package.module:function or a Hugging Face folder."
        )
        raise OptionError(message)
    files = weight_files(weights)
    takers = [name for name in names if not is_whole(name)]
    if len(takers) == 1 and len(files) > 1:
        names = [other for name in names for other in ([name] * len(files) if name == takers[0] else [name])]
        takers = takers * len(files)
    if files and len(files) != len(takers):
        message = (
            f"{counted(len(files), 'file')} of weights for {counted(len(takers), 'network')} to take them "
            f"({', '.join(takers) or 'none'}): expected one network for all files, or one for each. Folders and {EXPORTED} files "
            f"bring their own weights."
        )
        raise OptionError(message)
    rest = iter(files)
    networks, sources = [], []
    for name in names:
        if is_whole(name):
            network, source = _whole(name, trust)
            sources += source
        else:
            path = next(rest, None)
            network = _with_weights(name, path, classes)
            sources += [] if path is None else [path]
        networks.append(network.eval())
    return Built(networks, sources, _hints(names[0], networks[0]))


def is_imported(name: str) -> bool:
    """Whether a name stands for a function of the user's own."""
    return ":" in name and not name.startswith(TIMM) and not is_path(name) and not is_whole(name)


def is_whole(name: str) -> bool:
    """Whether a name stands for a network with its weights."""
    if name in MODELS or name.startswith(TIMM):
        return False
    return Path(name).expanduser().is_dir() or name.endswith(EXPORTED)


def _whole(name: str, trust: bool) -> tuple[nn.Module, list[Path]]:
    path = Path(name).expanduser()
    if name.endswith(EXPORTED):
        return load_exported(path, trust=trust), [path]
    return load_transformers(path)


def _with_weights(name: str, path: Path | None, classes: int | None) -> nn.Module:
    if name in MODELS or name.startswith(TIMM):
        if path is None:
            message = f"{name} has no trained weights by itself: name files of them with --weights."
            raise OptionError(message)
        build: Callable[[int], nn.Module] = (
            timm_builder(name.removeprefix(TIMM)) if name.startswith(TIMM) else lambda count: build_network(name, count)
        )
        network = build(classes or _classes_in(path, build(10)) or 10)
    elif is_imported(name):
        network = _imported(name)
    else:
        near = f"{name} is no file or folder here, and " if "/" in name or name.startswith(".") else ""
        message = (
            f"unknown network {name!r}: {near}expected one of {', '.join(MODELS)}; package.module:function; timm:NAME; a folder "
            f"with config.json and model.safetensors; or a {EXPORTED} file.{did_you_mean(name, MODELS)}"
        )
        raise OptionError(message)
    if path is not None:
        load_weights(network, path)
    return network


def _imported(name: str) -> nn.Module:
    """What the user's function makes.

    Raises:
        OptionError: whatever goes wrong in the user's code, in one line.
        MolaError: as raised inside.
    """
    try:
        return import_builder(name)()
    except MolaError:
        raise
    except Exception as error:  # the user's code may raise anything
        message = f"{name} failed ({type(error).__name__}: {error}): expected a function without arguments that makes the network."
        raise OptionError(message) from error


def _classes_in(path: Path, like: nn.Module) -> int | None:
    """How many outputs the weights in a file have: rows of what the network calls its last tensor.

    Raises:
        StorageError: if it stands for more numbers than the file holds.
    """
    state: Any = read_state(path)
    last = list(like.state_dict())[-1]
    while isinstance(state, dict):
        for name, value in state.items():
            if (name == last or str(name).endswith(f".{last}")) and getattr(value, "ndim", 0) > 0:
                if value.numel() * value.element_size() > value.untyped_storage().nbytes():
                    message = f"{path} holds fewer numbers than the {value.shape[0]:,} rows that {name} claims: it is damaged."
                    raise StorageError(message)
                return int(value.shape[0])
        state = next((value for value in state.values() if isinstance(value, dict)), None)
    return None


def _hints(name: str, network: nn.Module) -> Hints:
    if name in MODELS:
        return Hints(shape=MODELS[name].input_shape)
    if name.startswith(TIMM):
        return timm_hints(network)
    path = Path(name).expanduser()
    return folder_hints(path) if path.is_dir() else Hints()


def check_unchanged(files: Sequence[Path], sums: Sequence[str]) -> None:
    """Whether files of weights are those that a posterior was fitted on.

    Args:
        files: as they lie on disk.
        sums: their SHA-256 sums at that time.

    Raises:
        StorageError: if one has changed.
    """
    for path, expected in zip(files, sums, strict=False):
        if checksum(path) != expected:
            message = f"{path} has changed since the posterior was fitted: put the old file back, or fit again with `mola fit`."
            raise StorageError(message)
