"""Networks by name, each with the shape of its inputs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from torch import nn

from mola.choices import one_of
from mola.errors import MissingExtraError, OptionError
from mola.models.lenet import lenet
from mola.models.mlp import digits_mlp
from mola.models.resnet import CifarResNet
from mola.models.wide_resnet import wrn16_4

__all__ = ["MODELS", "ModelSpec", "build_network"]


@dataclass(frozen=True)
class ModelSpec:
    """How to build a network, and what it takes.

    Args:
        build: from the number of classes to a network with random weights.
        input_shape: channels, height and width of one input.
        homogeneous: whether f(a x) = a f(x) for a > 0, as the paper's far-field theory asks.
    """

    build: Callable[[int], nn.Module]
    input_shape: tuple[int, int, int]
    homogeneous: bool = False


def _imported_wrn50_2(classes: int) -> nn.Module:
    """WRN-50-2 for ImageNet, from torchvision or timm, whichever is installed; both name its parameters alike.

    Raises:
        MissingExtraError: if neither is installed.
    """
    try:
        build = importlib.import_module("torchvision.models").wide_resnet50_2
    except ImportError:
        try:
            create = importlib.import_module("timm").create_model
        except ImportError as error:
            raise MissingExtraError(feature="wrn-50-2", package="timm or torchvision", extra="hub") from error
        build = partial(create, "wide_resnet50_2")
    network: nn.Module = build(num_classes=classes)
    return network


GREY, COLOUR = (1, 28, 28), (3, 32, 32)

MODELS: Mapping[str, ModelSpec] = MappingProxyType(
    {
        "mlp": ModelSpec(digits_mlp, (1, 8, 8), homogeneous=True),
        "lenet": ModelSpec(lenet, GREY),
        "lenet-homogeneous": ModelSpec(partial(lenet, bias=False), GREY, homogeneous=True),
        **{f"resnet-{depth}": ModelSpec(partial(CifarResNet, depth), COLOUR) for depth in (20, 32, 44, 56, 110)},
        "resnet-20-homogeneous": ModelSpec(partial(CifarResNet, 20, homogeneous=True), COLOUR, homogeneous=True),
        "wrn-16-4": ModelSpec(wrn16_4, COLOUR),
        "wrn-16-4-homogeneous": ModelSpec(partial(wrn16_4, homogeneous=True), COLOUR, homogeneous=True),
        "wrn-50-2": ModelSpec(_imported_wrn50_2, (3, 224, 224)),
    }
)
"""Networks by name."""


def build_network(name: str, classes: int = 10) -> nn.Module:
    """A network with random weights, drawn from PyTorch's global generator.

    Args:
        name: one of `MODELS`.
        classes: number of outputs.

    Returns:
        The network, in training mode as PyTorch builds it.

    Raises:
        OptionError: if there is no class.
    """
    spec = MODELS[one_of(name, MODELS, "network")]
    if classes < 1:
        message = f"classes must be 1 or more, got {classes!r}."
        raise OptionError(message)
    return spec.build(classes)
