"""Features of a pretrained CIFAR-10 ResNet-20 on real images, computed once and cached.

The data folder holds mosaics of 32 x 32 tiles (`cifar10/*.webp`, `svhn/test_10k.webp`) with label bytes beside them, and the
networks' weights as `networks/resnet20/NN.safetensors`.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from mola.models.resnet import resnet20

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MOSAICS = {
    "train": tuple(f"cifar10/data_batch_{index}" for index in range(1, 6)),
    "test": ("cifar10/test_batch",),
    "svhn": ("svhn/test_10k",),
}


@dataclass(frozen=True)
class HeadInputs:
    """The last layer of a trained network, and what it sees of each data set, with the labels."""

    head: nn.Linear
    features: dict[str, Tensor]
    labels: dict[str, Tensor]


def load(data: Path, network: int, cache: Path | None) -> HeadInputs:
    """Head, features and labels; features come from the cache where it has them, and go there where it does not."""
    trained = resnet20().eval()
    trained.load_state_dict(load_file(data / "networks" / "resnet20" / f"{network:02d}.safetensors"))
    stored = None if cache is None else cache / f"resnet20_{network:02d}.npz"
    if stored is not None and stored.exists():
        with np.load(stored) as arrays:
            features = {name: torch.from_numpy(arrays[name]) for name in MOSAICS}
    else:
        features = {name: compute(trained, read(data, files)) for name, files in MOSAICS.items()}
        if stored is not None:
            stored.parent.mkdir(parents=True, exist_ok=True)
            np.savez(stored, **{name: values.numpy() for name, values in features.items()})
    labels = {
        name: torch.from_numpy(
            np.concatenate([np.fromfile(data / f"{file}.labels", np.uint8) for file in files])
        ).long()
        for name, files in MOSAICS.items()
    }
    return HeadInputs(trained.linear, features, labels)


def read(data: Path, files: tuple[str, ...]) -> Tensor:
    """Images (n, 3, 32, 32) in bytes."""
    parts = []
    for file in files:
        mosaic = np.asarray(Image.open(data / f"{file}.webp").convert("RGB"))
        rows, columns = mosaic.shape[0] // 32, mosaic.shape[1] // 32
        tiles = mosaic.reshape(rows, 32, columns, 32, 3).transpose(0, 2, 4, 1, 3)
        parts.append(torch.from_numpy(tiles.reshape(-1, 3, 32, 32)))
    return torch.cat(parts)


def compute(network: nn.Module, images: Tensor) -> Tensor:
    """Inputs (n, 64) of the network's last layer."""
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    seen: list[Tensor] = []
    handle = network.linear.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    with torch.no_grad():
        for batch in images.split(500):
            network((batch / 255 - mean) / std)
    handle.remove()
    return torch.cat(seen)
