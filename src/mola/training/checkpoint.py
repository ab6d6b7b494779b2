"""A training under way, on disk: interrupted after an epoch, it goes on to the same bits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mola.baselines.keeping import below, restore_optimiser
from mola.errors import StorageError
from mola.schema import parse
from mola.storage import read_sealed_tensors, sealed_tensors, write_atomically

__all__ = ["Checkpoint"]

FORMAT = "mola-training-1"


@dataclass(frozen=True)
class Checkpoint:
    """Where a training is kept, and what training it is."""

    path: Path
    identity: dict[str, Any]
    """Plain JSON values: a file of another training is refused."""

    def save(self, epoch: int, network: nn.Module, optimiser: Optimizer, schedule: LRScheduler) -> None:
        """Keep the state after an epoch; the file always holds a whole one.

        Args:
            epoch: number of epochs done.
            network: under training.
            optimiser: of its parameters.
            schedule: of the learning rate.
        """
        tensors = {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
        for index, state in optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{index}.{name}": torch.as_tensor(value) for name, value in state.items()}
        tensors |= {f"random.{name}": state for name, state in _random_states(network).items()}
        metadata = {
            "format": FORMAT,
            "identity": json.dumps(self.identity, sort_keys=True),
            "epoch": str(epoch),
            "rates": json.dumps([group["lr"] for group in optimiser.param_groups]),
            "steps": str(schedule.last_epoch),
        }
        write_atomically(self.path, sealed_tensors(tensors, metadata))

    def restore(self, network: nn.Module, optimiser: Optimizer, schedule: LRScheduler) -> int:
        """Put back the state that was kept, the random state included.

        Args:
            network: as built.
            optimiser: of its parameters, fresh.
            schedule: of the learning rate, fresh.

        Returns:
            The number of epochs done, 0 without a file.

        Raises:
            StorageError: if the file is damaged, or belongs to another training.
        """
        if not self.path.exists():
            return 0
        try:
            tensors, metadata = read_sealed_tensors(self.path)
        except StorageError as error:
            message = f"{self.path} is not a whole checkpoint ({error}) Delete it to train this network from the start."
            raise StorageError(message) from error
        if metadata.get("format") != FORMAT:
            message = (
                f"{self.path} was not written by this version of mola's training. Delete it to train from the start."
            )
            raise StorageError(message)
        if metadata.get("identity") != json.dumps(self.identity, sort_keys=True):
            message = (
                f"{self.path} is the checkpoint of another training: expected {json.dumps(self.identity, sort_keys=True)}, "
                f"got {metadata.get('identity')}. Delete it, or train into another folder."
            )
            raise StorageError(message)
        try:
            epoch, steps = int(metadata["epoch"]), int(metadata["steps"])
            rates = [{"lr": float(rate)} for rate in parse(metadata["rates"])]
            network.load_state_dict(below(tensors, "network."))
            restore_optimiser(optimiser, below(tensors, "optimiser."), rates)
            _set_random_states(network, below(tensors, "random."))
        except (
            KeyError,
            ValueError,
            TypeError,
            RuntimeError,
        ) as error:  # an older file has no seal, and may be damaged anywhere
            message = f"{self.path} is damaged ({error}). Delete it to train this network from the start."
            raise StorageError(message) from error
        schedule.last_epoch = steps
        return epoch

    def remove(self) -> None:
        """Forget it: the training is done."""
        self.path.unlink(missing_ok=True)


def _device(network: nn.Module) -> torch.device:
    return next(network.parameters()).device


def _random_states(network: nn.Module) -> dict[str, Tensor]:
    device = _device(network)
    accelerator = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state(), **accelerator}


def _set_random_states(network: nn.Module, states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and _device(network).type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], _device(network))
