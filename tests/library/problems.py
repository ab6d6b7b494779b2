"""Small networks and data that several test files use."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.conftest import make_problem

CLASSES = 4

X = torch.randn(20, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(20) % 3
SIZES = [6, 1, 8, 5]
LOADER = list(zip(X.split(SIZES), Y.split(SIZES), strict=True))
"""Twenty data in batches of different sizes."""


def networks(count: int, classes: int = CLASSES) -> list[nn.Module]:
    """Untrained networks with different weights."""
    return [make_problem(seed=seed, classes=classes).network for seed in range(count)]


def data(seed: int = 9, count: int = 40, classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    """Random inputs (n, 3), and labels that have nothing to do with them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, generator=generator), torch.randint(classes, (count,), generator=generator)


def loader(inputs: Tensor, labels: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(inputs.split(size), labels.split(size), strict=True))


def blobs(seed: int = 0, count: int = 160, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """Inputs around one corner per class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    corners = 1.9 * torch.randn(CLASSES, 3, generator=torch.Generator().manual_seed(99))
    return corners[labels] + spread * torch.randn(count, 3, generator=generator), labels


def blob_loader(seed: int = 0, size: int = 50, **options: float) -> list[tuple[Tensor, Tensor]]:
    return loader(*blobs(seed, **options), size)


def train(
    network: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    steps: int,
    rate: float,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
) -> nn.Module:
    """The network, trained on all data at once."""
    optimiser = torch.optim.Adam(network.parameters(), rate)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(network(inputs), labels).backward()
        optimiser.step()
    return network.eval()


def trained(seed: int, bias: bool = True, width: int = 8) -> nn.Module:
    """A small ReLU network that has learnt the blobs, in float64."""
    torch.manual_seed(seed)
    layers = [nn.Linear(3, width, bias=bias), nn.ReLU(), nn.Linear(width, width, bias=bias), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Linear(width, CLASSES, bias=bias)).double()
    inputs, labels = blobs()
    return train(network, inputs.double(), labels, 120, 0.02)


def features_of(network: nn.Sequential, inputs: Tensor) -> Tensor:
    """The inputs of the last layer, without the constant 1."""
    with torch.no_grad():
        return network[:-1](inputs)


def close(first: Tensor, second: Tensor, tolerance: float = 1e-12) -> bool:
    return first.shape == second.shape and float((first - second).detach().abs().max()) <= tolerance


def relative(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, in units of the largest expected value."""
    assert actual.shape == expected.shape
    return float((actual - expected).detach().abs().max() / expected.detach().abs().max().clamp_min(1e-300))
