"""A mixture's parts as a JSON document and tensors, and back, with every check that keeps a posterior off the wrong network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mola.component import Component, Curvature
from mola.cooling import Cooling, Usual
from mola.errors import HeadError, OptionError, StorageError
from mola.laplace import STRUCTURES, ClassSums, Structure
from mola.likelihood import CATEGORICAL, LIKELIHOODS, Likelihood
from mola.links import LINKS, Link
from mola.mixture import check_weighting, check_weights
from mola.network import Head, Positions, check_positions, head_by_name, undisturbed
from mola.network.fingerprint import NETWORK, Watch, fingerprint, same_network
from mola.options import counted
from mola.saving import storage
from mola.schema import Optional, check
from mola.tuning.candidates import Tuning

LABELS = "label_sums"
"""Name of the tensor with what a likelihood sums of labels beside their log-likelihood, where there is one."""

WEIGHTS = "weights"
"""Name of the tensor with a head's trained weights; the others are the structure's own."""

MIXTURE = {
    "link": {"name": str},
    "weighting": str,
    "weights": [float],
    "tuning": Optional({"rule": str, "curve": {str: [float]}, "notes": [str]}),
}
"""Schema of what every mixture of Laplace approximations has beside its components."""

COOLING = {
    "temperature": float,
    "exponent": float,
    "usual": Optional({"scales": [[float]], "score": Optional([[float]])}),  # and "energies", since these are known
}
"""Schema of what logits are divided by; files of older versions have none."""

CLASSES = "classes."
"""How the names of tensors for distances begin, after the number of the component; older versions have written none."""

SCHEMA = {
    "classes": int,
    "likelihood": str,
    "structure": {"name": str},
    **MIXTURE,
    "components": [
        {
            "head": str,
            "features": int,
            "bias": bool,
            "fingerprint": {str: str},
            "network": NETWORK,
            "prior_precision": float,
            "count": int,
            "log_likelihood": Optional(float),
        }
    ],
}


class Parts(NamedTuple):
    """What a mixture of Laplace approximations has beside its components."""

    link: Any
    weights: str | list[float]
    tuning: Tuning | None
    cooling: Cooling


def pack_mixture(
    link: Any, weights: Tensor, weighting: str, tuning: Tuning | None, cooling: Cooling, links: dict[str, Any]
) -> dict[str, Any]:
    """Link, weights, tuning and cooling as JSON, by the schema `MIXTURE`; `links` are those that can be rebuilt, by name."""
    usual = None if cooling.usual is None else cooling.usual.as_json()
    # A version of mola that does not know of cooling must not read it: it would be surer than it should.
    # Nor one that does not know the outlier score: thresholds of an alarm are of this one.
    scored = cooling.usual is not None and cooling.usual.score is not None
    newer = {} if cooling.changes_nothing and not scored else {"version": storage.COOLED_VERSION}
    return {
        **newer,
        "cooling": {"temperature": cooling.temperature, "exponent": cooling.exponent, "usual": usual},
        "link": _described(link, links, "link"),
        "weighting": weighting,
        "weights": weights.tolist(),
        "tuning": None if tuning is None else tuning.as_json(),
    }


def unpack_mixture(document: dict[str, Any], precisions: tuple[float, ...], links: dict[str, Any]) -> Parts:
    """What `pack_mixture` packed.

    Args:
        document: which holds it.
        precisions: prior precisions of the components.
        links: kinds by name.

    Returns:
        Link, weights and tuning.
    """
    try:
        link = _rebuild(document["link"], links, "link")
        check_weights(document["weights"], len(precisions))
        weighting = document["weighting"]
        weights: Any = document["weights"] if weighting == "given" else check_weighting(weighting, len(precisions))
        cooling = _cooling(document, len(precisions))
    except (OptionError, TypeError) as error:
        raise StorageError(f"the saved document holds a value that cannot be used: {error}") from error
    tuning = None if document["tuning"] is None else Tuning.from_json(document["tuning"], precisions)
    return Parts(link, weights, tuning, cooling)


def _cooling(document: dict[str, Any], count: int) -> Cooling:
    if "cooling" not in document and document["version"] < storage.COOLED_VERSION:
        return Cooling()
    check(document, {"cooling": COOLING}, "")
    entry = document["cooling"]
    usual = entry["usual"]
    if usual is not None:
        pairs = [*usual["scales"], *(usual["score"] or ())]
        energies = usual.get("energies")
        if energies is not None:
            check(energies, [float], "cooling.usual.energies")
        counts = {len(usual["scales"]), count if energies is None else len(energies)}
        if counts != {count} or any(len(pair) != 2 for pair in pairs):
            raise StorageError(
                f"the saved document is garbled: usual distances of {len(usual['scales'])} networks for {count} components."
            )
    return Cooling(entry["temperature"], entry["exponent"], None if usual is None else Usual.from_json(usual))


def pack(
    components: Sequence[Component],
    link: Link,
    weights: Tensor,
    weighting: str,
    tuning: Tuning | None,
    cooling: Cooling,
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
                **({"every_position": True} if head.every_position else {}),
                **({} if head.positions is None else {"positions": head.positions.as_json()}),
                "fingerprint": fingerprint(curvature.weights),
                "network": curvature.watch.signature,
                "prior_precision": component.precision,
                "count": curvature.factors.count,
                "log_likelihood": curvature.factors.log_likelihood,
                **_own_settings(curvature.likelihood, components[0].likelihood),
            }
        )
        tensors[f"{index}.{WEIGHTS}"] = curvature.weights
        for name, tensor in curvature.factors.saved().items():
            tensors[f"{index}.{name}"] = tensor
        if curvature.factors.label_sums is not None:
            tensors[f"{index}.{LABELS}"] = curvature.factors.label_sums
        if curvature.classes is not None:
            for name, tensor in curvature.classes.tensors().items():
                tensors[f"{index}.{CLASSES}{name}"] = tensor
    head, curvature = components[0].require_curvature("saving a posterior")
    document = {
        "classes": head.classes,
        **pack_likelihood(curvature.likelihood),
        "structure": _described(curvature.structure, STRUCTURES, "structure"),
        **pack_mixture(link, weights, weighting, tuning, cooling, LINKS),
        "components": parts,
    }
    return document, tensors


def pack_likelihood(likelihood: Likelihood) -> dict[str, Any]:
    """Its name, and its settings where it has some."""
    settings = _described(likelihood, LIKELIHOODS, "likelihood")
    name = settings.pop("name")
    return {"likelihood": name, **({"likelihood_settings": settings} if settings else {})}


def unpack_likelihood(document: dict[str, Any]) -> Likelihood:
    """What `pack_likelihood` packed; classes where a document says nothing, as older versions wrote it.

    Args:
        document: which holds it.

    Returns:
        The likelihood.
    """
    if "likelihood" not in document and document["version"] < storage.COOLED_VERSION:
        return CATEGORICAL
    check(document, {"likelihood": str}, "")
    try:
        return _likelihood(document, {})
    except (OptionError, TypeError) as error:
        raise StorageError(f"the saved likelihood cannot be used: {error}") from error


def _own_settings(likelihood: Likelihood, shared: Likelihood) -> dict[str, Any]:
    common = shared.settings()
    own = {name: value for name, value in likelihood.settings().items() if common.get(name) != value}
    return {"likelihood_settings": own} if own else {}


def _described(thing: Any, known: dict[str, Any], what: str) -> dict[str, Any]:
    if type(thing) is not known.get(thing.name):
        raise StorageError(
            f"a {what} of your own ({type(thing).__name__}) cannot be saved: mola.load could not rebuild it."
        )
    return {"name": thing.name, **thing.settings()}


def unpack(
    document: dict[str, Any], tensors: dict[str, Tensor], networks: Sequence[nn.Module]
) -> tuple[list[Component], Parts]:
    """Put saved parts back on the networks they belong to.

    Args:
        document: as `pack` made it.
        tensors: as `pack` made them.
        networks: in the order they were fitted in.

    Returns:
        The components of the mixture, and all else that it has.
    """
    kind = document.get("kind", "posterior")
    if kind != "posterior":
        raise StorageError(f"the folder holds a saved {kind}, not a posterior of mola.fit. {storage.how_to_load(kind)}")
    check(document, SCHEMA, "")
    parts = document["components"]
    if len(parts) != len(networks):
        raise StorageError(
            f"the saved posterior has {counted(len(parts), 'component')}, got {counted(len(networks), 'model')}: pass the "
            f"{counted(len(parts), 'network')} that it was fitted on, in the same order."
        )
    if document["likelihood"] not in LIKELIHOODS:
        known = ", ".join(map(repr, LIKELIHOODS))
        raise StorageError(
            f"the saved posterior is for likelihood {document['likelihood']!r}; this mola knows {known}."
        )
    try:
        structure = _rebuild(document["structure"], STRUCTURES, "structure")
        likelihoods = [_likelihood(document, part) for part in parts]
        heads = _check_networks(networks, parts, document["classes"], likelihoods[0])
        components = [
            _component(index, network, head, part, structure, likelihood, tensors)
            for index, (network, head, part, likelihood) in enumerate(
                zip(networks, heads, parts, likelihoods, strict=True)
            )
        ]
    except (OptionError, TypeError) as error:
        raise StorageError(f"the saved document holds a value that cannot be used: {error}") from error
    return components, unpack_mixture(document, tuple(part["prior_precision"] for part in parts), LINKS)


def _likelihood(document: dict[str, Any], part: dict[str, Any]) -> Likelihood:
    # The likelihood of a component: that of all, with settings of its own.
    shared, own = document.get("likelihood_settings", {}), part.get("likelihood_settings", {})
    check(shared, {}, "likelihood_settings")
    check(own, {}, "components.likelihood_settings")
    entry = {"name": document["likelihood"], **shared, **own}
    return _rebuild(entry, LIKELIHOODS, "likelihood")


def _rebuild(entry: dict[str, Any], known: dict[str, Any], what: str) -> Any:
    settings = dict(entry)
    name = settings.pop("name")
    if name not in known:
        raise StorageError(f"unknown {what} {name!r}; this mola knows {sorted(known)}.")
    rebuilt = known[name](**settings)
    # A value of another type than the default's would pass through the constructor and fail much later.
    kinds = {field.name: type(field.default) for field in fields(rebuilt) if field.default is not None}
    check(settings, {key: kinds[key] for key in settings if key in kinds}, what)
    return rebuilt


def _component(
    index: int,
    network: nn.Module,
    head: Head,
    part: dict[str, Any],
    structure: Structure,
    likelihood: Likelihood,
    tensors: dict[str, Tensor],
) -> Component:
    outputs = likelihood.latent(head.classes)
    shapes = structure.empty(head.width, outputs) | {WEIGHTS: (outputs, head.width)}
    named = {name: _tensor(tensors, f"{index}.{name}", shape) for name, shape in shapes.items()}
    weights = named.pop(WEIGHTS)
    if part["count"] < 1:
        raise StorageError(f"component {index}: the number of training data must be at least 1, got {part['count']}.")
    factors = structure.restore(part["count"], part["log_likelihood"], named)
    known = tensors.get(f"{index}.{LABELS}")
    if known is not None:
        factors = factors.with_labels(_tensor(tensors, f"{index}.{LABELS}", (*known.shape[:1], outputs)))
    classes = _class_sums(index, head, part, tensors, likelihood.groups(head.classes))
    curvature = Curvature(structure, factors, weights, Watch(network, part["network"]), likelihood, classes)
    return Component(network, head, curvature, part["prior_precision"])


def _class_sums(
    index: int, head: Head, part: dict[str, Any], tensors: dict[str, Tensor], groups: int
) -> ClassSums | None:
    shapes = ClassSums.shapes(head.width - head.has_bias, groups)
    if not any(f"{index}.{CLASSES}{name}" in tensors for name in shapes):
        return None
    sums = ClassSums(**{name: _tensor(tensors, f"{index}.{CLASSES}{name}", shape) for name, shape in shapes.items()})
    if sums.count != part["count"] or float(sums.counts.min()) < 0:
        raise StorageError(
            f"component {index}: the class means are of {sums.count} data, and the posterior of {part['count']}."
        )
    return sums


def _tensor(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    if name not in tensors:
        raise StorageError(f"tensor {name} is missing from the saved posterior.")
    tensor = tensors[name]
    if tuple(tensor.shape) != shape:
        raise StorageError(f"tensor {name} has shape {tuple(tensor.shape)}, expected {shape}.")
    if tensor.dtype != torch.float64 or not bool(torch.isfinite(tensor).all()):
        raise StorageError(f"tensor {name} must hold finite numbers in float64, got {tensor.dtype}, finite or not.")
    return tensor


def _check_networks(
    networks: Sequence[nn.Module], parts: Sequence[dict[str, Any]], classes: int, likelihood: Likelihood
) -> list[Head]:
    heads = []
    with undisturbed(*networks):
        for index, (network, part) in enumerate(zip(networks, parts, strict=True)):
            problem = _mismatch(network, part, classes, likelihood)
            if problem is not None:
                others = [
                    other for other, one in enumerate(networks) if _mismatch(one, part, classes, likelihood) is None
                ]
                hint = f" They are those of models[{others[0]}]." if others else ""
                raise StorageError(
                    f"models[{index}]: {problem}{hint} Pass the same {len(networks)} networks, in the order they were "
                    f"fitted in."
                )
            head = head_by_name(network, part["head"])
            heads.append(replace(head, every_position=_every_position(part), positions=_positions(part)))
    return heads


def _positions(part: dict[str, Any]) -> Positions | None:
    # How outputs at many positions were used; said only of heads that have such.
    if "positions" not in part:
        return None
    entry = part["positions"]
    check(part, {"positions": {"axes": int, "ignore_index": float}}, "components")
    try:
        return Positions(entry["axes"], check_positions(entry["used"]), int(entry["ignore_index"]))
    except (KeyError, OptionError) as error:
        raise StorageError(f"the saved document is garbled at 'components.positions': {error}") from error


def _every_position(part: dict[str, Any]) -> bool:
    # Whether the head runs at every position of a sequence; said only of those that do.
    check(part, {"every_position": bool} if "every_position" in part else {}, "components")
    return bool(part.get("every_position", False))


def _mismatch(network: nn.Module, part: dict[str, Any], classes: int, likelihood: Likelihood) -> str | None:
    try:
        head = head_by_name(network, part["head"])
    except HeadError as error:
        return f"this is not the network that was fitted: {error}"
    found, saved = (head.classes, head.width, head.has_bias), (classes, part["features"], part["bias"])
    if found != saved:
        return f"head {head.name!r} has (classes, features, bias) = {found}, the saved posterior {saved}."
    same = same_network(network, part["network"])
    if same and "tensors" in part["network"] and "weight" not in head.layer._parameters:
        return None  # the weights are computed from others, which are the same: in another precision they follow only to rounding
    dtype = str(head.layer.weight.dtype).removeprefix("torch.")
    uncertain = head.weights()[
        likelihood.rows(head.classes)
    ]  # those of variances are compared with the rest of the network
    if fingerprint(uncertain)[dtype] != part["fingerprint"].get(dtype):
        return f"the weights of head {head.name!r} are not those the posterior was fitted on."
    if not same:
        return f"its head {head.name!r} was fitted, but other layers have changed since the posterior was saved."
    return None
