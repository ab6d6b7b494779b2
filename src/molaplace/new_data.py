r"""Change the training data of a posterior: sums are added or subtracted, and the old data are not read again.

If A and B are disjoint data, the sums over both are the sum of the sums. The networks, and therefore the posterior means, do not
change; only the curvature, the noise estimate, the evidence and the distances follow the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from molaplace.component import Component, LastLayer
from molaplace.distributed import Team
from molaplace.errors import DataError, OptionError
from molaplace.network import Head, check_loader, evaluating
from molaplace.options import counted
from molaplace.posterior import MoLA
from molaplace.saving.fit_checkpoint import FitCheckpoint
from molaplace.structures import distance
from molaplace.sums import Sums
from molaplace.training_sums import read_sums, warn_of_empty_classes

ROUNDING = 16
"""Largest rounding error of sums over features, in machine epsilons of the network and relative to the size of the sums. The error is
due to the network: its features depend slightly on the batch size."""

SMALLEST_ROUNDING = 1e-10
"""Lower bound on the rounding error of sums, relative to their size."""


def added(posterior: MoLA, loader: Iterable[Any], **options: Any) -> MoLA:
    """Return the posterior with the data of a loader; the options are those of `MoLA.add`."""
    sums = _sums_over(posterior, loader, "training loader", **options)
    pairs = list(zip(_additive_layers(posterior), sums, strict=True))
    for layer, new_sums in pairs:
        _check_labelled_alike(layer.sums, new_sums)
    return _with_sums(posterior, [layer.sums + new_sums for layer, new_sums in pairs])


def removed(posterior: MoLA, loader: Iterable[Any], **options: Any) -> MoLA:
    """Return the posterior without the data of a loader.

    Raises `DataError` if the remaining sums are impossible, so that the data cannot have been among the training data.
    """
    layers = _additive_layers(posterior)
    heads = [component.head for component in posterior.components if component.head is not None]
    if heads[0].dense_axes and isinstance(heads[0].positions, int):
        raise OptionError(
            f"the fit drew {heads[0].positions} positions from each input, and they would be drawn differently now. Data can be "
            f"removed only if all positions were used (positions='all' or 'average')."
        )
    sums = _sums_over(posterior, loader, "loader of removed data", **options)
    remaining = []
    for component, layer, head, old_sums in zip(posterior.components, layers, heads, sums, strict=True):
        _check_labelled_alike(layer.sums, old_sums)
        remaining.append(layer.sums - old_sums)
        reason = _impossible(component, layer, head, remaining[-1])
        if reason is not None:
            raise DataError(
                f"these data were not all among the training data: without them, {reason}. Pass data from the fit, unchanged and "
                f"with the same labels."
            )
    return _with_sums(posterior, remaining)


def merged(first: MoLA, second: MoLA) -> MoLA:
    """Return the first posterior with the training data of both; no data are read."""
    _check_mergeable(first, second)
    pairs = zip(_additive_layers(first), _additive_layers(second), strict=True)
    return _with_sums(first, [layer.sums + other.sums for layer, other in pairs])


def _sums_over(
    posterior: MoLA,
    loader: Iterable[Any],
    where: str,
    *,
    team: Team | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 100,
    progress: bool = True,
) -> list[Sums]:
    # Return the sums over the data of a loader, read as the posterior's training data were.
    team = Team.single() if team is None else team
    layers = _additive_layers(posterior)
    heads = [component.head for component in posterior.components if component.head is not None]
    check_loader(loader, where)
    posterior.check_unchanged()  # sums over different features cannot be added
    checkpoints = FitCheckpoint(checkpoint, checkpoint_every, team.rank, team.size)
    _, _, sums = read_sums(
        posterior.networks,
        heads,
        loader,
        layers[0].structure,
        posterior.likelihood.as_specified(),
        where=where,
        distances=posterior.has_distances,
        positions=heads[0].positions,
        ignore_index=heads[0].ignore_index,
        checksums=[layer.checksums for layer in layers],
        team=team,
        checkpoints=checkpoints,
        progress=progress,
    )
    checkpoints.remove()
    return sums


def _with_sums(posterior: MoLA, totals: Sequence[Sums]) -> MoLA:
    components = []
    with torch.inference_mode(False), torch.no_grad():
        for component, layer, sums in zip(posterior.components, _additive_layers(posterior), totals, strict=True):
            likelihood = component.likelihood.as_specified().fitted(sums.weighted())
            components.append(
                Component(component.network, component.head, layer.with_sums(sums, likelihood), likelihood)
            )
    warn_of_empty_classes(totals[0])
    stale = posterior.stale or posterior.tuning is not None or posterior.validation_reference is not None
    return posterior.with_parts(components=components, tuning=posterior.tuning, stale=stale)


def _additive_layers(posterior: MoLA) -> list[LastLayer]:
    layers = [component.require_layer("new data") for component in posterior.components]
    if not layers[0].structure.additive:
        raise OptionError(
            "the sums of this structure depend on the order of the data, because they are a running average. Fit with "
            "running_average=None, whose sums can be added."
        )
    return layers


def _check_labelled_alike(sums: Sums, others: Sums) -> None:
    if (sums.log_likelihood is None) != (others.log_likelihood is None):
        subject = "the posterior was fitted" if sums.log_likelihood is None else "the new data are"
        raise DataError(
            f"{subject} without labels, unlike the other data. Pass labels with all data or with none: without labels, distances "
            f"are measured from predicted classes."
        )


def _check_mergeable(first: MoLA, second: MoLA) -> None:
    # Raise an OptionError unless the sums of both posteriors are sums of the same functions.
    if len(first.components) != len(second.components):
        raise OptionError(
            f"expected a posterior over the same {counted(len(first.components), 'network')}, got one over "
            f"{counted(len(second.components), 'network')}."
        )
    pairs = zip(_additive_layers(first), _additive_layers(second), strict=True)
    with evaluating(*first.networks, *second.networks):
        for index, ((layer, other_layer), component, other) in enumerate(
            zip(pairs, first.components, second.components, strict=True)
        ):
            difference = None
            if layer.structure != other_layer.structure:
                difference = f"structure ({_described(layer.structure)} and {_described(other_layer.structure)})"
            elif component.likelihood.as_specified() != other.likelihood.as_specified():
                difference = f"likelihood ({_described(component.likelihood)} and {_described(other.likelihood)})"
            elif _head_options(component.head) != _head_options(other.head):
                difference = (
                    f"last layer or its options ({_head_options(component.head)} and {_head_options(other.head)})"
                )
            elif layer.checksums != other_layer.checksums:
                difference = "weights"
            elif layer.sums.tensors.keys() != other_layer.sums.tensors.keys():
                difference = "option 'distances', or only one of them has labels"
            if difference is not None:
                raise OptionError(
                    f"networks[{index}]: only posteriors over the same networks with the same options can be added, but these two "
                    f"differ in their {difference}."
                )


def _described(part: Any) -> str:
    settings = ", ".join(f"{name}={value!r}" for name, value in part.settings().items())
    return f"{part.name!r} with {settings}" if settings else repr(part.name)


def _head_options(head: Head | None) -> dict[str, Any]:
    names = ("name", "every_position", "dense_axes", "ignore_index", "positions")
    return {name: getattr(head, name) for name in names}


def _impossible(component: Component, layer: LastLayer, head: Head, remaining: Sums) -> str | None:
    # Return what is impossible about the remaining sums, or None. Possible sums do not prove that the data were in the fit.
    if remaining.count <= 0:
        return f"{remaining.count:,} training data would remain"
    tolerance = max(SMALLEST_ROUNDING, ROUNDING * torch.finfo(head.module.weight.dtype).eps)
    before = layer.sums
    reason = distance.impossible(remaining, tolerance * (before.count + before.extra_rows))
    if reason is not None:
        return reason
    for parts in (layer.structure.nonnegative, component.likelihood.nonnegative):
        for values, others in zip(parts(remaining), parts(before), strict=True):
            if float(values.min()) < -tolerance * float(others.abs().max()):
                return "a sum of squares would be negative"
    for parts in (layer.structure.semidefinite, distance.semidefinite):
        for matrices, others in zip(parts(remaining), parts(before), strict=True):
            if float(torch.linalg.eigvalsh(matrices).min()) < -tolerance * float(_trace(others).max()):
                return "the curvature or the covariance of the features would have a negative eigenvalue"
    return None


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)
