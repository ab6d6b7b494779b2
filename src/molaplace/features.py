"""Fit a posterior to features and outputs that were computed elsewhere, for example in JAX or by an inference server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from molaplace.distributed import Team
from molaplace.errors import DataError, OptionError, located
from molaplace.fitting import fit
from molaplace.likelihoods import Likelihood, as_likelihood
from molaplace.links import Link
from molaplace.network import HeadNetwork, as_layer, as_rows, captured_arrays, head_by_name
from molaplace.options import counted
from molaplace.posterior import MoLA
from molaplace.rules import Rule
from molaplace.structures import Structure

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
    if heads is None:
        raise OptionError(
            "is missing. Pass the last layer as an nn.Linear or as a pair (weight, bias), or a list of them.",
            argument="heads",
        )
    networks = head_networks(heads)
    likelihood = as_likelihood(likelihood)
    return fit(
        networks,
        _batches(features, outputs, labels, networks, likelihood),
        val_loader,
        rule=rule,
        structure=structure,
        link=link,
        likelihood=likelihood,
        prior_precision=prior_precision,
        weights=weights,
        distances=distances,
        team=team,
        progress=progress,
    )


def _batches(
    features: Any, outputs: Any, labels: Any, networks: Sequence[nn.Module], likelihood: Likelihood
) -> Iterator[tuple[Any, ...]]:
    # Yield the features in parts of bounded size, with their labels, after a comparison of the outputs with those of the last layers.
    heads = [head_by_name(network, "layer") for network in networks]
    whole = outputs is not None
    if not whole and (labels is not None or hasattr(features, "shape") or not isinstance(features, Iterable)):
        raise OptionError(
            "are missing. Pass the outputs of the last layer, before any softmax. Only if `features` is an iterable of batches "
            "(features, outputs, labels) are outputs and labels None.",
            argument="outputs",
        )
    for index, batch in enumerate([(features, outputs, labels)] if whole else features):
        where = WHERE if whole else f"batch {index} of the {WHERE}"
        if not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
            size = f" of length {len(batch)}" if isinstance(batch, (tuple, list)) else ""
            raise DataError(
                f"expected (features, outputs, labels) or (features, outputs), got {type(batch).__name__}{size}.",
                place=where,
            )
        of_layers, of_networks, targets = (*batch, None)[:3]
        count = len(of_networks[0] if isinstance(of_networks, (tuple, list)) else of_networks)
        if targets is not None and len(targets) != count:
            raise DataError(
                f"expected a label for each of {counted(count, 'row')}, got {len(targets):,} labels.", place=where
            )
        for start in range(0, count, ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            with located(where):
                inputs = tuple(captured_arrays(heads, of_layers, of_networks, likelihood, rows).features)
            yield (inputs,) if targets is None else (inputs, as_rows(targets[rows], "labels"))
