"""Progress of a computation, reported to a function as it proceeds."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Function that receives a description of the current step and the completed share of the work, from 0 to 1."""


def no_progress(doing: str, done: float) -> None:
    """Ignore the progress."""


def part(progress: Progress, begin: float, end: float) -> Progress:
    """Return the progress of a part of the work, which takes the share of the time from `begin` to `end`."""
    return lambda doing, done: progress(doing, begin + (end - begin) * done)
