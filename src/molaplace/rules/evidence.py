"""The rule that maximises the log marginal likelihood of the training labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from molaplace.likelihoods import Likelihood
from molaplace.rules.objective import Objective
from molaplace.rules.rule import Rule, Tuning
from molaplace.rules.search import maximise


@dataclass(frozen=True)
class Evidence(Rule):
    """The rule that maximises the log marginal likelihood of the training labels, without validation data.

    Args:
        shared: choose a single prior precision, which maximises the sum of the components' log evidences. Otherwise, a separate prior
            precision is chosen for each component.
    """

    shared: bool = True
    needs_data = False

    def applies_to(self, likelihood: Likelihood) -> bool:
        """Return True if the rule is defined for the likelihood."""
        return True

    def __call__(self, objective: Objective) -> Tuning:
        """Choose the prior precision and, for regression, the noise unless it was given."""
        networks = range(objective.num_networks)
        free = objective.likelihood.estimated
        precisions: list[float] = []
        factors: list[float] = []
        for group in [networks] if self.shared else [[index] for index in networks]:
            at_factor = partial(_largest_evidence, objective, group)
            log_factor = 0.0
            if free:
                log_factor = maximise(lambda log, at_factor=at_factor: at_factor(log)[1], -7.0, 7.0, coarse=29)  # type: ignore[misc]
            precisions += [math.exp(at_factor(log_factor)[0])] * len(group)
            factors += [math.exp(log_factor)] * len(group)
        listed = ", ".join(dict.fromkeys(f"{precision:.3g}" for precision in precisions))
        noise_factor = tuple(factors) if free else ()
        return Tuning(
            f"Evidence(shared={self.shared})",
            replace(objective.settings, prior_precision=tuple(precisions), noise_factor=noise_factor),
            f"The log evidence of the training labels is largest at prior precision {listed}.",
        )


def _largest_evidence(objective: Objective, group: Sequence[int], log_factor: float) -> tuple[float, float]:
    # Return the log of the prior precision that maximises the sum of the networks' log evidences with scaled noise, and this maximum.
    noise_factor = (math.exp(log_factor),) * objective.num_networks

    def evidence(log_precision: float) -> float:
        settings = objective.settings.at_precision(math.exp(log_precision), noise_factor=noise_factor)
        return float(objective.log_evidence(settings, group).sum())

    log_precision = maximise(evidence, math.log(1e-16), math.log(1e16))
    return log_precision, evidence(log_precision)
