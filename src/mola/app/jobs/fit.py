"""`mola fit`: from the names of networks and data to a posterior's folder.

The data are opened and checked against the networks first (`Material`), the validation data are read before the training data,
so that a wrong order of the classes is found early, and the folder is written in one step at the end.
"""

from __future__ import annotations

import platform
import re
import shutil
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mola import __version__
from mola.app.jobs.decisions import COLUMNS, decision_columns
from mola.app.jobs.folder import (
    BUNDLED,
    describe_inputs,
    holds_posterior,
    kept_scores,
    move,
    usual_alarm,
)
from mola.app.jobs.job import NAME, RULE_NAMES, WEIGHTINGS, Job, Progress
from mola.app.jobs.networks import Built, build_networks, checksum, is_whole, weight_files
from mola.app.jobs.pictures import Pictures, shown_by
from mola.app.jobs.preparation import settle
from mola.app.jobs.regression import networks_alone, noise_factors, summary
from mola.app.jobs.rows import Account, Loader
from mola.app.jobs.sets import UserSet, divided, open_set
from mola.app.options import as_document, relative, to_toml
from mola.compare.answers import Answer
from mola.compare.regression import RegressionAnswer
from mola.distributed import Team
from mola.errors import DataError, OptionError, warn
from mola.fitting import fit
from mola.laplace import STRUCTURES
from mola.likelihoods import ClassificationLikelihood
from mola.likelihoods.base import mixed
from mola.links import LINKS, as_link
from mola.network import as_batch, call, check_positions, evaluating, find_heads
from mola.options import one_of
from mola.posterior import MoLA
from mola.saving.files import partial_file, write_atomically, write_folder
from mola.saving.posterior import pack
from mola.tally import Tally
from mola.tuning import RULES, Outliers, Rule, as_rule
from mola.tuning.held_out import HeldOut, read_held_out

READING = "reading the validation data"
ROWS = 1024
"""Rows of the validation data in a chunk."""


@dataclass(frozen=True)
class FitResult:
    """The outcome of `mola fit`."""

    folder: Path
    document: dict[str, Any]
    """Content of `job.toml`."""
    account: Account
    """Inputs that were left out."""
    notes: tuple[str, ...]
    """Summary and notes of the tuning; empty without tuning."""
    replaced: bool = False
    """True if the folder held an earlier posterior."""


def make_rule(job: Job, outliers: Loader | None) -> Rule | None:
    """Return the rule that a job names, with its settings; None keeps the prior precision."""
    name = one_of(job.rule_name, RULE_NAMES, "rule")
    settings = {"confidence": ("--threshold", job.threshold), "price": ("--price", job.price)}
    given = {field: value for field, (_, value) in settings.items() if value is not None}
    for field in given:
        known = [repr(one) for one, rule in RULES.items() if hasattr(rule, field)]
        if repr(name) not in known:
            raise OptionError(f"{settings[field][0]} is for the rule {' or '.join(known)}, got the rule {name!r}.")
    if job.prior_precision != 1.0 and name != "none":
        raise OptionError(f"--prior-precision is for --rule none: the rule {name!r} chooses the prior precision.")
    if name == "distance" and not job.distances:
        raise OptionError(
            "the rule 'distance' needs the distances that --no-distances leaves out: drop one of the two."
        )
    if (name == "outliers") != (job.outliers is not None):
        raise OptionError("the rule 'outliers' and the data named by --outliers go together: give both or neither.")
    if name == "outliers":
        return Outliers([] if outliers is None else outliers)
    return None if name == "none" else replace(RULES[name], **given) if given else RULES[name]  # type: ignore[type-var]


def check_job(job: Job) -> None:
    """Refuse wrong options before any data are read."""
    if job.train is None:
        raise OptionError(
            "no training data: name them with --train (a folder of images, .npz, .csv, mnist:train, package.module:function)."
        )
    likelihood = job.meaning()
    _positions(job)
    one_of(job.structure, STRUCTURES, "structure")
    as_link(one_of(job.link, LINKS, "link"), likelihood)
    one_of(job.mixing, WEIGHTINGS, "mixing")
    rule, needs = make_rule(job, None), None
    if rule is not None and rule.needs_data:
        needs = f"rule {job.rule_name!r}"
    elif job.mixing == "stacking":
        needs = "mixing 'stacking'"
    if job.val is None and needs is not None:
        raise OptionError(
            f"the {needs} needs validation data: name them with --val, or choose --rule evidence, which needs none."
        )
    if job.rule_name in RULES:
        as_rule(job.rule_name, likelihood, job.val if RULES[job.rule_name].needs_data else None)


def run_fit(
    job: Job,
    output: Path,
    progress: Progress = lambda doing, done: None,
    *,
    bundle: bool = False,
    team: Team | None = None,
    checkpoint: Path | None = None,
) -> FitResult:
    """Fit a posterior and write its folder. Processes of a team share the data, and rank 0 writes."""
    check_job(job)
    if bundle and (not job.weights or any(map(is_whole, job.network))):
        raise OptionError(
            "--bundle copies files of --weights into the folder: networks that bring their own weights cannot be bundled."
        )
    if (job.resize or job.crop) and str(job.train).endswith((".npz", ".npy")):
        warn(f"--resize and --crop are for image files, and leave the arrays of {job.train} unchanged.")
    replaced = holds_posterior(output, checkpoint)
    if job.val is not None and job.val == job.train:
        warn(
            "the validation data are the training data: on these, networks look better and more confident than they are."
        )
    torch.manual_seed(job.seed)
    progress("loading networks", 0.0)
    count = job.classes if isinstance(job.classes, int) else None if job.classes is None else len(job.classes)
    built = build_networks(job.network, job.weights, classes=count, trust=job.trust)
    for network in built.networks:
        move(network, job.device)
    together = Team.single() if team is None else team
    account = Account()
    if job.download and not together.first:
        together.share(None)  # rank 0 downloads missing data before the others look for them
    data = Material(job, built, account, progress, together)
    if job.download and together.first:
        together.share(None)
    # Read before the training data, which may take hours: this finds a wrong order of the classes. Nothing reads them again.
    held_out = None
    if data.val is not None:
        held_out = _read_validation(built, job, data, data.loader(data.val, READING, 0.05, 0.15))
    posterior = fit(
        built.networks,
        data.loader(data.train, "fitting", 0.15, 0.7, labelled=False),
        structure=job.structure,
        prior_precision=job.prior_precision,
        weights="uniform" if job.mixing == "stacking" else job.mixing,
        link=job.link,
        head=job.head,
        progress=False,
        likelihood=job.meaning(),
        team=together,
        checkpoint=checkpoint,
        distances=job.distances,
        positions=_positions(job),
        ignore_index=job.ignore_index,
    )
    posterior = _tune(posterior, job, data, held_out)
    progress("checking", 0.85)
    measured, scores, columns = (None, None, None) if held_out is None else _measure(posterior, held_out)
    data.account = account = account.together(together)
    if bundle and together.first:
        job, built = _bundled(job, built, output)
    elif job.weights:
        # List each file by name: files added to the folder later do not belong to this posterior.
        job = replace(job, weights=tuple(str(path) for path in weight_files(job.weights)))
    document = as_document(job, "fit", output) | {"result": _result(posterior, built, data, measured, output)}
    if together.first:
        # The posterior and its job in one step; then the job once more, for people and for `mola fit --config`.
        text = to_toml(document)
        packed, tensors = pack(posterior)
        tensors |= {} if scores is None else kept_scores(scores, columns)
        write_folder(output, {**packed, "job": tomllib.loads(text)}, tensors)
        write_atomically(output / NAME, text.encode())
        if bundle:
            _forget_others(output, built.files)
    progress("done", 1.0)
    notes = () if posterior.tuning is None else (posterior.tuning.summary, *posterior.tuning.notes)
    return FitResult(output, document, account, notes, replaced)


def _positions(job: Job) -> str | int:
    return check_positions(int(job.positions) if job.positions.lstrip("-").isdigit() else job.positions)


def _read_validation(built: Built, job: Job, data: Material, val: Loader) -> HeldOut:
    names, likelihood = [job.head] * len(built.networks), job.meaning()
    with evaluating(*built.networks):
        found = find_heads(built.networks, names, data.first, likelihood)
        heads = [replace(head, ignore_index=job.ignore_index) for head in found]
        where = "validation data"
        held_out = read_held_out(built.networks, heads, val, likelihood, where=where, labelled=True, team=data.team)
    try:
        held_out.check_labels()
    except DataError as error:
        if data.classes is None:
            raise
        listed = ", ".join(data.classes[:20]) + (", ..." if len(data.classes) > 20 else "")
        raise DataError(f"{error} The order is now {listed}: give the order of the outputs with --classes.") from error
    return held_out


def _tune(posterior: MoLA, job: Job, data: Material, held_out: HeldOut | None) -> MoLA:
    outliers = None if data.outliers is None else data.loader(data.outliers, "tuning", 0.8, 0.85, labelled=False)
    rule = make_rule(job, outliers)
    if rule is not None:
        data.progress("tuning", 0.7)
        held = held_out if rule.needs_data else None
        posterior = posterior.tune(held, rule=rule, progress=False, team=data.team)
    if job.mixing == "stacking" and held_out is not None:
        posterior = posterior.reweight(held_out, progress=False, team=data.team)
    return posterior


def _measure(posterior: MoLA, held_out: HeldOut) -> tuple[dict[str, Any], NDArray[np.float64], dict[str, Tensor]]:
    # Scores of the networks alone and of the posterior, OOD scores (n,), and the columns that decisions need.
    plain, whole, team, likelihood = Tally(), Tally(), held_out.team, posterior.likelihood
    count, discrete = len(posterior.components), isinstance(likelihood, ClassificationLikelihood)
    # For regression the networks alone have the noise that does best on these data.
    factors = None if discrete else noise_factors(posterior, held_out, count)
    # Positions of one input are not independent: no guarantee would follow from them.
    decided = not posterior.is_dense and (likelihood.mutually_exclusive or not discrete)
    scores: list[Tensor] = []
    kept: list[dict[str, Tensor]] = []
    for part, labels in held_out.chunks(ROWS):
        assert labels is not None
        prediction = posterior.predict_from_features(part.phi, part.outputs)
        # The networks alone have the posterior's weights, so that only the Laplace approximations differ.
        if isinstance(likelihood, ClassificationLikelihood):
            alone = mixed(posterior.weights, [likelihood.probabilities(one) for one in part.outputs])
            plain.add(Answer(alone, likelihood=likelihood).columns(labels))
            whole.add(Answer(prediction.probs, likelihood=likelihood).columns(labels))
        else:
            plain.add(RegressionAnswer(networks_alone(posterior, prediction, count, factors)).columns(labels))
            whole.add(RegressionAnswer(prediction).columns(labels))
        scores.append(prediction.ood_score.double())
        if decided:
            kept.append(decision_columns(prediction, labels))
    columns = {
        name: team.gather(torch.cat([one[name] for one in kept]) if kept else None)
        for name in (COLUMNS[discrete] if decided else ())
    }
    everyone = team.gather(torch.cat(scores) if scores else None).numpy()
    threshold, rate = usual_alarm(everyone)
    measured = {
        "networks": summary(plain.gather(team)),
        "posterior": summary(whole.gather(team)),
        "count": len(everyone),
        "outlier_threshold": threshold,
        "false_alarm_rate": rate,
    }
    return measured, everyone, columns


def _forget_others(output: Path, kept: list[Path]) -> None:
    # Remove the weights that an older bundle left: its posterior is gone.
    names = {path.name for path in kept}
    for path in (output / BUNDLED).iterdir():
        if re.fullmatch(r"\d+(-[0-9a-f]{16})?", path.stem) and path.name not in names:
            path.unlink(missing_ok=True)


def _bundled(job: Job, built: Built, output: Path) -> tuple[Job, Built]:
    target = output / BUNDLED
    target.mkdir(parents=True, exist_ok=True)
    # Named by what they hold: the weights of the posterior that is here stay until the new one is written.
    copies = [target / f"{index}-{checksum(path)[:16]}{path.suffix}" for index, path in enumerate(built.files)]
    for path, copy in zip(built.files, copies, strict=True):
        with partial_file(copy) as partial:
            shutil.copyfile(path, partial)
    return replace(job, weights=tuple(str(copy) for copy in copies)), replace(built, files=copies)


def _result(
    posterior: MoLA, built: Built, data: Material, measured: dict[str, Any] | None, output: Path
) -> dict[str, Any]:
    return {
        "classes": list(data.classes or ()),
        "outputs": data.outputs,
        **data.inputs,
        "files": [relative(str(path), output) for path in built.files],
        "sha256": [checksum(path) for path in built.files],
        "prior_precision": list(posterior.prior_precision),
        "temperature": posterior.temperature,
        "pooling": posterior.pooling,
        "distance_exponent": posterior.distance_exponent,
        **({"noise": posterior.noise.tolist()} if not posterior.likelihood.classification else {}),
        "rule": None if posterior.tuning is None else posterior.tuning.rule,
        "train_count": posterior.components[0].require_layer("a result").sums.count,
        "has_positions": posterior.is_dense,
        "left_out": len(data.account),
        "intake": data.intake.plain(),
        "validation": measured,
        "versions": {"mola": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


class Material:
    """The sets of a job, opened and checked against the networks, with the preparation that all of them share.

    `classes` are the names in the order of the networks' outputs, `inputs` describes an input, and `first` holds a few training
    inputs.
    """

    def __init__(self, job: Job, built: Built, account: Account, progress: Progress, team: Team) -> None:
        self.job, self.account, self.progress, self.team = job, account, progress, team
        floats = [one.dtype for one in built.networks[0].parameters() if one.is_floating_point()]
        dtype = str(floats[0] if floats else torch.float32).removeprefix("torch.")
        self.intake = settle(job, built.hints, dtype)
        self.classes = job.classes if isinstance(job.classes, tuple) else built.hints.classes
        self.outputs = 0
        self.train, self.first = self._open_train(str(job.train))
        self.classes = self.classes or self.train.classes
        self.inputs = describe_inputs(self.first)
        self.outputs = self._outputs(built, self.first)
        counts: list[tuple[int, tuple[str, ...]]] = [(job.classes, ())] if isinstance(job.classes, int) else []
        for many, listed in [*counts, (len(self.classes or ()) or self.outputs, self.classes or ())]:
            if many == self.outputs:
                continue
            advice = (
                f"remove what is no class from {job.train}, or use networks with {many} outputs"
                if listed == self.train.classes and many > self.outputs
                else "name all of them, in the order of the outputs, with --classes"
            )
            names = f" ({', '.join(listed[:5])}{', ...' if many > 5 else ''})" if listed else ""
            raise DataError(f"{many} classes{names} for a network with {self.outputs} outputs: {advice}.")
        # Opened again, now that the possible labels are known.
        self.train = self._open(str(job.train), labelled=True)
        self.val = None if job.val is None else self._open(job.val, labelled=True)
        self.outliers = None if job.outliers is None else self._open(job.outliers, labelled=False)

    def _outputs(self, built: Built, first: Any) -> int:
        try:
            network, likelihood = built.networks[0].eval(), self.job.meaning()
            outputs = call(network, first)
            if outputs.dim() > 2:  # the head determines which dimension holds the classes
                with evaluating(network):
                    return find_heads([network], [self.job.head], first, likelihood)[0].outputs
            return 1 if outputs.dim() == 1 else outputs.shape[1]
        except DataError as error:
            if not isinstance(self.train, Pictures) or self.intake.shape is None:
                raise
            channels, height, width = self.intake.shape
            raise DataError(
                f"the network does not accept the images, {height}x{width} with {channels} channels: bring them to the size "
                f"that it was trained on with --resize HEIGHTxWIDTH (and --crop), to its channels with --mode RGB or L. {error}"
            ) from error

    def _open_train(self, name: str) -> tuple[UserSet, Any]:
        train = self._open(name, labelled=True)
        if isinstance(train, Pictures):
            mode, shape = shown_by(train)
            self.intake = replace(self.intake, mode=mode, shape=shape)
            train = replace(train, intake=self.intake)
        few = replace(train, intake=replace(self.intake, batch_size=min(8, self.intake.batch_size)))
        first = as_batch(next(iter(Loader(few, Account(), labelled=False))), name).inputs
        if isinstance(first, Tensor):
            self.intake = replace(self.intake, shape=tuple(first.shape[1:]))
        return train, first

    def _open(self, name: str, *, labelled: bool) -> UserSet:
        return open_set(
            name,
            self.intake,
            labelled=labelled,
            classes=self.classes,
            outputs=self.outputs or None,
            directory=self.job.data,
            seed=self.job.seed,
            download=self.job.download,
            likelihood=self.job.meaning(),
        )

    def loader(self, source: UserSet, doing: str, start: float, end: float, *, labelled: bool = True) -> Loader:
        """Return a set as a loader that reports progress between two shares of the whole work."""
        self.progress(doing, start)
        return Loader(
            divided(source, self.team),
            self.account,
            self.job.strict,
            labelled,
            lambda share: self.progress(doing, start + (end - start) * share),
            whole=self.team.size == 1,
        )
