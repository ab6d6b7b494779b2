"""A set divided among processes: each reads its own part, and nothing is read by two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from mola.app.jobs.pictures import Pictures
from mola.app.jobs.rows import Rows, Set
from mola.distributed import Team

__all__ = ["Dealt", "divided", "in_turns", "some_of"]


@dataclass(frozen=True)
class Dealt:
    """The batches of a set, dealt out in turns: for sets that are read from start to end.

    Attributes:
        source: the whole set, which every process reads.
        rank: of this process.
        size: number of processes.
    """

    source: Set
    rank: int
    size: int

    @property
    def name(self) -> str:
        """As the user named the set."""
        return self.source.name

    @property
    def count(self) -> int | None:
        """About how many inputs there are."""
        return None if self.source.count is None else self.source.count // self.size

    def __iter__(self) -> Iterator[Rows]:
        """This process's batches."""
        return islice(iter(self.source), self.rank, None, self.size)


def divided(source: Set, team: Team) -> Set:
    """This process's part of a set; image files are divided before they are decoded."""
    if team.size == 1:
        return source
    if not isinstance(source, Pictures):
        return Dealt(source, team.rank, team.size)
    return some_of(source, team.shard(range(source.count)))


def in_turns(source: Set, team: Team) -> Set:
    """This process's batches of a set, of which every process takes one in turn; image files are divided before they are decoded."""
    if team.size == 1:
        return source
    if not isinstance(source, Pictures):
        return Dealt(source, team.rank, team.size)
    size = source.intake.batch_size
    starts = range(team.rank * size, source.count, team.size * size)
    return some_of(source, [place for start in starts for place in range(start, min(start + size, source.count))])


def some_of(source: Pictures, places: Sequence[int]) -> Pictures:
    """Some of the pictures, in this order."""
    now = {place: index for index, place in enumerate(places)}
    return replace(
        source,
        paths=tuple(source.paths[place] for place in places),
        names=tuple(source.names[place] for place in places),
        labels=None if source.labels is None else source.labels[list(places)],
        problems={now[place]: words for place, words in source.problems.items() if place in now},
    )
