"""Whether two loaders yield the same inputs: a few rows of each batch are remembered by their bytes.

Rows that hold the same numbers to the last bit are the same data, so what is found is never a matter of chance; what is changed on
the way, as by augmentation, is not found. Memory is bounded, and a batch costs the reading of a few of its rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Remembering", "shared_rows"]

ROWS = 16
"""Remembered of each batch."""

MOST = 50_000
"""Remembered of a loader."""

ENOUGH = 5
"""Rows that must be shared before anything is said."""

ALIKE = 0.1
"""Share of repeated rows from which on data repeat themselves: categories in a table are the same in any two sets."""

UNSEEN = 4
"""Rows of the training data that may well come up again, although none was seen to."""


class Remembering:
    """A loader that remembers some of the rows that it yields.

    Args:
        loader: any iterable of batches.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        """Remember nothing yet."""
        self.loader = loader
        self.keys: list[int] = []
        self.count = 0

    def __len__(self) -> int:
        """Number of batches, where the loader knows it."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """The batches as they are.

        Yields:
            One batch after the other.
        """
        for batch in self.loader:
            rows = _rows(batch)
            if rows is not None:
                self.count += len(rows)
                some = rows[: max(0, min(ROWS, MOST - len(self.keys)))]
                self.keys += [hash(row.tobytes()) for row in some.detach().cpu().contiguous().float().numpy()]
            yield batch


def _rows(batch: Any) -> Tensor | None:
    """The inputs of a batch, or the first tensor of them."""
    if isinstance(batch, Tensor):
        plain = batch.layout == torch.strided and batch.device.type != "meta" and not batch.is_complex()
        return batch if plain and batch.dim() > 0 else None
    parts: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        parts = (part for name, part in batch.items() if name != "labels")
    elif isinstance(batch, (list, tuple)):
        parts = batch
    return next((found for found in map(_rows, parts) if found is not None), None)


def shared_rows(training: Remembering, validation: Remembering) -> str | None:
    """What to say of validation data that are among the training data.

    Args:
        training: after it was read.
        validation: likewise.

    Returns:
        Words for the user, if most of the validation data are; None if not, or if rows repeat themselves anyway.
    """
    times, looked = Counter(training.keys), set(validation.keys)
    if not times or not looked or len(times) < (1 - ALIKE) * len(training.keys):
        return None
    # What training repeats, as blank pictures, may come up in any data.
    found = sum(times[key] == 1 for key in looked)
    # So many would be found if all were training data: of these, only some were remembered.
    expected = len(looked) * len(training.keys) / training.count
    # And so many are found anyway, of rows that are rare and yet come up again: as often as some come up twice in training.
    twice = sum(count == 2 for count in times.values())
    anyway = (2 * twice + UNSEEN) * len(looked) / len(training.keys)
    if found < ENOUGH or found - anyway < expected / 2:
        return None
    return (
        f"the validation data are among the training data: of {len(looked):,} validation inputs that were looked at, "
        f"{found:,} hold the same numbers as one of {len(training.keys):,} training inputs. Networks look surer and better on these "
        f"than they are. Pass data that they were not trained on."
    )
