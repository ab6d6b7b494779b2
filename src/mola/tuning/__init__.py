"""Choose the prior precision and the scaling of logits on held-out data."""

from mola.errors import OptionError
from mola.likelihoods import Likelihood
from mola.options import one_of
from mola.tuning.calibrated import Calibrated
from mola.tuning.distance import Distance
from mola.tuning.held_out import HeldOut, read_held_out
from mola.tuning.rules import PLAIN_RULES, Evidence, Outliers, Score, Threshold
from mola.tuning.tuning import Rule, Tuning

__all__ = [
    "RULES",
    "Calibrated",
    "Distance",
    "Evidence",
    "HeldOut",
    "Outliers",
    "Rule",
    "Score",
    "Threshold",
    "Tuning",
    "as_rule",
    "read_held_out",
]

RULES: dict[str, Rule] = PLAIN_RULES | {"distance": Distance(), "calibrated": Calibrated()}
"""Rules by name."""


def as_rule(rule: Rule | str | None, likelihood: Likelihood, data: object = None) -> Rule:
    """The rule of that name, or the rule itself; None is the likelihood's default. Checks that it has the data that it needs."""
    name = likelihood.rules[0] if rule is None else rule
    if isinstance(name, str):
        one_of(name, RULES, "rule", "an object such as mola.rules.Evidence()")
        if name not in likelihood.rules:
            raise OptionError(
                f"rule {name!r} does not apply to likelihood {likelihood.name!r}: use one of {', '.join(likelihood.rules)}."
            )
        chosen = RULES[name]
    elif callable(name) and not isinstance(name, type):
        chosen = name
    else:
        raise OptionError(
            f"rule must be one of {', '.join(RULES)}, or an object such as mola.rules.Evidence(); got {rule!r}."
        )
    needs_data = getattr(chosen, "needs_data", True)
    label = repr(name) if isinstance(name, str) else type(chosen).__name__
    if needs_data and data is None:
        raise OptionError(f"rule {label} needs validation data: pass val_loader, or use 'evidence', which needs none.")
    if not needs_data and data is not None:
        raise OptionError(f"rule {label} uses the training data alone: leave val_loader out, or choose another rule.")
    return chosen
