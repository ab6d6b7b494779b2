"""Float64 for what is summed or solved, also where a network's device has none."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["exact", "exact_device"]


def exact_device(device: torch.device) -> torch.device:
    """Where float64 numbers can be that belong to a device: on the CPU where it has none."""
    return torch.device("cpu") if device.type == "mps" else device


def exact(tensor: Tensor) -> Tensor:
    """In float64. First moved, then lifted: a device that has none cannot convert on the way."""
    return tensor.to(exact_device(tensor.device)).double()
