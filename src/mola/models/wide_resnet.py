r"""Wide residual networks (Zagoruyko and Komodakis, 2016) for small images, as the paper uses them: WRN-16-4, dropout 0.3.

A 3 x 3 convolution to 16 channels, three groups of n pre-activation blocks with 16 w, 32 w and 64 w channels, BatchNorm,
ReLU, global average pooling, and a linear layer: depth 6 n + 4, width w. Where a block changes the number of channels, a
1 x 1 convolution of its normalised and rectified input is the shortcut.

Convolutions start from :math:`N(0, 2 / (k^2 c_{out}))`, the last layer's bias from 0, all else as PyTorch does it.

The homogeneous form leaves out BatchNorm and the last layer's bias: then f(a x) = a f(x) for a > 0 (in evaluation; in
training too, under one draw of the dropout), and the paper's far-field theory holds exactly. With BatchNorm it does not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from mola.errors import OptionError

__all__ = ["WideResNet", "wrn16_4"]


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
        """Feature maps of the block."""
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
        channels: of the images; several images may come stacked.
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
        """Logits (n, classes) of images (n, channels, height, width)."""
        hidden = self.group3(self.group2(self.group1(self.conv1(images))))
        logits: Tensor = self.linear(torch.mean(functional.relu(self.bn(hidden)), dim=(2, 3)))
        return logits


def _group(inputs: int, outputs: int, blocks: int, stride: int, dropout: float, homogeneous: bool) -> nn.Sequential:
    first = WideBlock(inputs, outputs, stride, dropout, homogeneous)
    return nn.Sequential(first, *(WideBlock(outputs, outputs, 1, dropout, homogeneous) for _ in range(blocks - 1)))


def wrn16_4(classes: int = 10, *, channels: int = 3, dropout: float = 0.3, homogeneous: bool = False) -> WideResNet:
    """The paper's network for CIFAR-10: 2,748,890 parameters, 256 features."""
    return WideResNet(16, 4, classes, channels=channels, dropout=dropout, homogeneous=homogeneous)
