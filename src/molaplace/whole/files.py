"""Save a posterior over whole networks as a JSON document and tensors, and load it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from molaplace.component import Component
from molaplace.errors import StorageError
from molaplace.fitting import as_networks
from molaplace.likelihoods import CATEGORICAL
from molaplace.options import one_of
from molaplace.saving.files import read_folder, write_folder
from molaplace.saving.fit_checkpoint import SavedSums, named_tensors, unpack_sums
from molaplace.saving.posterior import (
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

KIND = "whole-posterior"
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


def save_whole(posterior: WholeMoLA, directory: str | Path, *, overwrite: bool = False) -> Path:
    """Write a posterior, without its networks, to a folder, and return the folder's path."""
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
    return write_folder(directory, {"kind": KIND, **asdict(saved)}, tensors, overwrite=overwrite)


def load(directory: str | Path, networks: nn.Module | Sequence[nn.Module]) -> WholeMoLA:
    """Load a saved posterior, given the networks to which it was fitted.

    Args:
        directory: folder written by `posterior.save`.
        networks: the networks to which the posterior was fitted, in the same order.

    Returns:
        The posterior. Raises `StorageError` if the files are damaged or a network differs from the one that was fitted.
    """
    document, tensors = read_folder(directory, KIND)
    models = as_networks(networks)
    with explained(directory):
        saved = from_json(SavedPosterior, document)
        check_networks(models, saved.components)
        chosen = [tensors.pop(f"{index}.{CHOSEN}", None) for index in range(len(models))]
        sums = unpack_sums([part.sums for part in saved.components], tensors)
        components = [
            part.component(network, saved.structure, component_sums, indices)
            for network, part, component_sums, indices in zip(models, saved.components, sums, chosen, strict=True)
        ]
        return WholeMoLA(components, **saved.arguments(len(components)))


def _checked_indices(chosen: Tensor, size: int) -> Tensor:
    rising = chosen.dtype == torch.int64 and chosen.dim() == 1 and len(chosen) > 0 and bool((chosen.diff() > 0).all())
    if not rising or int(chosen[0]) < 0 or int(chosen[-1]) >= size:
        raise StorageError(f"tensor 'chosen': expected increasing indices below {size}. Save the posterior again.")
    return chosen
