"""The training loop: the same seed gives the same network, interrupted or not."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from mola.errors import DataError
from mola.lab.training.checkpoint import TrainingCheckpoint
from mola.lab.training.recipe import Labelled, Recipe


def member_seeds(members: int, seed: int) -> list[int]:
    """Draw a seed for each network of an ensemble; a larger ensemble begins with the same seeds.

    Drawn rather than counted up, so that ensembles of neighbouring seeds share no member.
    """
    return torch.randint(2**31, (members,), generator=torch.Generator().manual_seed(seed)).tolist()


def train(
    build: Callable[[], nn.Module],
    data: Labelled,
    recipe: Recipe,
    *,
    seed: int,
    prepare: Callable[[Tensor], Tensor] = lambda inputs: inputs,
    on_epoch: Callable[[int], None] = lambda epoch: None,
    checkpoint: TrainingCheckpoint | None = None,
) -> nn.Module:
    """Build a network and train it on the cross-entropy; torch's global random state is restored.

    Args:
        build: makes a network with fresh weights; called once, after seeding.
        data: training data, reshuffled every epoch.
        recipe: optimiser and schedule.
        seed: seed of the initial weights, the order of the data, dropout and augmentation.
        prepare: turns a batch of stored inputs into network inputs; it may draw from torch's random state.
        on_epoch: called after every epoch with the number of epochs done.
        checkpoint: where to save the training after every epoch, and to resume it from.

    Returns:
        The network in eval mode, on the device and in the precision of the prepared inputs.
    """
    if not len(data):
        raise DataError("there are no training data: expected at least one row.")
    inputs, labels = data.inputs, data.labels
    with torch.random.fork_rng(devices=[inputs.device.index or 0] if inputs.device.type == "cuda" else []):
        torch.manual_seed(seed)
        network = build()
        state = torch.get_rng_state()
        example = prepare(inputs[:1])
        torch.set_rng_state(state)
        network = network.to(example.device, example.dtype).train()
        optimiser = recipe.make_optimiser(network.parameters())
        schedule = recipe.make_schedule(optimiser, len(data))
        done = steps = 0
        if checkpoint is not None:
            done, steps, states = checkpoint.restore(recipe.epochs, network, optimiser, schedule)
            if done:
                _set_random_states(states, example.device)
                on_epoch(done)
        for epoch in range(done + 1, recipe.epochs + 1):
            for rows in torch.split(torch.randperm(len(data)), recipe.batch_size):
                loss = _step(network, optimiser, prepare(inputs[rows]), labels[rows])
                schedule.step()
                steps += 1
            if not math.isfinite(float(loss)):
                raise DataError(
                    f"the loss is {float(loss)} after epoch {epoch}: lower the learning rate (now {recipe.learning_rate})."
                )
            if checkpoint is not None:
                checkpoint.save(epoch, network, optimiser, steps=steps, more=_random_states(example.device))
            on_epoch(epoch)
    return network.eval()


def _random_states(device: torch.device) -> dict[str, Tensor]:
    accelerator = {"random.cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"random.cpu": torch.get_rng_state(), **accelerator}


def _set_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["random.cpu"])
    if "random.cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["random.cuda"], device)


def _step(network: nn.Module, optimiser: Optimizer, inputs: Tensor, labels: Tensor) -> Tensor:
    optimiser.zero_grad()
    loss = functional.cross_entropy(network(inputs), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()
    return loss.detach()


def train_ensemble(
    build: Callable[[], nn.Module],
    data: Labelled,
    recipe: Recipe,
    *,
    members: int,
    seed: int,
    on_epoch: Callable[[int, int], None] = lambda member, epoch: None,
) -> list[nn.Module]:
    """Train a deep ensemble: `members` networks that differ by their seed alone; see `train`.

    `on_epoch` is called after every epoch with the member's index and its number of epochs done.
    """
    return [
        train(build, data, recipe, seed=own, on_epoch=lambda epoch, member=member: on_epoch(member, epoch))  # type: ignore[misc]
        for member, own in enumerate(member_seeds(members, seed))
    ]
