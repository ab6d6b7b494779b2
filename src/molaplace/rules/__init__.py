"""Tuning rules, which choose the prior precision and, given held-out data, the scaling of the logits."""

from molaplace.errors import OptionError
from molaplace.likelihoods import Likelihood
from molaplace.rules.calibrated import Calibrated
from molaplace.rules.distance import Distance
from molaplace.rules.evidence import Evidence
from molaplace.rules.objective import Objective
from molaplace.rules.outliers import Outliers
from molaplace.rules.rule import RULES as RULES
from molaplace.rules.rule import Rule, Tuning, rule_of
from molaplace.rules.score import Score
from molaplace.rules.temperature import Temperature
from molaplace.rules.threshold import Threshold

__all__ = [
    "Calibrated",
    "Distance",
    "Evidence",
    "Objective",
    "Outliers",
    "Rule",
    "Score",
    "Temperature",
    "Threshold",
    "Tuning",
]

RULES |= {
    "threshold": Threshold(),
    "nll": Score("nll"),
    "brier": Score("brier"),
    "ece": Score("ece"),
    "crps": Score("crps"),
    "evidence": Evidence(),
    "distance": Distance(),
    "calibrated": Calibrated(),
    "temperature": Temperature(),
}


def as_rule(rule: Rule | str | None, likelihood: Likelihood, data: object = None) -> Rule:
    """Return the rule with the given name, the given rule object itself or, if `rule` is None, the likelihood's default rule.

    Raise `OptionError` if the rule does not apply to the likelihood, if it needs validation data and none are given, or if validation
    data are given that it does not use.
    """
    rule = likelihood.default_rule if rule is None else rule
    chosen = rule_of(rule)
    label = repr(rule) if isinstance(rule, str) else type(rule).__name__
    if not chosen.applies_to(likelihood):
        known = ", ".join(repr(name) for name, rule in RULES.items() if rule.applies_to(likelihood))
        raise OptionError(
            f"{label} does not apply to likelihood {likelihood.name!r}. Use one of {known}.", argument="rule"
        )
    if chosen.needs_data and data is None:
        raise OptionError(
            f"{label} needs validation data. Pass val_loader, or use the rule 'evidence', which needs no validation data.",
            argument="rule",
        )
    if not chosen.needs_data and data is not None:
        raise OptionError(
            f"{label} uses only the training data. Omit val_loader, or choose another rule.", argument="rule"
        )
    return chosen
