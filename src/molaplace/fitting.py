"""Functions that create a posterior: `fit` with a Laplace approximation, and `ensemble` without one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from molaplace.component import Component, LastLayer, per_component
from molaplace.distributed import Team, check_sampler
from molaplace.errors import DataError, OptionError, warn
from molaplace.likelihoods import Likelihood, as_likelihood
from molaplace.links import Link, as_link
from molaplace.network import (
    IGNORE_INDEX,
    Captured,
    Head,
    LogitsOf,
    Positions,
    as_batch,
    batch_count,
    check_loader,
    check_network,
    check_positions,
    evaluating,
    find_heads,
    head_by_name,
    peek,
    state_checksum,
    stream,
    unwrapped,
)
from molaplace.numerics import float64_device
from molaplace.posterior import MoLA
from molaplace.rules import Rule, as_rule
from molaplace.saving.fit_checkpoint import FitCheckpoint, FitProgress
from molaplace.settings import Settings
from molaplace.structures import Structure, as_structure
from molaplace.structures.base import check_size
from molaplace.structures.distance import distance_sums
from molaplace.sums import Sums
from molaplace.weights import check_weighting

Logits: TypeAlias = "Callable[[Any], Tensor]"
"""A function that maps a network's output to its logits."""


def as_networks(
    networks: nn.Module | Sequence[nn.Module], logits: Logits | Sequence[Logits] | None = None
) -> list[nn.Module]:
    """Return the networks as a list, without their torch.compile wrappers, and warn if the same network occurs twice.

    Args:
        networks: one or more networks.
        logits: function that extracts the logits from a network's output, or one such function per network; not needed if the network
            returns the logits.
    """
    given: list[Any]
    if isinstance(networks, Iterable) and not isinstance(networks, (str, Mapping)):
        # A Sequential is iterable but counts as one network.
        given = (
            list(networks) if isinstance(networks, nn.ModuleList) or not isinstance(networks, nn.Module) else [networks]
        )
    else:
        given = [networks]
    wrong = [one for one in given if not isinstance(one, nn.Module)]
    if wrong or not given:
        got, remedy = type(wrong[0]).__name__ if wrong else "an empty list", ""
        if wrong and isinstance(wrong[0], (str, Path)):
            got = f"a file name, {str(wrong[0])!r}"
            remedy = (
                f" Build the network and load its weights first: network.load_state_dict(torch.load({str(wrong[0])!r}, "
                f"weights_only=True)). The command `molaplace fit` accepts such files directly."
            )
        elif wrong and isinstance(wrong[0], Mapping):
            got = "a state dict"
            remedy = " Build the network, call network.load_state_dict(state_dict), and pass the network itself."
        raise OptionError(
            f"must be an nn.Module or a non-empty list of nn.Modules, got {got}.{remedy}", argument="networks"
        )
    for one in given:
        check_network(one)
    models = [unwrapped(one) for one in given]
    functions = [logits] * len(models) if logits is None or callable(logits) else list(logits)
    if len(functions) != len(models) or not (logits is None or all(map(callable, functions))):
        raise OptionError(
            f"must be a function that maps a network's output to its logits, such as `lambda output: output[0]`, or "
            f"a list of {len(models)} such functions; got {logits!r}.",
            argument="logits",
        )
    pairs = combinations(zip(models, functions, strict=True), 2)
    if any(first is second and _are_copies(one, two) for (one, first), (two, second) in pairs):
        warn(
            "the same network was passed more than once. Copies always agree, so the mixture is no better than a single network."
        )
    if logits is None:
        return models
    return [
        LogitsOf(model, function) for model, function in zip(models, functions, strict=True) if function is not None
    ]


def _are_copies(one: nn.Module, two: nn.Module) -> bool:
    own, other = list(one.parameters()), list(two.parameters())
    alike = bool(own) and [values.shape for values in own] == [values.shape for values in other]
    pairs = zip(own, other, strict=True)
    return one is two or (alike and all(mine is theirs or torch.equal(mine, theirs.to(mine)) for mine, theirs in pairs))


def fit(
    networks: nn.Module | Sequence[nn.Module],
    train_loader: Iterable[Any],
    val_loader: Iterable[Any] | None = None,
    *,
    rule: Rule | str | None = None,
    structure: str | Structure = "kron",
    link: str | Link = "probit",
    likelihood: str | Likelihood = "categorical",
    prior_precision: float | Sequence[float] = 1.0,
    weights: str | Sequence[float] | Tensor = "uniform",
    head: str | Sequence[str] | None = None,
    logits: Logits | Sequence[Logits] | None = None,
    distances: bool = True,
    positions: Positions = "all",
    ignore_index: int = IGNORE_INDEX,
    team: Team | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 100,
    progress: bool = True,
) -> MoLA:
    """Fit a Laplace approximation to the last layer of each trained network in one pass over the training data.

    The data are read only once, and every network processes each batch. The networks are not modified.

    Args:
        networks: a trained network, or a list of K trained networks. Their architectures may differ, but they must all have the same
            number of outputs.
        train_loader: any iterable of batches. A batch is `(x, y)`, `x` alone, or a mapping that holds the labels under the key
            "labels".
        val_loader: optional validation data on which the posterior is tuned.
        rule: the tuning rule, by name or as an object from `mola.rules`; by default, the likelihood's default rule. Without
            validation data, the default is to apply no rule and keep `prior_precision`.
        structure: "kron" (Algorithm 1), "kron-exact", "kron-diag", "diag" or "full", or an object from `mola.structures`.
        link: "probit", "probit-centred", "mean-field", "bridge" or "mc", or an object from `mola.links`.
        likelihood: "categorical" (one of C classes), "bernoulli" (binary or multi-label) or "gaussian" (regression), or an object from
            `mola.likelihoods`.
        prior_precision: prior precision lambda, used unless a rule chooses one: a single number, or one per network.
        weights: "uniform", "evidence", or K numbers that sum to 1.
        head: dotted name of the last linear layer, or one name per network; by default, the layer is found automatically.
        logits: function that extracts the logits from a network's output, such as `lambda output: output[0]`, or one such function
            per network; not needed if the network returns the logits. Pass the same function to `mola.load`.
        distances: whether to compute the sums needed for distances from the training classes. For each network, these sums are
            matrices of shapes C x P and P x P.
        positions: how to treat dense outputs of shape (n, C, H, W) or (n, T, C). "all" treats each position as a datum, and "average"
            treats each input as a single datum. If `positions` is a number, that many positions are drawn from each input.
        ignore_index: label that marks positions to ignore.
        team: processes that share the fit; see `mola.distributed.join`. Each process reads its own shard, and every process returns
            the posterior for the combined data.
        checkpoint: folder in which intermediate sums are saved. If the fit is interrupted, repeating the call resumes it from
            these sums. The folder is removed when the fit is complete.
        checkpoint_every: number of batches between checkpoints.
        progress: whether to show a progress bar when stderr is a terminal.

    Raises:
        OptionError: if an argument is invalid. Unsuitable networks raise `HeadError`, and unsuitable batches raise `DataError`.
    """
    team = Team.single() if team is None else team
    models, likelihood = as_networks(networks, logits), as_likelihood(likelihood)
    count = len(models)
    chosen_structure, chosen_link = as_structure(structure), as_link(link, likelihood)
    weighting = check_weighting(weights, count)
    settings = Settings(tuple(per_component(prior_precision, count, "prior_precision")))
    names = per_component(head, count, "head")
    positions = check_positions(positions)
    if not isinstance(distances, bool):
        raise OptionError(f"must be True or False, got {distances!r}.", argument="distances")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise OptionError(
            f"must be an integer that is not a class index, got {ignore_index!r}.", argument="ignore_index"
        )
    check_loader(train_loader, "training loader")
    if val_loader is not None:
        check_loader(val_loader, "validation loader")
        if val_loader is train_loader:
            warn(
                "the validation data are the same as the training data. Networks are more accurate and more confident on training "
                "data than on new data, so pass held-out data instead."
            )
    if rule is not None or val_loader is not None:
        as_rule(rule, likelihood, val_loader)
    if team.size > 1:
        check_sampler(train_loader)
        if not chosen_structure.additive:
            raise OptionError(
                "a running average depends on the order of the batches and cannot be computed by several processes. "
                "Use running_average=None."
            )
    checkpoints = FitCheckpoint(checkpoint, checkpoint_every, team.rank, team.size)

    def sums_of(layer: Head, phi: Tensor, outputs: Tensor, labels: Tensor | None) -> Sums:
        tensors = chosen_structure.sums(phi, likelihood.curvature(outputs, labels))
        log_likelihood = None
        if labels is not None:
            labels = labels.to(outputs.device)
            later = likelihood.label_sums(
                outputs, labels
            )  # sums for computing the log-likelihood later, if it cannot be computed yet
            tensors |= later
            log_likelihood = 0.0 if later else float(likelihood.log_likelihood(outputs, labels).sum())
        if distances:
            groups, number = likelihood.group(outputs, labels), likelihood.num_groups(outputs.shape[1])
            tensors |= distance_sums(phi[:, : layer.inputs], groups, number, predicted=labels is None)
        return Sums(tensors, len(phi), log_likelihood)

    def batch_sums(batch: Captured) -> list[Sums]:
        parts = [Sums({}) for _ in heads]
        for rows in batch.chunks():
            for k, (layer, phi, outputs) in enumerate(zip(heads, rows.phi, rows.outputs, strict=True)):
                own = sums_of(layer, phi, outputs, rows.labels)
                # Sums over a single chunk may stay sparse. Sums over several chunks are made dense, because their sparse entries
                # would otherwise accumulate.
                parts[k] = own if len(rows) == len(batch) else parts[k] + own
        return parts

    # Sums computed in inference mode could not be differentiated later.
    with torch.inference_mode(False), torch.no_grad(), evaluating(*models):
        heads, batches = _find_heads(models, names, train_loader, likelihood, team)
        heads = [replace(one, ignore_index=ignore_index) for one in heads]
        check_size(chosen_structure, [one.width for one in heads], heads[0].outputs)
        needs_checksums = checkpoint is not None or team.size > 1
        identity = {
            "networks": [state_checksum(one) for one in models] if needs_checksums else [],
            "heads": [[one.name, one.outputs, one.width, one.every_position, one.dense_axes] for one in heads],
            "structure": {"name": chosen_structure.name, **chosen_structure.settings()},
            "likelihood": {"name": likelihood.name, **likelihood.settings()},
            "options": [distances, positions, ignore_index],
        }
        team.agree(identity, "fit")
        done = checkpoints.load(identity) or FitProgress([Sums({}) for _ in heads])
        devices = [float64_device(one.layer.weight.device) for one in heads]
        done.sums = [total.to(device) for total, device in zip(done.sums, devices, strict=True)]
        for batch in stream(
            models,
            heads,
            checkpoints.resume(batches, done),
            where="training loader",
            likelihood=likelihood,
            progress=progress,
            total=batch_count(train_loader),
            positions=positions,
            ignore_index=ignore_index,
            first_batch=done.batches,
            first_input=done.inputs + (team.rank << 40),  # each process draws different positions
            required=team.size == 1,
        ):
            if len(batch):
                # Do not store the batch's sums in a variable: they are as large as the totals and would stay in memory after the loop.
                done.sums = [
                    chosen_structure.accumulate(*pair) for pair in zip(done.sums, batch_sums(batch), strict=True)
                ]
            done.batches, done.inputs = done.batches + 1, done.inputs + batch.layout.inputs
            done.used_inputs += batch.used_inputs
            checkpoints.save(identity, done)
        checkpoints.save(identity, done, last=True)  # save the sums, because tuning may also be interrupted
        totals = [sum_over_processes(one.to("cpu"), team) for one in done.sums]
        if totals[0].count == 0:
            raise DataError("the training loader contains no known labels. At least one label is needed.")
        if positions == "average" and heads[0].dense_axes:
            number = int(team.sum([torch.tensor(float(done.used_inputs), dtype=torch.float64, device="cpu")])[0])
            totals = [one.scaled(number / one.count, number) for one in totals]
        components = []
        for network, layer, total in zip(models, heads, totals, strict=True):
            # In regression, this call estimates the noise from the sums unless the noise is given.
            fitted = likelihood.fitted(total)
            solved = LastLayer.solve(chosen_structure, total, layer.weights(), fitted)
            components.append(Component(network, layer, solved, fitted))
    if likelihood.classification:
        _warn_of_empty_classes(totals[0])
    posterior = MoLA(components, settings, link=chosen_link, weights=weighting)
    if val_loader is not None or rule is not None:
        posterior = posterior.tune(val_loader, rule=rule, progress=progress, team=team)
    checkpoints.remove()
    return posterior


def _find_heads(
    networks: Sequence[nn.Module],
    names: Sequence[str | None],
    loader: Iterable[Any],
    likelihood: Likelihood,
    team: Team,
) -> tuple[list[Head], Iterator[Any]]:
    # Return the heads and all batches. The heads are found by watching a forward pass on the first batch; a rank without data copies
    # them from another rank.
    if team.size == 1:
        first, batches = peek(loader, "training loader")
    else:
        batches = iter(loader)
        first = next(batches, None)
        batches = batches if first is None else chain([first], batches)
    heads = None
    if first is not None:
        inputs = as_batch(first, "batch 0 of the training loader").inputs
        heads = find_heads(networks, names, inputs, likelihood)
    own = None if heads is None else [(one.name, one.every_position, one.dense_axes) for one in heads]
    known = next((one for one in team.collect(own) if one is not None), None)
    if known is None:
        raise DataError("the training loader is empty on every rank. Pass at least one batch.")
    if heads is None:
        heads = [
            replace(head_by_name(network, name), every_position=every_position, dense_axes=dense_axes)
            for network, (name, every_position, dense_axes) in zip(networks, known, strict=True)
        ]
    return heads, batches


def sum_over_processes(own: Sums, team: Team) -> Sums:
    """Add up the sums from all processes."""
    if team.size == 1:
        return own
    # A process without data has no sums, so it takes the shapes from the other processes.
    shapes: dict[str, list[int]] = {}
    for known in team.collect({name: list(tensor.shape) for name, tensor in own.tensors.items()}):
        shapes |= known
    parts = [
        own.tensors.get(name, torch.zeros(shape, dtype=torch.float64, device="cpu")) for name, shape in shapes.items()
    ]
    labelled = all(team.collect(own.log_likelihood is not None or own.count == 0))
    scalars = torch.tensor([float(own.count), own.log_likelihood or 0.0], dtype=torch.float64, device="cpu")
    scalars, *summed = team.sum([scalars, *parts])
    tensors = dict(zip(shapes, summed, strict=True))
    return Sums(tensors, int(scalars[0]), float(scalars[1]) if labelled else None)


def _warn_of_empty_classes(sums: Sums) -> None:
    # Without labels, the sums count predicted classes, so a class with a zero count may still have training data.
    counts = None if sums.log_likelihood is None else sums.tensors.get("class_counts")
    if counts is not None and len(counts) > 1 and bool((counts == 0).any()):
        empty = (counts == 0).nonzero().flatten().tolist()
        listed = ", ".join(map(str, empty[:10])) + (", ..." if len(empty) > 10 else "")
        warn(
            f"{len(empty)} of {len(counts)} classes have no training data (class {listed}), so distances from them are "
            f"unknown. Check that these are the data on which the networks were trained."
        )


def ensemble(
    networks: nn.Module | Sequence[nn.Module],
    weights: str | Sequence[float] | Tensor = "uniform",
    *,
    likelihood: str | Likelihood = "categorical",
    logits: Logits | Sequence[Logits] | None = None,
) -> MoLA:
    """Make a deep ensemble of trained networks, or a plain (MAP) predictor from one network; no data are needed.

    Args:
        networks: a trained network, or a list of K trained networks.
        weights: "uniform", or K numbers that sum to 1.
        likelihood: likelihood of the labels given the outputs, as for `fit`.
        logits: function that extracts the logits from a network's output, as for `fit`.
    """
    likelihood = as_likelihood(likelihood)
    models = as_networks(networks, logits)
    components = [Component(network, None, None, likelihood) for network in models]
    return MoLA(components, weights=check_weighting(weights, len(models)))
