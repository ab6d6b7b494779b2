"""Memory for the rows that are summed next, in float64, used again and again: new memory took longer than copying into it."""

from __future__ import annotations

import torch

from mola.errors import DataError
from mola.exactness import exact_device
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
    return exact_device(seen.logits.device)


class Room:
    """What one network made of some data.

    Args:
        head: which sees the features.
        rows: how many there is to be room for.
    """

    def __init__(self, head: Head, rows: int) -> None:
        """Wait for the first rows, which say how wide they are and where they are to be kept."""
        self.head, self.rows, self._bias = head, rows, head.has_bias
        self._kept: Lifted | None = None
        self._form: tuple[object, ...] = ()

    def put(self, seen: Features, start: int = 0) -> Lifted:
        """Copy rows there.

        Args:
            seen: input and output of the head, on any device and in any precision.
            start: row to begin at; those before it stay.

        Returns:
            The copies, as views.
        """
        given, outputs, kept = seen.features.detach(), seen.logits.detach(), self._kept
        count, width = given.shape
        # This is paid at every batch, and all the Python in it takes longer than the copies of a small one.
        form = (width, outputs.shape[1], given.device, outputs.device)
        if kept is None or form != self._form or start + count > kept.logits.shape[0]:
            kept, self._form = self._room_for(seen, start, start + count), form
        features, logits = kept.features.narrow(0, start, count), kept.logits.narrow(0, start, count)
        # First to the device, then to float64: a device that has none cannot convert on the way.
        features.narrow(1, 0, width).copy_(given.to(features.device))
        logits.copy_(outputs.to(logits.device))
        if self._bias:  # again and again: whoever had these rows before may have written into them
            features.select(1, width).fill_(1)
        return Lifted(features, logits)

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
