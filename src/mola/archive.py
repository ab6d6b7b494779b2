"""A mixture's parts as a JSON document and tensors, and back, with every check that keeps a posterior off the wrong network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from mola import storage
from mola.component import Component, Curvature
from mola.errors import HeadError, StorageError
from mola.heads import Head, head_by_name
from mola.laplace import STRUCTURES
from mola.links import LINKS, Link
from mola.tuning import Tuning

__all__ = ["Parts", "pack", "unpack"]


class Parts(NamedTuple):
    """What a mixture of Laplace approximations is made of."""

    components: list[Component]
    link: Link
    weights: str | list[float]
    tuning: Tuning | None


def pack(
    components: Sequence[Component], link: Link, weights: Tensor, weighting: str, tuning: Tuning | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The document and the tensors that `unpack` needs beside the networks."""
    parts, tensors = [], {}
    for index, component in enumerate(components):
        head, curvature = component.require_curvature("saving a posterior")
        parts.append(
            {
                "head": head.name,
                "features": head.width,
                "bias": head.has_bias,
                "fingerprint": storage.fingerprint(head.layer),
                "prior_precision": component.precision,
                "count": curvature.factors.count,
                "log_likelihood": curvature.factors.log_likelihood,
            }
        )
        for name, tensor in curvature.factors.tensors().items():
            tensors[f"{index}.{name}"] = tensor
    head, curvature = components[0].require_curvature("saving a posterior")
    document = {
        "classes": head.classes,
        "likelihood": curvature.likelihood.name,
        "structure": _described(curvature.structure, STRUCTURES, "structure"),
        "link": _described(link, LINKS, "link"),
        "weighting": weighting,
        "weights": weights.tolist(),
        "tuning": None if tuning is None else tuning.as_json(),
        "components": parts,
    }
    return document, tensors


def _described(thing: Any, known: dict[str, Any], what: str) -> dict[str, Any]:
    if type(thing) is not known.get(thing.name):
        message = f"a {what} of your own ({type(thing).__name__}) cannot be saved: mola.load could not rebuild it."
        raise StorageError(message)
    return {"name": thing.name, **thing.settings()}


def unpack(document: dict[str, Any], tensors: dict[str, Tensor], networks: Sequence[nn.Module]) -> Parts:
    """Put saved parts back on the networks they belong to.

    Args:
        document: as `pack` made it.
        tensors: as `pack` made them.
        networks: in the order they were fitted in.

    Returns:
        The parts of the mixture.

    Raises:
        StorageError: if something is missing or garbled, or a network is not the one that was fitted.
    """
    try:
        return _unpack(document, tensors, networks)
    except (KeyError, TypeError, AttributeError) as error:
        message = f"the saved document lacks or garbles an entry ({error}): it was edited, or is not of this version."
        raise StorageError(message) from error


def _unpack(document: dict[str, Any], tensors: dict[str, Tensor], networks: Sequence[nn.Module]) -> Parts:
    parts = document["components"]
    if len(parts) != len(networks):
        message = f"the saved posterior has {len(parts)} components, got {len(networks)} models."
        raise StorageError(message)
    structure = _rebuild(document["structure"], STRUCTURES, "structure")
    link = _rebuild(document["link"], LINKS, "link")
    components = []
    for index, (network, part) in enumerate(zip(networks, parts, strict=True)):
        head = _check_network(index, network, part, document["classes"], networks)
        named = {name: tensors[f"{index}.{name}"] for name in structure.empty(head.width, head.classes)}
        for name, shape in structure.empty(head.width, head.classes).items():
            if tuple(named[name].shape) != shape:
                message = f"tensor {index}.{name} has shape {tuple(named[name].shape)}, expected {shape}."
                raise StorageError(message)
        factors = structure.restore(part["count"], part["log_likelihood"], named)
        components.append(Component(network, head, Curvature(structure, factors), part["prior_precision"]))
    weights = document["weighting"] if document["weighting"] != "given" else document["weights"]
    precisions = tuple(part["prior_precision"] for part in parts)
    tuning = None if document["tuning"] is None else Tuning.from_json(document["tuning"], precisions)
    return Parts(components, link, weights, tuning)


def _rebuild(entry: dict[str, Any], known: dict[str, Any], what: str) -> Any:
    settings = dict(entry)
    name = settings.pop("name")
    if name not in known:
        message = f"unknown {what} {name!r}; this mola knows {sorted(known)}."
        raise StorageError(message)
    return known[name](**settings)


def _check_network(
    index: int, network: nn.Module, part: dict[str, Any], classes: int, networks: Sequence[nn.Module]
) -> Head:
    try:
        head = head_by_name(network, part["head"])
    except HeadError as error:
        message = f"models[{index}] is not the network that was fitted: {error}"
        raise StorageError(message) from None
    found = (head.classes, head.width, head.has_bias)
    saved = (classes, part["features"], part["bias"])
    if found != saved:
        message = (
            f"models[{index}]: head {head.name!r} has (classes, features, bias) = {found}, the saved posterior {saved}. "
            f"Pass the networks that were fitted."
        )
        raise StorageError(message)
    dtype = str(head.layer.weight.dtype).removeprefix("torch.")
    if storage.fingerprint(head.layer)[dtype] != part["fingerprint"][dtype]:
        message = (
            f"models[{index}]: the weights of head {head.name!r} are not those the posterior was fitted on."
            f"{_order_hint(part, networks, dtype)} Pass the same {len(networks)} networks, in the order they were fitted in."
        )
        raise StorageError(message)
    return head


def _order_hint(part: dict[str, Any], networks: Sequence[nn.Module], dtype: str) -> str:
    for index, network in enumerate(networks):
        module = dict(network.named_modules()).get(part["head"])
        if isinstance(module, nn.Linear) and storage.fingerprint(module)[dtype] == part["fingerprint"][dtype]:
            return f" They are those of models[{index}]."
    return ""
