"""Networks named one by one: the user's own functions, and architectures of timm and torchvision with weights from files.

| name | network |
|---|---|
| `package.module:function` | what the function returns, with its weights |
| `package.module:function=FILE` | the same, with weights from a file |
| `timm:NAME=FILE` | an architecture of timm |
| `torchvision:NAME=FILE` | an architecture of torchvision |

Nothing is downloaded. The networks of one mixture may take images of different sizes: all are given the same images, with pixels
from 0 to 1, and those of timm and torchvision bring them to their own size and normalise them as their library says. Functions
return a network that does so itself, such as a `mola.network.Resized`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from mola.errors import MissingExtraError, OptionError
from mola.lab.activations import Network, network_checksum
from mola.lab.imported import import_builder
from mola.network import Resized

TIMM, TORCHVISION = "timm:", "torchvision:"

SIZE, CROP = 224, 0.875
"""What nearly all networks for ImageNet take, where a library says nothing."""


def are_names(text: str) -> bool:
    """Whether a text names networks one by one; otherwise it is a folder."""
    return ":" in text and not Path(text).expanduser().is_dir()


def open_named(text: str, classes: int) -> list[Network]:
    """Networks by their names.

    Args:
        text: names as in the table above, separated by commas.
        classes: number of outputs, for libraries that ask for it.

    Returns:
        The networks.
    """
    found = []
    for one in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, file = one.partition("=")
        path = Path(file).expanduser() if file else None
        if path is not None and not path.is_file():
            raise OptionError(
                f"the weights {path} of {name} do not exist: expected a file (safetensors, or made by torch.save)."
            )
        if path is None and name.startswith((TIMM, TORCHVISION)):
            raise OptionError(f"{name} comes without trained weights: name their file, as {name}=FILE.")
        build = _builder(name, classes)
        network = Network(path, build, "", name)
        found.append(Network(path, build, network_checksum(network.load(), name), one))
    return found


def _builder(name: str, classes: int) -> Callable[[], nn.Module]:
    if name.startswith(TIMM):
        make = timm_builder(name.removeprefix(TIMM))
        return lambda: _like_timm(make(classes))
    if name.startswith(TORCHVISION):
        return torchvision_builder(name.removeprefix(TORCHVISION), classes)
    return import_builder(name)


def timm_builder(name: str) -> Callable[[int], nn.Module]:
    """What makes a network of timm without weights, from the number of classes.

    Args:
        name: timm's name of it.

    Returns:
        The function.
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
            raise OptionError(
                f"timm cannot make {name!r}: {error}. `timm.list_models()` lists what it knows."
            ) from error
        return network

    return build


def _like_timm(network: nn.Module) -> nn.Module:
    # A network of timm that brings images to its own size, as timm's own evaluation does.
    found = getattr(network, "pretrained_cfg", None) or {}
    shape = found.get("input_size") or (3, SIZE, SIZE)
    interpolation = found.get("interpolation")
    return Resized(
        network,
        int(shape[-1]),
        crop=1.0 if found.get("crop_mode") == "squash" else float(found.get("crop_pct") or CROP),
        mean=found.get("mean") or 0.0,
        std=found.get("std") or 1.0,
        interpolation="bicubic" if interpolation == "bicubic" else "bilinear",
    )


def torchvision_builder(name: str, classes: int) -> Callable[[], nn.Module]:
    """What makes a network of torchvision that brings images to its own size, without weights.

    Args:
        name: torchvision's name of it.
        classes: number of outputs.

    Returns:
        The function.
    """
    try:
        models: Any = importlib.import_module("torchvision.models")
    except ImportError as error:
        raise MissingExtraError(
            feature=f"the network torchvision:{name}", package="torchvision", extra="hub"
        ) from error

    def build() -> nn.Module:
        try:
            network = models.get_model(name, weights=None, num_classes=classes)
            evaluated = models.get_model_weights(name).DEFAULT.transforms()
        except (ValueError, KeyError) as error:
            raise OptionError(
                f"torchvision cannot make {name!r}: {error}. `torchvision.models.list_models()` lists what it knows."
            ) from error
        size, resized = (getattr(evaluated, side)[0] for side in ("crop_size", "resize_size"))
        # A member of torchvision's InterpolationMode: bicubic for many of its newer networks.
        interpolation = evaluated.interpolation.value
        return Resized(
            network,
            size,
            crop=size / resized,
            mean=evaluated.mean,
            std=evaluated.std,
            interpolation="bicubic" if interpolation == "bicubic" else "bilinear",
        )

    return build
