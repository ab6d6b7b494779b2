"""One pass over the training data: every network's sums, from where a checkpoint left off, over all processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from mola.distributed import Team
from mola.errors import DataError, OptionError, StorageError
from mola.laplace import Factors, Structure
from mola.likelihood import Likelihood
from mola.network import (
    Features,
    Head,
    Lifted,
    RowBuffer,
    as_batch,
    batch_count,
    batches_of,
    device_of_sums,
    first_passes,
    stream,
)
from mola.sums.checkpoint import (
    Kept,
    SumsCheckpoint,
    batch_checksum,
    describe_heads,
    difference,
    empty_factors,
    heads_from,
    identity_of,
    on_device,
    with_tensors,
)

__all__ = ["sum_up"]

NO_DATA = "the training loader is empty: it yielded no batch. An iterator read before has nothing left; pass the loader itself."


@dataclass(frozen=True)
class Work:
    """What does not change during the pass."""

    networks: Sequence[nn.Module]
    structure: Structure
    likelihood: Likelihood
    team: Team
    checkpoints: SumsCheckpoint
    identity: dict[str, Any]


def sum_up(
    networks: Sequence[nn.Module],
    names: Sequence[str | None],
    loader: Iterable[Any],
    structure: Structure,
    likelihood: Likelihood,
    *,
    team: Team,
    checkpoints: SumsCheckpoint,
    options: dict[str, Any],
    progress: bool,
) -> tuple[list[Head], list[Factors]]:
    """The head of every network, and its sums over all the training data of all processes.

    Call it inside `undisturbed(*networks)` and `team.work(...)`.

    Args:
        networks: the trained classifiers.
        names: for each, the dotted name of its head, or None to find it.
        loader: batches of this process; none of them, if others have some.
        structure: what is summed.
        likelihood: what the outputs mean.
        team: the processes.
        checkpoints: keeps sums under way.
        options: what else must be the same on every rank, as JSON.
        progress: whether to show a progress bar on stderr, if that is a terminal.

    Returns:
        Heads and sums, the same bits on every rank.

    Raises:
        OptionError: if ranks differ in more than their data, or sums of ranks cannot be added.
        DataError: if there are no data.
    """
    if team.size > 1 and structure.settings().get("running_average") is not None:
        message = (
            "a running average depends on the order of the batches, and several processes have none. Use Kron() without "
            "running_average: its sums are exact and merge."
        )
        raise OptionError(message)
    plain = team.size == 1 and not checkpoints.active
    work = Work(
        networks,
        structure,
        likelihood,
        team,
        checkpoints,
        {} if plain else identity_of(networks, structure, likelihood),
    )
    kept = checkpoints.load(work.identity, structure)
    batches = batches_of(loader, "the training loader")
    _skip(batches, kept)
    first = next(batches, None)
    seen: list[Features] | None = None
    labelled = kept.labelled
    heads = None if kept.heads is None else heads_from(networks, kept.heads)
    if first is not None:
        batch = as_batch(first, f"batch {kept.batches} of the training loader")
        heads, seen = first_passes(networks, names, batch.inputs)
        labelled = batch.labels is not None
        batches = chain([first], batches)
    if heads is not None and not plain:
        _check_kept(kept, describe_heads(heads))
    if plain and heads is None:
        raise DataError(NO_DATA)
    if not plain:
        heads, labelled = _agree(work, heads, labelled, options)
    assert heads is not None  # one process alone has data, and several have agreed
    structure.check_size([one.width for one in heads], heads[0].classes)
    totals = list(kept.totals or [])
    if seen is not None:
        totals = _stream(work, heads, batches, seen, kept, batch_count(loader), labelled=labelled, progress=progress)
    return heads, _over_all(work, heads, totals, labelled=labelled)


def _skip(batches: Iterator[Any], kept: Kept) -> None:
    """Read past the batches that are in the sums already.

    Raises:
        StorageError: if they are other batches than those.
    """
    checksum = Kept().checksum
    for index in range(kept.batches):
        try:
            checksum = batch_checksum(checksum, next(batches))
        except StopIteration:
            message = (
                f"the checkpoint holds sums of {kept.batches} batches, but the training loader has only {index}: it is not the "
                f"loader that this fit began with. Pass that one, or delete the checkpoint to start from zero."
            )
            raise StorageError(message) from None
    if checksum != kept.checksum:
        message = (
            f"the first {kept.batches} batches of the training loader are not those in the checkpoint: the data, their order or the "
            f"batch size have changed. Going on would count some data twice and others never. Pass the same data unshuffled, or "
            f"delete the checkpoint to start from zero."
        )
        raise StorageError(message)


def _check_kept(kept: Kept, heads: list[dict[str, Any]]) -> None:
    """Refuse sums of other heads.

    Raises:
        StorageError: if the checkpoint's are others.
    """
    words = difference({"heads": kept.heads}, {"heads": heads})
    if words is not None:
        message = f"the checkpoint is of another fit: {words}. Pass what that fit was given, or delete the checkpoint."
        raise StorageError(message)


def _agree(
    work: Work, heads: list[Head] | None, labelled: bool | None, options: dict[str, Any]
) -> tuple[list[Head], bool]:
    """See that all ranks do the same; a rank without data learns the heads from those that have some.

    Raises:
        OptionError: if ranks differ in more than their data.
        DataError: if no rank has data, or only some have labels.
    """
    own = (
        work.identity
        | options
        | {
            "heads": None if heads is None else describe_heads(heads),
            "labelled": labelled,
        }
    )
    everyone = work.team.collect(own)
    if everyone is not None:
        lead = next((rank for rank, one in enumerate(everyone) if one["heads"] is not None), None)
        if lead is None:
            raise DataError(NO_DATA)
        for rank, one in enumerate(everyone):
            if one["labelled"] is not None and one["labelled"] != everyone[lead]["labelled"]:
                have, lack = (lead, rank) if everyone[lead]["labelled"] else (rank, lead)
                message = f"the batches of rank {have} have labels, those of rank {lack} have none. Give labels to all or none."
                raise DataError(message)
            words = difference(everyone[lead], one)
            if words is not None:
                message = (
                    f"rank {rank} is not doing the same work as rank {lead}: {words}. Pass the same networks and options in every "
                    f"process; only the data differ."
                )
                raise OptionError(message)
        own = everyone[lead]
    agreed = work.team.share({"heads": own["heads"], "labelled": own["labelled"]})
    if heads is None:
        heads = heads_from(work.networks, agreed["heads"])
        words = difference(agreed, {"heads": describe_heads(heads)})
        if words is not None:
            message = f"this rank has no data, and other networks than those that have some: {words}."
            raise OptionError(message)
    return heads, agreed["labelled"]


def _stream(
    work: Work,
    heads: Sequence[Head],
    batches: Iterable[Any],
    first: Sequence[Features],
    kept: Kept,
    total: int | None,
    *,
    labelled: bool | None,
    progress: bool,
) -> list[Factors]:
    structure, likelihood, checkpoints = work.structure, work.likelihood, work.checkpoints
    totals: list[Any] = [None] * len(heads)
    if kept.totals is not None:
        # A checkpoint comes back in main memory; sums go on where the features are.
        totals = [on_device(total, device_of_sums(one)) for total, one in zip(kept.totals, first, strict=True)]
    rows = structure.rows(max(head.width for head in heads), heads[0].classes)
    buffers = [RowBuffer(head, rows or 1) for head in heads]
    checksums = [kept.checksum]
    done = saved = kept.batches
    coming = 0

    def with_checksums() -> Iterator[Any]:
        for batch in batches:
            checksums.append(batch_checksum(checksums[-1], batch))
            yield batch

    def told(count: int) -> None:
        nonlocal coming
        coming = count

    def save() -> None:
        described = describe_heads(heads)
        checkpoints.save(
            work.identity, Kept(done, checksums[0], labelled, described, [total.cpu() for total in totals])
        )

    for seen, labels in stream(
        work.networks,
        heads,
        with_checksums() if checkpoints.active else batches,
        where="training loader",
        progress=progress,
        total=total,
        likelihood=likelihood,
        rows=rows or 1,
        first=first,
        start=kept.batches,
        told=told,
    ):
        for index, (buffer, one) in enumerate(zip(buffers, seen, strict=True)):
            totals[index] = _absorbed(work, totals[index], _portions(buffer, one, labels, rows))
        del seen, labels, one  # not kept while the next is made
        done += coming
        if checkpoints.active:
            del checksums[:coming]  # the first is that of all batches in the sums
            if done - saved >= checkpoints.every:
                save()
                saved = done
        work.team.check()
    if checkpoints.active and done > saved:
        save()
    return totals


@torch.no_grad()  # a loader may need gradients of its own: not around the whole pass
def _absorbed(work: Work, total: Any, portions: Iterable[tuple[Tensor, Tensor, Tensor | None]]) -> Any:
    """The total with portions of a batch in it."""
    for features, logits, labels in portions:
        if labels is None:
            score, curvature = None, work.likelihood.curvature(logits)
        else:
            scores, curvature = work.likelihood.scored_curvature(logits, labels)
            score = float(scores.sum())
        total = work.structure.absorb(total, features, curvature, score)
    return total


def _portions(
    buffer: RowBuffer, seen: Features, labels: Tensor | None, rows: int | None
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Features with the constant 1, logits and labels, in float64 and at most `rows` at a time: a batch may be large."""
    count = len(seen.logits)
    for start in range(0, count, rows or count):
        part = slice(start, None if rows is None else start + rows)
        features, logits = seen.features[part], seen.logits[part]
        if not isinstance(seen, Lifted):
            features, logits = buffer.put(Features(features, logits))
        yield features, logits, None if labels is None else labels[part].to(logits.device)


def _over_all(work: Work, heads: Sequence[Head], totals: Sequence[Factors], *, labelled: bool | None) -> list[Factors]:
    """Sums of all ranks, in main memory."""
    if work.team.size == 1:
        return [total.cpu() for total in totals]
    nothing = 0.0 if labelled else None
    own = totals or [empty_factors(work.structure, head.width, head.classes, nothing) for head in heads]
    # A rank without data may lack sums that the others have.
    forms: list[dict[str, list[int]]] = [{} for _ in own]
    described = [{name: list(tensor.shape) for name, tensor in total.tensors().items()} for total in own]
    for one in work.team.collect(described) or ():
        forms = [known | more for known, more in zip(forms, one, strict=True)]
    forms = work.team.share(forms)
    parts: list[Tensor] = []
    for total, form in zip(own, forms, strict=True):
        given = total.tensors()
        like = next(iter(given.values()))
        parts.append(like.new_tensor([total.count, total.log_likelihood or 0.0]))
        parts += [given[name] if name in given else like.new_zeros(shape) for name, shape in form.items()]
    sums = iter(work.team.sum(parts))
    summed = []
    for total, form in zip(own, forms, strict=True):
        count, score = next(sums).tolist()
        named = {name: next(sums).cpu() for name in form}
        summed.append(with_tensors(total, int(count), score if labelled else None, named))
    return summed
