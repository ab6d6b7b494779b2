"""The ways to make a posterior: fit it, take the networks alone, or load it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mola import archive, storage
from mola.component import Component, Curvature, per_component
from mola.errors import OptionError
from mola.features import Features, batch_count, first_passes, peek, stream
from mola.heads import Head
from mola.laplace import Structure, as_structure, check_precision
from mola.likelihood import CATEGORICAL, Likelihood
from mola.links import Link, as_link
from mola.networks import as_batch, undisturbed
from mola.posterior import MoLA
from mola.weights import check_weighting

__all__ = ["ensemble", "fit", "load"]


def _as_networks(models: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList):
        return [models]  # a Sequential can be iterated, but is one network
    networks = list(models) if isinstance(models, Iterable) else [models]
    if not networks or not all(isinstance(network, nn.Module) for network in networks):
        kinds = [type(network).__name__ for network in networks]
        message = f"models: expected one nn.Module or a non-empty list of them, got {kinds}."
        raise OptionError(message)
    return networks


def fit(
    models: nn.Module | Sequence[nn.Module],
    train_loader: Iterable[Any],
    val_loader: Iterable[Any] | None = None,
    structure: str | Structure = "kron",
    prior_precision: float | Sequence[float] = 1.0,
    weights: str | Sequence[float] | Tensor = "uniform",
    link: str | Link = "probit",
    head: str | Sequence[str] | None = None,
    progress: bool = True,
) -> MoLA:
    """Put a Laplace approximation on the last layer of each trained network: one pass over the training data.

    Data are read once, and every network sees each batch in turn. The networks are not modified.

    Args:
        models: one trained classifier, or K of them; architectures may differ, the number of classes may not.
        train_loader: any iterable of batches: `(x, y)`, `[x, y]`, `x` alone, or a mapping with the labels under "labels".
        val_loader: if given, the prior precision is tuned on it at once, by the paper's rule.
        structure: "kron" (Algorithm 1), "kron-exact", "diag" or "full", or a `Structure`.
        prior_precision: lambda, one number or K.
        weights: "uniform", "evidence", or K numbers that sum to 1.
        link: "probit", "probit-centered", "mean-field", "bridge" or "mc", or a `Link`.
        head: None finds each network's last linear layer; or its dotted name, one for all or one for each.
        progress: whether to show a progress bar on stderr, if that is a terminal.

    Returns:
        The posterior.

    Raises:
        OptionError: if an argument has a value that cannot be used; `HeadError` and `DataError` come from the networks
            and the loader.
    """
    networks = _as_networks(models)
    count = len(networks)
    chosen_structure, chosen_link = as_structure(structure), as_link(link)
    weighting = check_weighting(weights, count)
    precisions = [check_precision(value) for value in per_component(prior_precision, count, "prior_precision")]
    names: list[str | None] = [head] * count if head is None or isinstance(head, str) else list(head)
    if len(names) != count:
        message = f"head: expected one name, or {count} of them (one for each model); got {len(names)}."
        raise OptionError(message)
    # Sums made in inference mode could not be differentiated by mola.Evidence later.
    with torch.inference_mode(False), undisturbed(*networks):
        first, batches = peek(train_loader, "the training loader")
        heads, seen = first_passes(networks, names, as_batch(first, "batch 0 of the training loader").inputs)
        chosen_structure.check_size([one.width for one in heads], heads[0].classes)
        curvatures = _curvatures(
            networks,
            heads,
            batches,
            chosen_structure,
            CATEGORICAL,
            first=seen,
            total=batch_count(train_loader),
            progress=progress,
        )
    components = [
        Component(network, one, curvature, precision)
        for network, one, curvature, precision in zip(networks, heads, curvatures, precisions, strict=True)
    ]
    posterior = MoLA(components, chosen_link, weighting)
    return posterior if val_loader is None else posterior.tune(val_loader, progress=progress)


def _curvatures(
    networks: Sequence[nn.Module],
    heads: Sequence[Head],
    batches: Iterable[Any],
    structure: Structure,
    likelihood: Likelihood,
    *,
    first: Sequence[Features],
    total: int | None,
    progress: bool,
) -> list[Curvature]:
    totals: list[Any] = [None] * len(heads)
    rows = structure.rows(max(head.width for head in heads))
    for seen, labels in stream(
        networks,
        heads,
        batches,
        where="training loader",
        progress=progress,
        total=total,
        likelihood=likelihood,
        rows=rows or 1,
        first=first,
    ):
        for index, (head, one) in enumerate(zip(heads, seen, strict=True)):
            for features, logits, some in _portions(head, one, labels, rows):
                score = None if some is None else float(likelihood.log_likelihood(logits, some).sum())
                sums = structure.sums(features, likelihood.curvature(logits), score)
                totals[index] = structure.merge(totals[index], sums)
    return [
        Curvature(structure, total.cpu(), head.weights(), likelihood) for head, total in zip(heads, totals, strict=True)
    ]


def _portions(
    head: Head, seen: Features, labels: Tensor | None, rows: int | None
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Features with the constant 1, logits and labels, in float64 and at most `rows` at a time: a batch may be large."""
    # On the CPU where the device has no float64.
    device = "cpu" if seen.logits.device.type == "mps" else seen.logits.device
    for start in range(0, len(seen.logits), rows or len(seen.logits)):
        part = slice(start, None if rows is None else start + rows)
        features, logits = seen.features[part].to(device), seen.logits[part].to(device)
        yield head.lift(features, torch.float64), logits.double(), None if labels is None else labels[part].to(device)


def ensemble(
    models: nn.Module | Sequence[nn.Module],
    weights: str | Sequence[float] | Tensor = "uniform",
) -> MoLA:
    """The deep ensemble of trained networks, or of one network its plain (MAP) prediction: no data needed.

    Args:
        models: one trained classifier, or K of them.
        weights: "uniform", or K numbers that sum to 1.

    Returns:
        A posterior without covariance.
    """
    return MoLA([Component(network, None, None, 1.0) for network in _as_networks(models)], "probit", weights)


def load(directory: str | Path, models: nn.Module | Sequence[nn.Module]) -> MoLA:
    """Load a saved posterior onto the networks it was fitted on.

    Args:
        directory: folder that `posterior.save` wrote.
        models: the networks, in the same order.

    Returns:
        The posterior; `StorageError` if the files are damaged or of another version, or a network is not the one that
        was fitted.
    """
    networks = _as_networks(models)
    return MoLA(*archive.unpack(*storage.read(directory), networks))
