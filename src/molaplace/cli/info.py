"""The contents of a folder that molaplace wrote, in words, as `molaplace info` shows them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from molaplace.cli.job import NAME, job_of
from molaplace.errors import StorageError
from molaplace.options import counted, listed
from molaplace.saving.bundle import FILE, Contents, read_bundle
from molaplace.saving.files import MARKER, Marker, file_name, read_file, read_folder
from molaplace.saving.posterior import LAST_LAYERS, SavedComponent, SavedMixture, SavedPosterior
from molaplace.saving.schema import from_json
from molaplace.structures.distance import COUNTS


@dataclass(frozen=True)
class FitResult:
    """What `molaplace fit` found, apart from the posterior."""

    outputs: int
    left_out: int
    images: str
    versions: dict[str, str]
    validation: Validation | None


@dataclass(frozen=True)
class Validation:
    """Metrics of the validation data."""

    outlier_threshold: float
    false_alarm_rate: float
    metrics: dict[str, float] = field(default_factory=dict)


def read_information(folder: Path) -> dict[str, Any]:
    """Return the document in a folder after checking all files, with their state; a folder without a document has only the files."""
    marker = Marker.read(folder / MARKER)
    if (folder / FILE).is_file():
        document, tensors, _, _ = read_bundle(folder)
        document |= {"has_distances": any(name.endswith(f".{COUNTS}") for name in tensors)}
    elif marker.kind is None:
        raise StorageError(
            f"{folder} contains no posterior. Pass a folder written by `molaplace fit`, another command or save(...)."
        )
    else:
        file = folder / file_name(marker.kind)
        document = read_folder(folder, marker.kind)[0] if file.is_file() else {"kind": marker.kind}
    names = marker.files or {path.name: [] for path in folder.iterdir() if path.name == FILE}
    files = {name: _state(folder / name, checksums) for name, checksums in names.items()}
    return {"folder": str(folder), "files": files, **document}


def _state(path: Path, checksums: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {"bytes": 0, "state": "missing"}
    content = read_file(path)
    intact = not checksums or hashlib.sha256(content).hexdigest() in checksums
    return {"bytes": len(content), "state": "intact" if intact else "changed"}


def print_information(console: Console, information: dict[str, Any]) -> None:
    """Print what `read_information` returned as a table."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    lines = [
        ("folder", information["folder"]),
        ("contents", information["kind"]),
        ("files", _files(information["files"])),
    ]
    if "components" in information:
        lines = [*_posterior_lines(information), *_contents_lines(information)]
    for name, words in lines:
        table.add_row(name, escape(words))
    console.print(table)


def _files(files: dict[str, Any]) -> str:
    words = f"{sum(file['bytes'] for file in files.values()):,} bytes"
    damaged = [f"{name} {file['state']}" for name, file in files.items() if file["state"] != "intact"]
    return f"{words}, {', '.join(damaged) or 'intact'}"


def _posterior_lines(information: dict[str, Any]) -> list[tuple[str, str]]:
    saved = from_json(SavedMixture, information)
    precisions = ", ".join(dict.fromkeys(f"{value:.4g}" for value in saved.settings.prior_precision))
    changed = {name.replace("_", " "): value for name, value in saved.settings.changed().items()}
    scaling = ", ".join(f"{name} {value:.4g}" for name, value in changed.items()) or "none"
    weights = ", ".join(f"{weight:.3g}" for weight in saved.weights)
    if len(set(saved.weights)) == 1:
        weights = "uniform"
    distances = "distances from the training classes"
    if not information["has_distances"]:
        distances = "no distances (--no-distances)"
    tuning = saved.tuning
    summary = "not tuned: the given prior precision is used" if tuning is None else tuning.summary
    rule = "given value" if tuning is None else f"rule {tuning.rule}"
    layer, structure, fitted_on = _layer_lines(information)
    return [
        ("tuning", summary),
        *([("stale", "the training data have changed since tuning. Tune again")] if saved.stale else []),
        *[("note", note) for note in (() if tuning is None else tuning.notes)],
        ("folder", information["folder"]),
        ("networks", str(len(information["components"]))),
        layer,
        ("structure", f"{structure}, link {saved.link['name']}, weights {weights}"),
        ("prior precision", f"{precisions}, {rule}"),
        ("scaling", f"{scaling}; {distances}"),
        ("fitted on", fitted_on),
        ("files", _files(information["files"])),
    ]


def _layer_lines(information: dict[str, Any]) -> tuple[tuple[str, str], str, str]:
    # Return the line about the layers, the structure, and the number of training data.
    if information.get("over") != LAST_LAYERS:
        count = int(information["components"][0]["sums"]["count"])
        return ("posterior over", "whole networks"), str(information["structure"]), counted(count, "input")
    saved = from_json(SavedPosterior, information)
    first = saved.components[0]
    head = first.head
    positions = head.dense_axes > 0 and head.positions != "average"
    layer = ("last layer", f"{head.name!r}, {counted(head.width, 'weight')} for each of {_outputs(first)}")
    return layer, str(saved.structure["name"]), counted(first.sums.count, "position" if positions else "input")


def _contents_lines(information: dict[str, Any]) -> list[tuple[str, str]]:
    contents = from_json(Contents, information["bundle"], "bundle")
    outputs = information["components"][0].get("head", information["components"][0])["outputs"]
    inputs = contents.inputs.tensors if contents.inputs else ()
    tensors = [f"{tensor.name or 'tensor'} {tensor.shape} of {tensor.dtype}" for tensor in inputs]
    sources = dict.fromkeys(f"{source.build or source.type}" for source in contents.networks)
    weights = [source.weights for source in contents.networks if source.weights]
    lines = [
        ("classes", listed(contents.classes, 12) or f"{outputs} outputs, unnamed"),
        *([("inputs", ", ".join(tensors))] if tensors else []),
        (
            "made from",
            ", ".join(sources) or "networks that the folder does not contain. Load it with mola.load(folder, networks)",
        ),
        ("weight files", ", ".join(weights) or "none"),
    ]
    return [*lines, *(_job_lines(contents, Path(information["folder"])) if contents.made else [])]


def _job_lines(contents: Contents, folder: Path) -> list[tuple[str, str]]:
    path = folder / NAME
    job = job_of(contents.made, path)
    result = from_json(FitResult, contents.made.get("result"), "made.result")
    data = f"training data {job.train}, validation data {job.val or 'none'}, inputs left out: {result.left_out}"
    lines = [*([("images", result.images)] if result.images else []), ("data", data)]
    validation = result.validation
    if validation is not None:
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in validation.metrics.items())
        lines.append(("validation", metrics))
        rate = f"at most {100 * validation.false_alarm_rate:.2g} % false alarms"
        lines.append(("OOD alarm", f"scores above {validation.outlier_threshold:.4g}, with {rate}"))
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return [*lines, ("made with", versions), ("fit again", f"molaplace fit --config {path}")]


def _outputs(component: SavedComponent) -> str:
    outputs = component.head.outputs
    likelihood = component.likelihood
    if likelihood["name"] == "categorical":
        return f"{outputs} classes"
    variances = ""
    if likelihood.get("heteroscedastic"):
        variances = f" (means and variances of {counted(outputs // 2, 'target')})"
    return f"{counted(outputs, 'output')}{variances}, likelihood {likelihood['name']}"
