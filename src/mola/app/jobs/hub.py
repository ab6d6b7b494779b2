"""Networks of Hugging Face transformers and of timm, with weights that lie on this disk: nothing is downloaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from mola.app.jobs.preparation import Hints
from mola.errors import MissingExtraError, OptionError, StorageError
from mola.schema import parse

__all__ = ["folder_hints", "load_transformers", "timm_builder", "timm_hints"]

CONFIG, PROCESSOR, WEIGHTS, INDEX = (
    "config.json",
    "preprocessor_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
)
CROP_PCT = 0.875
"""Share of the shorter side that timm keeps where a network does not say."""

KINDS = {
    "ForImageClassification": "AutoModelForImageClassification",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
}
"""What a configuration's architecture ends in, and what loads it."""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = parse(path.read_bytes())
    except (OSError, ValueError) as error:
        message = f"{path} cannot be read as JSON: {error}."
        raise StorageError(message) from error
    if not isinstance(content, dict):
        message = f"{path} holds a {type(content).__name__}; expected an object."
        raise StorageError(message)
    return content


def load_transformers(folder: Path) -> tuple[nn.Module, list[Path]]:
    """A classifier from a folder in the form of Hugging Face.

    Args:
        folder: holds `config.json` and `model.safetensors`, whole or in parts.

    Returns:
        The network, and the files its weights come from.

    Raises:
        OptionError: if the folder is none, or holds no classifier.
        StorageError: if weights are missing or do not fit.
        MissingExtraError: if transformers is not installed.
    """
    if not (folder / CONFIG).is_file():
        message = (
            f"{folder} holds no {CONFIG}: expected a folder in the form of Hugging Face, with {CONFIG} and {WEIGHTS}."
        )
        raise OptionError(message)
    files = _weight_files(folder)
    for path in files:
        if not path.is_file():
            message = f"{path} does not exist: weights are read from safetensors alone. Save the model again with save_pretrained."
            raise StorageError(message)
    architectures = _read_json(folder / CONFIG).get("architectures") or ["none"]
    kind = next((KINDS[end] for end in KINDS if str(architectures[0]).endswith(end)), None)
    if kind is None:
        message = (
            f"{folder} holds a {architectures[0]}: expected a classifier, of a kind that ends in {' or '.join(KINDS)}."
        )
        raise OptionError(message)
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingExtraError(feature="a Hugging Face folder", package="transformers", extra="hub") from error
    try:
        network, info = getattr(transformers, kind).from_pretrained(
            folder, local_files_only=True, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # damaged weights and configurations make it raise a dozen kinds
        reason = (str(error) or repr(error)).splitlines()[0]
        message = f"{folder} cannot be loaded by transformers: {reason}"
        raise StorageError(message) from error
    absent = sorted(info.get("missing_keys", [])) + [str(one) for one in info.get("mismatched_keys", [])]
    if absent:
        message = f"{folder} lacks weights of the network ({absent[0]} and {len(absent) - 1} more): it would be partly random."
        raise StorageError(message)
    loaded: nn.Module = network
    return loaded, files


def _weight_files(folder: Path) -> list[Path]:
    """Where the weights should be: in one file, or in the parts that an index lists.

    Raises:
        StorageError: if the index is none.
    """
    if not (folder / INDEX).is_file():
        return [folder / WEIGHTS]
    parts = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(parts, dict) or not parts or not all(isinstance(name, str) for name in parts.values()):
        message = f"{folder / INDEX} lists no weights: expected the file of each under 'weight_map'."
        raise StorageError(message)
    return [folder / name for name in sorted(set(parts.values()))]


def folder_hints(folder: Path) -> Hints:
    """Class names and the preparation of images, where the folder tells.

    Args:
        folder: in the form of Hugging Face.

    Returns:
        What it says.
    """
    names = _read_json(folder / CONFIG).get("id2label") or {}
    classes = tuple(str(names[key]) for key in sorted(names, key=int)) if names else None
    if classes is not None and all(name == f"LABEL_{index}" for index, name in enumerate(classes)):
        classes = None  # what transformers writes where nobody has named the classes
    if not (folder / PROCESSOR).is_file():
        return Hints(classes=classes)
    found = _read_json(folder / PROCESSOR)
    resize, crop = _side(found.get("size")) if found.get("do_resize", True) else None, None
    if found.get("do_center_crop", False):
        square = _side(found.get("crop_size"))
        crop = square[0] if isinstance(square, tuple) else square
    mean, std = _statistics(found)
    return Hints(classes=classes, resize=resize, crop=crop, mean=mean, std=std)


def _statistics(found: dict[str, Any]) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Mean and standard deviation of pixels from 0 to 1, whatever range the processor brings bytes to before it normalises."""
    mean, std = (tuple(float(one) for one in found.get(name) or ()) or None for name in ("image_mean", "image_std"))
    if not found.get("do_normalize", True):
        mean = std = None
    factor = float(found.get("rescale_factor", 1 / 255)) if found.get("do_rescale", True) else 1.0
    whole = 255 * factor
    offset = 1.0 if found.get("rescale_offset", False) else 0.0
    if abs(whole - 1) < 1e-6 and not offset:
        return mean, std
    return tuple((one + offset) / whole for one in mean or (0.0,)), tuple(one / whole for one in std or (1.0,))


def _side(size: Any) -> int | tuple[int, int] | None:
    """The shorter side, or height and width: what Hugging Face writes in several ways."""
    if isinstance(size, dict):
        if "shortest_edge" in size:
            return int(size["shortest_edge"])
        return (int(size["height"]), int(size["width"])) if {"height", "width"} <= size.keys() else None
    return (int(size), int(size)) if isinstance(size, int) else None


def timm_builder(name: str) -> Callable[[int], nn.Module]:
    """What makes a network of timm without weights, from the number of classes.

    Args:
        name: timm's name of it.

    Returns:
        The function.

    Raises:
        OptionError: if the name is that of a place.
        MissingExtraError: if timm is not installed.
    """
    if ":" in name:
        message = f"timm:{name} would be fetched or read from elsewhere: expected the plain name of an architecture, such as resnet18."
        raise OptionError(message)
    try:
        timm: Any = importlib.import_module("timm")
    except ImportError as error:
        raise MissingExtraError(feature=f"the network timm:{name}", package="timm", extra="hub") from error

    def build(classes: int) -> nn.Module:
        try:
            network: nn.Module = timm.create_model(name, pretrained=False, num_classes=classes)
        except RuntimeError as error:
            message = f"timm cannot make {name!r}: {error}. `timm.list_models()` lists what it knows."
            raise OptionError(message) from error
        return network

    return build


def timm_hints(network: nn.Module) -> Hints:
    """What timm says of a network's inputs."""
    found = getattr(network, "pretrained_cfg", None) or {}
    mean, std = (tuple(float(one) for one in found.get(name) or ()) or None for name in ("mean", "std"))
    shape = found.get("input_size")
    if not shape:
        return Hints(mean=mean, std=std)
    side = int(shape[-1])
    if found.get("crop_mode") == "squash":
        return Hints(resize=(side, side), mean=mean, std=std)
    # Like timm's own evaluation: the shorter side to a little more, then the middle.
    return Hints(resize=int(side / float(found.get("crop_pct") or CROP_PCT)), crop=side, mean=mean, std=std)
