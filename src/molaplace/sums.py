"""Sufficient statistics: named float64 tensors summed over batches, processes and restarts.

A fit computes one `Sums` object for each network. Checkpoints store the sums, distributed fits add them across processes, and `save`
writes them to a file. The curvature, the distances and, for regression, the noise are all computed from the sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sums:
    """Sums over the training data. A missing tensor counts as zero, so `Sums({})` is the identity element of `+`."""

    tensors: dict[str, Tensor]
    count: int = 0
    """Number of data points N."""
    log_likelihood: float | None = 0.0
    """Log-likelihood of the labels, or None if there were no labels; 0 if it is computed after the fit (`Likelihood.label_sums`)."""

    def __add__(self, other: Sums) -> Sums:
        merged = dict(self.tensors)
        for name, tensor in other.tensors.items():
            merged[name] = merged[name] + tensor if name in merged else tensor.to_dense().clone()
        return self._with(merged, other)

    def __sub__(self, other: Sums) -> Sums:
        return self + other.scaled(-1, -other.count)

    def __iadd__(self, other: Sums) -> Sums:
        # Add in place, because allocating another C x C or P x P matrix for each batch would dominate the cost of the fit. The sums of
        # a batch may be sparse, but the total is always dense.
        for name, tensor in other.tensors.items():
            if name in self.tensors:
                self.tensors[name].add_(tensor)
            else:
                self.tensors[name] = tensor.to_dense()
        return self._with(self.tensors, other)

    def _with(self, tensors: dict[str, Tensor], other: Sums) -> Sums:
        known = self.log_likelihood is not None and other.log_likelihood is not None
        log_likelihood = (self.log_likelihood or 0.0) + (other.log_likelihood or 0.0) if known else None
        return Sums(tensors, self.count + other.count, log_likelihood)

    def present(self, *names: str) -> list[Tensor]:
        """Return those of the named tensors that exist, on the CPU and dense."""
        return [self.tensors[name].cpu().to_dense() for name in names if name in self.tensors]

    def scaled(self, share: float, count: int) -> Sums:
        """Return the sums multiplied by `share`, with `count` as the number of data points."""
        tensors = {name: share * tensor for name, tensor in self.tensors.items()}
        return Sums(tensors, count, None if self.log_likelihood is None else share * self.log_likelihood)

    def to(self, device: torch.device | str) -> Sums:
        """Return the same sums on another device."""
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return Sums(tensors, self.count, self.log_likelihood)
