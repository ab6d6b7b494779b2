"""The interface of tuning rules, and the result that a rule returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from molaplace.errors import warn

if TYPE_CHECKING:
    from molaplace.likelihoods import Likelihood
    from molaplace.posterior import MoLA
    from molaplace.rules.held_out import HeldOut


def warned(note: str) -> str:
    """Issue a warning, and return its text for the notes of a `Tuning`."""
    warn(note)
    return note


@dataclass(frozen=True)
class Tuning:
    """The result of tuning a posterior."""

    rule: str
    prior_precision: tuple[float, ...]
    """Prior precision of each component."""
    summary: str = ""
    """Short description of the choice."""
    notes: tuple[str, ...] = ()
    """Warnings and remarks about the choice."""
    curve: dict[str, tuple[float, ...]] = field(default_factory=dict, repr=False)
    """Scores of all candidates on the validation data, keyed by name."""
    temperature: float = 1.0
    pooling: float = 1.0
    distance_exponent: float = 0.0
    onset: float = 1.0
    noise_factors: tuple[float, ...] = ()
    """Factor by which each component's noise is multiplied; empty unless a rule for regression chose the noise."""

    def __str__(self) -> str:
        return "\n".join(line for line in (self.summary, *self.notes) if line)

    def as_json(self) -> dict[str, Any]:
        """Return the tuning as a dictionary that can be written as JSON."""
        return asdict(self)

    @staticmethod
    def from_json(entry: dict[str, Any]) -> Tuning:
        """Rebuild the tuning from a dictionary returned by `as_json`."""
        tuples = {name: tuple(entry[name]) for name in ("prior_precision", "notes", "noise_factors")}
        curve = {name: tuple(values) for name, values in entry["curve"].items()}
        return Tuning(**(entry | tuples | {"curve": curve}))


class Rule:
    """A way to choose the prior precision and the scaling of the logits.

    A plain function `(posterior, data) -> Tuning` can be used instead.
    """

    needs_data = True
    """True if the rule uses validation data."""
    needs_labels = True
    """True if the validation data must have labels."""
    fixes_weights = False
    """True if evidence-based weights keep their values from before tuning, even though the rule changes the prior precision."""

    def applies_to(self, likelihood: Likelihood) -> bool:
        """Return True if the rule is defined for the likelihood. By default, a rule is defined for every classification likelihood."""
        return likelihood.classification

    def __call__(self, posterior: MoLA, data: HeldOut) -> Tuning:
        """Choose the prior precision and the scaling of the logits.

        Args:
            posterior: the posterior at its initial prior precision, with temperature 1, pooling coefficient 1 and distance exponent 0.
            data: features and outputs of the validation data; None if `needs_data` is False.
        """
        raise NotImplementedError
