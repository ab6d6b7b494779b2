"""Rules by name, whether they have what they need, and how the processes of a team choose together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mola.distributed import Team
from mola.errors import OptionError
from mola.likelihood import CATEGORICAL, Likelihood
from mola.options import one_of
from mola.tuning.candidates import HeldOut, Problem, Tuning
from mola.tuning.distance import Distance
from mola.tuning.rules import PLAIN_RULES, ConfidenceThreshold, Evidence, OutlierExposure, Rule, ValidationScore

RULES: dict[str, Rule] = PLAIN_RULES | {"distance": Distance()}
"""Rules that have a name: those that need no settings."""


def as_rule(rule: Rule | str | None, val_loader: object = None, likelihood: Likelihood = CATEGORICAL) -> Rule:
    """The rule of that name, or the rule itself; None is the likelihood's own, for classes the paper's."""
    if isinstance(rule, str):
        one_of(rule, RULES, "rule", "an object such as mola.Evidence()")
        if rule not in likelihood.rules:
            raise OptionError(
                f"rule {rule!r} means nothing for likelihood {likelihood.name!r}: use one of {', '.join(likelihood.rules)}."
            )
        return RULES[rule]
    if hasattr(val_loader, "choose") or not (rule is None or (hasattr(rule, "choose") and not isinstance(rule, type))):
        raise OptionError(
            f"the rule must be one of {', '.join(RULES)}, or an object such as mola.Evidence(), and is passed as rule=...; got "
            f"val_loader {type(val_loader).__name__}, rule {rule!r}."
        )
    return RULES[likelihood.default_rule] if rule is None else rule


def check_rule(rule: Rule | str | None, val_loader: object, likelihood: Likelihood = CATEGORICAL) -> None:
    """Refuse a rule that lacks what it needs before the training data are read.

    Args:
        rule: as the user gave it.
        val_loader: the validation data, or None.
        likelihood: what the outputs mean.
    """
    chosen = as_rule(rule, val_loader, likelihood)
    name = repr(rule) if isinstance(rule, str) else type(chosen).__name__
    if isinstance(chosen, Evidence) and val_loader is not None:
        raise OptionError(
            f"the rule {name} uses the training data alone: leave val_loader out, or choose another rule."
        )
    if (
        rule is not None
        and val_loader is None
        and isinstance(chosen, (ConfidenceThreshold, ValidationScore, OutlierExposure, Distance))
    ):
        raise OptionError(
            f"the rule {name} needs validation data: pass val_loader, or choose 'evidence', which needs none."
        )


def choose_together(
    rule: Rule | str | None,
    problem: Problem,
    val_loader: Iterable[Any] | HeldOut | None,
    team: Team,
    check: Callable[[], None],
) -> Tuning:
    """What a rule chooses; of several processes, each of which reads its own shard, what rank 0 chooses.

    Args:
        rule: as for `as_rule`.
        problem: the mixture; what it reads must belong to the same team.
        val_loader: this process's shard of the validation data, or what was read of it, or None.
        team: the processes.
        check: whether the networks are still those that were fitted; called where no data are read, which would tell.

    Returns:
        The choice, to the same bits on every rank.
    """
    chosen = as_rule(rule, val_loader, problem.likelihood)
    with team.work("tune"):
        team.agree({"rule": type(chosen).__name__, "components": len(problem.spectra), "link": problem.link.name})
        if val_loader is None:
            check()
        data: Any = val_loader  # rules hand it on to `problem.read`, which knows both
        tuning = chosen.choose(problem, data)
        # Sums are the same everywhere, eigenvectors need not be: machines differ.
        document, precisions = team.share([tuning.as_json(), tuning.prior_precision])
        return tuning if team.size == 1 else Tuning.from_json(document, tuple(precisions))
