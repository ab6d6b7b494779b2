"""Links of whole-network posteriors: those on moments of linearised logits, and draws of the weights themselves."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mola.errors import OptionError
from mola.links import LINKS, Link, MonteCarlo, as_link
from mola.options import one_of, whole_number
from mola.randomness import check_seed

__all__ = ["WeightDraws", "as_whole_link"]


@dataclass(frozen=True)
class WeightDraws:
    """Average the probabilities of networks with drawn weights: nothing is linearised.

    Args:
        samples: number of draws.
        seed: of the draws, unless a generator is passed with the call.

    Raises:
        OptionError: if one cannot be used.
    """

    samples: int = 30
    seed: int = 0
    name = "samples"

    def __post_init__(self) -> None:
        """Check the options."""
        object.__setattr__(self, "samples", whole_number(self.samples, "samples"))  # plain, for files
        check_seed(self.seed)

    def settings(self) -> dict[str, Any]:
        """What it takes to rebuild the link, as JSON."""
        return asdict(self)


def as_whole_link(link: str | Link | WeightDraws, samples: int = 30, seed: int = 0) -> Link | WeightDraws:
    """The link of that name, or the link itself.

    Args:
        link: "samples", a name of `mola.links.LINKS`, or an object.
        samples: number of draws of "samples".
        seed: of these draws.

    Returns:
        The link.

    Raises:
        OptionError: if it is unknown, or draws the last layer's weights alone.
    """
    draws = WeightDraws(samples, seed)
    if isinstance(link, WeightDraws):
        return link
    if isinstance(link, str) and link == draws.name:
        return draws
    if not isinstance(link, Link):
        one_of(link, (*LINKS, draws.name), "link", "a Link object")
    chosen = as_link(link)
    if isinstance(chosen, MonteCarlo) and chosen.over == "weights":
        message = (
            "MonteCarlo(over='weights') draws a last layer's weights; for all weights of a network use link='samples'."
        )
        raise OptionError(message)
    return chosen
