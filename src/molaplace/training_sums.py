"""One pass over the training data, which gives the sums of each network.

The pass can be interrupted and resumed from a checkpoint, and several processes can share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from molaplace.distributed import Team, check_sampler
from molaplace.errors import DataError, OptionError, warn
from molaplace.likelihoods import Likelihood
from molaplace.network import (
    Captured,
    Head,
    Positions,
    StateChecksums,
    as_batch,
    batch_count,
    check_loader,
    check_positions_labelled,
    evaluating,
    find_heads,
    head_by_name,
    peek,
    state_checksums,
    stream,
)
from molaplace.numerics import float64_device
from molaplace.options import listed
from molaplace.saving.fit_checkpoint import FitCheckpoint, FitProgress
from molaplace.structures import Structure
from molaplace.structures.base import check_size
from molaplace.structures.distance import distance_sums
from molaplace.sums import Sums


def read_sums(
    networks: Sequence[nn.Module],
    heads: Sequence[Head | str | None],
    loader: Iterable[Any],
    structure: Structure,
    likelihood: Likelihood,
    *,
    where: str,
    distances: bool,
    positions: Positions,
    ignore_index: int,
    checksums: Sequence[StateChecksums] | None = None,
    team: Team,
    checkpoints: FitCheckpoint,
    progress: bool,
) -> tuple[list[Head], Sequence[StateChecksums], list[Sums]]:
    """Read a loader once and return the heads, the checksums, and the sums of each network over the data of all processes, on the CPU.

    Remove the checkpoints when the sums are no longer needed.

    Args:
        networks: the trained networks.
        heads: head of each network or, to find it in the pass over the first batch, its name or None.
        loader: any iterable of batches.
        structure: structure of the curvature.
        likelihood: likelihood of the labels.
        where: name of the loader in messages.
        distances: whether to compute the sums needed for distances.
        positions: positions of dense outputs to use, as for `mola.fit`.
        ignore_index: label that marks positions to ignore.
        checksums: checksums of the networks' weights, if they are known.
        team: processes that share the pass.
        checkpoints: where to save the progress.
        progress: whether to show a progress bar.
    """
    check_loader(loader, where)
    if team.size > 1:
        check_sampler(loader)
        if not structure.additive:
            raise OptionError(
                "a running average depends on the order of the batches and cannot be computed by several processes. "
                "Use running_average=None."
            )
    # Sums computed in inference mode could not be differentiated later.
    with torch.inference_mode(False), torch.no_grad(), evaluating(*networks):
        known, batches, first = _first_pass(networks, heads, loader, likelihood, where, team)
        known = [replace(head, ignore_index=ignore_index, positions=positions) for head in known]
        check_size(structure, [head.width for head in known], known[0].outputs)
        checksums = state_checksums(networks) if checksums is None else checksums
        identity = {
            "networks": [list(parts) for parts in checksums],
            "heads": [[head.name, head.outputs, head.width, head.every_position, head.dense_axes] for head in known],
            "structure": {"name": structure.name, **structure.settings()},
            "likelihood": {"name": likelihood.name, **likelihood.settings()},
            "options": [distances, positions, ignore_index],
        }
        team.agree(identity, "fit")
        done = checkpoints.load(identity) or FitProgress([Sums({}) for _ in known])
        captured = stream(
            networks,
            known,
            checkpoints.resume(batches, done),
            where=where,
            likelihood=likelihood,
            progress=progress,
            total=batch_count(loader),
            positions=positions,
            ignore_index=ignore_index,
            first_batch=done.batches,
            first_input=team.unique(done.inputs),  # each process draws different positions
            first=None if done.batches else first,
            required=team.size == 1,
        )
        del first  # the stream frees it after the first batch
        done.sums = [
            total.to(float64_device(head.module.weight.device)) for total, head in zip(done.sums, known, strict=True)
        ]
        for batch in captured:
            _add_batch(done, batch, known, structure, likelihood, distances=distances)
            checkpoints.save(identity, done)
        checkpoints.save(identity, done, last=True)  # save the sums, because tuning may also be interrupted
        return known, checksums, _finished_sums(done, known, team, where)


def _first_pass(
    networks: Sequence[nn.Module],
    heads: Sequence[Head | str | None],
    loader: Iterable[Any],
    likelihood: Likelihood,
    where: str,
    team: Team,
) -> tuple[list[Head], Iterator[Any], Captured | None]:
    # Return the heads, all batches and, if the heads were found in the pass over the first batch, what it captured. A rank without
    # data copies the heads from another rank.
    names = [head for head in heads if not isinstance(head, Head)]
    if not names:
        return list(heads), iter(loader), None  # type: ignore[arg-type]
    raw, batches = peek(loader, where, required=team.size == 1)
    found: list[Head] = []
    first = None
    if raw is not None:
        batch_name = f"batch 0 of the {where}"
        batch = as_batch(raw, batch_name)
        found, first = find_heads(networks, names, batch.inputs, likelihood)
        if found[0].dense_axes == 1:  # before the size of a whole vocabulary is refused
            check_positions_labelled(networks, batch, found[0].outputs, batch_name)
    descriptions = [(head.name, head.every_position, head.dense_axes) for head in found]
    descriptions = next((of_rank for of_rank in team.collect(descriptions) if of_rank), [])
    if not descriptions:
        raise DataError(f"the {where} is empty on every rank. Pass at least one batch.")
    return (
        [
            replace(head_by_name(network, name), every_position=every_position, dense_axes=dense_axes)
            for network, (name, every_position, dense_axes) in zip(networks, descriptions, strict=True)
        ],
        batches,
        first,
    )


def _add_batch(
    done: FitProgress,
    batch: Captured,
    heads: Sequence[Head],
    structure: Structure,
    likelihood: Likelihood,
    *,
    distances: bool,
) -> None:
    if len(batch):
        # The batch's sums are as large as the totals; they are freed on return.
        batch_sums = _batch_sums(batch, heads, structure, likelihood, distances)
        pairs = zip(done.sums, batch_sums, strict=True)
        done.sums = [structure.accumulate(total, added) for total, added in pairs]
    done.batches += 1
    done.inputs += batch.layout.inputs
    done.used_inputs += batch.used_inputs


def _finished_sums(done: FitProgress, heads: Sequence[Head], team: Team, where: str) -> list[Sums]:
    # Return the sums of each network over the data of all processes, on the CPU.
    totals = [sum_over_processes(sums.to("cpu"), team) for sums in done.sums]
    if totals[0].count == 0:
        raise DataError(f"the {where} contains no known labels. At least one label is needed.")
    if heads[0].positions == "average" and heads[0].dense_axes:
        number = int(team.sum([torch.tensor(float(done.used_inputs), dtype=torch.float64, device="cpu")])[0])
        totals = [replace(total, count=number, extra_rows=total.count - number) for total in totals]
    return totals


def _batch_sums(
    batch: Captured, heads: Sequence[Head], structure: Structure, likelihood: Likelihood, distances: bool
) -> list[Sums]:
    # Return the sums of each network over the rows in use.
    totals = [Sums({}) for _ in heads]
    for rows in batch.chunks():
        for index, (head, phi, outputs) in enumerate(zip(heads, rows.phi, rows.outputs, strict=True)):
            labels = None if rows.labels is None else rows.labels.to(outputs.device)
            tensors = structure.sums(phi, likelihood.curvature(outputs, labels))
            log_likelihood = None
            if labels is not None:
                # Some likelihoods can compute the log-likelihood only after the fit, from these sums.
                label_sums = likelihood.label_sums(outputs, labels)
                tensors |= label_sums
                log_likelihood = 0.0 if label_sums else float(likelihood.log_likelihood(outputs, labels).sum())
            if distances:
                groups = likelihood.group(outputs, labels)
                num_groups = likelihood.num_groups(outputs.shape[1])
                tensors |= distance_sums(phi[:, : head.inputs], groups, num_groups, predicted=labels is None)
            sums = Sums(tensors, len(phi), log_likelihood)
            # Sums over a single chunk may stay sparse. Sums over several chunks are made dense, because their sparse entries would
            # otherwise accumulate.
            totals[index] = sums if len(rows) == len(batch) else totals[index] + sums
    return totals


def sum_over_processes(sums: Sums, team: Team) -> Sums:
    """Add up the sums from all processes."""
    if team.size == 1:
        return sums
    # A process without data has no sums, so it takes the shapes from the other processes.
    shapes: dict[str, list[int]] = {}
    for rank_shapes in team.collect({name: list(tensor.shape) for name, tensor in sums.tensors.items()}):
        shapes |= rank_shapes
    parts = [
        sums.tensors.get(name, torch.zeros(shape, dtype=torch.float64, device="cpu")) for name, shape in shapes.items()
    ]
    labelled = all(team.collect(sums.log_likelihood is not None or sums.count == 0))
    scalars = torch.tensor([float(sums.count), sums.log_likelihood or 0.0], dtype=torch.float64, device="cpu")
    scalars, *summed = team.sum([scalars, *parts])
    tensors = dict(zip(shapes, summed, strict=True))
    return Sums(tensors, int(scalars[0]), float(scalars[1]) if labelled else None)


def warn_of_empty_classes(sums: Sums) -> None:
    """Warn if some classes have no training data."""
    # Without labels, the sums count predicted classes, so a class with a zero count may still have training data.
    counts = None if sums.log_likelihood is None else sums.tensors.get("class_counts")
    if counts is not None and len(counts) > 1 and bool((counts == 0).any()):
        empty = (counts == 0).nonzero().flatten().tolist()
        warn(
            f"{len(empty)} of {len(counts)} classes have no training data (class {listed(empty, 10)}), so distances from them are "
            f"unknown. Check that these are the data on which the networks were trained."
        )
