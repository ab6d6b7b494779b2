r"""The networks from the paper's experiments, by name: LeNet-5, residual networks and wide residual networks.

**LeNet-5** for 28 x 28 greyscale images has 44,426 parameters and 84 features.

**Residual networks** of depth 6 n + 2 for 32 x 32 images (He et al., 2016, section 4.2) have parameter-free shortcuts. They consist of
a 3 x 3 convolution to 16 channels, three stages of n basic blocks with 16, 32 and 64 channels, global average pooling, and a linear
layer from 64 features to the classes.

**Wide residual networks** of depth 6 n + 4 and width w (Zagoruyko and Komodakis, 2016) are also designed for small images. They
consist of a 3 x 3 convolution to 16 channels, three groups of n pre-activation blocks with 16 w, 32 w and 64 w channels, BatchNorm,
ReLU, global average pooling, and a linear layer. The paper uses WRN-16-4 with a dropout probability of 0.3. Convolution weights are
drawn from :math:`N(0, 2 / (k^2 c_{out}))`, the last layer's bias starts at 0, and all other parameters are initialised as in PyTorch.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from molaplace.demo import digits_network
from molaplace.errors import OptionError, importing
from molaplace.options import one_of

DROPOUT = 0.3
"""Probability of dropout inside each block of a wide residual network."""


def lenet(classes: int = 10) -> nn.Sequential:
    """Build LeNet-5: two convolutions and three linear layers with ReLU."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions around a shortcut that skips pixels and pads channels instead of learning a projection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.padding = (outputs - inputs) // 2

    def forward(self, images: Tensor) -> Tensor:
        """Return feature maps of the block."""
        hidden = functional.relu(self.bn1(self.conv1(images)))
        shortcut = images[:, :, :: self.stride, :: self.stride]
        shortcut = functional.pad(shortcut, (0, 0, 0, 0, self.padding, self.padding))
        return functional.relu(self.bn2(self.conv2(hidden)) + shortcut)


class CifarResNet(nn.Module):
    """A residual network of depth 6 n + 2: 20, 32, 44, 56, 110, ...

    Args:
        depth: number of layers with weights.
        classes: number of outputs.

    Raises:
        OptionError: if the depth is not 6 n + 2.
    """

    def __init__(self, depth: int = 20, classes: int = 10) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise OptionError(f"depth must be 6 n + 2 (20, 32, 44, 56, 110, ...), got {depth}.")
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(BasicBlock, 16, 16, blocks, 1)
        self.layer2 = _stage(BasicBlock, 16, 32, blocks, 2)
        self.layer3 = _stage(BasicBlock, 32, 64, blocks, 2)
        self.linear = nn.Linear(64, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (n, classes) of images (n, 3, height, width)."""
        hidden = functional.relu(self.bn1(self.conv1(images)))
        hidden = self.layer3(self.layer2(self.layer1(hidden)))
        logits: Tensor = self.linear(torch.mean(hidden, dim=(2, 3)))
        return logits


def _stage(
    block: Callable[[int, int, int], nn.Module], inputs: int, outputs: int, count: int, stride: int
) -> nn.Sequential:
    first = block(inputs, outputs, stride)
    return nn.Sequential(first, *(block(outputs, outputs, 1) for _ in range(count - 1)))


def resnet20(classes: int = 10) -> CifarResNet:
    """Build a ResNet-20, which has 269,722 parameters for 10 classes."""
    return CifarResNet(20, classes)


class WideBlock(nn.Module):
    """Normalise, rectify, convolve, twice, with dropout before the second convolution, around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout(DROPOUT)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs else None

    def forward(self, images: Tensor) -> Tensor:
        """Return feature maps of the block."""
        active = functional.relu(self.bn1(images))
        passed = images if self.shortcut is None else self.shortcut(active)
        hidden: Tensor = self.conv2(self.dropout(functional.relu(self.bn2(self.conv1(active)))))
        return hidden + passed


class WideResNet(nn.Module):
    """A wide residual network of depth 6 n + 4: WRN-16-4, WRN-28-10, ...

    Args:
        depth: number of layers with weights.
        width: how many times wider than a plain residual network, which is 1.
        classes: number of outputs.

    Raises:
        OptionError: if the depth is not 6 n + 4.
    """

    def __init__(self, depth: int = 16, width: int = 4, classes: int = 10) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise OptionError(f"depth must be 6 n + 4 (16, 22, 28, 40, ...), got {depth}.")
        blocks = (depth - 4) // 6
        features = 64 * width
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.group1 = _stage(WideBlock, 16, 16 * width, blocks, 1)
        self.group2 = _stage(WideBlock, 16 * width, 32 * width, blocks, 2)
        self.group3 = _stage(WideBlock, 32 * width, features, blocks, 2)
        self.bn = nn.BatchNorm2d(features)
        self.linear = nn.Linear(features, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
                nn.init.normal_(module.weight, 0, math.sqrt(2 / fan_out))
        nn.init.zeros_(self.linear.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (n, classes) of images (n, 3, height, width)."""
        hidden = self.group3(self.group2(self.group1(self.conv1(images))))
        logits: Tensor = self.linear(torch.mean(functional.relu(self.bn(hidden)), dim=(2, 3)))
        return logits


def wrn16_4(classes: int = 10) -> WideResNet:
    """Return the paper's network for CIFAR-10, with 2,748,890 parameters and 256 features."""
    return WideResNet(16, 4, classes)


def _imported_wrn50_2(classes: int) -> nn.Module:
    # Build WRN-50-2 for ImageNet with torchvision if it is installed and otherwise with timm; both use the same parameter names.
    try:
        build = importlib.import_module("torchvision.models").wide_resnet50_2
    except ImportError:
        with importing("wrn-50-2", "timm or torchvision", "hub"):
            create = importlib.import_module("timm").create_model
        build = partial(create, "wide_resnet50_2")
    network: nn.Module = build(num_classes=classes)
    return network


MODELS: Mapping[str, Callable[[int], nn.Module]] = {
    "mlp": digits_network,
    "lenet": lenet,
    **{f"resnet-{depth}": partial(CifarResNet, depth) for depth in (20, 32, 44, 56, 110)},
    "wrn-16-4": wrn16_4,
    "wrn-50-2": _imported_wrn50_2,
}
"""Functions that map the number of classes to a network with random weights, keyed by name."""


def build_network(name: str, classes: int = 10) -> nn.Module:
    """Build one of the `MODELS` with random weights drawn from PyTorch's global generator."""
    return MODELS[one_of(name, MODELS, "network")](classes)


def fast_inputs(inputs: Tensor) -> Tensor:
    """Return the inputs in the fastest memory layout: channels last for colour images, unchanged otherwise."""
    return inputs.contiguous(memory_format=torch.channels_last) if _has_colours(inputs) else inputs


def fast_network(network: nn.Module, inputs: Tensor) -> nn.Module:
    """Convert a network to the fastest memory layout for the given inputs, and return it."""
    if _has_colours(inputs):
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network


def _has_colours(inputs: Tensor) -> bool:
    return inputs.dim() == 4 and inputs.shape[1] > 1
