"""Memory for the rows that are summed next, in float64, used again and again: new memory took longer than copying into it."""

from __future__ import annotations

import torch

from mola.errors import DataError
from mola.features.watching import Features
from mola.heads import Head

__all__ = ["Lifted", "Room", "device_of_sums"]

ALIGNED = 8
"""Rows begin at multiples of 64 bytes: products of rows of 257 numbers took a third longer."""

ROWS = 4096
"""For which there is room from the start; room for more is made as they come."""


class Lifted(Features):
    """Features with the constant 1 (n, P) and logits (n, C), in float64, until the next are put in their place."""

    __slots__ = ()


def device_of_sums(seen: Features) -> torch.device:
    """Where float64 sums over these rows are made: on the CPU where the network's device has no float64."""
    return torch.device("cpu") if seen.logits.device.type == "mps" else seen.logits.device


class Room:
    """What one network made of some data.

    Args:
        head: which sees the features.
        rows: how many there is to be room for.
    """

    def __init__(self, head: Head, rows: int) -> None:
        """Wait for the first rows, which say how wide they are and where they are to be kept."""
        self.head, self.rows = head, rows
        self._kept: Lifted | None = None

    def put(self, seen: Features, start: int = 0) -> Lifted:
        """Copy rows there.

        Args:
            seen: input and output of the head, on any device and in any precision.
            start: row to begin at; those before it stay.

        Returns:
            The copies, as views.
        """
        end, width = start + len(seen.logits), seen.features.shape[1]
        kept = self._room_for(seen, start, end)
        # First to the device, then to float64: a device that has none cannot convert on the way.
        kept.features[start:end, :width].copy_(seen.features.to(kept.features.device))
        kept.logits[start:end].copy_(seen.logits.to(kept.logits.device))
        if self.head.has_bias:  # again and again: whoever had these rows before may have written into them
            kept.features[start:end, width] = 1
        return Lifted(kept.features[start:end], kept.logits[start:end])

    def first(self, count: int) -> Lifted:
        """The first rows that were put there.

        Raises:
            IndexError: if there are fewer.
        """
        if self._kept is None or len(self._kept.logits) < count:
            message = f"{count} rows were not put here"
            raise IndexError(message)
        return Lifted(self._kept.features[:count], self._kept.logits[:count])

    def _room_for(self, seen: Features, start: int, end: int) -> Lifted:
        device = device_of_sums(seen)
        width, outputs = seen.features.shape[1] + self.head.has_bias, seen.logits.shape[1]
        had = self._kept
        if had is not None and (had.features.shape[1], had.logits.shape[1]) != (width, outputs):
            message = (
                f"head {self.head.name!r} saw {width - self.head.has_bias} features and gave {outputs} outputs, after "
                f"{had.features.shape[1] - self.head.has_bias} and {had.logits.shape[1]} in the batches before."
            )
            raise DataError(message)
        if had is None or len(had.logits) < end or had.logits.device != device:
            rows = max(end, min(self.rows, max(ROWS, 2 * end)))
            features = torch.empty(rows, -(-width // ALIGNED) * ALIGNED, dtype=torch.float64, device=device)
            logits = torch.empty(rows, outputs, dtype=torch.float64, device=device)
            self._kept = Lifted(features[:, :width], logits)
            if had is not None:
                self._kept.features[:start].copy_(had.features[:start])
                self._kept.logits[:start].copy_(had.logits[:start])
            had = self._kept
        return had
