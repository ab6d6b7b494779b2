"""Checkpoints of a training under way: interrupted after an epoch, it continues to the same bits.

One format for `mola train`, SWAG and MIMO: network and optimiser in a folder, with what identifies the training. A schedule depends
only on its number of steps: a fresh schedule is advanced by that number.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mola.baselines.members import all_tensors, below, shape_differences
from mola.errors import DataError, StorageError
from mola.saving.files import DOCUMENT, read_folder, write_folder


class DivergedError(DataError):
    """The loss is no longer finite: the learning rate is too high."""


@dataclass(frozen=True)
class TrainingCheckpoint:
    """The checkpoint folder of a training."""

    folder: Path
    kind: str
    """Kind of training, such as "swag-checkpoint"."""
    identity: Mapping[str, Any]
    """JSON values; a checkpoint with other values is refused."""

    def save(
        self,
        epochs: int,
        network: nn.Module,
        optimiser: Optimizer,
        *,
        steps: int = 0,
        more: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Save the state after an epoch; the folder always holds a complete state.

        Args:
            epochs: number of epochs done.
            network: the network in training.
            optimiser: its optimiser.
            steps: number of steps of the learning-rate schedule.
            more: other tensors.
        """
        tensors = {f"network.{name}": tensor for name, tensor in all_tensors(network).items()}
        for index, state in optimiser.state_dict()["state"].items():
            known = {name: value for name, value in state.items() if value is not None}
            tensors |= {f"optimiser.{index}.{name}": torch.as_tensor(value) for name, value in known.items()}
        tensors |= {f"more.{name}": tensor for name, tensor in (more or {}).items()}
        document = {"kind": self.kind, "epochs": epochs, "steps": steps, "identity": dict(self.identity)}
        write_folder(self.folder, document, tensors)

    def restore(
        self, epochs: int, network: nn.Module, optimiser: Optimizer, schedule: LRScheduler | None = None
    ) -> tuple[int, int, dict[str, Tensor]]:
        """Restore a saved state into a fresh network, optimiser and schedule.

        Returns:
            The numbers of epochs and steps done, 0 if nothing was saved, and the other tensors.

        Raises:
            StorageError: the folder is damaged, or holds another training or more than `epochs`.
        """
        if not (self.folder / DOCUMENT).exists():
            return 0, 0, {}
        try:
            document, tensors = read_folder(self.folder, self.kind, {"epochs": int, "steps": int, "identity": {}})
        except StorageError as error:
            raise StorageError(f"{error} To train from the start, choose another folder or delete this one.") from error
        identity = json.loads(json.dumps(self.identity))
        if document["identity"] != identity:
            raise StorageError(
                f"{self.folder} is the checkpoint of another training or another network: expected {identity}, got "
                f"{document['identity']}. Delete it, or use another folder."
            )
        if document["epochs"] > epochs:
            raise StorageError(
                f"{self.folder} holds {document['epochs']} epochs, more than the requested {epochs}. Request as many, or use another "
                f"folder."
            )
        own, kept = all_tensors(network), below(tensors, "network.")
        if shape_differences(kept, {name: tuple(tensor.shape) for name, tensor in own.items()}):
            raise StorageError(
                f"{self.folder} is the checkpoint of another network: its tensors differ in name or shape."
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(kept[name])
        if schedule is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch: the optimiser has not been stepped before the schedule
                for _ in range(document["steps"]):
                    schedule.step()
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in sorted(below(tensors, "optimiser.").items()):  # files do not keep the order
            index, key = name.split(".", 1)
            state.setdefault(int(index), {})[key] = tensor
        optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
        return document["epochs"], document["steps"], below(tensors, "more.")

    def remove(self) -> None:
        """Delete the checkpoint: the training is done."""
        shutil.rmtree(self.folder, ignore_errors=True)
