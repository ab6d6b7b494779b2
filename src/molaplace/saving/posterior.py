"""Save a posterior as a JSON document and tensors, and restore it with the networks to which it was fitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from molaplace.component import Component, LastLayer
from molaplace.errors import StorageError
from molaplace.laplace_mixture import LaplaceMixture
from molaplace.likelihoods import LIKELIHOODS, Likelihood
from molaplace.links import LINKS, Link
from molaplace.network import (
    StateChecksums,
    TokenChoice,
    changed_part,
    check_positions,
    evaluating,
    head_by_name,
    state_checksums,
)
from molaplace.options import counted
from molaplace.posterior import MoLA
from molaplace.rules import Tuning
from molaplace.saving.files import read_folder, write_folder
from molaplace.saving.fit_checkpoint import SUMS, pack_sums, unpack_sums
from molaplace.saving.schema import Optional
from molaplace.settings import Reference, Settings
from molaplace.structures import STRUCTURES, Structure
from molaplace.weights import check_weighting, check_weights

KIND = "posterior"
NETWORK: dict[str, Any] = {"network": str, "adapter": Optional(str), "tokens": Optional([int])}
"""Checksums of a network, and the ids of the tokens among which it chooses."""

REFERENCE = {"scales": [[float]], "score": Optional([[float]]), "energies": Optional([float])}
HEAD = {
    "name": str,
    "every_position": bool,
    "dense_axes": int,
    "ignore_index": float,
    "positions": str,
    "outputs": int,
    "width": int,
}
SETTINGS = {name: [float] if isinstance(value, list) else float for name, value in Settings((1.0,)).as_json().items()}
TUNING = {
    **dict.fromkeys(("rule", "summary"), str),
    **{"settings": SETTINGS, "notes": [str], "curve": {str: [float]}},
}
MIXTURE = {
    "link": {"name": str},
    "weighting": str,
    "weights": [float],
    "settings": SETTINGS,
    "reference": Optional(REFERENCE),
    "tuning": Optional(TUNING),
    "stale": bool,
}
SCHEMA = {
    "structure": {"name": str},
    **MIXTURE,
    "components": [{**NETWORK, "head": HEAD, "likelihood": {"name": str}, **SUMS[0]}],
}


def save_posterior(posterior: MoLA, directory: str | Path, *, overwrite: bool = False) -> Path:
    """Write a posterior, without its networks, to a folder and return the folder's path."""
    return write_folder(directory, *pack(posterior), overwrite=overwrite)


def pack(posterior: MoLA) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the document and the tensors that `load_posterior` needs in addition to the networks."""

    def entry_of(index: int, component: Component, layer: LastLayer) -> dict[str, Any]:
        head = component.head
        assert head is not None  # every component with a last layer has a head
        if not torch.equal(component.likelihood.uncertain(head.weights()).to(layer.weights), layer.weights):
            raise StorageError(
                f"the weights of head {head.name!r} have changed since the posterior was fitted. Fit again.",
                place=f"networks[{index}]",
            )
        saved_head = {name: getattr(head, name) for name in HEAD} | {"positions": str(head.positions)}
        return {"head": saved_head, "likelihood": describe(component.likelihood, LIKELIHOODS, "likelihood")}

    document, tensors = pack_components(posterior, entry_of)
    structure = describe(posterior.components[0].require_layer("saving").structure, STRUCTURES, "structure")
    return {"kind": KIND, "structure": structure, **document}, tensors


def pack_components(
    posterior: LaplaceMixture, entry_of: Callable[[int, Component, LastLayer], dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a posterior, without its structure, as JSON and tensors. `entry_of` provides additional entries for each component."""
    layers = [component.require_layer("saving a posterior") for component in posterior.components]
    entries, tensors = pack_sums([layer.sums for layer in layers])
    document = {
        "link": describe(posterior.link, LINKS, "link"),
        "weighting": posterior.weighting,
        "weights": posterior.weights.tolist(),
        "settings": posterior.settings.as_json(),
        "reference": None if posterior.validation_reference is None else posterior.validation_reference.as_json(),
        "tuning": None if posterior.tuning is None else posterior.tuning.as_json(),
        "stale": posterior.stale,
    }
    posterior.check_weights(StorageError)
    with evaluating(*posterior.networks):
        parts = [
            {**layers[index].checksums._asdict(), "tokens": _tokens_of(component.network)}
            | entry_of(index, component, layers[index])
            | entries[index]
            for index, component in enumerate(posterior.components)
        ]
    return {**document, "components": parts}, tensors


def load_posterior(directory: str | Path, networks: Sequence[nn.Module]) -> MoLA:
    """Read a posterior from a folder; raise `StorageError` unless the posterior was fitted to `networks` in this order."""
    document, tensors = read_folder(directory, KIND, SCHEMA)
    parts = document["components"]
    try:
        structure = rebuild(document["structure"], STRUCTURES, "structure")
        likelihoods = [rebuild(part["likelihood"], LIKELIHOODS, "likelihood") for part in parts]
        check_networks(networks, parts)
        components = []
        with evaluating(*networks):
            for index, sums in enumerate(unpack_sums(parts, tensors)):
                network = networks[index]
                likelihood = likelihoods[index]
                saved = parts[index]["head"]
                options = {name: saved[name] for name in ("every_position", "dense_axes")}
                options["ignore_index"] = int(saved["ignore_index"])
                positions = saved["positions"]
                options["positions"] = check_positions(int(positions) if positions.isdigit() else positions)
                head = replace(head_by_name(network, saved["name"]), **options)
                checksums = StateChecksums(parts[index]["network"], parts[index]["adapter"])
                layer = LastLayer.from_sums(structure, sums, head.weights(), likelihood, checksums)
                components.append(Component(network, head, layer, likelihood))
        return MoLA(components, **unpack_mixture(document, len(components)))
    except StorageError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise StorageError(
            f"{directory} contains no posterior for these networks: {error}. Save the posterior again."
        ) from error


def unpack_mixture(document: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return the arguments, except the `count` components, with which a mixture is constructed."""
    reference = document["reference"]
    if reference is not None:
        scales, score, energies = (reference[name] for name in REFERENCE)
        lengths = len(scales), count if energies is None else len(energies), 3 if score is None else len(score)
        if lengths != (count, count, 3) or any(len(pair) != 2 for pair in [*scales, *(score or ())]):
            raise StorageError(
                f"the saved reference distances do not match {counted(count, 'component')}. Save the posterior again."
            )
    if len(document["settings"]["prior_precision"]) != count:
        raise StorageError(
            f"the saved prior precisions do not match {counted(count, 'component')}. Save the posterior again."
        )
    weights = check_weights(document["weights"], count)
    return {
        "settings": Settings.from_json(document["settings"]),
        "link": rebuild(document["link"], LINKS, "link"),
        "weights": weights if document["weighting"] == "given" else check_weighting(document["weighting"], count),
        "reference": None if reference is None else Reference.from_json(reference),
        "tuning": None if document["tuning"] is None else Tuning.from_json(document["tuning"]),
        "stale": document["stale"],
    }


def describe(thing: Structure | Likelihood | Link, known: Mapping[str, type], what: str) -> dict[str, Any]:
    """Return the name and settings of a structure, link or likelihood as JSON.

    Raises `StorageError` if the object's class is not in `known`.
    """
    if known.get(thing.name) is not type(thing):
        raise StorageError(
            f"a custom {what} ({type(thing).__name__}) cannot be saved, because mola.load could not rebuild it."
        )
    return {"name": thing.name, **thing.settings()}


def rebuild(entry: Mapping[str, Any], known: Mapping[str, type], what: str) -> Any:
    """Rebuild an object from its name and settings (the inverse of `describe`)."""
    settings = {name: value for name, value in entry.items() if name != "name"}
    if entry["name"] not in known:
        raise StorageError(f"unknown {what} {entry['name']!r}; this version of molaplace supports {', '.join(known)}.")
    kind = known[entry["name"]]
    return kind(**settings)


def check_networks(networks: Sequence[nn.Module], parts: Sequence[Mapping[str, Any]]) -> None:
    """Raise `StorageError` unless the networks' tokens and checksums match those of the saved components, in the same order."""
    remedy = f"Pass the same {counted(len(parts), 'network')}, with the order and the precision unchanged."
    if len(networks) != len(parts):
        raise StorageError(
            f"expected the posterior's {counted(len(parts), 'network')}, got {counted(len(networks), 'network')}. {remedy}"
        )
    for index, (network, part) in enumerate(zip(networks, parts, strict=True)):
        tokens = part["tokens"]
        if _tokens_of(network) != tokens:
            raise StorageError(
                "the posterior was fitted without tokens. Remove tokens= from mola.load."
                if tokens is None
                else f"the posterior was fitted with the tokens {tokens}, got {_tokens_of(network)}. Pass tokens={tokens} to mola.load.",
                place=f"networks[{index}]",
            )
    current = state_checksums(networks)
    saved = [StateChecksums(part["network"], part["adapter"]) for part in parts]
    for index, (checksums, expected) in enumerate(zip(current, saved, strict=True)):
        if checksums != expected:
            hint = f" networks[{current.index(expected)}] has the saved weights." if expected in current else ""
            changed, unchanged = changed_part(networks[index], checksums, expected)
            raise StorageError(
                f"{changed} differ from the saved weights in their names, shapes, precision or values{unchanged}.{hint} {remedy}",
                place=f"networks[{index}]",
            )


def _tokens_of(network: nn.Module) -> list[int] | None:
    return network.tokens.tolist() if isinstance(network, TokenChoice) else None
