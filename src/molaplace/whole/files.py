"""Save a posterior over whole networks as a JSON document and tensors, and load it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from molaplace.component import Component
from molaplace.errors import StorageError
from molaplace.likelihoods import CATEGORICAL
from molaplace.options import one_of
from molaplace.saving.fit_checkpoint import SavedSums, named_tensors, unpack_sums
from molaplace.saving.posterior import (
    KIND,
    SavedMixture,
    SavedNetwork,
    check_networks,
    check_saveable,
    explained,
    identity_of,
    settings_of,
)
from molaplace.saving.schema import from_json
from molaplace.sums import Sums
from molaplace.whole.jacobians import Block, WeightLayout
from molaplace.whole.posterior import WholeMoLA, make_component, structure_of
from molaplace.whole.structures import NAMES, WholeStructure

WHOLE_NETWORKS = "whole networks"
"""What the posterior is over."""

CHOSEN = "chosen"  # name of the tensor that holds the indices of a subnetwork's weights; all other tensors are sums


@dataclass(frozen=True, kw_only=True)
class SavedComponent(SavedNetwork):
    """A network, the layout of its weights and its sums over the training data."""

    blocks: tuple[Block, ...]
    outputs: int
    sums: SavedSums

    def component(self, network: nn.Module, structure_name: str, sums: Sums, chosen: Tensor | None) -> Component:
        """Return the component, given its network, its sums and the indices of its subnetwork."""
        layout = WeightLayout(self.blocks)
        if chosen is not None:
            layout = replace(layout, chosen=_checked_indices(chosen, layout.total))
        structure = WholeStructure(layout, self.outputs, one_of(structure_name, NAMES, "structure"))
        component = make_component(network, structure, sums, CATEGORICAL, self.checksums)
        layer: Any = component.require_layer("loading")
        if layer.curvature.values.shape != layer.weights.shape:
            raise StorageError(
                "the shape of the saved sums does not match the network's weights. Save the posterior again."
            )
        return component


@dataclass(frozen=True, kw_only=True)
class SavedPosterior(SavedMixture):
    """The document of a posterior over whole networks."""

    structure: str
    components: tuple[SavedComponent, ...]


def pack(posterior: WholeMoLA) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the document and the tensors that `unpack` needs in addition to the networks."""
    layers = check_saveable(posterior)
    layouts = [structure_of(component).layout for component in posterior.components]
    components = [
        SavedComponent(
            **identity_of(component, layer),
            blocks=layout.blocks,
            outputs=structure_of(component).outputs,
            sums=SavedSums.of(layer.sums),
        )
        for component, layer, layout in zip(posterior.components, layers, layouts, strict=True)
    ]
    saved = SavedPosterior(**settings_of(posterior), structure=str(posterior.structure), components=tuple(components))
    tensors = named_tensors([layer.sums for layer in layers])
    tensors |= {f"{index}.{CHOSEN}": layout.chosen for index, layout in enumerate(layouts) if layout.chosen is not None}
    return {"kind": KIND, "over": WHOLE_NETWORKS, **asdict(saved)}, tensors


def unpack(
    document: Mapping[str, Any], tensors: Mapping[str, Tensor], networks: Sequence[nn.Module], place: object
) -> WholeMoLA:
    """Return the posterior that `pack` described; `place` names its file in messages."""
    with explained(place):
        saved = from_json(SavedPosterior, document)
        check_networks(networks, saved.components)
        chosen = [tensors.get(f"{index}.{CHOSEN}") for index in range(len(networks))]
        numbers = {name: tensor for name, tensor in tensors.items() if not name.endswith(f".{CHOSEN}")}
        sums = unpack_sums([part.sums for part in saved.components], numbers)
        components = [
            part.component(network, saved.structure, component_sums, indices)
            for network, part, component_sums, indices in zip(networks, saved.components, sums, chosen, strict=True)
        ]
        return WholeMoLA(components, **saved.arguments(len(components)))


def _checked_indices(chosen: Tensor, size: int) -> Tensor:
    rising = chosen.dtype == torch.int64 and chosen.dim() == 1 and len(chosen) > 0 and bool((chosen.diff() > 0).all())
    if not rising or int(chosen[0]) < 0 or int(chosen[-1]) >= size:
        raise StorageError(f"tensor 'chosen': expected increasing indices below {size}. Save the posterior again.")
    return chosen
