"""Sufficient statistics: named float64 tensors summed over batches, processes and restarts.

A fit computes one `Sums` object for each network. Checkpoints store the sums, distributed fits add them across processes, and `save`
writes them to a file. The curvature, the distances and, for regression, the noise are all computed from the sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sums:
    """Sums over the training data. A missing tensor counts as zero, so `Sums({})` is the identity element of `+`."""

    tensors: dict[str, Tensor]
    count: int = 0
    """Number of data points N. If positions are averaged, an input is one data point, however many rows it has."""
    log_likelihood: float | None = 0.0
    """Log-likelihood of the labels, or None if there were no labels; 0 if it is computed after the fit (`Likelihood.label_sums`)."""
    extra_rows: int = 0
    """Number of rows in the sums beyond one for each data point. The sums hold all rows with a weight of 1, so they can be added."""

    def __add__(self, other: Sums) -> Sums:
        merged = dict(self.tensors)
        for name, tensor in other.tensors.items():
            merged[name] = merged[name] + tensor if name in merged else tensor.to_dense().clone()
        return self._with(merged, other)

    def __sub__(self, other: Sums) -> Sums:
        log_likelihood = None if other.log_likelihood is None else -other.log_likelihood
        negative = {name: -tensor for name, tensor in other.tensors.items()}
        return self + Sums(negative, -other.count, log_likelihood, -other.extra_rows)

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
        return Sums(tensors, self.count + other.count, log_likelihood, self.extra_rows + other.extra_rows)

    def present(self, *names: str) -> list[Tensor]:
        """Return those of the named tensors that exist, on the CPU and dense."""
        return [self.tensors[name].cpu().to_dense() for name in names if name in self.tensors]

    def weighted(self) -> Sums:
        """Return the sums in which all rows together have the weight of N data points, from which estimates are computed."""
        if self.extra_rows == 0:
            return self
        weight = self.count / (self.count + self.extra_rows)
        tensors = {name: weight * tensor for name, tensor in self.tensors.items()}
        return Sums(tensors, self.count, None if self.log_likelihood is None else weight * self.log_likelihood)

    def to(self, device: torch.device | str) -> Sums:
        """Return the same sums on another device."""
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors)
