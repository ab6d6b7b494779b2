"""Build networks by name and load their weights. Nothing is downloaded.

| name | network |
|---|---|
| `mlp` | the perceptron for digits that `molaplace demo` trains, with weights from files |
| `package.module:function` | the network that the function returns, with its own weights or weights from files |
| a folder with `config.json` | a Hugging Face classifier, with the weights in the folder |

One name with K weight files gives K networks, and so do K names. Only the user's own functions can run arbitrary code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from molaplace.cli.terminal import limit_threads
from molaplace.data.digits import digits_network
from molaplace.data.preprocessing import Preprocessing
from molaplace.errors import MolaError, OptionError, StorageError, importing
from molaplace.imported import import_builder, is_function_name
from molaplace.options import counted, did_you_mean
from molaplace.saving.bundle import DIGITS as MLP
from molaplace.saving.pretrained import load_pretrained, read_config
from molaplace.saving.weights import load_weights

ENDINGS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""File extensions that identify weights in a folder."""

CONFIG = "config.json"
PROCESSOR = "preprocessor_config.json"

KINDS = {
    "ForImageClassification": "AutoModelForImageClassification",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
}
"""Transformers classes that load networks, keyed by the suffix of the architecture's name."""


@dataclass(frozen=True)
class BuiltNetworks:
    """Networks with loaded weights, ready for fitting."""

    networks: list[nn.Module]
    files: list[Path]
    """Files that contain the weights."""
    hints: Preprocessing
    """Input preparation specified by the networks' configuration."""
    classes: tuple[str, ...] | None = None
    """Class names specified by the networks' configuration."""


def weight_files(names: Sequence[str]) -> list[Path]:
    """Return the named files. Files in a folder are sorted by name."""
    files: list[Path] = []
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.suffix in ENDINGS and file.is_file())
            if not inside:
                raise OptionError(
                    f"the folder {path} contains no weights: expected files that end in {', '.join(ENDINGS)}."
                )
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise OptionError(
                f"the weights {path} do not exist. Pass a file (safetensors or torch.save) or a folder of such files."
            )
    return files


def build_networks(names: Sequence[str], weights: Sequence[str] = (), *, classes: int | None = None) -> BuiltNetworks:
    """Build the networks and load their weights."""
    if not names:
        raise OptionError(
            "there is no network. Use --network to specify one, such as package.module:function or a Hugging Face folder."
        )
    files = weight_files(weights)
    without_weights = [name for name in names if not is_folder(name)]
    if len(names) == len(without_weights) == 1 and len(files) > 1:
        names = without_weights = list(names) * len(files)
    if files and len(files) != len(without_weights):
        raise OptionError(
            f"got {counted(len(files), 'weight file')} for {counted(len(without_weights), 'network')} without weights "
            f"({', '.join(without_weights) or 'none'}). Pass one network for all files, or one network for each file. Hugging "
            f"Face folders contain their own weights."
        )
    if set(names) == {MLP}:
        limit_threads(1)  # so small networks lose more time to synchronisation than they gain from parallelism
    paths = iter(files)
    networks = [
        load_transformers(Path(name).expanduser())
        if is_folder(name)
        else _with_weights(name, next(paths, None), classes)
        for name in names
    ]
    for network in networks:
        network.eval()
    if is_folder(names[0]):
        return BuiltNetworks(networks, files, *folder_hints(Path(names[0]).expanduser()))
    return BuiltNetworks(networks, files, Preprocessing(mode="L" if names[0] == MLP else None))


def is_folder(name: str) -> bool:
    """Return True for a Hugging Face folder, which contains its own weights."""
    return name != MLP and Path(name).expanduser().is_dir()


def _with_weights(name: str, path: Path | None, classes: int | None) -> nn.Module:
    if name == MLP:
        if path is None:
            raise OptionError(f"{name} has no trained weights. Pass its weight files as arguments.")
        network: nn.Module = digits_network(classes or 10)
    elif is_function_name(name):
        network = _imported(name)
    else:
        hint = (
            " The file or folder does not exist." if "/" in name or name.startswith(".") else did_you_mean(name, [MLP])
        )
        raise OptionError(
            f"unknown network {name!r}.{hint} Expected package.module:function, {MLP}, or a folder with config.json and model.safetensors."
        )
    if path is not None:
        load_weights(network, path)
    return network


def _imported(name: str) -> nn.Module:
    try:
        network = import_builder(name)()
    except MolaError:
        raise
    except Exception as error:  # the user's code may raise any exception
        raise OptionError(
            f"{name} failed ({type(error).__name__}: {error}): expected a function without arguments that returns the network."
        ) from error
    return getattr(network, "_orig_mod", network)  # unwrap the module, because torch.compile hides its layers


def load_transformers(folder: Path) -> nn.Module:
    """Return a classifier from a Hugging Face folder."""
    if not (folder / CONFIG).is_file():
        raise OptionError(f"{folder} contains no {CONFIG}. Pass a folder written by save_pretrained.")
    architectures = read_config(folder / CONFIG).get("architectures") or ["none"]
    kind = next((KINDS[end] for end in KINDS if str(architectures[0]).endswith(end)), None)
    if kind is None:
        raise OptionError(
            f"{folder} contains a {architectures[0]}: expected a classifier whose class name ends in {' or '.join(KINDS)}."
        )
    with importing("a Hugging Face folder", "transformers", "hub"):
        import transformers
    try:
        network, info = load_pretrained(getattr(transformers, kind), folder, output_loading_info=True)
    except StorageError:
        raise
    except Exception as error:  # damaged files can raise many kinds of error
        reason = (str(error) or repr(error)).splitlines()[0]
        raise StorageError(f"{folder} cannot be loaded by transformers: {reason}") from error
    absent = sorted(info.get("missing_keys", [])) + [str(key) for key in info.get("mismatched_keys", [])]
    if absent:
        raise StorageError(
            f"{folder} lacks some of the network's weights ({absent[0]} and {len(absent) - 1} more), which would be initialised "
            f"at random. Save the model again."
        )
    loaded: nn.Module = network
    return loaded


def folder_hints(folder: Path) -> tuple[Preprocessing, tuple[str, ...] | None]:
    """Return the image preparation and the class names that a Hugging Face folder specifies, if any."""
    names = read_config(folder / CONFIG).get("id2label") or {}
    classes = tuple(str(names[key]) for key in sorted(names, key=int)) if names else None
    if classes is not None and all(name == f"LABEL_{index}" for index, name in enumerate(classes)):
        classes = None  # placeholders that transformers inserts
    if not (folder / PROCESSOR).is_file():
        return Preprocessing(), classes
    processor = read_config(folder / PROCESSOR)
    resize = _side(processor.get("size")) if processor.get("do_resize", True) else None
    crop = None
    if processor.get("do_center_crop", False):
        square = _side(processor.get("crop_size"))
        crop = square[0] if isinstance(square, tuple) else square
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    if processor.get("do_normalize", True):
        mean = tuple(processor.get("image_mean") or mean)
        std = tuple(processor.get("image_std") or std)
    # Rescale the statistics for pixel values in [0, 1]. The processor may scale bytes to another range before it normalises them.
    largest = 255 * (float(processor.get("rescale_factor", 1 / 255)) if processor.get("do_rescale", True) else 1.0)
    offset = 1.0 if processor.get("rescale_offset", False) else 0.0
    mean = tuple((value + offset) / largest for value in mean)
    std = tuple(value / largest for value in std)
    return Preprocessing(resize=resize, crop=crop, mean=mean, std=std), classes


def _side(size: Any) -> int | tuple[int, int] | None:
    # Return the shorter side, or the height and width, from any of the Hugging Face formats.
    if isinstance(size, dict):
        if "shortest_edge" in size:
            return int(size["shortest_edge"])
        return (int(size["height"]), int(size["width"])) if {"height", "width"} <= size.keys() else None
    return (int(size), int(size)) if isinstance(size, int) else None
