"""Fit a Laplace approximation over all weights of each network.

A fit takes one pass over the training data, or two passes for a subnetwork.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from molaplace.component import per_component
from molaplace.distributed import Team, check_sampler
from molaplace.errors import DataError, OptionError, located
from molaplace.fitting import as_networks
from molaplace.likelihoods import CATEGORICAL, Likelihood, as_likelihood
from molaplace.links import Link, as_link
from molaplace.network import (
    Inputs,
    as_batch,
    batch_count,
    call,
    check_finite,
    check_loader,
    check_logits,
    evaluating,
    named_batches,
    peek,
    state_checksums,
)
from molaplace.options import one_of
from molaplace.rules import Rule, as_rule
from molaplace.settings import Settings
from molaplace.structures.base import check_size
from molaplace.sums import Sums
from molaplace.training_sums import sum_over_processes
from molaplace.weights import check_weighting
from molaplace.whole.jacobians import WeightLayout, curvature_roots, find_layout, size_of, some_of
from molaplace.whole.posterior import WholeMoLA, make_component
from molaplace.whole.structures import WholeStructure


def fit(
    networks: nn.Module | Sequence[nn.Module],
    train_loader: Iterable[Any],
    val_loader: Iterable[Any] | None = None,
    *,
    rule: Rule | str | None = None,
    structure: str | None = None,
    subnetwork: int | float | None = None,
    link: str | Link = "probit",
    likelihood: str | Likelihood = "categorical",
    prior_precision: float | Sequence[float] = 1.0,
    weights: str | Sequence[float] | Tensor = "uniform",
    team: Team | None = None,
    progress: bool = True,
) -> WholeMoLA:
    """Fit a Laplace approximation over all weights of each trained network, rather than over its last layer only.

    The posterior over the trainable weights (`requires_grad`) is Gaussian. Its mean is the vector of trained weights, and its
    precision is `H + lambda I`, where H is the generalised Gauss-Newton matrix summed over the training data. The networks are not
    modified.

    Args:
        networks: one trained classifier, or K of them. Their architectures may differ, but they must have the same number of classes.
        train_loader: any iterable of batches. A batch is `(x, y)`, `x` alone, or a mapping that holds the labels under the key
            "labels". Iterators are rejected for a subnetwork, which needs two passes.
        val_loader: if given, validation data on which the posterior is tuned.
        rule: tuning rule, as in `mola.fit`.
        structure: "kron" (K-FAC for every linear and convolutional layer, the diagonal for all other parameters), "diag" (the exact
            diagonal) or "full" (small networks only). The default is "kron", or "full" for a subnetwork.
        subnetwork: number or fraction of the weights to be treated as uncertain. The weights with the largest marginal variance under
            the diagonal approximation are chosen (Daxberger et al., 2021) and given a full covariance. All other weights keep their
            trained values. Weights that do not affect any prediction on the training data, such as those of dead units, are chosen
            last.
        link: "probit", "probit-centred", "mean-field", "bridge" or "mc" on the linearised logits, or an object from `mola.links`.
        likelihood: only "categorical". Use `mola.fit` for other likelihoods.
        prior_precision: prior precision lambda, as one number or K numbers.
        weights: "uniform", "evidence", or K numbers that sum to 1.
        team: processes that fit the posterior together, as returned by `mola.distributed.join()`. Each process reads its own shard,
            and all processes return the same posterior, fitted to all data.
        progress: show a progress bar if stderr is a terminal.
    """
    team = Team.single() if team is None else team
    likelihood = as_likelihood(likelihood)
    if likelihood != CATEGORICAL:
        raise OptionError(
            f"likelihood {likelihood.name!r}: mola.whole.fit supports only classification with an unweighted loss. Use mola.fit, which "
            f"covers the last layer only."
        )
    models = as_networks(networks)
    name = _check_structure(structure, subnetwork)
    link = as_link(link, likelihood)
    weighting = check_weighting(weights, len(models))
    settings = Settings(tuple(per_component(prior_precision, len(models), "prior_precision")))
    check_loader(train_loader, "training loader")
    if val_loader is not None:
        check_loader(val_loader, "validation loader")
    if rule is not None or val_loader is not None:
        as_rule(rule, likelihood, val_loader)
    if subnetwork is not None and iter(train_loader) is train_loader:
        raise DataError(
            "a subnetwork needs two passes over the training data, but the loader is an iterator. Pass a DataLoader or a list of "
            "batches."
        )
    if team.size > 1:
        check_sampler(train_loader)
    with torch.inference_mode(False), torch.no_grad(), evaluating(*models):
        batches: Iterable[Any]
        first, batches = peek(train_loader, "training loader")
        total = batch_count(train_loader)
        inputs = as_batch(first, "batch 0 of the training loader").inputs
        layouts, classes = _layouts(models, inputs, factored=name == "kron")
        checksums = state_checksums(models)
        identity = {
            "networks": [list(parts) for parts in checksums],
            "layouts": [asdict(layout) for layout in layouts],
            "structure": [name, subnetwork],
        }
        team.agree(identity, "fit")
        structures = [WholeStructure(layout, classes, name) for layout in layouts]
        sizes = [layout.total for layout in layouts]
        if subnetwork is not None:
            sizes = [_subnetwork_size(size, subnetwork) for size in sizes]
        check_size(structures[0], sizes, classes)
        if subnetwork is not None:
            diagonals = [WholeStructure(layout, classes, "diag") for layout in layouts]
            diagonal_sums = _sum_up(models, diagonals, batches, total, team, progress=progress)
            structures = []
            for layout, sums, size in zip(layouts, diagonal_sums, sizes, strict=True):
                chosen = _largest_variances(sums.tensors["rest"], size)
                structures.append(WholeStructure(replace(layout, chosen=chosen), classes, "subnetwork"))
            batches = train_loader
        totals = _sum_up(models, structures, batches, total, team, progress=progress)
        components = [
            make_component(network, structure, sums, likelihood, parts)
            for network, structure, sums, parts in zip(models, structures, totals, checksums, strict=True)
        ]
    posterior = WholeMoLA(components, settings, link=link, weights=weighting)
    if val_loader is None and rule is None:
        return posterior
    return posterior.tune(val_loader, rule=rule, progress=progress, team=team)


def _check_structure(structure: str | None, subnetwork: float | None) -> str:
    if subnetwork is None:
        return one_of("kron" if structure is None else structure, ("kron", "diag", "full"), "structure")
    if structure not in (None, "full"):
        raise OptionError(
            f"must be 'full' or None for a subnetwork, which always has a full covariance; got {structure!r}.",
            argument="structure",
        )
    return "full"


def _subnetwork_size(weights: int, subnetwork: float) -> int:
    if type(subnetwork) is int and 1 <= subnetwork <= weights:
        return subnetwork
    if type(subnetwork) is float and 0 < subnetwork < 1:
        return max(1, round(subnetwork * weights))
    raise OptionError(
        f"must be a number of weights from 1 to {weights}, or a fraction between 0 and 1; got {subnetwork!r}.",
        argument="subnetwork",
    )


def _largest_variances(diagonal: Tensor, count: int) -> Tensor:
    # Return, in increasing order, the indices of the weights with the smallest h, that is, the largest marginal variances
    # 1 / (h + lambda). Weights with h = 0 come last, because they do not affect any prediction on the training data. A third of a
    # trained LeNet's weights belong to dead units and would otherwise fill the subnetwork.
    order = torch.sort(torch.where(diagonal > 0, diagonal, torch.inf), stable=True).indices
    return order[:count].sort().values.cpu()


def _layouts(networks: Sequence[nn.Module], inputs: Inputs, *, factored: bool) -> tuple[list[WeightLayout], int]:
    layouts = []
    classes = []
    size = size_of(inputs)
    for index, network in enumerate(networks):
        with located(f"batch 0 of the training loader, networks[{index}]"):
            outputs = call(network, inputs)
            if outputs.dim() != 2 or len(outputs) != size:
                raise DataError(
                    f"expected logits of shape ({size}, C), got {tuple(outputs.shape)}. Use mola.fit for dense outputs."
                )
            check_finite(outputs)
            check_logits(network, inputs, outputs, CATEGORICAL)
            layouts.append(find_layout(network, inputs, factored=factored))
        classes.append(outputs.shape[1])
    if len(set(classes)) > 1:
        raise DataError(f"expected networks with the same number of classes, got {classes}.")
    return layouts, classes[0]


def _sum_up(
    networks: Sequence[nn.Module],
    structures: Sequence[WholeStructure],
    batches: Iterable[Any],
    total: int | None,
    team: Team,
    *,
    progress: bool,
) -> list[Sums]:
    totals = [Sums({}) for _ in networks]
    for where, batch in named_batches(networks, batches, "training loader", progress=progress, total=total):
        for position, (network, structure) in enumerate(zip(networks, structures, strict=True)):
            with located(f"{where}, networks[{position}]"):
                totals[position] += _batch_sums(network, structure, batch.inputs, batch.labels, where)
    return [sum_over_processes(sums, team) for sums in totals]


def _batch_sums(
    network: nn.Module, structure: WholeStructure, inputs: Inputs, labels: Tensor | None, where: str
) -> Sums:
    size = size_of(inputs)
    step = structure.layout.data_at_once(structure.outputs)
    total = Sums({})
    chunks = []
    for start in range(0, size, step):
        part = some_of(inputs, slice(start, start + step), size)
        outputs, rows = structure.rows(network, part, curvature_roots)
        check_finite(outputs)
        chunks.append(outputs)
        total += Sums({name: values.cpu() for name, values in structure.sums(rows).items()}, len(outputs))
    if labels is None:
        return Sums(total.tensors, total.count, None)
    logits = torch.cat(chunks)
    log_likelihood = CATEGORICAL.log_likelihood(logits, CATEGORICAL.check_labels(labels, logits, where)).sum()
    return Sums(total.tensors, total.count, float(log_likelihood))
