"""Checkpoints of a training under way: interrupted after an epoch, it continues to the same bits.

One format for `mola train`, SWAG and MIMO: network, optimiser and schedule in a folder, with what identifies the training.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map

from mola.errors import DataError, OptionError, StorageError
from mola.network import Inputs
from mola.saving import storage
from mola.saving.storage import DOCUMENT, read_sealed_tensors
from mola.schema import parse

OLDER_FORMAT = "mola-training-1"
"""Of the single file in which `mola train` kept its trainings before it shared this format."""


class DivergedError(DataError):
    """The loss is no longer finite: the learning rate is too high."""


def blame_inputs(inputs: Inputs, place: str) -> None:
    """Say so, where a loss that is not finite comes from the data and not from the learning rate.

    Args:
        inputs: of the batch.
        place: words for the error message.
    """
    wrong: list[Tensor] = []
    tree_map(
        lambda one: wrong.append(one) if isinstance(one, Tensor) and not bool(torch.isfinite(one).all()) else None,
        inputs,
    )
    if wrong:
        raise DataError(f"{place}: the inputs hold NaN or infinite numbers. Clean or leave out those data.")


def all_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers, those that a state dictionary leaves out included, each once."""
    named = [*network.named_parameters(), *network.named_buffers()]
    return {name: tensor.detach() for name, tensor in named}


@dataclass(frozen=True)
class TrainingCheckpoint:
    """Where a training is kept, and what training it is."""

    folder: Path
    kind: str
    """Of training, such as "swag-checkpoint"."""
    identity: dict[str, Any]
    """Plain JSON values: the checkpoint of another training is refused."""
    older: Path | None = None
    """A file of `OLDER_FORMAT` from which to resume where the folder does not exist yet."""

    def save(
        self,
        epochs: int,
        network: nn.Module,
        optimiser: Optimizer,
        schedule: LRScheduler | None = None,
        more: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Save the state after an epoch; the folder always holds a complete one.

        Args:
            epochs: number done.
            network: under training.
            optimiser: of its parameters.
            schedule: of the learning rate, if it changes.
            more: tensors to save with it.
        """
        tensors = {f"network.{name}": tensor for name, tensor in all_tensors(network).items()}
        for index, state in optimiser.state_dict()["state"].items():
            known = {name: value for name, value in state.items() if value is not None}
            tensors |= {f"optimiser.{index}.{name}": torch.as_tensor(value) for name, value in known.items()}
        tensors |= {f"more.{name}": tensor for name, tensor in (more or {}).items()}
        try:
            rates = None if schedule is None else _as_json(schedule.state_dict())
        except TypeError as error:
            raise OptionError(
                f"schedule: the state of {type(schedule).__name__} cannot be written to a checkpoint ({error}). Use one "
                f"that is made of numbers, or train without a checkpoint."
            ) from error
        document = {
            "epochs": epochs,
            "identity": self.identity,
            "schedule": rates,
            "groups": _settings_of_groups(optimiser),
        }
        storage.write(self.folder, document, tensors, kind=self.kind)

    def restore(
        self, epochs: int, network: nn.Module, optimiser: Optimizer, schedule: LRScheduler | None = None
    ) -> tuple[int, dict[str, Tensor]]:
        """Restore what was saved.

        Args:
            epochs: number requested.
            network: as it was at the start.
            optimiser: of its parameters, fresh.
            schedule: of the learning rate, fresh.

        Returns:
            The number of epochs done, 0 if nothing was saved, and the other tensors.
        """
        try:
            document, tensors = self._read()
        except StorageError as error:
            raise StorageError(f"{error} To train from the start, choose another folder or delete this one.") from error
        if not document:
            return 0, {}
        place = self.place
        if document["identity"] != _as_json(self.identity):
            raise StorageError(
                f"{place} is the checkpoint of another training or another network: expected {self.identity}, got "
                f"{document['identity']}. Delete it, or use another folder."
            )
        if document["epochs"] > epochs:
            raise StorageError(
                f"{place} holds {document['epochs']} epochs, more than the {epochs} that are asked for. Ask for as "
                f"many, or use another folder."
            )
        own, kept = all_tensors(network), below(tensors, "network.")
        if {name: tensor.shape for name, tensor in own.items()} != {name: one.shape for name, one in kept.items()}:
            raise StorageError(f"{place} is the checkpoint of another network: names or shapes of its tensors differ.")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(kept[name])
        try:
            _restore_optimiser(optimiser, below(tensors, "optimiser."), document["groups"])
            if schedule is not None:
                schedule.load_state_dict(_taken_up(schedule.state_dict(), document["schedule"]))
        except (
            KeyError,
            ValueError,
            TypeError,
            AttributeError,
        ) as error:  # an older file has no seal, and may say anything
            raise StorageError(f"{place} is damaged ({error!r}). Delete it to train from the start.") from error
        return document["epochs"], below(tensors, "more.")

    @property
    def place(self) -> Path:
        """The folder, or the file of an older version where only that exists."""
        older = self.older is not None and self.older.exists() and not (self.folder / DOCUMENT).exists()
        return self.older if older and self.older is not None else self.folder

    def _read(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        # What was kept; two empty dictionaries if nothing was.
        if (self.folder / DOCUMENT).exists():
            return storage.read(self.folder, self.kind, {"epochs": int, "identity": {}, "groups": [{}]})
        return ({}, {}) if self.older is None or not self.older.exists() else _read_older(self.older)

    def remove(self) -> None:
        """Delete the checkpoint: the training is done."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.older is not None:
            self.older.unlink(missing_ok=True)


def _read_older(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    # The checkpoint in a file of `OLDER_FORMAT`, as it would be in a folder.
    tensors, metadata = read_sealed_tensors(path)
    if metadata.get("format") != OLDER_FORMAT:
        raise StorageError(f"{path} is not a checkpoint of a training.")
    try:
        document = {
            "epochs": int(metadata["epoch"]),
            "identity": parse(metadata["identity"]),
            "schedule": {"last_epoch": int(metadata["steps"])},
            "groups": [{"lr": float(rate)} for rate in parse(metadata["rates"])],
        }
    except (KeyError, ValueError, TypeError) as error:
        raise StorageError(f"{path} is damaged ({error!r}).") from error
    return document, {
        f"more.{name}" if name.startswith("random.") else name: tensor for name, tensor in tensors.items()
    }


def below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _settings_of_groups(optimiser: Optimizer) -> list[dict[str, Any]]:
    # What an optimiser does to each group of parameters: a schedule may change not the learning rate alone.
    return [
        {
            name: float(value) if isinstance(value, Tensor) else value
            for name, value in group.items()
            if isinstance(value, (bool, int, float, tuple)) or (isinstance(value, Tensor) and value.numel() == 1)
        }
        for group in optimiser.param_groups
    ]


def _restore_optimiser(optimiser: Optimizer, tensors: dict[str, Tensor], groups: list[dict[str, Any]]) -> None:
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in sorted(tensors.items()):  # files do not keep the order
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = tensor
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    for group, settings in zip(optimiser.param_groups, groups, strict=True):
        group |= {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}


def _as_json(value: Any) -> Any:
    # As it comes back from a file: tuples as lists, keys as words.
    return json.loads(json.dumps(value))


def _taken_up(fresh: Any, kept: Any) -> Any:
    # The kept state of a schedule. What did not change is the fresh one's own: types do not survive in a file.
    if _as_json(fresh) == kept:
        return fresh
    if isinstance(fresh, dict) and isinstance(kept, dict):
        if not all(isinstance(key, str) for key in fresh):
            raise StorageError(
                "the schedule in the checkpoint keeps things by number, which cannot be taken up. Train anew, in another folder."
            )
        return {key: _taken_up(fresh.get(key), value) for key, value in kept.items()}
    if isinstance(fresh, list) and isinstance(kept, list) and len(fresh) == len(kept):
        return [_taken_up(one, other) for one, other in zip(fresh, kept, strict=True)]
    return tuple(kept) if isinstance(fresh, tuple) else kept
