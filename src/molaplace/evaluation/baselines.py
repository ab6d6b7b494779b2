"""The methods with which a posterior is compared, derived from the posterior: MAP, DE, their scaled versions, LLLA, the paper's MoLA."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from molaplace.calibration.noise import scale_noise
from molaplace.component import Component
from molaplace.distributed import Team
from molaplace.errors import OptionError, collect_warnings
from molaplace.likelihoods import Gaussian
from molaplace.posterior import MoLA
from molaplace.rules import Rule, Temperature, Threshold
from molaplace.rules.held_out import HeldOut
from molaplace.rules.rule import rule_of

SINGLE, ENSEMBLE, LAPLACE, MIXTURE = "MAP", "DE", "LLLA", "MoLA"


def baselines(
    posterior: MoLA,
    val_loader: Iterable[Any] | HeldOut | None = None,
    *,
    rule: Rule | str | None = None,
    progress: bool = True,
    team: Team | None = None,
) -> dict[str, MoLA]:
    """Return the methods with which a posterior should be compared, by name, in the order of their complexity.

    Classification: "MAP" is the first network alone and "DE" the plain ensemble, with the posterior's weights; "MAP-T" and "DE-T" have a
    temperature, "DE-L" averages logits before it divides them by a temperature; "LLLA" is the posterior of the first network, and
    "MoLA (paper)" the posterior tuned by the rule of the paper. Regression: "MAP", "MAP-N", "DE", "DE-N" and "LLLA", where "-N" stands
    for a rescaled noise. A posterior of a single network has no "DE" and is itself "LLLA", so its last baseline is "LLLA (paper)".

    All methods share the posterior's networks, so `mola.evaluate` runs each network once for all of them.

    Args:
        posterior: a posterior from `mola.fit`.
        val_loader: labelled validation data, which are read once for all methods. Without them, no method is tuned, and those that only
            a tuning makes are left out.
        rule: the rule that tunes LLLA; by default, the likelihood's default rule.
        progress: whether to show a progress bar if stderr is a terminal.
        team: processes that read the validation data together. Each process reads its own shard.
    """
    if not isinstance(posterior, MoLA):
        raise OptionError(f"must be a posterior from mola.fit, got {type(posterior).__name__}.", argument="posterior")
    for component in posterior.components:
        component.require_layer("a comparison with baselines")
    count = len(posterior.components)
    data = first = None
    if val_loader is not None:
        data = posterior.read(val_loader, "validation loader", labelled=True, progress=progress, team=team)
        first = data.of_first(1)
    methods: dict[str, MoLA] = {}
    with collect_warnings():  # each tuning keeps its notes
        for name, size, held_out in ((SINGLE, 1, first), (ENSEMBLE, count, data)):
            if name == ENSEMBLE and count == 1:
                continue
            methods[name] = plain = _networks_alone(posterior, size)
            if held_out is None:
                continue
            if isinstance(plain.likelihood, Gaussian):
                methods[f"{name}-N"] = scale_noise(plain, held_out)
            if not plain.likelihood.classification:
                continue
            methods[f"{name}-T"] = plain.tune(held_out, rule=Temperature())
            if name == ENSEMBLE:
                methods[f"{name}-L"] = plain.tune(held_out, rule=Temperature("logits"))
        if count > 1:
            methods[LAPLACE] = _tuned_alone(posterior, first, rule, team)
        paper = Threshold()
        if data is not None and paper.applies_to(posterior.likelihood):
            methods[f"{MIXTURE if count > 1 else LAPLACE} (paper)"] = posterior.tune(data, rule=paper, team=team)
    return methods


def _networks_alone(posterior: MoLA, count: int) -> MoLA:
    # Return the first `count` networks, one or all, without Laplace approximations; in regression, with the noise before tuning.
    components = [
        Component(component.network, None, None, component.likelihood) for component in posterior.components[:count]
    ]
    return MoLA(components, weights=posterior.weights if count > 1 else "uniform")


def _tuned_alone(posterior: MoLA, data: HeldOut | None, rule: Rule | str | None, team: Team | None) -> MoLA:
    # Return the posterior of the first network, tuned by the rule if there are the data that it needs.
    alone = posterior.alone(0)
    chosen = rule_of(posterior.likelihood.default_rule if rule is None else rule)
    if chosen.needs_data and data is None:
        return alone
    return alone.tune(data if chosen.needs_data else None, rule=chosen, team=team)
