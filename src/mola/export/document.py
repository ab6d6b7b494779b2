"""The description that a file contains: classes, inputs, outputs, and how the posterior was made and tuned. JSON throughout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mola.errors import OptionError, StorageError
from mola.export.graph import PosteriorGraph
from mola.saving.schema import Optional, check, parse

FORMAT_VERSION = 1
PREFIX = "mola."
"""Begins the names of a file's own properties; the user's metadata has no prefix."""

THRESHOLDS = ("ood_threshold", "answer_threshold", "set_threshold")
"""Thresholds of decisions. They are not part of the graph, so they can be changed later."""

SCHEMA: dict[str, Any] = {
    "format_version": int,
    "signature": {"kind": str, "names": [str]},
    "outputs": [str],
    "classes": [str],
    "networks": [str],
    **{name: Optional(float) for name in THRESHOLDS},
}


def check_classes(classes: Sequence[str] | None, count: int) -> list[str]:
    """Return the names of the classes in the order of the networks' outputs; None numbers them."""
    names = [str(name) for name in (range(count) if classes is None else classes)]
    if len(names) != count or len(set(names)) != count or isinstance(classes, str):
        raise OptionError(
            f"classes: expected {count} different names, one for each output of the networks; got {classes!r}."
        )
    return names


def describe(graph: PosteriorGraph, classes: Sequence[str], thresholds: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the document of a file, as JSON."""
    from mola import __version__

    posterior = graph.held[0]
    tuning = posterior.tuning
    return {
        "format_version": FORMAT_VERSION,
        "version": __version__,
        "torch": torch.__version__,
        "classes": list(classes),
        "signature": graph.signature.as_json(),
        "outputs": list(graph.outputs),
        "networks": [type(network).__name__ for network in posterior.networks],
        "likelihood": posterior.likelihood.name,
        "structure": posterior.structure,
        "link": {"name": posterior.link.name, **posterior.link.settings()},
        "temperature": posterior.temperature,
        "pooling": posterior.pooling,
        "distance_exponent": posterior.distance_exponent,
        "prior_precision": None if posterior.structure is None else list(posterior.prior_precision),
        "weights": posterior.weights.tolist(),
        "weighting": posterior.weighting,
        "rule": None if tuning is None else tuning.rule,
        "tuning_notes": [] if tuning is None else list(tuning.notes),
        "ood_score": posterior.ood_score_name,
        **{name: thresholds.get(name) for name in THRESHOLDS},
        "float16": graph.float16,
        "preparation": None if graph.preparation is None else repr(graph.preparation),
    }


def as_properties(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the document as JSON strings under names that begin with "mola."."""
    return {f"{PREFIX}{name}": json.dumps(value) for name, value in document.items()}


def user_properties(metadata: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the user's metadata as strings by name; values other than strings become JSON."""
    own = {str(name): one if isinstance(one, str) else json.dumps(one) for name, one in (metadata or {}).items()}
    taken = [name for name in own if name.startswith(PREFIX)]
    if taken:
        raise OptionError(f"metadata: names that begin with {PREFIX!r} are reserved for mola; got {taken}.")
    return own


def from_properties(properties: Mapping[str, str], path: object) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the document and the user's metadata of a file; `StorageError` if it was not written by this mola."""
    document = {
        name.removeprefix(PREFIX): parse(value, f"{path}: property {name}")
        for name, value in properties.items()
        if name.startswith(PREFIX)
    }
    if "format_version" not in document:
        raise StorageError(f"{path} was not exported by mola: it has no property {PREFIX}format_version.")
    if document["format_version"] != FORMAT_VERSION:
        raise StorageError(
            f"{path} has format version {document['format_version']!r}, and this mola reads {FORMAT_VERSION}. Update mola, or run "
            f"the file without it."
        )
    check(document, SCHEMA, "")
    return document, {name: value for name, value in properties.items() if not name.startswith(PREFIX)}
