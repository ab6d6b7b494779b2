"""Factors of no data, and the same factors with other numbers: moved, loaded, or added up elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mola.laplace import Factors, Structure

__all__ = ["moved", "no_data", "remade"]


def no_data(structure: Structure, features: int, outputs: int, log_likelihood: float | None) -> Factors:
    """The neutral element of `+`: sums over nothing."""
    shapes = structure.empty(features, outputs)
    zeros = {name: torch.zeros(shape, dtype=torch.float64, device="cpu") for name, shape in shapes.items()}
    return structure.restore(0, log_likelihood, zeros)


def remade(like: Factors, count: int, log_likelihood: float | None, tensors: dict[str, Tensor]) -> Factors:
    """Factors of the same kind with other numbers."""
    changes: dict[str, Any] = {"count": count, "log_likelihood": log_likelihood, **tensors}
    return replace(like, **changes)


def moved(factors: Factors, device: torch.device) -> Factors:
    """The same sums on another device."""
    there = {name: tensor.to(device) for name, tensor in factors.tensors().items()}
    return remade(factors, factors.count, factors.log_likelihood, there)
