"""A fit under way, on disk: sums so far and how many batches are in them. They are additive, so a fit goes on from there."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mola import folders
from mola.errors import OptionError, StorageError
from mola.fingerprints import NETWORK
from mola.laplace import Factors, Structure
from mola.schema import Optional
from mola.storage import DOCUMENT
from mola.summing.blank import no_data, remade
from mola.summing.identity import difference
from mola.summing.trail import START

__all__ = ["Keeper", "Kept"]

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
    trail: str = START
    labelled: bool | None = None
    heads: list[dict[str, Any]] | None = None
    totals: Sequence[Factors] | None = None


class Keeper:
    """Where a fit under way is kept; with no folder, nowhere.

    Args:
        folder: given by the user, or None.
        every: batches between two checkpoints.
        rank: of this process.
        size: number of processes; each keeps its own sums, of its own shard.

    Raises:
        OptionError: if `every` is not a whole number above 0.
    """

    def __init__(self, folder: str | Path | None, every: int, rank: int, size: int) -> None:
        """Note the place.

        Raises:
            OptionError: if `every` is not a whole number above 0.
        """
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            message = f"checkpoint_every must be a whole number of batches above 0, got {every!r}."
            raise OptionError(message)
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

    def load(self, identity: dict[str, Any], structure: Structure) -> Kept:
        """What was kept of this fit; nothing, if none was.

        Args:
            identity: of networks and structure.
            structure: makes factors of saved tensors.

        Returns:
            How far the fit was.

        Raises:
            StorageError: if the folder holds another fit, or is damaged.
        """
        if self.folder is None:
            return Kept()
        self._refuse_other_teams()
        if not (self.place / DOCUMENT).exists():
            return Kept()
        document, tensors = folders.load(self.place, KIND, SCHEMA)
        words = difference(document["identity"], identity)
        if words is not None:
            message = (
                f"{self.folder} is the checkpoint of another fit: {words}. Pass what that fit was given, or delete the folder to "
                f"start from zero."
            )
            raise StorageError(message)
        lengths = {name: len(document[name]) for name in ("heads", "counts", "log_likelihoods")}
        if set(lengths.values()) != {len(identity["networks"])}:
            message = f"{self.place} is garbled: entries for {lengths} networks. Delete the folder to start from zero."
            raise StorageError(message)
        totals = [
            self._factors(index, entry, document, tensors, structure) for index, entry in enumerate(document["heads"])
        ]
        return Kept(document["batches"], document["trail"], document["labelled"], document["heads"], totals)

    def _refuse_other_teams(self) -> None:
        """Refuse a folder that another number of processes wrote.

        Raises:
            StorageError: if it did.
        """
        for found in Path(self.folder or "").glob("rank-*-of-*"):
            size = re.fullmatch(r"rank-\d+-of-(\d+)", found.name)
            if size is not None and int(size[1]) != self.size:
                message = (
                    f"{self.folder} is the checkpoint of a fit by {size[1]} processes, got {self.size}: their shards were other ones. "
                    f"Start {size[1]} processes, or delete the folder to start from zero."
                )
                raise StorageError(message)

    def _factors(
        self,
        index: int,
        head: dict[str, Any],
        document: dict[str, Any],
        tensors: dict[str, Tensor],
        structure: Structure,
    ) -> Factors:
        blank = no_data(structure, head["features"], head["classes"], None)
        named = {name.partition(".")[2]: one for name, one in tensors.items() if name.startswith(f"{index}.")}
        for name, like in blank.tensors().items():
            if name not in named or named[name].shape != like.shape or named[name].dtype != like.dtype:
                message = f"{self.place}: tensor {index}.{name} is missing or of another shape. Delete the folder to start from zero."
                raise StorageError(message)
        return remade(blank, document["counts"][index], document["log_likelihoods"][index], named)

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
            "trail": kept.trail,
            "labelled": bool(kept.labelled),
            "counts": [total.count for total in totals],
            "log_likelihoods": [total.log_likelihood for total in totals],
        }
        tensors = {f"{k}.{name}": one for k, total in enumerate(totals) for name, one in total.tensors().items()}
        folders.save(self.place, KIND, document, tensors)

    def remove(self) -> None:
        """The fit is done: forget how far it was."""
        if self.folder is None:
            return
        shutil.rmtree(self.place, ignore_errors=True)
        with suppress(OSError):  # other processes' checkpoints, or files of the user's, are still there
            self.folder.rmdir()
