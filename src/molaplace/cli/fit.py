"""`molaplace fit`: fit a posterior to the user's networks and data, and write its folder.

First, the data are opened and checked against the networks (`open_data`). The validation data are read before the training data,
so that a wrong class order is found early. Finally, the folder is written atomically.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import molaplace as mola
from molaplace.cli.decisions import default_alarm
from molaplace.cli.folder import move
from molaplace.cli.job import NAME, Job
from molaplace.cli.networks import PROCESSOR, BuiltNetworks, build_networks, is_folder
from molaplace.cli.options import to_toml
from molaplace.data.dataset import Dataset, Loader, SkippedInputs
from molaplace.data.image_files import ImageDataset, most_frequent_form
from molaplace.data.opening import open_dataset
from molaplace.data.preprocessing import Preprocessing
from molaplace.distributed import Team
from molaplace.errors import DataError, OptionError, collect_warnings
from molaplace.evaluation import PredictionColumns, measured
from molaplace.likelihoods import Likelihood
from molaplace.links import as_link
from molaplace.network import Captured, Head, Layout, as_batch, check_positions, find_heads
from molaplace.options import counted, listed
from molaplace.posterior import MoLA
from molaplace.progress import Progress, no_progress, part
from molaplace.rules import RULES, as_rule
from molaplace.rules.held_out import HeldOut, read_held_out
from molaplace.saving.bundle import (
    FILE,
    NETWORKS,
    SCORE,
    WEIGHTS,
    WITH_NETWORKS,
    Contents,
    InputForm,
    Source,
    save_bundle,
    thinned,
    validation_columns,
)
from molaplace.saving.files import check_folder, check_writable
from molaplace.saving.posterior import KIND

LAST = (FILE, NAME)
"""Files that complete the folder."""


def check_job(job: Job) -> None:
    """Raise `OptionError` for invalid options before any data are read."""
    if job.train is None:
        raise OptionError(
            "there are no training data. Pass --train (a folder of images, .npz, .csv, or package.module:function)."
        )
    likelihood = job.make_likelihood()
    job.prepare(Preprocessing())
    _positions(job)
    as_link(job.link, likelihood)
    rule = job.make_rule()
    if job.val is None and job.mixing == "stacking":
        raise OptionError("--mixing stacking needs validation data. Pass --val, or use --mixing evidence.")
    if job.val is None and rule is not None and rule.needs_data:
        subject = f"the default rule, {job.rule_name}," if job.rule is None else f"--rule {job.rule_name}"
        raise OptionError(f"{subject} needs validation data. Pass --val, or use --rule evidence.")
    if job.rule_name in RULES:
        as_rule(job.rule_name, likelihood, job.val if RULES[job.rule_name].needs_data else None)


def run_fit(job: Job, progress: Progress = no_progress, team: Team | None = None) -> dict[str, Any]:
    """Fit a posterior, write its folder, and return a summary as plain values.

    The processes in a team share the data, and rank 0 writes the folder. In the summary, "result" is the result stored in
    `job.toml`, "notes" contains the summary of the tuning followed by its notes, and "replaced" is true if the folder contained
    an earlier posterior.
    """
    check_job(job)
    check_writable(job.output)
    ignored = () if job.checkpoint is None else (job.checkpoint.name,)  # left by an interrupted fit
    kind = WITH_NETWORKS if _is_bundled(job) else KIND
    check_folder(job.output, kind, LAST, overwrite=job.overwrite, ignored=ignored)
    replaced = (job.output / FILE).exists()
    torch.manual_seed(job.seed)
    progress("loading networks", 0.0)
    count = len(job.classes) if isinstance(job.classes, tuple) else job.classes
    built = build_networks(job.network, job.weights, classes=count)
    for network in built.networks:
        move(network, job.device)
    team = team or Team.single()
    data = open_data(job, built)
    skipped = SkippedInputs()

    def loader(source: Dataset, doing: str, start: float, end: float, *, labelled: bool) -> Loader:
        # Return a loader that reads a set and reports progress from `start` to `end`, as fractions of the total work.
        reading = partial(part(progress, start, end), doing)
        reading(0.0)
        return Loader(source, skipped, job.strict, labelled, reading, team)

    # The validation data are read first, and only once. A wrong class order is thus found before the pass over the training data,
    # which may take hours.
    held_out = None
    if data.val is not None:
        val = loader(data.val, "reading the validation data", 0.05, 0.15, labelled=True)
        held_out = _read_validation(built.networks, data, val, job.make_likelihood())
    posterior = mola.fit(
        built.networks,
        loader(data.train, "fitting", 0.15, 0.7, labelled=False),
        structure=job.structure,
        prior_precision=job.prior_precision,
        weights="uniform" if job.mixing == "stacking" else job.mixing,
        link=job.link,
        head=job.head,
        progress=False,
        likelihood=job.make_likelihood(),
        team=team,
        checkpoint=job.checkpoint,
        distances=job.distances,
        positions=_positions(job),
        ignore_index=job.ignore_index,
    )
    progress("tuning", 0.7)
    outliers = None if data.outliers is None else loader(data.outliers, "tuning", 0.8, 0.85, labelled=False)
    posterior = _tune(posterior, job, outliers, held_out, team)
    progress("checking", 0.85)
    validation, columns = (None, {}) if held_out is None else _measure(posterior, held_out)
    skipped = skipped.together(team)
    result = _result(posterior, data, validation, len(skipped))
    if team.first:
        _write(posterior, job, built, data, result, columns)
    progress("done", 1.0)
    return {
        "folder": str(job.output),
        "result": result,
        "notes": [] if posterior.tuning is None else [posterior.tuning.summary, *posterior.tuning.notes],
        "replaced": replaced,
        "left_out": skipped.left_out,
    }


def _positions(job: Job) -> str | int:
    return check_positions(int(job.positions) if job.positions.lstrip("-").isdigit() else job.positions)


def _read_validation(networks: Sequence[nn.Module], data: FitData, val: Loader, likelihood: Likelihood) -> HeldOut:
    held_out = read_held_out(
        networks, data.heads, val, likelihood, where="validation data", labelled=True, team=val.team
    )
    try:
        held_out.check_labels()
    except DataError as error:
        if data.classes is None:
            raise
        raise DataError(
            f"{error} The current order is {listed(data.classes, 20)}. With --classes, pass the class names in the order of the outputs."
        ) from error
    return held_out


def _tune(posterior: MoLA, job: Job, outliers: Loader | None, held_out: HeldOut | None, team: Team) -> MoLA:
    rule = job.make_rule(outliers)
    if rule is not None:
        with collect_warnings():  # the command prints the notes from tuning itself
            posterior = posterior.tune(held_out if rule.needs_data else None, rule=rule, progress=False, team=team)
    if job.mixing == "stacking" and held_out is not None:
        posterior = posterior.reweight(held_out, progress=False, team=team)
    return posterior


def _measure(posterior: MoLA, held_out: HeldOut) -> tuple[dict[str, Any], dict[str, Tensor]]:
    # Return metrics of the posterior, and the values that decisions need for each example.
    predictions = PredictionColumns()
    chunks: list[dict[str, Tensor]] = []
    for chunk in held_out.chunks():
        assert chunk.labels is not None
        # The rows end with the constant 1 already, so they need no head. They were checked when they were captured.
        rows = Captured([None] * len(chunk.phi), chunk.phi, chunk.outputs, Layout.of(chunk.outputs[0], -1))
        prediction = posterior.make_prediction(rows)
        predictions.add(prediction, chunk.labels)
        chunks.append(validation_columns(posterior, prediction, chunk.labels))
    columns = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
    count = len(columns[SCORE])
    columns = thinned(columns)
    threshold, rate = default_alarm(columns[SCORE])
    metrics = {name: measurement.value for name, measurement in measured(predictions).items()}
    return {"count": count, "outlier_threshold": threshold, "false_alarm_rate": rate, "metrics": metrics}, columns


def _write(
    posterior: MoLA, job: Job, built: BuiltNetworks, data: FitData, result: dict[str, Any], columns: dict[str, Tensor]
) -> None:
    # Write the bundle, which contains the job, and the options in their own file, for human readers and for `molaplace fit --config`.
    # The job lists individual files, because files added to a folder later do not belong to this posterior.
    output = job.output
    count = len(built.networks)
    names = list(job.network) * (count // len(job.network))
    builds = [None if is_folder(name) else name for name in names]
    files = iter(built.files)
    places = [Path(name) if build is None else next(files, None) for name, build in zip(names, builds, strict=True)]
    bundled = _is_bundled(job)
    if bundled:
        folders = [output / NETWORKS / str(index) for index in range(count)]
        places = [folder if build is None else folder / WEIGHTS for folder, build in zip(folders, builds, strict=True)]
    used = [str(place) if build is None else build for place, build in zip(places, builds, strict=True)]
    weights = tuple(str(place) for place, build in zip(places, builds, strict=True) if build and place)
    network = tuple(used[:1] if len(set(used)) == 1 else used)
    options = replace(job, network=network, weights=weights)
    stored = {
        name: value for name, value in result.items() if name not in ("classes", "form", "inputs", "preprocessing")
    }
    contents = Contents(
        networks=tuple(
            Source.of(network, build, _relative(place, output))
            for network, build, place in zip(built.networks, builds, places, strict=True)
        ),
        classes=data.classes or (),
        inputs=InputForm.of(data.first),
        preparation=data.preprocessing,
        made=_from_anywhere(options).as_document() | {"result": stored},
    )

    def write(new: Path) -> None:
        (new / NAME).write_text(to_toml(options.as_document()), encoding="utf-8")
        for index, name in enumerate(names):
            processor = Path(name).expanduser() / PROCESSOR
            if bundled and builds[index] is None and processor.is_file():
                shutil.copyfile(processor, new / NETWORKS / str(index) / PROCESSOR)

    save_bundle(
        posterior, output, contents, columns, networks=bundled, build=builds, write=write, last=(NAME,), overwrite=True
    )  # as checked before the fit


def _from_anywhere(job: Job) -> Job:
    # The names of data, so that they are found from any folder.
    def lasting(name: str | None) -> str | None:
        return str(Path(name).resolve()) if name and Path(name).exists() else name

    return replace(job, train=lasting(job.train), val=lasting(job.val), outliers=lasting(job.outliers))


def _relative(path: Path | None, folder: Path) -> str | None:
    return None if path is None else os.path.relpath(path.expanduser().resolve(), folder.resolve())


def _is_bundled(job: Job) -> bool:
    # Return whether the networks are copied into the folder: as asked, or because they are there from an earlier fit.
    earlier = (job.output / NETWORKS).resolve()
    paths = [Path(name).expanduser().resolve() for name in (*job.weights, *job.network)]
    return job.bundle or any(earlier in (path, *path.parents) for path in paths)


def _result(posterior: MoLA, data: FitData, validation: dict[str, Any] | None, left_out: int) -> dict[str, Any]:
    form = InputForm.of(data.first)
    return {
        "classes": list(data.classes or ()),
        "outputs": data.heads[0].outputs,
        "form": form.form,
        "inputs": [asdict(tensor) for tensor in form.tensors],
        **posterior.settings.as_json(),
        **({"noise": posterior.noise.tolist()} if not posterior.likelihood.classification else {}),
        "rule": None if posterior.tuning is None else posterior.tuning.rule,
        "train_count": posterior.components[0].require_layer("a result").sums.count,
        "has_positions": posterior.is_dense,
        "left_out": left_out,
        "preprocessing": data.preprocessing.plain(),
        "images": data.preprocessing.describe() if data.train.has_pixels else "",
        "validation": validation,
        "versions": {"molaplace": mola.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }


# --- the data --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FitData:
    """The data sets for a job, opened and checked against the networks, with one preparation."""

    train: Dataset
    val: Dataset | None
    outliers: Dataset | None
    preprocessing: Preprocessing
    classes: tuple[str, ...] | None
    """Class names in the order of the networks' outputs."""
    heads: list[Head]
    """The last layer of each network."""
    first: Any
    """A small batch of training inputs."""


def open_data(job: Job, built: BuiltNetworks) -> FitData:
    """Open the data sets, prepare their inputs as the networks need them, and find the networks' last layers."""
    floats = [parameter.dtype for parameter in built.networks[0].parameters() if parameter.is_floating_point()]
    dtype = str(floats[0] if floats else torch.float32).removeprefix("torch.")
    preprocessing = job.prepare(replace(built.hints, dtype=dtype))
    classes = job.classes if isinstance(job.classes, tuple) else built.classes
    meaning: dict[str, Any] = {"likelihood": job.make_likelihood(), "seed": job.seed}
    train = open_dataset(str(job.train), preprocessing, labelled=True, classes=classes, **meaning)
    if isinstance(train, ImageDataset):
        mode, shape = most_frequent_form(train)
        preprocessing = replace(preprocessing, mode=mode, shape=shape)
    few = replace(train, preprocessing=replace(preprocessing, batch_size=min(8, preprocessing.batch_size)))
    first = as_batch(next(iter(Loader(few, SkippedInputs(), labelled=False))), train.name).inputs
    if isinstance(first, Tensor):
        preprocessing = replace(preprocessing, shape=tuple(first.shape[1:]))
    heads = _find_heads(built.networks, job, first, preprocessing.shape if isinstance(train, ImageDataset) else None)
    outputs = heads[0].outputs
    names = classes or train.classes or ()
    count = job.classes if isinstance(job.classes, int) else len(names) or outputs
    if count != outputs or len(names) not in (0, outputs):
        passed = f"{counted(len(names), 'class', 'classes')} ({listed(names, 5)})" if names else f"--classes {count}"
        raise DataError(
            f"got {passed} for a network with {counted(outputs, 'output')}. Pass all class names, in the order of the outputs, with "
            f"--classes, or choose other data or networks."
        )

    def opened(name: str | None, *, labelled: bool) -> Dataset | None:
        if name is None:
            return None
        return open_dataset(name, preprocessing, labelled=labelled, classes=names or None, outputs=outputs, **meaning)

    return FitData(
        train=replace(train, preprocessing=preprocessing),
        val=opened(job.val, labelled=True),
        outliers=opened(job.outliers, labelled=False),
        preprocessing=preprocessing,
        classes=names or None,
        heads=heads,
        first=first,
    )


def _find_heads(
    networks: Sequence[nn.Module], job: Job, inputs: Any, image_shape: tuple[int, ...] | None
) -> list[Head]:
    try:
        heads, _ = find_heads(networks, [job.head] * len(networks), inputs, job.make_likelihood())
    except DataError as error:
        if image_shape is None:
            raise
        channels, height, width = image_shape
        raise DataError(
            f"the network does not accept images of {height}x{width} pixels with {counted(channels, 'channel')}. Use --resize "
            f"HEIGHTxWIDTH (and --crop) to set the size it was trained on, and --mode RGB or L to set its channels. {error}"
        ) from error
    return [replace(head, ignore_index=job.ignore_index) for head in heads]
