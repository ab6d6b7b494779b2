"""`mola evaluate` where outputs are numbers: one network, the ensemble, LLLA and MoLA on a user's own test data."""

from __future__ import annotations

import platform
import time
import warnings
from dataclasses import replace
from typing import Any

import torch

from mola import __version__
from mola.app.jobs.fit import make_rule
from mola.app.jobs.folder import PosteriorFolder
from mola.app.jobs.job import Progress
from mola.app.jobs.numbers import MEASURES, best_noise, errors, measures, summary
from mola.app.jobs.rows import Account, Loader
from mola.app.jobs.sets import divided
from mola.compare.report.tables import Column, Table, make_table
from mola.distributed import Team
from mola.errors import MolaWarning, OptionError
from mola.likelihood import Gaussian
from mola.network import undisturbed
from mola.regression import RegressionMoLA
from mola.regression_prediction import RegressionPrediction
from mola.tuning.candidates import HeldOut, read_held_out

__all__ = ["numbers_table", "run_evaluate_numbers"]

SINGLE, ENSEMBLE, LAPLACE, MIXTURE = "MAP", "DE", "LLLA", "MoLA"


def run_evaluate_numbers(
    fitted: PosteriorFolder,
    test: str,
    progress: Progress = lambda doing, done: None,
    *,
    val: str | None = None,
    strict: bool = False,
    directory: str | None = None,
    team: Team | None = None,
) -> tuple[dict[str, Any], Account]:
    """Compare the methods on the same test data.

    The networks alone have the noise that does best on the validation data, for one network and for the ensemble apart; LLLA is
    tuned by the posterior's rule.

    Args:
        fitted: an opened posterior.
        test: data with targets, as the user names them.
        progress: told what is being done, and which share of the work is done.
        val: data with targets to choose noise on; None takes those that the posterior was tuned on.
        strict: whether an input that cannot be used is an error.
        directory: that holds the built-in sets.
        team: the processes that do it together, each on its own part of every set. None is this one alone.

    Returns:
        The document that is written, the same for every process, and what was left out.

    Raises:
        OptionError: if there are no validation data.
    """
    began, posterior = time.perf_counter(), fitted.posterior
    assert isinstance(posterior, RegressionMoLA)
    together, account = Team.alone() if team is None else team, Account()
    tuned_on = val or fitted.job.val
    if tuned_on is None:
        message = "numbers need validation data for the noise of the networks alone: name some with --val."
        raise OptionError(message)

    def read(name: str, said: bool, doing: str, share: float) -> HeldOut:
        progress(doing, share)
        source = fitted.open_set(name, labelled=True, directory=directory, said=said)
        loader = Loader(divided(source, together), account, strict, True, lambda _: None, whole=together.size == 1)
        heads = [component.head for component in posterior.components]
        posterior.check_networks()
        with together.work(doing), undisturbed(*posterior.networks):
            return read_held_out(
                posterior.networks,
                heads,
                loader,
                where=f"{doing} data",
                labelled=True,
                progress=False,
                team=together,
                likelihood=posterior.likelihood,
            )

    held, data = read(tuned_on, val is not None, "validation", 0.0), read(test, True, "test", 0.4)
    progress("comparing", 0.8)
    single, notes = posterior, []
    if len(posterior.components) > 1:
        single = RegressionMoLA(posterior.components[:1], posterior.link)
        rule = make_rule(fitted.job, None)
        if rule is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", MolaWarning)  # kept in the notes
                first = replace(held, features=held.features[:1], logits=held.logits[:1])
                single = single.tune(
                    None if fitted.job.rule == "evidence" else first, rule=rule, progress=False, team=together
                )
    for name, one in ((LAPLACE, single), (MIXTURE, posterior)):
        notes += [] if one.tuning is None else [f"{name}: {note}" for note in one.tuning.notes]
    with together.work("comparing"):
        found = _compared(posterior, single, held, data)
        account = account.together(together)
    methods = {name: {"scores": summary(rows), "errors": errors(rows)} for name, rows in found.items()}
    document = {
        "test": test,
        "validation": tuned_on,
        "count": len(next(iter(found.values()))),
        "methods": methods,
        "notes": notes,
        "posterior": str(fitted.folder),
        "seconds": time.perf_counter() - began,
        "versions": {"mola": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    progress("done", 1.0)
    return document, account


def _compared(
    posterior: RegressionMoLA, single: RegressionMoLA, held: HeldOut, data: HeldOut
) -> dict[str, torch.Tensor]:
    """Rows of measures of every method, over the data of all processes."""
    team, units = data.team, posterior.likelihoods[0].in_units
    assert data.labels is not None
    assert held.labels is not None
    targets, known = units(data.labels), units(held.labels)

    def rows(said: RegressionPrediction) -> torch.Tensor:
        return team.rows(measures(said, targets) if len(data) else None)

    whole, before = posterior.on_held_out(data), posterior.on_held_out(held)
    found = {}
    for name, count in ((SINGLE, 1), (ENSEMBLE, len(posterior.components))):
        if name == ENSEMBLE and count == 1:
            continue
        weights = posterior.weights[:count] / posterior.weights[:count].sum()
        means = team.rows(before.component_mean[:count].transpose(0, 1) if len(held) else None).transpose(0, 1)
        noise = best_noise(weights, means, team.rows(known if len(held) else None))
        alone = Gaussian(noise=tuple(noise.tolist()))
        found[name] = rows(RegressionPrediction.of_means(whole.component_mean[:count], weights, alone))
    if single is posterior:
        return {**found, LAPLACE: rows(whole)}
    first = replace(data, features=data.features[:1], logits=data.logits[:1])
    return {**found, LAPLACE: rows(single.on_held_out(first)), MIXTURE: rows(whole)}


def numbers_table(document: dict[str, Any]) -> Table:
    """The document's scores as a table."""
    names = {"rmse": "RMSE", "nll": "NLL", "crps": "CRPS", "coverage": "in 90 % intervals %", "std": "mean std."}
    lower = ("rmse", "nll", "crps")
    columns = [
        Column(names[key], better="low" if key in lower else None, digits=4 if key != "coverage" else 1)
        for key in MEASURES
    ]
    values = {
        name: [one["scores"][key] * (100 if key == "coverage" else 1) for key in MEASURES]
        for name, one in document["methods"].items()
    }
    caption = (
        f"{document['count']:,} inputs, targets in their own units. The networks alone have the noise that does best on the "
        f"validation data."
    )
    return make_table("On the test data", caption, columns, values)
