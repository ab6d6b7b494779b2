"""Residual networks for 32 x 32 images (He et al., 2016, section 4.2), with parameter-free shortcuts.

A 3 x 3 convolution to 16 channels, three stages of n basic blocks with 16, 32 and 64 channels, global average pooling,
and a linear layer from 64 features to the classes: depth 6 n + 2.

The homogeneous form leaves out BatchNorm and the last layer's bias. What remains (convolutions without bias, ReLU, sums,
means) is positively homogeneous, f(a x) = a f(x) for a > 0, so the paper's far-field theory holds for it exactly. With
BatchNorm it does not: its running mean shifts, in evaluation too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mola.errors import OptionError

__all__ = ["CifarResNet", "resnet20", "resnet32", "resnet44", "resnet56", "resnet110"]


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
        """Feature maps of the block."""
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
        """Logits (n, classes) of images (n, 3, height, width)."""
        hidden = functional.relu(self.bn1(self.conv1(images)))
        hidden = self.layer3(self.layer2(self.layer1(hidden)))
        logits: Tensor = self.linear(torch.mean(hidden, dim=(2, 3)))
        return logits


def _stage(inputs: int, outputs: int, blocks: int, stride: int, homogeneous: bool) -> nn.Sequential:
    first = BasicBlock(inputs, outputs, stride, homogeneous)
    return nn.Sequential(first, *(BasicBlock(outputs, outputs, 1, homogeneous) for _ in range(blocks - 1)))


def resnet20(classes: int = 10, *, homogeneous: bool = False) -> CifarResNet:
    """ResNet-20: 269,722 parameters for 10 classes."""
    return CifarResNet(20, classes, homogeneous=homogeneous)


def resnet32(classes: int = 10, *, homogeneous: bool = False) -> CifarResNet:
    """ResNet-32: 464,154 parameters for 10 classes."""
    return CifarResNet(32, classes, homogeneous=homogeneous)


def resnet44(classes: int = 10, *, homogeneous: bool = False) -> CifarResNet:
    """ResNet-44: 658,586 parameters for 10 classes."""
    return CifarResNet(44, classes, homogeneous=homogeneous)


def resnet56(classes: int = 10, *, homogeneous: bool = False) -> CifarResNet:
    """ResNet-56: 853,018 parameters for 10 classes."""
    return CifarResNet(56, classes, homogeneous=homogeneous)


def resnet110(classes: int = 10, *, homogeneous: bool = False) -> CifarResNet:
    """ResNet-110: 1,727,962 parameters for 10 classes."""
    return CifarResNet(110, classes, homogeneous=homogeneous)
