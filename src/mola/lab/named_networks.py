"""Networks named one by one: the user's own functions, and architectures of timm and torchvision with weights from files.

| name | network |
|---|---|
| `package.module:function` | the function's return value, with its weights |
| `package.module:function=FILE` | the same, with weights from a file |
| `timm:NAME=FILE` | an architecture of timm |
| `torchvision:NAME=FILE` | an architecture of torchvision |

Nothing is downloaded. The networks of a mixture may differ in the size of their images: all get the same images, with pixels from
0 to 1, and networks of timm and torchvision resize and normalise them as their library does. A function returns a network that
does so itself, such as a `mola.network.Resized`.
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
"""Usual for ImageNet, where a library has no setting."""


def are_names(text: str) -> bool:
    """Return whether a text names networks one by one; otherwise it is a folder."""
    return ":" in text and not Path(text).expanduser().is_dir()


def open_named(text: str, classes: int) -> list[Network]:
    """Open networks by their names, as in the table above, separated by commas; those of libraries get `classes` outputs."""
    found = []
    for one in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, file = one.partition("=")
        path = Path(file).expanduser() if file else None
        if path is not None and not path.is_file():
            raise OptionError(
                f"the weights {path} of {name} do not exist: expected a file (safetensors, or made by torch.save)."
            )
        if path is None and name.startswith((TIMM, TORCHVISION)):
            raise OptionError(f"{name} comes without trained weights: add their file, as {name}=FILE.")
        build = _builder(name, classes)
        found.append(Network(path, build, network_checksum(Network(path, build, "").load(), name), one))
    return found


def _builder(name: str, classes: int) -> Callable[[], nn.Module]:
    if name.startswith(TIMM):
        make = timm_builder(name.removeprefix(TIMM))
        return lambda: _resized_timm(make(classes))
    if name.startswith(TORCHVISION):
        return _torchvision_builder(name.removeprefix(TORCHVISION), classes)
    return import_builder(name)


def timm_builder(name: str) -> Callable[[int], nn.Module]:
    """Return a function that makes a network of timm without weights, from the number of classes."""
    if ":" in name:
        raise OptionError(
            f"timm:{name} would be downloaded: expected the plain name of an architecture, such as resnet18."
        )
    try:
        timm: Any = importlib.import_module("timm")
    except ImportError as error:
        raise MissingExtraError(feature=f"the network timm:{name}", package="timm", extra="hub") from error

    def build(classes: int) -> nn.Module:
        try:
            network: nn.Module = timm.create_model(name, pretrained=False, num_classes=classes)
        except RuntimeError as error:
            raise OptionError(
                f"timm cannot make {name!r}: {error}. `timm.list_models()` lists its networks."
            ) from error
        return network

    return build


def _resized_timm(network: nn.Module) -> nn.Module:
    # Resizes and normalises images as timm's own evaluation does.
    found = getattr(network, "pretrained_cfg", None) or {}
    shape = found.get("input_size") or (3, SIZE, SIZE)
    return Resized(
        network,
        int(shape[-1]),
        crop=1.0 if found.get("crop_mode") == "squash" else float(found.get("crop_pct") or CROP),
        mean=found.get("mean") or 0.0,
        std=found.get("std") or 1.0,
        interpolation="bicubic" if found.get("interpolation") == "bicubic" else "bilinear",
    )


def _torchvision_builder(name: str, classes: int) -> Callable[[], nn.Module]:
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
                f"torchvision cannot make {name!r}: {error}. `torchvision.models.list_models()` lists its networks."
            ) from error
        size, resized = (getattr(evaluated, side)[0] for side in ("crop_size", "resize_size"))
        return Resized(
            network,
            size,
            crop=size / resized,
            mean=evaluated.mean,
            std=evaluated.std,
            interpolation="bicubic" if evaluated.interpolation.value == "bicubic" else "bilinear",
        )

    return build
