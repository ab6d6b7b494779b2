"""Save a posterior over whole networks as a JSON document and tensors, and load it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from molaplace.component import Component, LastLayer
from molaplace.errors import OptionError, StorageError
from molaplace.fitting import as_networks
from molaplace.likelihoods import CATEGORICAL
from molaplace.network import StateChecksums
from molaplace.options import one_of
from molaplace.saving.files import read_folder, write_folder
from molaplace.saving.fit_checkpoint import SUMS, unpack_sums
from molaplace.saving.posterior import MIXTURE, NETWORK, check_networks, pack_components, unpack_mixture
from molaplace.saving.schema import Optional
from molaplace.sums import Sums
from molaplace.whole.jacobians import Block, WeightLayout
from molaplace.whole.posterior import WholeMoLA, make_component, structure_of
from molaplace.whole.structures import NAMES, WholeStructure

KIND = "whole-posterior"
CHOSEN = "chosen"  # name of the tensor that holds the indices of a subnetwork's weights; all other tensors are sums
BLOCK: dict[str, Any] = {"names": [str], "rows": int, "columns": int, "layer": Optional(str)}
COMPONENT: dict[str, Any] = {**NETWORK, "blocks": [BLOCK], "outputs": int}
SCHEMA: dict[str, Any] = {"structure": str, **MIXTURE, "components": [{**COMPONENT, **SUMS[0]}]}


def save_whole(posterior: WholeMoLA, directory: str | Path, *, overwrite: bool = False) -> Path:
    """Write a posterior, without its networks, to a folder, and return the folder's path."""

    def entry_of(index: int, component: Component, _: LastLayer) -> dict[str, Any]:
        structure = structure_of(component)
        blocks = [asdict(block) | {"names": list(block.names)} for block in structure.layout.blocks]
        return {"blocks": blocks, "outputs": structure.outputs}

    document, tensors = pack_components(posterior, entry_of)
    for index, component in enumerate(posterior.components):
        chosen = structure_of(component).layout.chosen
        if chosen is not None:
            tensors[f"{index}.{CHOSEN}"] = chosen
    document = {"kind": KIND, "structure": posterior.structure, **document}
    return write_folder(directory, document, tensors, overwrite=overwrite)


def load(directory: str | Path, networks: nn.Module | Sequence[nn.Module]) -> WholeMoLA:
    """Load a saved posterior, given the networks to which it was fitted.

    Args:
        directory: folder written by `posterior.save`.
        networks: the networks to which the posterior was fitted, in the same order.

    Returns:
        The posterior. Raises `StorageError` if the files are damaged or a network differs from the one that was fitted.
    """
    document, tensors = read_folder(directory, KIND, SCHEMA)
    models = as_networks(networks)
    parts = document["components"]
    check_networks(models, parts)
    try:
        chosen = [tensors.pop(f"{index}.{CHOSEN}", None) for index in range(len(parts))]
        sums = unpack_sums(parts, tensors)
        components = [
            _component(network, part, document["structure"], component_sums, indices)
            for network, part, component_sums, indices in zip(models, parts, sums, chosen, strict=True)
        ]
        return WholeMoLA(components, **unpack_mixture(document, len(components)))
    except StorageError:
        raise
    except (OptionError, KeyError, AttributeError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise StorageError(
            f"{directory} contains no posterior over these networks: {error}. Save the posterior again."
        ) from error


def _component(
    network: nn.Module, entry: Mapping[str, Any], structure_name: str, sums: Sums, chosen: Tensor | None
) -> Component:
    layout = WeightLayout(tuple(Block(**block | {"names": tuple(block["names"])}) for block in entry["blocks"]))
    if chosen is not None:
        layout = replace(layout, chosen=_checked_indices(chosen, layout.total))
    structure = WholeStructure(layout, entry["outputs"], one_of(structure_name, NAMES, "structure"))
    checksums = StateChecksums(entry["network"], entry["adapter"])
    component = make_component(network, structure, sums, CATEGORICAL, checksums)
    layer: Any = component.require_layer("loading")
    if layer.curvature.values.shape != layer.weights.shape:
        raise StorageError(
            "the shape of the saved sums does not match the network's weights. Save the posterior again."
        )
    return component


def _checked_indices(chosen: Tensor, size: int) -> Tensor:
    rising = chosen.dtype == torch.int64 and chosen.dim() == 1 and len(chosen) > 0 and bool((chosen.diff() > 0).all())
    if not rising or int(chosen[0]) < 0 or int(chosen[-1]) >= size:
        raise StorageError(f"tensor 'chosen': expected increasing indices below {size}. Save the posterior again.")
    return chosen
