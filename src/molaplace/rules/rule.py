"""The interface of tuning rules, and the result that a rule returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from molaplace.errors import OptionError
from molaplace.likelihoods import Likelihood
from molaplace.options import counted, one_of
from molaplace.rules.objective import Objective
from molaplace.settings import Settings


@dataclass(frozen=True)
class Tuning:
    """The result of tuning a posterior."""

    rule: str
    settings: Settings
    """The chosen settings."""
    summary: str = ""
    """Short description of the choice."""
    notes: tuple[str, ...] = ()
    """Warnings and remarks about the choice."""
    curve: dict[str, tuple[float, ...]] = field(default_factory=dict, repr=False)
    """Scores of all candidates on the validation data, keyed by name."""

    def __str__(self) -> str:
        return "\n".join(line for line in (self.summary, *self.notes) if line)


def check_tuning(tuning: object, num_networks: int) -> Tuning:
    """Return what a rule returned; raise `OptionError` unless it is a `Tuning` with the settings of one mixture of the networks."""
    if not isinstance(tuning, Tuning):
        raise OptionError(
            f"must return a mola.rules.Tuning, such as Tuning('my rule', settings); got {type(tuning).__name__}.",
            argument="rule",
        )
    settings = tuning.settings
    if not isinstance(settings, Settings):
        raise OptionError(
            f"must choose settings, such as objective.settings.at_precision(0.5); got {settings!r}.", argument="rule"
        )
    if len(settings.prior_precision) != num_networks:
        raise OptionError(
            f"must choose one prior precision for each of {counted(num_networks, 'network')}, got {settings!r}.",
            argument="rule",
        )
    return tuning


class Rule(ABC):
    """A way to choose the settings of a mixture.

    A plain function that maps an `Objective` to a `Tuning` can be used instead.
    """

    needs_data = True
    """True if the rule uses validation data."""
    needs_labels = True
    """True if the validation data must have labels."""
    needs_covariance = True
    """True if the rule tunes a Laplace approximation; False if it also tunes plain ensembles."""
    fixes_weights = False
    """True if evidence-based weights keep their values from before tuning, even though the rule changes the prior precision."""

    def applies_to(self, likelihood: Likelihood) -> bool:
        """Return True if the rule is defined for the likelihood. By default, a rule is defined for every classification likelihood."""
        return likelihood.classification

    @abstractmethod
    def __call__(self, objective: Objective) -> Tuning:
        """Choose the settings that suit the objective."""


@dataclass(frozen=True)
class FunctionRule(Rule):
    """A plain function as a rule, which uses labelled validation data and is assumed to apply to every likelihood."""

    function: Callable[[Objective], Tuning]

    def applies_to(self, likelihood: Likelihood) -> bool:
        """Return True."""
        return True

    def __call__(self, objective: Objective) -> Tuning:
        """Call the function."""
        return self.function(objective)


RULES: dict[str, Rule] = {}
"""Tuning rules by name, filled in by `molaplace.rules`."""


def rule_of(rule: Rule | str | Callable[[Objective], Tuning]) -> Rule:
    """Return the rule with the given name, a rule object itself, or a plain function as a rule."""
    if isinstance(rule, Rule):
        return rule
    if callable(rule) and not isinstance(rule, type):
        return FunctionRule(rule)
    return RULES[one_of(rule, RULES, "rule", "an object such as mola.rules.Outliers(ood_loader)")]
