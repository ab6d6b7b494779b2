"""How much training the methods that need some may do: the paper's, or what a user's machine can afford."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from mola.errors import OptionError

__all__ = ["Budget", "MimoBudget", "SwagBudget", "changed"]


@dataclass(frozen=True)
class SwagBudget:
    """Of SWAG and MultiSWAG, for each trained network.

    Raises:
        OptionError: if a number cannot be used.
    """

    learning_rate: float
    snapshots: int = 40
    images: int | None = None
    """Training images between two snapshots, and in the pass that makes BatchNorm's statistics for a draw; None is all of
    them, a snapshot an epoch."""
    batch_size: int = 512
    samples: int = 30
    """Draws from each network's Gaussian."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        _require(self.learning_rate > 0, "learning rate of SWAG", "above 0", self.learning_rate)
        _require(self.snapshots >= 2, "snapshots of SWAG", "at least 2", self.snapshots)
        _require(self.samples >= 1, "draws of SWAG", "at least 1", self.samples)
        _require(self.images is None or self.images >= 1, "images between snapshots", "at least 1", self.images)
        _require(self.batch_size >= 1, "batch size of SWAG", "at least 1", self.batch_size)

    def describe(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class MimoBudget:
    """Of a MIMO network.

    Raises:
        OptionError: if a number cannot be used.
    """

    epochs: int = 100
    members: int = 3
    batch_repetition: int = 4

    def __post_init__(self) -> None:
        """Check the numbers."""
        _require(self.epochs >= 1, "epochs of MIMO", "at least 1", self.epochs)
        _require(self.members >= 1, "members of MIMO", "at least 1", self.members)
        _require(self.batch_repetition >= 1, "batch repetition of MIMO", "at least 1", self.batch_repetition)

    def describe(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Budget:
    """Of all methods that train."""

    swag: SwagBudget
    mimo: MimoBudget = field(default_factory=MimoBudget)


Part = TypeVar("Part", SwagBudget, MimoBudget)


def changed(part: Part, text: str) -> Part:
    """A budget with some of its numbers changed, as a user writes them.

    Args:
        part: the budget to begin with.
        text: such as "snapshots=12, images=12500".

    Returns:
        The new budget.

    Raises:
        OptionError: if a name is not known, or its value is no number.
    """
    names = [one.name for one in fields(part)]
    values: dict[str, Any] = {}
    for pair in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, value = (piece.strip() for piece in pair.partition("="))
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if name not in names or not math.isfinite(number):
            message = f"expected name=number of {', '.join(names)}, separated by commas; got {pair!r}."
            raise OptionError(message)
        if name == "learning_rate":
            values[name] = number
        else:
            _require(number == int(number), name, "a whole number", number)
            values[name] = int(number)
    return replace(part, **values)


def _require(holds: bool, what: str, expected: str, found: object) -> None:
    if not holds:
        message = f"{what} must be {expected}, got {found!r}."
        raise OptionError(message)
