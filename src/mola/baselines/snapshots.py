r"""Moments of a network's weights along a path, as SWAG keeps them (Maddox et al., 2019).

After the snapshots :math:`\theta_1, \dots, \theta_T` there are the mean, the variance of each weight (mean of squares
minus square of the mean), and the last K columns :math:`d_t = \theta_t - \bar\theta_t`, each a deviation from the mean
of the snapshots up to its own, so that the first is 0. A draw is

.. math:: \theta = \bar\theta + \sqrt{s}\, \bigl(\sigma \odot z_1 + D z_2 / \sqrt{K - 1}\bigr),

with standard normal :math:`z_1, z_2`. The variance is kept as Welford's sum of products rather than as a mean of
squares: the same number, but nothing cancels in float32. That is (2 + K) numbers for each weight, besides
the network's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Moments"]

SMALLEST_VARIANCE = 1e-30
"""Where a weight did not move."""


@dataclass(frozen=True)
class Moments:
    """Mean, spread and last deviations of named weights."""

    count: int
    """Number of snapshots."""
    mean: dict[str, Tensor]
    squares: dict[str, Tensor]
    """Sum of squared deviations from the mean, for each weight."""
    columns: dict[str, Tensor]
    """(K, ...): the last deviations, oldest first."""

    @staticmethod
    def start(weights: Mapping[str, Tensor]) -> Moments:
        """Of no snapshot yet. In float32 for weights in half precision, where small steps would be lost in the mean."""
        kinds = {name: torch.promote_types(tensor.dtype, torch.float32) for name, tensor in weights.items()}
        return Moments(
            0,
            {name: torch.zeros_like(tensor, dtype=kinds[name]) for name, tensor in weights.items()},
            {name: torch.zeros_like(tensor, dtype=kinds[name]) for name, tensor in weights.items()},
            {name: tensor.new_zeros((0, *tensor.shape), dtype=kinds[name]) for name, tensor in weights.items()},
        )

    def add(self, weights: Mapping[str, Tensor], rank: int) -> Moments:
        """With one more snapshot.

        Args:
            weights: the snapshot, by the same names.
            rank: how many columns to keep.

        Returns:
            New moments; the old ones are written over, as there is room for one only.
        """
        for name, theta in weights.items():
            mean = self.mean[name]
            before = theta - mean
            mean.add_(before / (self.count + 1))
            after = theta - mean
            self.squares[name].addcmul_(before, after)
            if rank:
                self.columns[name] = torch.cat([self.columns[name][1 - rank :], after[None]])
        return Moments(self.count + 1, self.mean, self.squares, self.columns)

    @property
    def rank(self) -> int:
        """Number of columns kept."""
        return len(next(iter(self.columns.values())))

    def variance(self, name: str) -> Tensor:
        """Of each weight over all snapshots, never below 1e-30."""
        return (self.squares[name] / self.count).clamp_min(SMALLEST_VARIANCE)

    def draw(self, seed: int, scale: float) -> dict[str, Tensor]:
        """Weights from the Gaussian; the same seed gives the same, on every device.

        Args:
            seed: of this draw.
            scale: of the covariance.

        Returns:
            Weights by name.
        """
        generator = torch.Generator("cpu").manual_seed(seed)
        shared = torch.randn(self.rank, generator=generator, dtype=torch.float64, device="cpu")
        drawn = {}
        for name in sorted(self.mean):  # files do not keep the order
            mean = self.mean[name]
            noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device="cpu").to(mean.device)
            step = self.variance(name).sqrt() * noise
            if self.rank:
                along = shared.to(mean) / (self.rank - 1) ** 0.5
                step = step + torch.tensordot(along, self.columns[name], dims=1)
            drawn[name] = mean + scale**0.5 * step
        return {name: drawn[name] for name in self.mean}

    def to(self, device: torch.device) -> Moments:
        """The same on another device."""
        parts = ({name: tensor.to(device) for name, tensor in part.items()} for part in self._parts())
        return Moments(self.count, *parts)

    def _parts(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        return self.mean, self.squares, self.columns

    def tensors(self) -> dict[str, Tensor]:
        """All numbers by name, for files."""
        kinds = zip(("mean", "squares", "columns"), self._parts(), strict=True)
        return {f"{kind}.{name}": tensor for kind, part in kinds for name, tensor in part.items()}

    @staticmethod
    def from_tensors(count: int, tensors: Mapping[str, Tensor]) -> Moments:
        """What `tensors` made."""
        parts: dict[str, dict[str, Tensor]] = {"mean": {}, "squares": {}, "columns": {}}
        for name, tensor in tensors.items():
            kind, own = name.split(".", 1)
            if kind in parts:
                parts[kind][own] = tensor
        return Moments(count, parts["mean"], parts["squares"], parts["columns"])
