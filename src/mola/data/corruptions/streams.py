"""Random numbers that belong to an image, not to its batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["Streams"]

Drawn = TypeVar("Drawn", bound=np.generic)


@dataclass(frozen=True)
class Streams:
    """One stream of random numbers for each of `count` images, the first of which has the index `first`.

    Philox is a function of a key and a counter. The key comes from what is done (seed, corruption, severity), and the
    image's index is the upper part of the counter: streams of different images never meet, and none depends on how
    many images are corrupted at once.
    """

    key: int
    first: int
    count: int

    @classmethod
    def of(cls, seed: int, corruption: str, severity: int, *, first: int, count: int) -> Streams:
        """The streams of one corruption at one severity."""
        digest = hashlib.sha256(f"{seed}/{corruption}/{severity}".encode()).digest()
        return cls(key=int.from_bytes(digest[:16], "little"), first=first, count=count)

    def __iter__(self) -> Iterator[np.random.Generator]:
        for index in range(self.first, self.first + self.count):
            yield np.random.Generator(np.random.Philox(key=self.key, counter=index << 64))

    def draw(self, one: Callable[[np.random.Generator], NDArray[Drawn]]) -> NDArray[Drawn]:
        """What `one` draws for each image, stacked; every call starts the streams anew."""
        return np.stack([one(generator) for generator in self])
