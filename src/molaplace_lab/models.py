r"""The networks from the paper's experiments, by name: LeNet-5, residual networks and wide residual networks.

**LeNet-5** for 28 x 28 greyscale images has 44,426 parameters and 84 features.

**Residual networks** of depth 6 n + 2 for 32 x 32 images (He et al., 2016, section 4.2) have parameter-free shortcuts. They consist of
a 3 x 3 convolution to 16 channels, three stages of n basic blocks with 16, 32 and 64 channels, global average pooling, and a linear
layer from 64 features to the classes.

**Wide residual networks** of depth 6 n + 4 and width w (Zagoruyko and Komodakis, 2016) are also designed for small images. They
consist of a 3 x 3 convolution to 16 channels, three groups of n pre-activation blocks with 16 w, 32 w and 64 w channels, BatchNorm,
ReLU, global average pooling, and a linear layer. The paper uses WRN-16-4 with a dropout probability of 0.3. Convolution weights are
drawn from :math:`N(0, 2 / (k^2 c_{out}))`, the last layer's bias starts at 0, and all other parameters are initialised as in PyTorch.

The homogeneous variants have neither BatchNorm nor biases, so that f(a x) = a f(x) for a > 0, and the paper's far-field theory is
exact. With BatchNorm, the theory is not exact, because the running means subtracted in evaluation mode do not scale with the
input.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional

from molaplace.errors import OptionError, importing
from molaplace.options import one_of
from molaplace_lab.training import digits_mlp


def lenet(classes: int = 10, *, bias: bool = True) -> nn.Sequential:
    """Build LeNet-5: two convolutions and three linear layers with ReLU; without biases, the network is homogeneous."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, bias=bias),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5, bias=bias),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 120, bias=bias),
        nn.ReLU(),
        nn.Linear(120, 84, bias=bias),
        nn.ReLU(),
        nn.Linear(84, classes, bias=bias),
    )


# The source code of a network's classes is part of its checksum, which identifies stored activations and records.


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions around a shortcut that skips pixels and pads channels instead of learning a projection."""

    def __init__(self, inputs: int, outputs: int, stride: int, homogeneous: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.Identity() if homogeneous else nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.Identity() if homogeneous else nn.BatchNorm2d(outputs)
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
        homogeneous: without BatchNorm and bias, for the paper's far-field theory; harder to train when deep.

    Raises:
        OptionError: if the depth is not 6 n + 2.
    """

    def __init__(self, depth: int = 20, classes: int = 10, *, homogeneous: bool = False) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            message = f"depth must be 6 n + 2 (20, 32, 44, 56, 110, ...), got {depth}."
            raise OptionError(message)
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.Identity() if homogeneous else nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks, 1, homogeneous)
        self.layer2 = _stage(16, 32, blocks, 2, homogeneous)
        self.layer3 = _stage(32, 64, blocks, 2, homogeneous)
        self.linear = nn.Linear(64, classes, bias=not homogeneous)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (n, classes) of images (n, 3, height, width)."""
        hidden = functional.relu(self.bn1(self.conv1(images)))
        hidden = self.layer3(self.layer2(self.layer1(hidden)))
        logits: Tensor = self.linear(torch.mean(hidden, dim=(2, 3)))
        return logits


def _stage(inputs: int, outputs: int, blocks: int, stride: int, homogeneous: bool) -> nn.Sequential:
    first = BasicBlock(inputs, outputs, stride, homogeneous)
    return nn.Sequential(first, *(BasicBlock(outputs, outputs, 1, homogeneous) for _ in range(blocks - 1)))


def resnet20(classes: int = 10, *, homogeneous: bool = False) -> CifarResNet:
    """Build a ResNet-20, which has 269,722 parameters for 10 classes."""
    return CifarResNet(20, classes, homogeneous=homogeneous)


class WideBlock(nn.Module):
    """Normalise, rectify, convolve, twice, with dropout before the second convolution, around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float, homogeneous: bool) -> None:
        super().__init__()
        self.bn1 = nn.Identity() if homogeneous else nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn2 = nn.Identity() if homogeneous else nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout(dropout)
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
        channels: number of channels; several images may be stacked.
        dropout: probability inside each block.
        homogeneous: without BatchNorm and bias, for the paper's far-field theory.

    Raises:
        OptionError: if the depth is not 6 n + 4, or the width is not positive.
    """

    def __init__(
        self,
        depth: int = 16,
        width: int = 4,
        classes: int = 10,
        *,
        channels: int = 3,
        dropout: float = 0.3,
        homogeneous: bool = False,
    ) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            message = f"depth must be 6 n + 4 (16, 22, 28, 40, ...), got {depth}."
            raise OptionError(message)
        if width < 1:
            message = f"width must be 1 or more, got {width}."
            raise OptionError(message)
        blocks, features = (depth - 4) // 6, 64 * width
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.group1 = _group(16, 16 * width, blocks, 1, dropout, homogeneous)
        self.group2 = _group(16 * width, 32 * width, blocks, 2, dropout, homogeneous)
        self.group3 = _group(32 * width, features, blocks, 2, dropout, homogeneous)
        self.bn = nn.Identity() if homogeneous else nn.BatchNorm2d(features)
        self.linear = nn.Linear(features, classes, bias=not homogeneous)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
                nn.init.normal_(module.weight, 0, math.sqrt(2 / fan_out))
        if not homogeneous:
            nn.init.zeros_(self.linear.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (n, classes) of images (n, channels, height, width)."""
        hidden = self.group3(self.group2(self.group1(self.conv1(images))))
        logits: Tensor = self.linear(torch.mean(functional.relu(self.bn(hidden)), dim=(2, 3)))
        return logits


def _group(inputs: int, outputs: int, blocks: int, stride: int, dropout: float, homogeneous: bool) -> nn.Sequential:
    first = WideBlock(inputs, outputs, stride, dropout, homogeneous)
    return nn.Sequential(first, *(WideBlock(outputs, outputs, 1, dropout, homogeneous) for _ in range(blocks - 1)))


def wrn16_4(classes: int = 10, *, channels: int = 3, dropout: float = 0.3, homogeneous: bool = False) -> WideResNet:
    """Return the paper's network for CIFAR-10, with 2,748,890 parameters and 256 features."""
    return WideResNet(16, 4, classes, channels=channels, dropout=dropout, homogeneous=homogeneous)


@dataclass(frozen=True)
class ModelSpec:
    """A network's builder and properties."""

    build: Callable[[int], nn.Module]
    """Function that maps the number of classes to a network with random weights."""
    input_shape: tuple[int, int, int]
    """Channels, height and width of one input."""
    homogeneous: bool = False
    """True if f(a x) = a f(x) for a > 0."""


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
"""Networks, keyed by name."""


def build_network(name: str, classes: int = 10) -> nn.Module:
    """Build one of the `MODELS` with random weights drawn from PyTorch's global generator."""
    spec = MODELS[one_of(name, MODELS, "network")]
    if classes < 1:
        raise OptionError(f"must be 1 or more, got {classes!r}.", argument="classes")
    return spec.build(classes)
