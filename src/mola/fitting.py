"""The ways to make a posterior: fit it, take the networks alone, or load it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mola.component import Component, LastLayer, per_component
from mola.distributed import Team, check_sampler
from mola.errors import DataError, OptionError, warn
from mola.laplace import Structure, Sums, as_structure, check_precision, check_size, distance_sums
from mola.likelihoods import Likelihood, as_likelihood
from mola.links import Link, as_link
from mola.network import (
    IGNORE_INDEX,
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
from mola.posterior import MoLA
from mola.saving.fit_checkpoint import FitCheckpoint, FitProgress, batch_checksum, skip
from mola.tuning import Rule, as_rule
from mola.weights import check_weighting

Logits = Callable[[Any], Tensor]
"""From a network's output to its logits."""


def as_networks(
    networks: nn.Module | Sequence[nn.Module], logits: Logits | Sequence[Logits] | None = None
) -> list[nn.Module]:
    """One network or several as a list, without the wrapper of torch.compile; `OptionError` for anything else.

    Args:
        networks: one or several.
        logits: picks the logits from a network's output, one for all networks or one for each; None takes it as it is.
    """
    if isinstance(networks, nn.Module) and not isinstance(networks, nn.ModuleList):
        given: list[Any] = [networks]  # a Sequential can be iterated, but is one network
    else:
        alone = isinstance(networks, (str, Path, Mapping)) or not isinstance(networks, Iterable)
        given = [networks] if alone else list(networks)
    for one in given:
        if isinstance(one, (str, Path)):
            raise OptionError(
                f"networks: expected one nn.Module or a list of them, got a file name, {str(one)!r}. Build the network and load its "
                f"weights first: network.load_state_dict(torch.load({str(one)!r}, weights_only=True)). The command "
                "`mola fit` takes files."
            )
        if isinstance(one, Mapping):
            raise OptionError(
                "networks: expected one nn.Module or a list of them, got a state dict. Build the network, call "
                "network.load_state_dict(state_dict), and pass the network."
            )
    if not given or not all(isinstance(one, nn.Module) for one in given):
        kinds = ", ".join(dict.fromkeys(type(one).__name__ for one in given)) or "an empty list"
        raise OptionError(f"networks: expected one nn.Module or a non-empty list of them, got {kinds}.")
    for one in given:
        check_network(one)
    models = [unwrapped(one) for one in given]
    if logits is None:
        return models
    functions = [logits] * len(models) if callable(logits) else list(logits)
    if len(functions) != len(models) or not all(map(callable, functions)):
        raise OptionError(
            f"logits: expected a function from a network's output to its logits, such as `lambda output: output[0]`, or "
            f"{len(models)} of them; got {logits!r}."
        )
    return [LogitsOf(model, function) for model, function in zip(models, functions, strict=True)]


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
    """Put a Laplace approximation on the last layer of each trained network: one pass over the training data.

    The data are read once, and every network sees each batch in turn. The networks are not modified.

    Args:
        networks: one trained network, or K of them; architectures may differ, the number of outputs may not.
        train_loader: any iterable of batches: `(x, y)`, `x` alone, or a mapping with the labels under "labels".
        val_loader: validation data; if given, the posterior is tuned on them.
        rule: how to tune: a name, or an object of `mola.rules`; None is the likelihood's default. Without validation data, None keeps
            `prior_precision`.
        structure: "kron" (Algorithm 1), "kron-exact", "kron-diag", "diag" or "full", or an object of `mola.structures`.
        link: "probit", "probit-centred", "mean-field", "bridge" or "mc", or an object of `mola.links`.
        likelihood: "categorical" (one of C classes), "bernoulli" (binary or multi-label), "gaussian" (regression), or an object of
            `mola.likelihoods`.
        prior_precision: lambda, one number or K.
        weights: "uniform", "evidence", or K numbers that sum to 1.
        head: dotted name of the last linear layer, one for all networks or one for each; None finds it.
        logits: picks the logits from the output of a network that returns more, such as `lambda output: output[0]`; one
            function for all networks or one for each. Pass it to `mola.load` again.
        distances: whether to sum what the distance from the training classes needs: C x P and P x P numbers for each network.
        positions: of dense outputs (n, C, H, W) or (n, T, C): "all" counts each position as a datum, "average"
            counts each input as one datum, and a number draws that many positions of each input.
        ignore_index: label of positions that are left out.
        team: processes to fit with, from `mola.distributed.join()`, each with its own shard; all get the posterior of all data.
        checkpoint: folder for the sums so far: an interrupted fit goes on from there when it is called again. Removed at the end.
        checkpoint_every: batches between two checkpoints.
        progress: show a progress bar on stderr, if that is a terminal.

    Raises:
        OptionError: if an argument cannot be used; `HeadError` and `DataError` come from the networks and the loaders.
    """
    team = Team.single() if team is None else team
    models, meaning = as_networks(networks, logits), as_likelihood(likelihood)
    count = len(models)
    chosen_structure, chosen_link = as_structure(structure), as_link(link, meaning)
    weighting = check_weighting(weights, count)
    precisions = [check_precision(value) for value in per_component(prior_precision, count, "prior_precision")]
    names = per_component(head, count, "head")
    positions = check_positions(positions)
    if not isinstance(distances, bool):
        raise OptionError(f"distances must be True or False, got {distances!r}.")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise OptionError(f"ignore_index must be an integer that is no class, got {ignore_index!r}.")
    check_loader(train_loader, "training loader")
    if val_loader is not None:
        check_loader(val_loader, "validation loader")
    if rule is not None or val_loader is not None:
        as_rule(rule, meaning, val_loader)
    if team.size > 1:
        check_sampler(train_loader)
        if not chosen_structure.additive:
            raise OptionError(
                "a running average depends on the order of the batches and cannot be shared by processes."
            )
    own = [(id(one._orig_mod), id(one.logits)) if isinstance(one, LogitsOf) else (id(one), 0) for one in models]
    if len(set(own)) < count:
        warn(
            "the same network is given more than once: its copies agree with each other, and the mixture looks too confident."
        )
    checkpoints = FitCheckpoint(checkpoint, checkpoint_every, team.rank, team.size)
    # Sums made in inference mode could not be differentiated later.
    with torch.inference_mode(False), torch.no_grad(), evaluating(*models):
        heads, sums = _sum_up(
            models,
            names,
            train_loader,
            chosen_structure,
            meaning,
            distances=distances,
            positions=positions,
            ignore_index=ignore_index,
            team=team,
            checkpoints=checkpoints,
            progress=progress,
        )
        components = []
        for network, one, total, precision in zip(models, heads, sums, precisions, strict=True):
            fitted = meaning.fitted(total)
            layer = LastLayer.solve(chosen_structure, total, one.weights(), fitted)
            components.append(Component(network, one, layer, precision, fitted))
    _warn_of_empty_classes(components[0])
    posterior = MoLA(components, chosen_link, weighting)
    if val_loader is not None or rule is not None:
        posterior = posterior.tune(val_loader, rule=rule, progress=progress, team=team)
    checkpoints.remove()
    return posterior


def _sum_up(
    networks: Sequence[nn.Module],
    names: Sequence[str | None],
    loader: Iterable[Any],
    structure: Structure,
    likelihood: Likelihood,
    *,
    distances: bool,
    positions: Positions,
    ignore_index: int,
    team: Team,
    checkpoints: FitCheckpoint,
    progress: bool,
) -> tuple[list[Head], list[Sums]]:
    heads, batches, has_data = _heads(networks, names, loader, likelihood, team)
    heads = [replace(head, ignore_index=ignore_index) for head in heads]
    check_size(structure, [head.width for head in heads], heads[0].outputs)
    identity = {
        "networks": [state_checksum(network) for network in networks]
        if checkpoints.folder is not None or team.size > 1
        else [],
        "heads": [[head.name, head.outputs, head.width, head.every_position, head.dense_axes] for head in heads],
        "structure": {"name": structure.name, **structure.settings()},
        "likelihood": {"name": likelihood.name, **likelihood.settings()},
        "options": [distances, positions, ignore_index],
    }
    team.agree(identity, "fit")
    done = checkpoints.load(identity) or FitProgress([Sums({}) for _ in heads])
    skip(batches, done)
    totals, read, inputs, used = list(done.sums), done.batches, done.inputs, done.used_inputs
    checksums = [done.checksum]
    if checkpoints.folder is not None:
        batches = _with_checksums(batches, checksums)

    def save() -> None:
        cpu = [one.to("cpu") for one in totals]
        checkpoints.save(identity, FitProgress(cpu, read, inputs, used, checksums[0]))

    rows_of = stream(
        networks,
        heads,
        batches,
        where="training loader",
        likelihood=likelihood,
        progress=progress,
        total=batch_count(loader),
        positions=positions,
        ignore_index=ignore_index,
        first_batch=read,
        first_input=inputs + (team.rank << 40),  # each process draws positions of its own
        required=team.size == 1,
    )
    batch: list[Sums | None] = [None] * len(heads)
    for rows in rows_of if has_data else ():
        if len(rows):
            for index, (head, phi, outputs) in enumerate(zip(heads, rows.features, rows.outputs, strict=True)):
                own = _row_sums(head, phi, outputs, rows.labels, structure, likelihood, distances=distances)
                before = batch[index]
                batch[index] = own if before is None else before + own
        if rows.last:
            for index, whole in enumerate(batch):
                if whole is not None:
                    place = next(iter(whole.tensors.values())).device
                    totals[index] = structure.accumulate(totals[index].to(place), whole)
            batch = [None] * len(heads)
            read, inputs, used = read + 1, inputs + rows.inputs_read, used + rows.inputs
            if checkpoints.due(read):
                save()
    if checkpoints.folder is not None and read > done.batches:
        save()  # tuning may be interrupted, too
    totals = [sum_over_processes(one.to("cpu"), team) for one in totals]
    if totals[0].count == 0:
        raise DataError("the training loader: no datum has a label.")
    if positions == "average" and heads[0].dense_axes:
        number = int(team.sum([torch.tensor(float(used), dtype=torch.float64, device="cpu")])[0])
        totals = [one.scaled(number / one.count, number) for one in totals]
    return heads, totals


def _row_sums(
    head: Head,
    phi: Tensor,
    outputs: Tensor,
    labels: Tensor | None,
    structure: Structure,
    likelihood: Likelihood,
    *,
    distances: bool,
) -> Sums:
    tensors = structure.sums(phi, likelihood.curvature(outputs, labels))
    log_likelihood = None
    if labels is not None:
        labels = labels.to(outputs.device)
        tensors |= likelihood.label_sums(outputs, labels)
        log_likelihood = likelihood.sum_log_likelihood(outputs, labels)
    if distances:
        groups, number = likelihood.group(outputs, labels), likelihood.num_groups(outputs.shape[1])
        tensors |= distance_sums(phi[:, : head.inputs], groups, number, predicted=labels is None)
    return Sums(tensors, len(phi), log_likelihood)


def _with_checksums(batches: Iterator[Any], checksums: list[str]) -> Iterator[Any]:
    for batch in batches:
        checksums[0] = batch_checksum(checksums[0], batch)
        yield batch


def _heads(
    networks: Sequence[nn.Module],
    names: Sequence[str | None],
    loader: Iterable[Any],
    likelihood: Likelihood,
    team: Team,
) -> tuple[list[Head], Iterator[Any], bool]:
    # The heads, from one watched pass over the first batch. A rank without data learns them from the others.
    found: list[Head] | None = None
    if team.size == 1:
        first, batches = peek(loader, "training loader")
    else:
        remaining = iter(loader)
        first = next(remaining, None)
        batches = iter(()) if first is None else chain([first], remaining)
    if first is not None:
        inputs = as_batch(first, "batch 0 of the training loader").inputs
        found = find_heads(networks, names, inputs, likelihood)
    own = None if found is None else [(head.name, head.every_position, head.dense_axes) for head in found]
    known = next((one for one in team.collect(own) if one is not None), None)
    if known is None:
        raise DataError("the training loader is empty on every rank.")
    if found is None:
        found = [
            Head(name, head_by_name(network, name).layer, every_position, dense_axes)
            for network, (name, every_position, dense_axes) in zip(networks, known, strict=True)
        ]
    return found, batches, first is not None


def sum_over_processes(own: Sums, team: Team) -> Sums:
    """The sums over the data of all processes."""
    if team.size == 1:
        return own
    # A rank without data has no sums: the others tell their shapes.
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


def _warn_of_empty_classes(component: Component) -> None:
    layer = component.layer
    assert layer is not None
    # Without labels, counts are of predicted classes: a class that is never predicted may still have data.
    counts = None if layer.sums.log_likelihood is None else layer.sums.tensors.get("class_counts")
    if counts is not None and component.likelihood.classification and len(counts) > 1 and bool((counts == 0).any()):
        empty = (counts == 0).nonzero().flatten().tolist()
        listed = ", ".join(map(str, empty[:10])) + (", ..." if len(empty) > 10 else "")
        warn(
            f"{len(empty)} of {len(counts)} classes have no training data (class {listed}): distances from them are "
            "unknown. Are these the data that the networks were trained on?"
        )


def ensemble(
    networks: nn.Module | Sequence[nn.Module],
    weights: str | Sequence[float] | Tensor = "uniform",
    *,
    likelihood: str | Likelihood = "categorical",
    logits: Logits | Sequence[Logits] | None = None,
) -> MoLA:
    """The deep ensemble of trained networks, or the plain (MAP) prediction of one network: no data needed.

    Args:
        networks: one trained network, or K of them.
        weights: "uniform", or K numbers that sum to 1.
        likelihood: as for `fit`.
        logits: as for `fit`.
    """
    meaning = as_likelihood(likelihood)
    models = as_networks(networks, logits)
    return MoLA([Component(network, None, None, 1.0, meaning) for network in models], "probit", weights)


def load(
    directory: str | Path,
    networks: nn.Module | Sequence[nn.Module],
    *,
    logits: Logits | Sequence[Logits] | None = None,
) -> MoLA:
    """Load a saved posterior onto the networks it was fitted on.

    Args:
        directory: folder that `posterior.save` wrote.
        networks: the networks, in the same order.
        logits: as for `fit`.

    Returns:
        The posterior; `StorageError` if the files are damaged or a network is not the one that was fitted.
    """
    from mola.saving.posterior import load_posterior

    return load_posterior(directory, as_networks(networks, logits))
