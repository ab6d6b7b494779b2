"""A posterior's folder: where it may be written, what it holds, and how it is opened again.

The posterior's document holds the job as well: its options, and under `result` what the fit determined (classes, shape of the
inputs, checksums of the weights, alarm threshold). Both are replaced in one step, so that no posterior is used with the
preparation of another. The `job.toml` next to it is for people and for `mola fit --config`; only its paths are read back.

Sorted OOD scores of the validation data are saved with the posterior's tensors, for other false-alarm rates, together with the
columns that other decisions need (`mola.app.jobs.decisions`).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mola.app.jobs.code import check_code, check_values
from mola.app.jobs.job import NAME, Job, job_of, read_job
from mola.app.jobs.networks import build_networks, check_unchanged, checksum, is_whole
from mola.app.jobs.preparation import Intake
from mola.app.jobs.sets import UserSet, is_own_function, open_set
from mola.app.options import check_writable, options_of
from mola.decisions.alarm import alarm_rank, alarm_threshold
from mola.errors import DataError, OptionError, StorageError, warn
from mola.lab.models import MODELS
from mola.laplace.distance import COUNTS, DIRECTIONS
from mola.posterior import MoLA
from mola.saving import files
from mola.saving.posterior import KIND, SCHEMA, load_posterior
from mola.saving.schema import Optional, check

Moved = TypeVar("Moved", bound=nn.Module)

RESULT = {
    "classes": [str],
    "outputs": int,
    "form": str,
    "inputs": [{"name": str, "shape": [int], "dtype": str}],
    "files": [str],
    "sha256": [str],
    "intake": {"batch_size": int, "dtype": str, "workers": int, "mean": [float], "std": [float]},
}
LARGEST_INPUT = 2**28
"""Values of one input; a document with more is damaged."""
BUNDLED = "weights"
"""Folder for copies of the weights, inside a posterior's folder."""

LEFT_BEHIND = re.compile(r"\..*|tensors-[0-9a-f]{16}\.safetensors")
"""Hidden files, and files of an interrupted fit."""

FALSE_ALARMS = 0.05
"""Default false-alarm rate."""

MOST_SCORES = 100_000
"""Scores to keep. Of more scores, evenly spaced ranks are kept, the largest score, and the threshold at the default rate."""

MOST_NUMBERS = 2**23
"""Values to keep of all validation data together, for decisions: with many outputs, of fewer data."""

VALIDATION, COLUMN = "validation.", "datum."
"""Prefixes of the tensors of the validation data, and of those with a value for each datum."""


@dataclass(frozen=True)
class PosteriorFolder:
    """A posterior with its networks and the preparation of its inputs."""

    posterior: MoLA
    classes: tuple[str, ...] | None
    """Names of the classes, labels or targets, if they have names."""
    example: Any
    """A batch of 2 zero inputs for tracing: a tensor, or a mapping or tuple of tensors."""
    preparation: dict[str, Any]
    """`mola.app.jobs.preparation.Intake` as plain values."""
    document: dict[str, Any]
    """Content of `job.toml`."""
    job: Job
    """The options, with paths as seen from the current folder."""
    folder: Path
    trust: bool = False

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return int(self.document["result"]["outputs"])

    def open_set(
        self,
        name: str,
        *,
        labelled: bool,
        directory: str | None = None,
        by_user: bool = False,
        absent: str | None = None,
    ) -> UserSet:
        """Open data by name, prepared as the training data were; code that the folder names, and not the user, is checked."""
        path = Path(name)
        if absent is not None and os.sep in name and not path.exists() and ":" not in path.name:
            raise OptionError(f"{self.folder} names the data {name}, which are not there (any more): {absent}")
        if not by_user and is_own_function(name):
            check_code(name, self.folder, trust=self.trust, option="--val" if name == self.job.val else None)
        return open_set(
            name,
            Intake.from_plain(self.preparation),
            labelled=labelled,
            classes=self.classes,
            outputs=self.outputs,
            directory=directory or self.job.data,
            seed=self.job.seed,
            download=self.job.download,
            likelihood=self.posterior.likelihood,
        )


def read_folder(path: Path) -> tuple[Job, dict[str, Any]]:
    """Return the job of a posterior's folder, checked, without building networks."""
    if not (path / files.DOCUMENT).is_file():
        raise StorageError(f"{path} holds no posterior: expected a folder that `mola fit --output` wrote.")
    document = files.read_document(path).get("job")
    if document is None:
        raise StorageError(
            f"{path} was saved from Python, not by `mola fit`: how its inputs are prepared is unknown. Use mola.load(...) in "
            f"Python, or fit with `mola fit`."
        )
    try:
        check(document, {"result": RESULT}, "job")
        result = document["result"]
        check(result.get("validation"), Optional({"outlier_threshold": float}), "result.validation")
        Intake.from_plain(result["intake"])
        shapes, types = zip(*((one["shape"], one["dtype"]) for one in result["inputs"]), strict=True)
        if max(map(math.prod, shapes)) > LARGEST_INPUT or len(result["classes"]) not in (0, result["outputs"]):
            raise StorageError(f"{len(result['classes'])} names for {result['outputs']} outputs, inputs of {shapes}.")
        if not all(isinstance(getattr(torch, one, None), torch.dtype) for one in types):
            raise StorageError(f"inputs of type {', '.join(types)}.")
    except (StorageError, ValueError) as error:
        raise StorageError(f"{path / files.DOCUMENT} is damaged: {error}") from error
    return _with_moved_files(job_of(document, path / NAME), path), document


def _with_moved_files(job: Job, path: Path) -> Job:
    # Paths may have been edited in `job.toml` since the fit; other changes to that file are reported.
    if not (path / NAME).is_file():
        return job
    beside, _ = read_job(path)
    paths = [one.name for one in options_of(Job) if one.is_path]
    paths = [name for name in paths if name != "network" or all(map(is_whole, job.network))]
    moved = replace(job, **{name: getattr(beside, name) for name in paths})
    changed = [one.name for one in options_of(Job) if getattr(moved, one.name) != getattr(beside, one.name)]
    if changed:
        warn(
            f"{path / NAME} differs from what the posterior was fitted with ({', '.join(changed[:3])}"
            f"{', ...' if len(changed) > 3 else ''}): what was fitted is used. To fit with the file as it is: `mola fit --config "
            f"{path / NAME}`."
        )
    return moved


def open_posterior(
    path: Path, device: str = "cpu", *, trust: bool = False, network: Sequence[str] = ()
) -> PosteriorFolder:
    """Open a posterior that `mola fit` wrote: build its networks, load their weights, and put the posterior on them.

    `mola.app.jobs.code` decides which functions the folder may name.
    """
    path = Path(path)
    job, document = read_folder(path)
    result = document["result"]
    if not network:
        check_values({"--network": job.network}, path, trust=trust)
    _require_files(job, path)
    try:
        built = build_networks(network or job.network, job.weights, classes=result["outputs"], trust=trust)
    except OptionError as error:
        if "cannot import" not in str(error):
            raise
        raise OptionError(
            f"{error} Run this in a folder from which the module can be imported, as for the fit."
        ) from error
    check_unchanged(built.files, result["sha256"])
    posterior = move(load_posterior(path, built.networks), device)
    outputs = {part.head.outputs for part in posterior.components if part.head is not None}
    if outputs != {result["outputs"]}:
        raise StorageError(
            f"{path} was fitted on networks with {result['outputs']} outputs, and these have "
            f"{', '.join(map(str, sorted(outputs)))}: one of them has changed."
        )
    return PosteriorFolder(
        posterior=posterior,
        classes=tuple(result["classes"]) or None,
        example=example_of(result),
        preparation=dict(result["intake"]),
        document=document,
        job=job,
        folder=path,
        trust=trust,
    )


def _require_files(job: Job, path: Path) -> None:
    again = f"`mola fit --config {path / NAME} --bundle`, where the files and the data are,"
    for name in job.weights:
        if not Path(name).exists():
            raise OptionError(
                f"the weights {name} do not exist, which {path} was fitted on: it was moved without them, or they were. Put them "
                f"back, or make a folder that holds its own copies and can be moved: {again} does."
            )
    for name in job.network:
        whole = os.sep in name and ":" not in name
        if whole and name not in MODELS and not Path(name).exists():
            raise OptionError(
                f"the network {name} is not there, which {path} was fitted on: put it back, or move both together."
            )


def move(module: Moved, device: str) -> Moved:
    """Return a network, or a posterior with its networks, on a device and in evaluation mode."""
    try:
        place = torch.device(device)
        torch.zeros(1, device=place).cpu()  # "meta" holds no numbers
        return module.to(place).eval()
    except (RuntimeError, AssertionError) as error:
        raise OptionError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error


def describe_inputs(inputs: Any) -> dict[str, Any]:
    """Return the form, shapes and types of the inputs of a batch, as plain values."""
    if isinstance(inputs, Tensor):
        form, named = "tensor", {"": inputs}
    elif isinstance(inputs, dict):
        form, named = "mapping", {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    else:
        form, named = "tuple", {str(index): value for index, value in enumerate(inputs)}
    described = [
        {"name": name, "shape": list(value.shape[1:]), "dtype": str(value.dtype).removeprefix("torch.")}
        for name, value in named.items()
    ]
    return {"form": form, "inputs": described}


def example_of(result: dict[str, Any]) -> Any:
    """Return a batch of 2 inputs of zeros; masks are of ones, since a fully masked input gives NaN."""
    made = {
        one["name"]: (torch.ones if "mask" in one["name"] else torch.zeros)(
            2, *one["shape"], dtype=getattr(torch, one["dtype"])
        )
        for one in result["inputs"]
    }
    if result["form"] == "mapping":
        return made
    return made[""] if result["form"] == "tensor" else tuple(made.values())


def holds_posterior(output: Path, checkpoint: Path | None) -> bool:
    """True if the folder holds a posterior, which a new posterior replaces; a folder with other content is refused."""
    if output.is_file():
        raise OptionError(f"{output} is a file; expected a folder to write the posterior to.")
    check_writable(output)
    if not output.exists():
        return False
    try:
        kind = files.kind_of(output)
    except StorageError as error:
        raise OptionError(f"{error} It is not replaced: choose another --output, or remove it.") from error
    if kind not in (None, KIND):
        raise OptionError(
            f"{output} holds a saved {kind}, which is not replaced by a posterior: choose another --output."
        )
    # Files of an interrupted fit, and a job file, may be there.
    known = (NAME, BUNDLED) if checkpoint is None else (NAME, BUNDLED, checkpoint.name)
    strange = sorted(
        path.name for path in output.iterdir() if path.name not in known and not LEFT_BEHIND.fullmatch(path.name)
    )
    if kind is None and strange:
        raise OptionError(
            f"{output} holds other files ({', '.join(strange[:3])}{', ...' if len(strange) > 3 else ''}) and no posterior: choose "
            f"another --output, either a new folder or one that holds an older posterior."
        )
    return kind is not None


def _has_bias(width: int, directions: Tensor | None) -> bool | None:
    # Distances are kept of the features alone, whose width counts the bias; without distances it is not known.
    return None if directions is None else width > directions.shape[1]


def read_information(folder: Path) -> dict[str, Any]:
    """Return the content and history of a folder, with its files checked."""
    document, tensors = files.read_folder(folder, KIND, SCHEMA)
    parts, scaling, tuning = document["components"], document["scaling"], document["tuning"]
    likelihood = dict(parts[0]["likelihood"])
    found: dict[str, Any] = {
        "folder": str(folder),
        "components": len(parts),
        "likelihood": likelihood.pop("name"),
        "likelihood_settings": likelihood,
        "structure": document["structure"]["name"],
        "link": document["link"]["name"],
        "weights": document["weights"],
        "weighting": document["weighting"],
        "prior_precision": [part["prior_precision"] for part in parts],
        "temperature": scaling["temperature"],
        "pooling": scaling["pooling"],
        "distance_exponent": scaling["exponent"],
        "has_distances": any(name.endswith(f".{COUNTS}") for name in tensors),
        "rule": None if tuning is None else tuning["rule"],
        "notes": [] if tuning is None else [tuning["summary"], *tuning["notes"]],
        "outputs": parts[0]["head"]["outputs"],
        "features": [part["head"]["width"] for part in parts],
        "bias": [_has_bias(part["head"]["width"], tensors.get(f"{n}.{DIRECTIONS}")) for n, part in enumerate(parts)],
        "heads": [part["head"]["name"] for part in parts],
        "train_count": parts[0]["count"],
        "has_positions": parts[0]["head"]["dense_axes"] > 0,
        "bytes": sum(path.stat().st_size for path in folder.iterdir() if path.is_file()),
        "tensors": len(tensors),
        "sha256": document["tensors"]["sha256"],
    }
    if "job" not in document:
        return {**found, "job": None}
    job, whole = read_folder(folder)
    result = whole["result"]
    paths = [str(folder / name) for name in result["files"]]
    paths = list(job.weights) if len(job.weights) == len(paths) else paths  # job.toml may name where they are now
    return {
        **found,
        "classes": result["classes"],
        "networks": list(job.network),
        "weight_files": [
            {"path": os.path.normpath(name), "state": _state(Path(name), expected)}
            for name, expected in zip(paths, result["sha256"], strict=False)
        ],
        "inputs": result["inputs"],
        "intake": result["intake"],
        "train": job.train,
        "val": job.val,
        "positions": job.positions,
        "validation": result.get("validation"),
        "left_out": result.get("left_out", 0),
        "versions": result.get("versions", {}),
        "job": str(folder / NAME),
    }


def _state(path: Path, expected: str) -> str:
    if not path.is_file():
        return "missing"
    return "as fitted" if checksum(path) == expected else "changed"


def kept_scores(scores: NDArray[np.float64], columns: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return OOD scores of validation data and the columns that decisions need, as tensors to save with the posterior."""
    count = len(scores)
    ranks = np.arange(1, count + 1)
    if count > MOST_SCORES:
        # With the rank of the default rate, so that --false-alarm-rate 0.05 gives the default threshold.
        even = np.linspace(1, count, MOST_SCORES).round().astype(np.int64)
        ranks = np.union1d(even, [alarm_rank(count, FALSE_ALARMS)])
    width = sum(column[0].numel() for column in (columns or {}).values())
    most = max(1, min(count, MOST_SCORES, MOST_NUMBERS // max(1, width)))
    places = torch.linspace(0, count - 1, most, dtype=torch.float64).round().long()
    kept = {"scores": torch.from_numpy(np.sort(scores)[ranks - 1]), "ranks": torch.from_numpy(ranks)}
    kept |= {f"{COLUMN}{name}": column[places] for name, column in (columns or {}).items()}
    return {f"{VALIDATION}{name}": values for name, values in kept.items()}


def usual_alarm(scores: NDArray[np.float64]) -> tuple[float, float]:
    """Return the threshold at the usual false-alarm rate, and that rate: of fewer than 19 scores, the smallest that they allow."""
    rate = max(FALSE_ALARMS, 1 / (len(scores) + 1))
    return alarm_threshold(scores, rate), rate


def alarm(fitted: PosteriorFolder, false_alarm_rate: float | None) -> float | None:
    """Return the outlier score above which inputs are called outlying."""
    validation = fitted.document["result"].get("validation")
    if validation is None:
        if false_alarm_rate is None:
            return None
        raise OptionError(
            f"--false-alarm-rate: {fitted.folder} was fitted without validation data, so that nothing is known of usual outlier "
            f"scores. Fit again with --val: mola fit --config {fitted.folder / 'job.toml'} --val DATA"
        )
    if false_alarm_rate is None:
        return float(validation["outlier_threshold"])
    scores, ranks, _ = read_scores(fitted.folder)
    try:
        wanted = alarm_rank(int(ranks[-1]), false_alarm_rate)
    except DataError as error:
        raise OptionError(f"--false-alarm-rate: {error}") from error
    # The next larger score that was kept, so that the false-alarm rate is not exceeded.
    return float(scores[int(torch.searchsorted(ranks, wanted))])


def read_scores(folder: Path) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the scores and ranks of the validation data of a folder, and the columns that decisions need."""
    _, tensors = files.read_folder(folder, KIND, SCHEMA)
    kept = {name.removeprefix(VALIDATION): one for name, one in tensors.items() if name.startswith(VALIDATION)}
    scores, ranks = kept.get("scores", torch.zeros(0)), kept.get("ranks", torch.zeros(0))
    sound = scores.ndim == 1 and scores.shape == ranks.shape and scores.dtype == torch.float64
    if not (sound and len(scores) and ranks.dtype == torch.int64):
        raise StorageError(f"{folder} does not hold the scores of its validation data: fit again with `mola fit`.")
    columns = {name.removeprefix(COLUMN): one for name, one in kept.items() if name.startswith(COLUMN)}
    return scores, ranks, columns
