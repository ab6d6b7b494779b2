"""One pass over the training data: the sums of every network, resumed from checkpoints and added up over processes.

Sums are additive, so an interrupted fit continues from its last checkpoint. A checkpoint holds the sums so far and what they belong to
(networks, heads and structure, described as a JSON document): sums of other ones are never added. A checksum that grows with each
batch notices a loader that yields other data.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mola.distributed import Team
from mola.errors import DataError, OptionError, StorageError, StructureTooLargeError, warn
from mola.laplace import ClassSums, Factors, Structure
from mola.laplace.memory import free_memory
from mola.laplace.symmetric import packed_size
from mola.likelihood import Likelihood
from mola.network import (
    IGNORED,
    Features,
    Head,
    Lifted,
    Positions,
    RowBuffer,
    Seen,
    as_batch,
    batch_count,
    batches_of,
    device_of_sums,
    first_passes,
    head_by_name,
    stream,
)
from mola.network.fingerprint import NETWORK, fingerprint, same_signature, signature
from mola.saving import storage
from mola.saving.archive import CLASSES
from mola.saving.storage import DOCUMENT
from mola.schema import Optional, check


def empty_factors(structure: Structure, features: int, outputs: int, log_likelihood: float | None) -> Factors:
    """The neutral element of `+`: sums over nothing."""
    shapes = structure.empty(features, outputs)
    zeros = {name: torch.zeros(shape, dtype=torch.float64, device="cpu") for name, shape in shapes.items()}
    return structure.restore(0, log_likelihood, zeros)


def with_tensors(like: Factors, count: int, log_likelihood: float | None, tensors: dict[str, Tensor]) -> Factors:
    """Factors of the same kind with other numbers."""
    changes: dict[str, Any] = {"count": count, "log_likelihood": log_likelihood, **tensors}
    return replace(like, **changes)


def on_device(factors: Factors, device: torch.device) -> Factors:
    """The same sums on another device."""
    there = {name: tensor.to(device) for name, tensor in factors.tensors().items()}
    return with_tensors(factors, factors.count, factors.log_likelihood, there)


def identity_of(networks: Sequence[nn.Module], structure: Structure, likelihood: Likelihood) -> dict[str, Any]:
    """Networks by their numbers, and what is summed. Call it inside `undisturbed(*networks)`."""
    return {
        "networks": [signature(network) for network in networks],
        "structure": {"name": structure.name, **structure.settings()},
        "likelihood": likelihood.name,
        **({"likelihood_settings": likelihood.settings()} if likelihood.settings() else {}),
    }


def describe_heads(heads: Sequence[Head]) -> list[dict[str, Any]]:
    """The heads by name, size and a checksum of their weights."""
    return [
        {
            "name": head.name,
            "classes": head.classes,
            "features": head.width,
            "every_position": head.every_position,
            **({} if head.positions is None else {"positions": head.positions.as_json()}),
            "weights": fingerprint(head.weights())["float64"],
        }
        for head in heads
    ]


def heads_from(networks: Sequence[nn.Module], described: Sequence[dict[str, Any]]) -> list[Head]:
    """The heads that were described, without a pass of the networks; `HeadError` if a network has none of that name."""
    return [
        replace(
            head_by_name(network, entry["name"]),
            every_position=entry["every_position"],
            positions=Positions(**entry["positions"]) if "positions" in entry else None,
        )
        for network, entry in zip(networks, described, strict=True)
    ]


def difference(first: dict[str, Any], second: dict[str, Any]) -> str | None:
    """The first difference between two documents, in words: what, expected, got.

    Args:
        first: what is expected.
        second: what came; entries that are None in either are not compared.

    Returns:
        Words, or None where they agree.
    """
    for name, expected in first.items():
        got = second.get(name)
        if expected is None or got is None:
            continue
        if name == "networks":
            words = _other_network(expected, got)
        elif isinstance(expected, list) and isinstance(got, list) and name == "heads":
            pairs = zip(expected, got, strict=False)
            words = next(
                (f"the head of models[{k}]: {_shortened(a, b)}" for k, (a, b) in enumerate(pairs) if a != b), None
            )
        else:
            words = None if expected == got else f"{name}: expected {expected}, got {got}"
        if words is not None:
            return words
    return None


def _shortened(expected: dict[str, Any], got: dict[str, Any]) -> str:
    differing = [name for name in expected if expected[name] != got.get(name)]
    if differing == ["weights"]:
        return "its weights are other ones"
    return ", ".join(
        f"{name} expected {expected[name]}, got {got.get(name)}" for name in differing if name != "weights"
    )


def _other_network(expected: list[dict[str, Any]], got: list[dict[str, Any]]) -> str | None:
    if len(expected) != len(got):
        return f"models: expected {len(expected)}, got {len(got)}"
    for index, (one, other) in enumerate(zip(expected, got, strict=True)):
        if "tensors" not in one:
            return f"an older version of mola wrote it, which cannot tell whether models[{index}] is the same"
        if not same_signature(other, one):
            return f"models[{index}] is another network: its numbers are other ones"
    return None


START = ""
"""Before the first batch."""

PROBES = 64
"""Numbers of each tensor that go into the checksum one by one. All of them would cost more than some networks' passes."""

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""Whole numbers by their size in bytes."""


def batch_checksum(so_far: str, batch: Any) -> str:
    """The checksum after one more batch: shapes, types, some numbers and the sum of all bits of its tensors.

    Some numbers alone may all be of an image's margin. Whole numbers add up to the same in any order and on any machine.
    """
    digest = hashlib.sha256(so_far.encode())
    for tensor in _tensors(batch):
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        numbers = tensor.detach().reshape(-1)
        probes = numbers[:: max(1, -(-len(numbers) // PROBES))].contiguous().cpu()
        digest.update(probes.view(torch.uint8).numpy().tobytes())
        words = numbers.contiguous().view(WORDS[numbers.element_size()])
        digest.update(str(int(words.sum(dtype=torch.int64))).encode())
    return digest.hexdigest()


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(part)


KIND = "fit-checkpoint"
SCHEMA = {
    "rank": int,
    "size": int,
    "identity": {
        "networks": [NETWORK],
        "structure": {"name": str},
        "likelihood": str,
    },
    "heads": [{"name": str, "classes": int, "features": int, "every_position": bool, "weights": str}],
    "batches": int,
    "trail": str,
    "labelled": bool,
    "counts": [int],
    "log_likelihoods": [Optional(float)],
}


@dataclass(frozen=True)
class Kept:
    """How far a fit is."""

    batches: int = 0
    inputs: int = 0
    """In these batches."""
    used_inputs: int = 0
    """Of these, with rows in the sums: all, but for outputs at many positions of which none counts."""
    checksum: str = START
    labelled: bool | None = None
    heads: list[dict[str, Any]] | None = None
    totals: Sequence[Factors] | None = None
    classes: Sequence[ClassSums] | None = None
    """For distances; None where they are not wanted, or an older version of mola has not summed them."""


class SumsCheckpoint:
    """Where a fit under way is kept; with no folder, nowhere.

    Args:
        folder: given by the user, or None.
        every: batches between two checkpoints.
        rank: of this process.
        size: number of processes; each keeps its own sums, of its own shard.
    """

    def __init__(self, folder: str | Path | None, every: int, rank: int, size: int) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise OptionError(f"checkpoint_every must be a whole number of batches above 0, got {every!r}.")
        self.every, self.rank, self.size = every, rank, size
        self.folder = None if folder is None else Path(folder)

    @property
    def active(self) -> bool:
        """Whether anything is kept."""
        return self.folder is not None

    @property
    def place(self) -> Path:
        """The folder of this process."""
        return Path(self.folder or "") / f"rank-{self.rank}-of-{self.size}"

    def load(self, identity: dict[str, Any], structure: Structure, likelihood: Likelihood) -> Kept:
        """What was kept of this fit; nothing, if none was.

        Args:
            identity: of networks, structure and likelihood.
            structure: makes factors of saved tensors.
            likelihood: says how many groups of data there are sums of.

        Returns:
            How far the fit was.
        """
        if self.folder is None:
            return Kept()
        self._refuse_other_teams()
        if not (self.place / DOCUMENT).exists():
            return Kept()
        document, tensors = storage.read(self.place, KIND, SCHEMA)
        words = difference(document["identity"], identity)
        if words is not None:
            raise StorageError(
                f"{self.folder} is the checkpoint of another fit: {words}. Pass what that fit was given, or delete the folder to "
                f"start from zero."
            )
        lengths = {name: len(document[name]) for name in ("heads", "counts", "log_likelihoods")}
        if set(lengths.values()) != {len(identity["networks"])}:
            raise StorageError(
                f"{self.place} is garbled: entries for {lengths} networks. Delete the folder to start from zero."
            )
        totals = [
            self._factors(index, entry, document, tensors, structure, likelihood.latent(entry["classes"]))
            for index, entry in enumerate(document["heads"])
        ]
        groups = [likelihood.groups(entry["classes"]) for entry in document["heads"]]
        classes = [
            self._class_sums(index, entry, tensors, some)
            for index, (entry, some) in enumerate(zip(document["heads"], groups, strict=True))
        ]
        known = [one for one in classes if one is not None]
        return Kept(
            document["batches"],
            *self._inputs(document),
            document["trail"],
            document["labelled"],
            document["heads"],
            totals,
            known if len(known) == len(classes) else None,
        )

    def _inputs(self, document: dict[str, Any]) -> tuple[int, int]:
        # Inputs that were read, and those with rows in the sums; older versions knew no difference, and counted rows.
        if "inputs" not in document:
            return document["counts"][0], document["counts"][0]
        check(document, {"inputs": {"read": int, "used": int}}, "")
        return document["inputs"]["read"], document["inputs"]["used"]

    def _class_sums(
        self, index: int, head: dict[str, Any], tensors: dict[str, Tensor], groups: int
    ) -> ClassSums | None:
        found = {name: tensors.get(f"{index}.{CLASSES}{name}") for name in ClassSums.shapes(0, 0)}
        if all(one is None for one in found.values()):
            return None
        # The head's description says how many features there are with the constant 1, which has no direction.
        given = found["directions"]
        width = 0 if given is None else given.shape[-1]
        for name, shape in ClassSums.shapes(width, groups).items():
            one = found[name]
            if one is None or one.shape != shape or one.dtype != torch.float64 or width > head["features"]:
                raise StorageError(
                    f"{self.place}: tensor {index}.{CLASSES}{name} is missing or of another shape. Delete the folder to start "
                    f"from zero."
                )
        return ClassSums(**{name: one for name, one in found.items() if one is not None})

    def _refuse_other_teams(self) -> None:
        for found in Path(self.folder or "").glob("rank-*-of-*"):
            size = re.fullmatch(r"rank-\d+-of-(\d+)", found.name)
            if size is not None and int(size[1]) != self.size:
                raise StorageError(
                    f"{self.folder} is the checkpoint of a fit by {size[1]} processes, got {self.size}: their shards were other ones. "
                    f"Start {size[1]} processes, or delete the folder to start from zero."
                )

    def _factors(
        self,
        index: int,
        head: dict[str, Any],
        document: dict[str, Any],
        tensors: dict[str, Tensor],
        structure: Structure,
        outputs: int,
    ) -> Factors:
        empty = empty_factors(structure, head["features"], outputs, None)
        own, others = f"{index}.", f"{index}.{CLASSES}"
        named = {
            name.partition(".")[2]: one
            for name, one in tensors.items()
            if name.startswith(own) and not name.startswith(others)
        }
        for name, like in empty.tensors().items():
            if name not in named or named[name].shape != like.shape or named[name].dtype != like.dtype:
                raise StorageError(
                    f"{self.place}: tensor {index}.{name} is missing or of another shape. Delete the folder to start from zero."
                )
        return with_tensors(empty, document["counts"][index], document["log_likelihoods"][index], named)

    def save(self, identity: dict[str, Any], kept: Kept) -> None:
        """Keep how far the fit is; the folder always holds a whole state.

        Args:
            identity: of networks and structure.
            kept: how far it is, with heads and totals.
        """
        totals = list(kept.totals or ())
        document = {
            "rank": self.rank,
            "size": self.size,
            "identity": identity,
            "heads": kept.heads,
            "batches": kept.batches,
            "inputs": {"read": kept.inputs, "used": kept.used_inputs},
            "trail": kept.checksum,
            "labelled": bool(kept.labelled),
            "counts": [total.count for total in totals],
            "log_likelihoods": [total.log_likelihood for total in totals],
        }
        tensors = {f"{k}.{name}": one for k, total in enumerate(totals) for name, one in total.tensors().items()}
        for k, classes in enumerate(kept.classes or ()):
            tensors |= {f"{k}.{CLASSES}{name}": one for name, one in classes.tensors().items()}
        storage.write(self.place, document, tensors, kind=KIND)

    def remove(self) -> None:
        """The fit is done: forget how far it was."""
        if self.folder is None:
            return
        shutil.rmtree(self.place, ignore_errors=True)
        with suppress(OSError):  # other processes' checkpoints, or files of the user's, are still there
            self.folder.rmdir()


LOST = (
    "the checkpoint has no class sums, as those of older versions of mola: the posterior will know no distances from the training "
    "classes. Delete the checkpoint and fit again to have them."
)

NO_LABELS = "the training data: every label is missing (NaN or -100), so there is nothing to fit. Yield some labels, or inputs alone."

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
    distances: bool
    positions: Positions
    """How outputs at many positions are used, where there are such."""


@dataclass
class Totals:
    """The sums of one network under way."""

    factors: Any = None
    """None before the first data."""
    classes: ClassSums | None = None
    """For distances; None where they are not summed."""


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
    distances: bool = True,
    positions: str | int = "all",
    ignore_index: int = IGNORED,
) -> tuple[list[Head], list[tuple[Factors, ClassSums | None]]]:
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
        distances: whether to sum what distances need, too.
        positions: of outputs at many positions, which are summed: "all", "average", or so many of each input.
        ignore_index: label of positions that are left out.

    Returns:
        Heads and sums, the same bits on every rank.
    """
    if team.size > 1 and structure.settings().get("running_average") is not None:
        raise OptionError(
            "a running average depends on the order of the batches, and several processes have none. Use Kron() without "
            "running_average: its sums are exact and merge."
        )
    plain = team.size == 1 and not checkpoints.active
    work = Work(
        networks,
        structure,
        likelihood,
        team,
        checkpoints,
        {} if plain else identity_of(networks, structure, likelihood),
        distances,
        Positions(0, positions, ignore_index),
    )
    kept = checkpoints.load(work.identity, structure, likelihood)
    batches = batches_of(loader, "the training loader")
    _skip(batches, kept)
    first = next(batches, None)
    seen: list[Seen] | None = None
    labelled = kept.labelled
    heads = None if kept.heads is None else heads_from(networks, kept.heads)
    if first is not None:
        batch = as_batch(first, f"batch {kept.batches} of the training loader")
        heads, seen = first_passes(networks, names, batch.inputs, likelihood)
        heads = [_with_positions(head, work) for head in heads]
        labelled = batch.labels is not None
        batches = chain([first], batches)
    if heads is not None and not plain:
        _check_kept(kept, describe_heads(heads))
    if plain and heads is None:
        raise DataError(NO_DATA)
    if not plain:
        heads, labelled = _agree(work, heads, labelled, options)
    assert heads is not None  # one process alone has data, and several have agreed
    structure.check_size([one.width for one in heads], likelihood.latent(heads[0].classes))
    if distances:
        _check_room(heads, likelihood)
    totals, inputs = _taken_up(kept), kept.used_inputs
    if seen is not None:
        totals, inputs = _stream(
            work, heads, batches, seen, kept, batch_count(loader), labelled=labelled, progress=progress
        )
    factors = _over_all(work, heads, [one.factors for one in totals], labelled=labelled)
    if factors[0].count == 0:
        raise DataError(NO_LABELS)
    classes = _classes_over_all(work, heads, totals, factors)
    if positions == "average" and heads[0].positions is not None:
        (count,) = team.sum([torch.tensor(float(inputs), dtype=torch.float64, device="cpu")])
        factors, classes = _averaged(int(count), factors, classes)
    return heads, list(zip(factors, classes, strict=True))


def _with_positions(head: Head, work: Work) -> Head:
    if head.positions is None:
        return head
    if work.structure.settings().get("running_average") is not None:
        raise OptionError(
            "a running average takes each batch as a whole, and a batch of outputs at many positions is read in portions. Use Kron() "
            "without running_average."
        )
    return replace(head, positions=replace(work.positions, axes=head.positions.axes))


def _averaged(
    inputs: int, factors: Sequence[Factors], classes: Sequence[ClassSums | None]
) -> tuple[list[Factors], list[ClassSums | None]]:
    # Sums over positions as if each input were one datum: its positions' average, where all inputs have equally many.
    scaled: list[Factors] = []
    for one in factors:
        share = inputs / one.count
        score = None if one.log_likelihood is None else share * one.log_likelihood
        scaled.append(with_tensors(one, inputs, score, {name: share * own for name, own in one.tensors().items()}))
    shares = [inputs / one.count for one in factors]
    pairs = zip(classes, shares, strict=True)
    return scaled, [None if one is None else one.scaled(share) for one, share in pairs]


def _taken_up(kept: Kept) -> list[Totals]:
    totals = list(kept.totals or ())
    classes: Sequence[ClassSums | None] = kept.classes or [None] * len(totals)
    return [Totals(*one) for one in zip(totals, classes, strict=True)]


def _check_room(heads: Sequence[Head], likelihood: Likelihood) -> None:
    needed = sum(8 * (likelihood.groups(head.classes) * head.width + packed_size(head.width)) for head in heads)
    free = free_memory()
    if free is not None and needed > free:
        raise StructureTooLargeError(
            f"the sums for distances take {needed / 1e9:.1f} GB ({heads[0].classes:,} classes x {heads[0].width:,} features), "
            f"and {free / 1e9:.1f} GB are free. Fit with distances=False: all but rule='distance' works without them."
        )


def _skip(batches: Iterator[Any], kept: Kept) -> None:
    checksum = Kept().checksum
    for index in range(kept.batches):
        try:
            checksum = batch_checksum(checksum, next(batches))
        except StopIteration:
            raise StorageError(
                f"the checkpoint holds sums of {kept.batches} batches, but the training loader has only {index}: it is not the "
                f"loader that this fit began with. Pass that one, or delete the checkpoint to start from zero."
            ) from None
    if checksum != kept.checksum:
        raise StorageError(
            f"the first {kept.batches} batches of the training loader are not those in the checkpoint: the data, their order or the "
            f"batch size have changed. Going on would count some data twice and others never. Pass the same data unshuffled, or "
            f"delete the checkpoint to start from zero."
        )


def _check_kept(kept: Kept, heads: list[dict[str, Any]]) -> None:
    words = difference({"heads": kept.heads}, {"heads": heads})
    if words is not None:
        raise StorageError(
            f"the checkpoint is of another fit: {words}. Pass what that fit was given, or delete the checkpoint."
        )


def _agree(
    work: Work, heads: list[Head] | None, labelled: bool | None, options: dict[str, Any]
) -> tuple[list[Head], bool]:
    # See that all ranks do the same; a rank without data learns the heads from those that have some.
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
                raise DataError(
                    f"the batches of rank {have} have labels, those of rank {lack} have none. Give labels to all or none."
                )
            words = difference(everyone[lead], one)
            if words is not None:
                raise OptionError(
                    f"rank {rank} is not doing the same work as rank {lead}: {words}. Pass the same networks and options in every "
                    f"process; only the data differ."
                )
        own = everyone[lead]
    agreed = work.team.share({"heads": own["heads"], "labelled": own["labelled"]})
    if heads is None:
        heads = heads_from(work.networks, agreed["heads"])
        words = difference(agreed, {"heads": describe_heads(heads)})
        if words is not None:
            raise OptionError(f"this rank has no data, and other networks than those that have some: {words}.")
    return heads, agreed["labelled"]


def _stream(
    work: Work,
    heads: Sequence[Head],
    batches: Iterable[Any],
    first: Sequence[Seen],
    kept: Kept,
    total: int | None,
    *,
    labelled: bool | None,
    progress: bool,
) -> tuple[list[Totals], int]:
    structure, likelihood, checkpoints = work.structure, work.likelihood, work.checkpoints
    # A checkpoint comes back in main memory; sums go on where the features are.
    places = [device_of_sums(one) for one in first]
    totals = _taken_up(kept)
    for under_way, place in zip(totals, places, strict=False):
        under_way.factors = on_device(under_way.factors, place)
        under_way.classes = None if under_way.classes is None else under_way.classes.to(place)
    if not totals:
        totals = [
            Totals(None, _no_sums(work, head, one.features.shape[-1], place) if work.distances else None)
            for head, one, place in zip(heads, first, places, strict=True)
        ]
    rows = structure.rows(max(head.width for head in heads), heads[0].classes)
    buffers = [RowBuffer(head, rows or 1) for head in heads]
    checksums = [kept.checksum]
    done = saved = kept.batches
    inputs, used = kept.inputs, kept.used_inputs
    coming = 0

    def with_checksums() -> Iterator[Any]:
        for batch in batches:
            checksums.append(batch_checksum(checksums[-1], batch))
            yield batch

    def told(count: int, some_inputs: int, all_inputs: int) -> None:
        nonlocal coming, used, inputs
        coming, used, inputs = count, used + some_inputs, inputs + all_inputs

    def save() -> None:
        if any(total.factors is None for total in totals):  # no datum with a label yet
            return
        factors = [total.factors.cpu() for total in totals]
        classes = [total.classes.to("cpu") for total in totals if total.classes is not None]
        kept_now = Kept(done, inputs, used, checksums[0], labelled, describe_heads(heads), factors, classes or None)
        checkpoints.save(work.identity, kept_now)

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
        positions=work.positions.used if isinstance(work.positions.used, int) else None,
        start_input=kept.inputs,
    ):
        for index, (buffer, one) in enumerate(zip(buffers, seen, strict=True)):
            _absorb(work, totals[index], _portions(buffer, one, labels, rows))
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
    return totals, used


def _no_sums(work: Work, head: Head, width: int, place: torch.device) -> ClassSums:
    return ClassSums.empty(width, work.likelihood.groups(head.classes), place)


@torch.no_grad()  # a loader may need gradients of its own: not around the whole pass
def _absorb(work: Work, total: Totals, portions: Iterable[tuple[Tensor, Tensor, Tensor | None]]) -> None:
    for features, logits, labels in portions:
        known = None if labels is None else work.likelihood.known(labels)
        if labels is not None and known is not None:  # data without any label leave no trace
            features, logits, labels = features[known], logits[known], labels[known]
        if not len(features):
            continue
        score, sums = None, None
        if labels is None:
            curvature = work.likelihood.curvature(logits)
        else:
            scores, curvature = work.likelihood.scored_curvature(logits, labels)
            score, sums = float(scores.sum()), work.likelihood.label_sums(logits, labels)
        total.factors = work.structure.absorb(total.factors, features, curvature, score).with_labels(sums)
        if total.classes is not None:  # last: it writes into the features
            groups = work.likelihood.group_of(logits, labels)
            width = total.classes.directions.shape[1]
            predicted = labels is None and len(total.classes.counts) > 1
            total.classes.absorb(features[:, :width], groups, predicted=predicted)


def _portions(
    buffer: RowBuffer, seen: Features, labels: Tensor | None, rows: int | None
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    # Features with the constant 1, logits and labels, in float64 and at most `rows` at a time: a batch may be large.
    count = len(seen.logits)
    for start in range(0, count, rows or count):
        part = slice(start, None if rows is None else start + rows)
        features, logits = seen.features[part], seen.logits[part]
        if not isinstance(seen, Lifted):
            features, logits = buffer.put(Features(features, logits))
            buffer.handed_out()
        yield features, logits, None if labels is None else labels[part].to(logits.device)


def _classes_over_all(
    work: Work, heads: Sequence[Head], totals: Sequence[Totals], factors: Sequence[Factors]
) -> list[ClassSums | None]:
    if not work.distances:
        return [None] * len(heads)
    own = (
        [_no_sums(work, head, head.inputs, torch.device("cpu")) for head in heads]
        if not totals
        else [total.classes for total in totals]
    )
    if work.team.size > 1:
        lacking = work.team.collect(any(one is None for one in own))
        if work.team.share(None if lacking is None else any(lacking)):
            if work.team.first:
                warn(LOST)
            return [None] * len(heads)
        parts = [tensor for one in own if one is not None for tensor in one.tensors().values()]
        summed, names = iter(work.team.sum(parts)), ClassSums.shapes(0, 0)
        own = [ClassSums(**{name: next(summed) for name in names}) for _ in own]
    pairs = zip(own, factors, strict=True)
    found = [None if one is None or one.count != total.count else one.to("cpu") for one, total in pairs]
    if any(one is None for one in found) and work.team.first:
        warn(LOST)
    return found


def _over_all(
    work: Work, heads: Sequence[Head], totals: Sequence[Factors | None], *, labelled: bool | None
) -> list[Factors]:
    nothing = 0.0 if labelled else None
    # No sums: of a rank without data, or of data that all lack labels.
    given: Sequence[Factors | None] = totals or [None] * len(heads)
    own = [
        empty_factors(work.structure, head.width, work.likelihood.latent(head.classes), nothing) if one is None else one
        for head, one in zip(heads, given, strict=True)
    ]
    if work.team.size == 1:
        return [total.cpu() for total in own]
    # A rank without data may lack sums that the others have.
    forms: list[dict[str, list[int]]] = [{} for _ in own]
    described = [{name: list(tensor.shape) for name, tensor in total.tensors().items()} for total in own]
    for one in work.team.collect(described) or ():
        forms = [known | more for known, more in zip(forms, one, strict=True)]
    forms = work.team.share(forms)
    parts: list[Tensor] = []
    for total, form in zip(own, forms, strict=True):
        tensors = total.tensors()
        like = next(iter(tensors.values()))
        parts.append(like.new_tensor([total.count, total.log_likelihood or 0.0]))
        parts += [tensors[name] if name in tensors else like.new_zeros(shape) for name, shape in form.items()]
    sums = iter(work.team.sum(parts))
    summed = []
    for total, form in zip(own, forms, strict=True):
        count, score = next(sums).tolist()
        named = {name: next(sums).cpu() for name in form}
        summed.append(with_tensors(total, int(count), score if labelled else None, named))
    return summed
