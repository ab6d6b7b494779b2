"""What is explored: a posterior, how its networks see pictures, and what to hold its scores against."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mola.app.explore.reference import Reference
from mola.app.explore.sight import Sight
from mola.posterior import MoLA

__all__ = ["Example", "Subject"]


@dataclass(frozen=True)
class Example:
    """A picture to begin with: bytes (channels, height, width), and what it is called."""

    name: str
    pixels: Tensor


@dataclass(frozen=True)
class Subject:
    """Everything that the page needs, whoever made it.

    Attributes:
        title: what the networks tell apart, for the page.
        source: where the posterior comes from, in words.
        posterior: a mixture of Laplace approximations.
        classes: their names.
        sight: how the networks see pictures.
        reference: outlier scores of validation data, or None where they are not known.
        examples: to begin with.
        notes: what was left out on the way, and why.
    """

    title: str
    source: str
    posterior: MoLA
    classes: tuple[str, ...]
    sight: Sight
    reference: Reference | None
    examples: tuple[Example, ...] = ()
    notes: tuple[str, ...] = ()
