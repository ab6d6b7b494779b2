"""Memory for the rows that are summed next, in float64, used again and again: new memory took longer than copying into it."""

from __future__ import annotations

import torch
from torch import Tensor

from mola.heads import Head

__all__ = ["Room"]

ALIGNED = 8
"""Rows begin at multiples of 64 bytes: products of rows of 257 numbers took a third longer."""


class Room:
    """What one network made of some data: features with the constant 1, and logits.

    Args:
        head: which sees the features.
        rows: how many there is room for; more is made where more come at once.
    """

    def __init__(self, head: Head, rows: int) -> None:
        """Wait for the first rows, which say where they are to be kept."""
        self.head, self.rows = head, rows
        self._features: Tensor | None = None
        self._logits: Tensor | None = None

    def put(self, features: Tensor, logits: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """Copy rows there.

        Args:
            features: input (n, P) of the head, or (n, P - 1) where a column of ones joins it.
            logits: (n, C)
            start: row to begin at; those before it stay.

        Returns:
            Views of the copies, features (n, P) and logits (n, C) in float64, until they are overwritten.
        """
        end = start + len(logits)
        lifted, outputs = self._memory(end, logits.device)
        lifted[start:end, : features.shape[1]].copy_(features)
        outputs[start:end].copy_(logits)
        return lifted[start:end, : self.head.width], outputs[start:end]

    def first(self, count: int) -> tuple[Tensor, Tensor]:
        """Features (n, P) and logits (n, C) of the first rows that were put there.

        Raises:
            IndexError: if nothing was.
        """
        if self._features is None or self._logits is None:
            message = "nothing was put here yet"
            raise IndexError(message)
        return self._features[:count, : self.head.width], self._logits[:count]

    def _memory(self, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        device = torch.device("cpu") if device.type == "mps" else device  # which has no float64
        had, had_logits = self._features, self._logits
        if had is None or had_logits is None or len(had) < rows or had.device != device:
            rows, width = max(self.rows, rows), -(-self.head.width // ALIGNED) * ALIGNED
            # The column of ones, and what only fills a row up, are never written again.
            features = torch.ones(rows, width, dtype=torch.float64, device=device)
            logits = torch.empty(rows, self.head.classes, dtype=torch.float64, device=device)
            if had is not None and had_logits is not None:
                features[: len(had)].copy_(had)
                logits[: len(had)].copy_(had_logits)
            self._features, self._logits = had, had_logits = features, logits
        return had, had_logits
