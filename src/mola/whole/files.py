"""A mixture over whole networks as a JSON document and tensors, and back onto the same networks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mola.cooling import Cooling
from mola.errors import StorageError
from mola.fitting import ensemble
from mola.links import LINKS, Link
from mola.network.fingerprint import NETWORK, Watch, require_network
from mola.options import counted
from mola.saving import archive, storage
from mola.schema import Optional
from mola.tuning.candidates import Tuning
from mola.whole.component import WeightDraws, WholeComponent, WholeCurvature
from mola.whole.jacobians import Layer, WeightLayout, is_normalisation, is_plain
from mola.whole.spectra import Blocks, Dense, LayerSpectrum, WeightSpectrum

KIND = "whole-posterior"

SCHEMA = {
    "structure": str,
    **archive.MIXTURE,
    "components": [
        {
            "layers": [
                {
                    "name": str,
                    "rows": int,
                    "columns": int,
                    "weight": bool,
                    "bias": bool,
                    "scales": bool,
                    "positions": int,
                    "rotated": bool,
                }
            ],
            "rest": [{"name": str, "shape": [int]}],
            "dense": bool,
            "chosen": Optional(int),
            "network": NETWORK,
            "prior_precision": float,
            "classes": int,
            "count": int,
            "log_likelihood": Optional(float),
        }
    ],
}


KNOWN_LINKS: dict[str, Any] = {WeightDraws.name: WeightDraws, **LINKS}


def write(
    directory: str | Path,
    components: Sequence[WholeComponent],
    structure: str,
    link: Link | WeightDraws,
    weights: Tensor,
    weighting: str,
    tuning: Tuning | None,
    cooling: Cooling,
) -> Path:
    """Save a mixture."""
    tensors: dict[str, Tensor] = {}
    entries = []
    for index, component in enumerate(components):
        entry, own = _pack(component)
        entries.append(entry)
        tensors |= {f"{index}.{name}": tensor for name, tensor in own.items()}
    mixture = archive.pack_mixture(link, weights, weighting, tuning, cooling, KNOWN_LINKS)
    document = {"structure": structure, **mixture, "components": entries}
    return storage.write(directory, document, tensors, kind=KIND)


def _pack(component: WholeComponent) -> tuple[dict[str, Any], dict[str, Tensor]]:
    curvature = component.curvature
    spectrum, layout = curvature.spectrum, curvature.layout
    rotated = [False] * len(layout.layers)
    if isinstance(spectrum, Dense):
        tensors = {"values": spectrum.values, "vectors": spectrum.vectors}
        chosen = spectrum.chosen
        if chosen is not None:
            tensors["chosen"] = chosen
    else:
        assert isinstance(spectrum, Blocks)
        chosen, tensors = None, {"rest": spectrum.rest}
        for number, layer in enumerate(spectrum.layers):
            tensors[f"layer.{number}.values"] = layer.values
            if layer.left is not None and layer.right is not None:
                rotated[number] = True
                tensors |= {f"layer.{number}.left": layer.left, f"layer.{number}.right": layer.right}
    layers = [asdict(layer) | {"rotated": turned} for layer, turned in zip(layout.layers, rotated, strict=True)]
    entry = {
        "layers": layers,
        "rest": [{"name": name, "shape": list(shape)} for name, shape in layout.rest],
        "dense": isinstance(spectrum, Dense),
        "chosen": None if chosen is None else len(chosen),
        "network": curvature.watch.signature,
        "prior_precision": component.precision,
        "classes": curvature.classes,
        "count": curvature.count,
        "log_likelihood": curvature.log_likelihood,
    }
    return entry, tensors


def read(
    directory: str | Path, models: nn.Module | Sequence[nn.Module]
) -> tuple[list[WholeComponent], str, archive.Parts]:
    """Load what `write` saved.

    Args:
        directory: a folder.
        models: the networks, in the order in which they were fitted.

    Returns:
        The components, the name of their structure, and all else that the mixture has.
    """
    document, tensors = storage.read(directory, KIND, SCHEMA)
    networks, entries = ensemble(models).networks, document["components"]
    if not entries or len(networks) != len(entries):
        raise StorageError(f"{directory} was saved with {counted(len(entries), 'network')}, got {len(networks)}.")
    components = []
    for index, (network, entry) in enumerate(zip(networks, entries, strict=True)):
        require_network(network, entry["network"], f"models[{index}]")
        own = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{index}.")}
        components.append(
            _unpack(network, entry, {name.split(".", 1)[1]: tensor for name, tensor in own.items()}, index)
        )
    precisions = tuple(component.precision for component in components)
    return components, document["structure"], archive.unpack_mixture(document, precisions, KNOWN_LINKS)


def _unpack(network: nn.Module, entry: dict[str, Any], tensors: dict[str, Tensor], index: int) -> WholeComponent:
    names = ("name", "rows", "columns", "weight", "bias", "scales", "positions")
    layers = tuple(Layer(*(layer[name] for name in names)) for layer in entry["layers"])
    layout = WeightLayout(layers, tuple((part["name"], tuple(part["shape"])) for part in entry["rest"]))
    _check_layout(network, layout, index)
    rotated = [layer["rotated"] for layer in entry["layers"]]
    spectrum = _spectrum(_checked(tensors, _shapes(layout, entry, rotated)), layout, entry, rotated)
    curvature = WholeCurvature(
        layout,
        spectrum,
        layout.vector(network),
        entry["classes"],
        entry["count"],
        entry["log_likelihood"],
        Watch(network, entry["network"]),
    )
    return WholeComponent(network, curvature, entry["prior_precision"])


def _check_layout(network: nn.Module, layout: WeightLayout, index: int) -> None:
    own = {name: tuple(value.shape) for name, value in network.named_parameters(remove_duplicate=False)}
    wrong = [name for name in layout.parameters if name not in own]
    wrong += [name for name, shape in layout.rest if own.get(name, shape) != shape]
    modules = dict(network.named_modules())
    for layer in layout.layers:
        fits = is_normalisation if layer.scales else is_plain
        if layer.name not in modules or not fits(modules[layer.name]):
            wrong.append(layer.name)
    if not layout.parameters:
        raise StorageError("the saved posterior is over no weights: the document is garbled.")
    for layer in layout.layers:
        sizes = [torch.Size(own[name]).numel() for name in layer.parameters if name in own]
        if sum(sizes) != layer.size:
            wrong.append(layer.name)
    if wrong:
        raise StorageError(
            f"models[{index}]: the saved posterior is over {wrong[0]!r}, which this network has not, or in another shape."
        )


def _shapes(layout: WeightLayout, entry: dict[str, Any], rotated: Iterable[bool]) -> dict[str, tuple[int, ...]]:
    if entry["dense"]:
        side = layout.size if entry["chosen"] is None else entry["chosen"]
        chosen = {} if entry["chosen"] is None else {"chosen": (side,)}
        return {"values": (side,), "vectors": (side, side)} | chosen
    shapes: dict[str, tuple[int, ...]] = {"rest": (layout.rest_size,)}
    for number, (layer, turned) in enumerate(zip(layout.layers, rotated, strict=True)):
        shapes[f"layer.{number}.values"] = (layer.rows, layer.columns)
        if turned:
            shapes[f"layer.{number}.left"] = (layer.rows, layer.rows)
            shapes[f"layer.{number}.right"] = (layer.columns, layer.columns)
    return shapes


def _checked(tensors: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    for name, shape in shapes.items():
        kind = torch.int64 if name == "chosen" else torch.float64
        found = tensors.get(name)
        if found is None or tuple(found.shape) != shape or found.dtype != kind or not bool(torch.isfinite(found).all()):
            raise StorageError(
                f"tensor {name} of the saved posterior is missing, not finite, or not of shape {shape} in {kind}."
            )
    return tensors


def _spectrum(
    tensors: dict[str, Tensor], layout: WeightLayout, entry: dict[str, Any], rotated: Sequence[bool]
) -> WeightSpectrum:
    if entry["dense"]:
        chosen = tensors.get("chosen") if entry["chosen"] is not None else None
        if chosen is not None and (int(chosen.min()) < 0 or int(chosen.max()) >= layout.size):
            raise StorageError(f"tensor chosen of the saved posterior points outside of {layout.size} weights.")
        return Dense(tensors["values"], tensors["vectors"], chosen, layout)
    layers = [
        LayerSpectrum(
            *(tensors[f"layer.{number}.{part}"] for part in ("values", "left", "right")[: 3 if turned else 1])
        )
        for number, turned in enumerate(rotated)
    ]
    return Blocks(tuple(layers), tensors["rest"])
