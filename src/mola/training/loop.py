"""A training under way, on disk: interrupted after an epoch, it goes on to the same bits.

The training loop: the same seed gives the same network, interrupted or not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mola.errors import DataError, StorageError
from mola.saving.storage import read_sealed_tensors, sealed_tensors, write_atomically
from mola.saving.training_checkpoint import below, restore_optimiser
from mola.schema import parse
from mola.training.labelled import Labelled
from mola.training.recipe import Recipe

__all__ = ["Checkpoint", "member_seeds", "train", "train_ensemble"]

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


def train(
    build: Callable[[], nn.Module],
    data: Labelled,
    recipe: Recipe,
    *,
    seed: int,
    prepare: Callable[[Tensor], Tensor] = lambda inputs: inputs,
    on_epoch: Callable[[int], None] = lambda epoch: None,
    checkpoint: Checkpoint | None = None,
) -> nn.Module:
    """Build a network and train it. Torch's own random state is left as it was.

    Args:
        build: makes a network with fresh weights; called once, after seeding.
        data: training data, shuffled anew for every epoch.
        recipe: how to train.
        seed: of the initial weights, the order of the data and any dropout or augmentation.
        prepare: makes a batch of stored inputs what the network sees; it may draw from torch's random state.
        on_epoch: called after every epoch with the number of epochs done.
        checkpoint: where to keep the training after every epoch, and to take it up again.

    Returns:
        The network in eval mode, on the device and in the precision of the prepared inputs.

    Raises:
        DataError: if the loss is no longer finite, or there are no data.
    """
    if not len(data):
        message = "there are no training data: expected at least one."
        raise DataError(message)
    inputs, labels = data.inputs, data.labels
    accelerators = [inputs.device.index or 0] if inputs.device.type == "cuda" else []
    with torch.random.fork_rng(devices=accelerators):
        torch.manual_seed(seed)
        network = build()
        state = torch.get_rng_state()
        seen = prepare(inputs[:1])
        torch.set_rng_state(state)
        network = network.to(seen.device, seen.dtype).train()
        optimiser = recipe.make_optimiser(network.parameters())
        schedule = recipe.make_schedule(optimiser, len(data))
        done = 0 if checkpoint is None else checkpoint.restore(network, optimiser, schedule)
        if done:
            on_epoch(done)
        for epoch in range(done + 1, recipe.epochs + 1):
            for rows in torch.split(torch.randperm(len(data)), recipe.batch_size):
                loss = _step(network, optimiser, prepare(inputs[rows]), labels[rows])
                schedule.step()
            if not math.isfinite(float(loss)):
                message = f"the loss is {float(loss)} after epoch {epoch}: lower the learning rate (now {recipe.learning_rate})."
                raise DataError(message)
            if checkpoint is not None:
                checkpoint.save(epoch, network, optimiser, schedule)
            on_epoch(epoch)
    return network.eval()


def _step(network: nn.Module, optimiser: Optimizer, inputs: Tensor, labels: Tensor) -> Tensor:
    optimiser.zero_grad()
    loss = functional.cross_entropy(network(inputs), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()
    return loss.detach()


def member_seeds(members: int, seed: int) -> list[int]:
    """A seed for each network of an ensemble; a larger ensemble begins with the same ones.

    Drawn rather than counted up, so that ensembles of neighbouring seeds share no member.
    """
    return torch.randint(2**31, (members,), generator=torch.Generator().manual_seed(seed)).tolist()


def train_ensemble(
    build: Callable[[], nn.Module],
    data: Labelled,
    recipe: Recipe,
    *,
    members: int,
    seed: int,
    on_epoch: Callable[[int, int], None] = lambda member, epoch: None,
) -> list[nn.Module]:
    """Train networks that differ by their seed alone: a deep ensemble.

    Args:
        build: makes a network with fresh weights.
        data: training data.
        recipe: how to train.
        members: number of networks.
        seed: of all the members' seeds.
        on_epoch: called after every epoch with the member's index and its number of epochs done.

    Returns:
        The networks.
    """
    return [
        train(build, data, recipe, seed=own, on_epoch=lambda epoch, member=member: on_epoch(member, epoch))  # type: ignore[misc]
        for member, own in enumerate(member_seeds(members, seed))
    ]
