"""Save a posterior as a JSON document and tensors, and restore it with the networks to which it was fitted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from molaplace.component import Component, LastLayer
from molaplace.errors import StorageError
from molaplace.laplace_mixture import LaplaceMixture
from molaplace.likelihoods import LIKELIHOODS, Likelihood
from molaplace.links import LINKS, Link
from molaplace.network import (
    Head,
    StateChecksums,
    TokenChoice,
    changed_part,
    check_positions,
    evaluating,
    head_by_name,
    state_checksums,
)
from molaplace.network.dense import Positions
from molaplace.options import counted
from molaplace.posterior import MoLA
from molaplace.rules import Tuning
from molaplace.saving.fit_checkpoint import SavedSums, named_tensors, unpack_sums
from molaplace.saving.schema import from_json
from molaplace.settings import Reference, Settings
from molaplace.structures import STRUCTURES, Structure
from molaplace.weights import check_weighting, check_weights

KIND = "posterior"
LAST_LAYERS = "last layers"
"""What the posterior is over; see also `molaplace.whole.files`."""


@dataclass(frozen=True, kw_only=True)
class SavedNetwork:
    """What identifies the network of a component."""

    network: str
    """Checksum of the network, without its adapters."""
    adapter: str | None
    """Checksum of the adapter, if there is one."""
    tokens: tuple[int, ...] | None
    """Ids of the tokens among which the network chooses."""

    @property
    def checksums(self) -> StateChecksums:
        """Checksums of the network's weights."""
        return StateChecksums(self.network, self.adapter)


@dataclass(frozen=True)
class SavedHead:
    """The last layer of a network, and how it was used."""

    name: str
    every_position: bool
    dense_axes: int
    ignore_index: float
    positions: Positions
    outputs: int
    width: int

    def find(self, network: nn.Module) -> Head:
        """Return the head in its network."""
        return replace(
            head_by_name(network, self.name),
            every_position=self.every_position,
            dense_axes=self.dense_axes,
            ignore_index=int(self.ignore_index),
            positions=check_positions(self.positions),
        )


@dataclass(frozen=True, kw_only=True)
class SavedComponent(SavedNetwork):
    """A network, its last layer and its sums over the training data, whose tensors are stored beside the document."""

    head: SavedHead
    likelihood: dict[str, Any]
    sums: SavedSums


@dataclass(frozen=True, kw_only=True)
class SavedMixture:
    """All but the components of a posterior, whose fields are described in `LaplaceMixture`."""

    link: dict[str, Any]
    weighting: str
    weights: tuple[float, ...]
    settings: Settings
    reference: Reference | None
    tuning: Tuning | None
    stale: bool

    def arguments(self, count: int) -> dict[str, Any]:
        """Return the arguments, except the `count` components, with which a mixture is constructed."""
        reference = self.reference
        if reference is not None:
            lengths = {len(reference.scales), count if reference.energies is None else len(reference.energies)}
            if lengths != {count} or (reference.score is not None and len(reference.score) != 3):
                raise StorageError(
                    f"the saved reference distances do not match {counted(count, 'component')}. Save the posterior again."
                )
        if len(self.settings.prior_precision) != count:
            raise StorageError(
                f"the saved prior precisions do not match {counted(count, 'component')}. Save the posterior again."
            )
        weights = check_weights(self.weights, count)
        return {
            "settings": self.settings,
            "link": rebuild(self.link, LINKS, "link"),
            "weights": weights if self.weighting == "given" else check_weighting(self.weighting, count),
            "reference": reference,
            "tuning": self.tuning,
            "stale": self.stale,
        }


@dataclass(frozen=True, kw_only=True)
class SavedPosterior(SavedMixture):
    """The document of a posterior over last layers."""

    structure: dict[str, Any]
    components: tuple[SavedComponent, ...]


def pack(posterior: MoLA) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the document and the tensors that `unpack` needs in addition to the networks."""
    layers = check_saveable(posterior)
    components = []
    with evaluating(*posterior.networks):
        for index, (component, layer) in enumerate(zip(posterior.components, layers, strict=True)):
            head = component.head
            assert head is not None  # every component with a last layer has a head
            if not torch.equal(component.likelihood.uncertain(head.weights()).to(layer.weights), layer.weights):
                raise StorageError(
                    f"the weights of head {head.name!r} have changed since the posterior was fitted. Fit again.",
                    place=f"networks[{index}]",
                )
            components.append(
                SavedComponent(
                    **identity_of(component, layer),
                    head=SavedHead(**{field.name: getattr(head, field.name) for field in fields(SavedHead)}),
                    likelihood=describe(component.likelihood, LIKELIHOODS, "likelihood"),
                    sums=SavedSums.of(layer.sums),
                )
            )
    saved = SavedPosterior(
        **settings_of(posterior),
        structure=describe(layers[0].structure, STRUCTURES, "structure"),
        components=tuple(components),
    )
    return {"kind": KIND, "over": LAST_LAYERS, **asdict(saved)}, named_tensors([layer.sums for layer in layers])


def check_saveable(posterior: LaplaceMixture) -> list[LastLayer]:
    """Return the approximation of each component; raise an error for a plain ensemble, or if weights have changed since the fit."""
    layers = [component.require_layer("saving a posterior") for component in posterior.components]
    posterior.check_unchanged(StorageError)
    return layers


def identity_of(component: Component, layer: LastLayer) -> dict[str, Any]:
    """Return the fields of a `SavedNetwork`."""
    return {**layer.checksums._asdict(), "tokens": _tokens_of(component.network)}


def settings_of(posterior: LaplaceMixture) -> dict[str, Any]:
    """Return the fields of a `SavedMixture`."""
    return {
        "link": describe(posterior.link, LINKS, "link"),
        "weighting": posterior.weighting,
        "weights": tuple(posterior.weights.tolist()),
        "settings": posterior.settings,
        "reference": posterior.validation_reference,
        "tuning": posterior.tuning,
        "stale": posterior.stale,
    }


def unpack(
    document: Mapping[str, Any], tensors: Mapping[str, Tensor], networks: Sequence[nn.Module], place: object
) -> MoLA:
    """Return the posterior that `pack` described; `place` names its file in messages.

    Raises `StorageError` unless the posterior was fitted to `networks` in this order.
    """
    with explained(place):
        saved = from_json(SavedPosterior, document)
        structure = rebuild(saved.structure, STRUCTURES, "structure")
        likelihoods = [rebuild(part.likelihood, LIKELIHOODS, "likelihood") for part in saved.components]
        check_networks(networks, saved.components)
        components = []
        with evaluating(*networks):
            sums_of_components = unpack_sums([part.sums for part in saved.components], tensors)
            for network, part, sums, likelihood in zip(
                networks, saved.components, sums_of_components, likelihoods, strict=True
            ):
                head = part.head.find(network)
                layer = LastLayer.from_sums(
                    structure, sums, likelihood.uncertain(head.weights()), likelihood, part.checksums
                )
                components.append(Component(network, head, layer, likelihood))
        return MoLA(components, **saved.arguments(len(components)))


@contextmanager
def explained(place: object) -> Iterator[None]:
    """Turn an error that damaged or foreign values cause inside the block into a `StorageError` that names the file."""
    try:
        yield
    except StorageError:
        raise
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise StorageError(
            f"{place} contains no posterior for these networks: {error}. Save the posterior again."
        ) from error


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


def check_networks(networks: Sequence[nn.Module], parts: Sequence[SavedNetwork]) -> None:
    """Raise `StorageError` unless the networks' tokens and checksums match those of the saved components, in the same order."""
    remedy = f"Pass the same {counted(len(parts), 'network')}, with the order and the precision unchanged."
    if len(networks) != len(parts):
        raise StorageError(
            f"expected the posterior's {counted(len(parts), 'network')}, got {counted(len(networks), 'network')}. {remedy}"
        )
    for index, (network, part) in enumerate(zip(networks, parts, strict=True)):
        tokens = None if part.tokens is None else list(part.tokens)
        if _tokens_of(network) != tokens:
            raise StorageError(
                "the posterior was fitted without tokens. Remove tokens= from mola.load."
                if tokens is None
                else f"the posterior was fitted with the tokens {tokens}, got {_tokens_of(network)}. Pass tokens={tokens} to mola.load.",
                place=f"networks[{index}]",
            )
    current = state_checksums(networks)
    saved = [part.checksums for part in parts]
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
