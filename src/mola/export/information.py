"""What a file says of itself: classes, inputs and outputs, and how the posterior was made and tuned. JSON throughout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mola.errors import OptionError, StorageError
from mola.export.graph import Exported
from mola.posterior import MoLA
from mola.schema import check, parse

FORMAT_VERSION = 1
PREFIX = "mola."
"""Of the names of a file's properties; properties of the user's own have none."""

SCHEMA = {"format_version": int, "signature": {"kind": str, "names": [str]}, "outputs": [str], "classes": [str]}


@dataclass(frozen=True)
class Thresholds:
    """Numbers by which whoever runs a file decides. They are not part of the graph, so that they can be changed later."""

    ood_threshold: float | None = None
    """Outlier score above which an input counts as an outlier."""
    answer_threshold: float | None = None
    """Confidence above which an input that is no outlier is answered."""
    set_threshold: float | None = None
    """Probability from which on classes are in the set of an input."""


def check_classes(classes: Sequence[str] | None, count: int) -> list[str]:
    """Names of the classes; their numbers, where there are none.

    Args:
        classes: the names, in the order of the network's outputs.
        count: how many there must be.

    Returns:
        One for each class.
    """
    names = [str(number) for number in range(count)] if classes is None else [str(name) for name in classes]
    if len(names) != count or len(set(names)) != count or isinstance(classes, str):
        raise OptionError(
            f"classes: expected {count} different names, one for each output of the networks; got {classes!r}."
        )
    return names


def describe(
    posterior: MoLA,
    graph: Exported,
    classes: Sequence[str] | None,
    count: int,
    thresholds: Thresholds,
) -> dict[str, Any]:
    """The document of a file.

    Args:
        posterior: what is exported.
        graph: as it is traced.
        classes: names of the classes, or None.
        count: how many classes there are.
        thresholds: by which to decide, where they are known.

    Returns:
        JSON.
    """
    from mola import __version__

    tuning = posterior.tuning
    return {
        "format_version": FORMAT_VERSION,
        "version": __version__,
        "torch": torch.__version__,
        "classes": check_classes(classes, count),
        "signature": graph.signature.as_json(),
        "outputs": list(graph.outputs),
        "networks": [type(network).__name__ for network in posterior.networks],
        "likelihood": posterior.likelihood.name,
        "structure": posterior.structure,
        "link": {"name": posterior.link.name, **posterior.link.settings()},
        "temperature": posterior.temperature,
        "distance_exponent": posterior.distance_exponent,
        "prior_precision": None if posterior.structure is None else list(posterior.prior_precision),
        "weights": posterior.weights.tolist(),
        "weighting": posterior.weighting,
        "rule": None if tuning is None else tuning.rule,
        "tuning_notes": [] if tuning is None else list(tuning.notes),
        "ood_score": graph.ood_score_name,
        **asdict(thresholds),
        "float16": graph.float16,
        "preparation": None if graph.preparation is None else repr(graph.preparation),
    }


def as_properties(document: Mapping[str, Any], metadata: Mapping[str, Any] | None) -> dict[str, str]:
    """The document and the user's own metadata as strings by name.

    Args:
        document: of `describe`.
        metadata: the user's own.

    Returns:
        JSON under names that begin with "mola.", and the user's own as they are.
    """
    own = {
        str(name): value if isinstance(value, str) else json.dumps(value) for name, value in (metadata or {}).items()
    }
    taken = [name for name in own if name.startswith(PREFIX)]
    if taken:
        raise OptionError(f"metadata: names that begin with {PREFIX!r} are mola's; got {taken}.")
    return {f"{PREFIX}{name}": json.dumps(value) for name, value in document.items()} | own


def from_properties(properties: Mapping[str, str], path: object) -> tuple[dict[str, Any], dict[str, str]]:
    """What `as_properties` made.

    Args:
        properties: strings by name.
        path: of the file, for the message.

    Returns:
        The document, and the user's own metadata.
    """
    try:
        document = {
            name.removeprefix(PREFIX): parse(value) for name, value in properties.items() if name.startswith(PREFIX)
        }
    except ValueError as error:
        raise StorageError(f"{path}: its properties are not JSON ({error}). Export it again.") from error
    if "format_version" not in document:
        raise StorageError(f"{path} was not exported by mola: it has no property {PREFIX}format_version.")
    if document["format_version"] != FORMAT_VERSION:
        raise StorageError(
            f"{path} has format version {document['format_version']!r}; this mola reads {FORMAT_VERSION}. Update mola, "
            f"or run the file without it."
        )
    check(document, SCHEMA, "")
    return document, {name: value for name, value in properties.items() if not name.startswith(PREFIX)}
