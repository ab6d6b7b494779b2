"""`mola fit`: from names of networks and data to a posterior's folder."""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mola import __version__, storage
from mola.choices import one_of
from mola.compare import Answer, Tally
from mola.distributed import Team
from mola.errors import OptionError, warn
from mola.fitting import fit
from mola.jobs.folder import move
from mola.jobs.job import NAME, Job, relative
from mola.jobs.material import Material, Progress
from mola.jobs.networks import Built, build_networks, checksum, is_whole, weight_files
from mola.jobs.order import check_order, said, warn_of_guessing
from mola.jobs.output import BUNDLED, holds_posterior
from mola.jobs.rows import Account, Loader
from mola.jobs.toml import to_toml
from mola.laplace import STRUCTURES
from mola.links import LINKS
from mola.posterior import MoLA
from mola.prior import RULES as NAMED_RULES
from mola.prior import ConfidenceThreshold, OutlierExposure, Rule

__all__ = ["RULES", "FitResult", "make_rule", "quantiles", "run_fit"]

RULES = (*NAMED_RULES, "outliers", "none")
"""How the prior precision is chosen; none keeps what is given."""

MIXING = ("uniform", "evidence", "stacking")
USUAL = 0.95
"""Share of the validation data that the outlier threshold lets pass."""

LEVELS = (*(percent / 100 for percent in range(100)), *((990 + tenth) / 1000 for tenth in range(1, 11)))
"""Shares of the validation data whose outlier scores are kept: each percent, and in the last, where outliers lie, each tenth."""


@dataclass(frozen=True)
class FitResult:
    """What `mola fit` did.

    Attributes:
        folder: where the posterior lies.
        document: what was written to `job.toml`.
        account: what was left out.
        notes: what tuning had to say.
        replaced: whether there was a posterior in the folder before.
    """

    folder: Path
    document: dict[str, Any]
    account: Account
    notes: tuple[str, ...]
    replaced: bool = False


def make_rule(job: Job, outliers: Loader | None) -> Rule | None:
    """The rule that a job names; None keeps the prior precision.

    Args:
        job: its rule and threshold.
        outliers: data for the rule that needs some.

    Returns:
        The rule.

    Raises:
        OptionError: if it is unknown, or lacks what it needs.
    """
    one_of(job.rule, RULES, "rule")
    if job.threshold is not None and job.rule != "threshold":
        message = f"--threshold is for the rule 'threshold', got the rule {job.rule!r}."
        raise OptionError(message)
    if (job.rule == "outliers") != (job.outliers is not None):
        message = "the rule 'outliers' and the data named by --outliers go together: give both or none."
        raise OptionError(message)
    if job.rule == "none":
        return None
    if job.rule == "threshold":
        return ConfidenceThreshold(confidence=job.threshold)
    if job.rule == "outliers":
        return OutlierExposure([] if outliers is None else outliers)
    return NAMED_RULES[job.rule]


def check_job(job: Job) -> None:
    """Refuse what can be seen to be wrong before anything is read.

    Args:
        job: as the user gave it.

    Raises:
        OptionError: if something is missing or unknown.
    """
    if job.train is None:
        message = "no training data: name them with --train (a folder of images, .npz, .csv, mnist:train, package.module:function)."
        raise OptionError(message)
    one_of(job.structure, STRUCTURES, "structure")
    one_of(job.link, LINKS, "link")
    one_of(job.mixing, MIXING, "mixing")
    if job.seed >= 2**63:
        message = f"seed must be below 2**63, got {job.seed}."
        raise OptionError(message)
    make_rule(job, None)
    needs = "rule" if job.rule not in ("evidence", "none") else "mixing" if job.mixing == "stacking" else None
    if job.val is None and needs is not None:
        message = (
            f"the {needs} {getattr(job, needs)!r} needs validation data: name them with --val, or choose --rule evidence, "
            f"which needs none."
        )
        raise OptionError(message)


def run_fit(
    job: Job,
    output: Path,
    progress: Progress = lambda doing, done: None,
    *,
    bundle: bool = False,
    team: Team | None = None,
    checkpoint: Path | None = None,
) -> FitResult:
    """Fit a posterior and write its folder.

    Args:
        job: what to do.
        output: folder to write.
        progress: told what is being done, and which share of the work is done.
        bundle: whether the weights are copied into the folder, so that it can be moved.
        team: the processes that do the job together, each on its own part of the data; rank 0 writes. None is this one alone.
        checkpoint: folder for the fit under way: an interrupted one goes on.

    Returns:
        What was done.

    Raises:
        OptionError: if the output is a file, or there is nothing to bundle.
    """
    check_job(job)
    if bundle and (not job.weights or any(map(is_whole, job.network))):
        message = "--bundle copies files of --weights into the folder: networks that bring their own cannot be bundled."
        raise OptionError(message)
    replaced = holds_posterior(output, checkpoint)
    if job.val is not None and job.val == job.train:
        warn("the validation data are the training data: networks look surer and better on these than they are.")
    torch.manual_seed(job.seed)
    progress("loading networks", 0.0)
    count = job.classes if isinstance(job.classes, int) else None if job.classes is None else len(job.classes)
    built = build_networks(job.network, job.weights, classes=count, trust=job.trust)
    _move(built, job.device)
    together = Team.alone() if team is None else team
    account = Account()
    with together.work("opening the data"):
        if job.download and not together.first:
            together.share(None)  # rank 0 fetches what is missing before the others look for it
        data = Material(job, built, account, progress, together)
        if job.download and together.first:
            together.share(None)
        if data.val is not None:
            pairs = said(built.networks[0], data.loader(data.val, "checking classes", 0.05, 0.15))
            pairs = together.rows(pairs if len(pairs) else None)
            check_order(pairs, data.outputs, data.classes, str(job.val))
            warn_of_guessing(pairs, data.outputs, str(job.val))
    posterior = fit(
        built.networks,
        data.loader(data.train, "fitting", 0.15, 0.7, labelled=False),
        structure=job.structure,
        prior_precision=job.prior_precision,
        weights="uniform" if job.mixing == "stacking" else job.mixing,
        link=job.link,
        head=job.head,
        progress=False,
        team=together,
        checkpoint=checkpoint,
    )
    posterior = _tune(posterior, job, data)
    progress("checking", 0.85)
    measured: dict[str, Any] = {}
    with together.work("checking"):
        if data.val is not None:
            measured = _measure(posterior, data.loader(data.val, "checking", 0.85, 0.98), together)
        data.account = account = account.together(together)
    with together.work("writing"):
        if bundle and together.first:
            job, built = _bundled(job, built, output)
        elif job.weights:
            # The files one by one: what joins a folder later is no part of this posterior.
            job = replace(job, weights=tuple(str(path) for path in weight_files(job.weights)))
        document = job.document(output) | {"result": _result(posterior, built, data, measured, output)}
        if together.first:
            posterior.save(output)
            storage.write_atomically(output / NAME, to_toml(document).encode())
    progress("done", 1.0)
    notes = posterior.tuning.notes if posterior.tuning is not None else ()
    return FitResult(output, document, account, notes, replaced)


def _move(built: Built, device: str) -> None:
    for network in built.networks:
        move(network, device)


def _tune(posterior: MoLA, job: Job, data: Material) -> MoLA:
    outliers = None if data.outliers is None else data.loader(data.outliers, "tuning", 0.8, 0.85, labelled=False)
    rule = make_rule(job, outliers)
    if rule is not None:
        val = None if data.val is None or job.rule == "evidence" else data.loader(data.val, "tuning", 0.7, 0.8)
        posterior = posterior.tune(val, rule=rule, progress=False, team=data.team)
    if job.mixing == "stacking" and data.val is not None:
        val = data.loader(data.val, "stacking", 0.8, 0.85)
        posterior = posterior.reweight(val, progress=False, team=data.team)
    return posterior


def _measure(posterior: MoLA, val: Loader, team: Team) -> dict[str, Any]:
    """The networks alone and the posterior on the validation data, and the outlier score that most of these stay below."""
    plain, whole = Tally(), Tally()
    for batch in val:
        labels = batch["labels"] if isinstance(batch, dict) else batch[1]
        (prediction,) = posterior.predict_batches([batch])
        assert prediction.logit_mean is not None  # a mixture of Laplace approximations has logits
        # The networks alone have the posterior's weights, so that only the Laplace approximations differ.
        shares = posterior.weights.to(prediction.logit_mean)
        plain.add(Answer(torch.einsum("k,knc->nc", shares, torch.softmax(prediction.logit_mean, -1))), labels)
        whole.add(Answer(prediction.probs, ood_score=prediction.ood_score), labels)
    plain, whole = plain.together(team), whole.together(team)
    scores = whole.score
    assert scores is not None
    return {
        "count": whole.count,
        "networks": plain.labelled(),
        "posterior": whole.labelled(),
        "outlier_threshold": float(np.quantile(scores, USUAL)),
        "outlier_quantiles": quantiles(scores),
    }


def quantiles(scores: NDArray[np.float64]) -> list[list[float]]:
    """Pairs of a share and the score that this share of the inputs stays below: how scores are distributed, in a few numbers."""
    return [[level, float(value)] for level, value in zip(LEVELS, np.quantile(scores, LEVELS), strict=True)]


def _bundled(job: Job, built: Built, output: Path) -> tuple[Job, Built]:
    """Copies of the weights inside the folder, and a job that names them."""
    target = output / BUNDLED
    target.mkdir(parents=True, exist_ok=True)
    copies = [target / f"{index}{path.suffix}" for index, path in enumerate(built.files)]
    # All are copied before any is put in place: a file may itself be one of an older bundle, under another number.
    partial = [copy.with_name(f"{copy.name}.partial") for copy in copies]
    try:
        for path, part in zip(built.files, partial, strict=True):
            shutil.copyfile(path, part)
        for part, copy in zip(partial, copies, strict=True):
            part.replace(copy)
    finally:
        for part in partial:
            part.unlink(missing_ok=True)
    return replace(job, weights=tuple(str(copy) for copy in copies)), replace(built, files=copies)


def _result(posterior: MoLA, built: Built, data: Material, measured: dict[str, Any], output: Path) -> dict[str, Any]:
    return {
        "classes": list(data.classes or ()),
        "outputs": data.outputs,
        **data.inputs,
        "files": [relative(str(path), output) for path in built.files],
        "sha256": [checksum(path) for path in built.files],
        "prior_precision": list(posterior.prior_precision),
        "rule": None if posterior.tuning is None else posterior.tuning.rule,
        "train_count": posterior.components[0].require_curvature("a result")[1].factors.count,
        "left_out": len(data.account),
        "intake": data.intake.plain(),
        "validation": measured or None,
        "versions": {"mola": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
