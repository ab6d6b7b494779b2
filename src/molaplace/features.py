"""Fit a posterior to features and outputs that were computed elsewhere, for example in JAX or by an inference server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from molaplace.component import per_component
from molaplace.distributed import Team
from molaplace.errors import DataError, HeadError, OptionError, located
from molaplace.fitting import make_component
from molaplace.likelihoods import Likelihood, as_likelihood
from molaplace.links import Link, as_link
from molaplace.network import (
    IGNORE_INDEX,
    Captured,
    Head,
    HeadNetwork,
    as_layer,
    as_rows,
    captured_arrays,
    head_by_name,
    state_checksums,
    with_labels,
)
from molaplace.options import counted
from molaplace.posterior import MoLA
from molaplace.rules import Rule, as_rule
from molaplace.saving.fit_checkpoint import FitProgress
from molaplace.settings import Settings
from molaplace.structures import Structure, as_structure
from molaplace.structures.base import check_size
from molaplace.sums import Sums
from molaplace.training_sums import add_batch, finished_sums, warn_of_empty_classes
from molaplace.weights import check_weighting

WHERE = "training features"

ROWS_AT_ONCE = 4096
"""Number of rows that are read at once from whole arrays, which may be memory-mapped files."""


def head_networks(heads: Any) -> list[nn.Module]:
    """Return networks whose inputs are features and whose outputs are those of the given last layers.

    Pass them to `mola.load` to load a posterior that was saved after `mola.fit_features`.

    Args:
        heads: a last layer, or a list of K last layers, as for `mola.fit_features`.
    """
    layers = heads if isinstance(heads, list) else [heads]
    if not layers:
        raise OptionError(
            "must be a last layer or a non-empty list of last layers, got an empty list.", argument="heads"
        )
    return [HeadNetwork(as_layer(layer, index), index) for index, layer in enumerate(layers)]


def fit_features(
    features: Any,
    outputs: Any = None,
    labels: Any = None,
    heads: Any = None,
    val_loader: Iterable[Any] | None = None,
    *,
    rule: Rule | str | None = None,
    structure: str | Structure = "kron",
    link: str | Link = "probit",
    likelihood: str | Likelihood = "categorical",
    prior_precision: float | Sequence[float] = 1.0,
    weights: str | Sequence[float] | Tensor = "uniform",
    distances: bool = True,
    team: Team | None = None,
    progress: bool = True,
) -> MoLA:
    """Fit a Laplace approximation to last layers, given the features and outputs of the training data: the posterior of `mola.fit`.

    The networks of the posterior are the last layers. Its inputs are features: a tensor (n, P), or a tuple of K tensors for K networks.
    `posterior.predict_from_features(features, outputs)` predicts from outputs that have already been computed.

    Arrays may be of any library that NumPy can read, such as JAX arrays or memory-mapped files.

    Args:
        features: inputs (n, P) of the last layer, or a list with those of each of K networks. If `outputs` is None, an iterable of
            batches `(features, outputs, labels)` or `(features, outputs)`, each in the form of these arguments.
        outputs: outputs (n, C) of the last layer, before any softmax, or a list with those of each network.
        labels: labels of the data, or None if there are none.
        heads: the last layer, or a list of K last layers. A last layer is an nn.Linear or a pair (weight, bias) of arrays of the
            shapes (C, P) and (C,), with None for no bias.
        val_loader: if given, validation data on which the posterior is tuned: batches `(features, labels)`, with a tuple of K arrays
            of features for K networks.
        rule: the tuning rule, as for `mola.fit`.
        structure: structure of the curvature, as for `mola.fit`.
        link: map from logits to probabilities, as for `mola.fit`.
        likelihood: likelihood of the labels, as for `mola.fit`.
        prior_precision: prior precision lambda, as for `mola.fit`.
        weights: "uniform", "evidence", or K numbers that sum to 1.
        distances: whether to compute the sums needed for distances from the training classes.
        team: processes that share the fit. Each process passes its own rows.
        progress: whether to show a progress bar while validation data are read.

    Raises:
        DataError: if the features do not give the outputs through the last layer.
    """
    team = Team.single() if team is None else team
    if heads is None:
        raise OptionError(
            "is missing. Pass the last layer as an nn.Linear or as a pair (weight, bias), or a list of them.",
            argument="heads",
        )
    networks = head_networks(heads)
    likelihood = as_likelihood(likelihood)
    structure = as_structure(structure)
    link = as_link(link, likelihood)
    weighting = check_weighting(weights, len(networks))
    settings = Settings(tuple(per_component(prior_precision, len(networks), "prior_precision")))
    if rule is not None or val_loader is not None:
        as_rule(rule, likelihood, val_loader)
    layers = [head_by_name(network, "layer") for network in networks]
    if len({layer.outputs for layer in layers}) > 1:
        raise HeadError(
            f"expected last layers with the same number of outputs, got {[layer.outputs for layer in layers]}.",
            argument="heads",
        )
    check_size(structure, [layer.width for layer in layers], layers[0].outputs)
    done = FitProgress([Sums({}) for _ in layers])
    with torch.inference_mode(False), torch.no_grad():
        for batch in _batches(features, outputs, labels, layers, likelihood):
            add_batch(done, batch, layers, structure, likelihood, distances=distances)
        totals = finished_sums(done, layers, team, WHERE)
        components = [
            make_component(structure, likelihood, *parts)
            for parts in zip(networks, layers, totals, state_checksums(networks), strict=True)
        ]
    warn_of_empty_classes(totals[0])
    posterior = MoLA(components, settings, link=link, weights=weighting)
    if val_loader is None and rule is None:
        return posterior
    return posterior.tune(val_loader, rule=rule, progress=progress, team=team)


def _batches(
    features: Any, outputs: Any, labels: Any, heads: Sequence[Head], likelihood: Likelihood
) -> Iterator[Captured]:
    # Yield the rows in parts of bounded size, with their labels.
    if outputs is not None:
        yield from _parts(features, outputs, labels, heads, likelihood, WHERE)
        return
    if labels is not None or hasattr(features, "shape") or not isinstance(features, Iterable):
        raise OptionError(
            "are missing. Pass the outputs of the last layer, before any softmax. Only if `features` is an iterable of batches "
            "(features, outputs, labels) are outputs and labels None.",
            argument="outputs",
        )
    labelled = None
    for index, batch in enumerate(features):
        where = f"batch {index} of the {WHERE}"
        if not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
            size = f" of length {len(batch)}" if isinstance(batch, (tuple, list)) else ""
            raise DataError(
                f"expected (features, outputs, labels) or (features, outputs), got {type(batch).__name__}{size}.",
                place=where,
            )
        batch_labels = batch[2] if len(batch) == 3 else None
        if labelled not in (None, batch_labels is not None):
            raise DataError(f"{'has no' if labelled else 'has'} labels, unlike the batches before it.", place=where)
        labelled = batch_labels is not None
        yield from _parts(batch[0], batch[1], batch_labels, heads, likelihood, where)


def _parts(
    features: Any, outputs: Any, labels: Any, heads: Sequence[Head], likelihood: Likelihood, where: str
) -> Iterator[Captured]:
    first = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
    count = len(first)
    if labels is not None and len(labels) != count:
        raise DataError(
            f"expected a label for each of {counted(count, 'row')}, got {len(labels):,} labels.", place=where
        )
    with located(where):
        for start in range(0, count, ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            captured = captured_arrays(heads, features, outputs, likelihood, rows)
            if labels is not None:
                captured = with_labels(captured, as_rows(labels[rows], "labels"), likelihood, "labels", IGNORE_INDEX)
            yield captured
