"""Inputs with their labels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Labelled:
    """Inputs (n, ...) and class indices (n,), or what another likelihood reads (n, C)."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, size: int = 256) -> list[tuple[Tensor, Tensor]]:
        """The data in their order as a list of (inputs, labels): a loader for `mola.fit` and `tune`."""
        return list(zip(torch.split(self.inputs, size), torch.split(self.labels, size), strict=True))
