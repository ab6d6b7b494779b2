"""Training of MIMO: every head learns its own input, which comes in its own order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from tqdm.auto import tqdm

from mola.baselines.members import derived_seeds
from mola.baselines.mimo import Mimo, stack_inputs
from mola.errors import DataError, OptionError
from mola.lab.training.checkpoint import DivergedError, TrainingCheckpoint
from mola.lab.training.passes import WithGradients, check_inputs, seeded
from mola.lab.training.recipe import RECIPES
from mola.likelihoods import CATEGORICAL
from mola.network import Batch, batch_count, batches, call, state_checksum
from mola.numerics import check_seed
from mola.options import whole_number

EPOCHS = 0  # purpose of the seeds

MakeOptimiser = Callable[[Iterable[nn.Parameter]], Optimizer]


def member_rows(
    size: int, members: int, batch_repetition: int, input_repetition: float, generator: torch.Generator | None = None
) -> Tensor:
    """Draw the datum of a batch for each member and row: indices (K, size * batch_repetition) on the CPU.

    The batch is repeated and shuffled; all rows but a share `input_repetition` are then shuffled again for each member.

    Args:
        size: size of the batch.
        members: K.
        batch_repetition: how often each datum occurs for each member.
        input_repetition: share of the rows in which all members get the same datum.
        generator: source of randomness; None uses torch's default.
    """
    total = size * batch_repetition
    shared = torch.randperm(total, generator=generator) % size
    own = int(total * (1 - input_repetition))
    orders = [shared[:own][torch.randperm(own, generator=generator)] for _ in range(members)]
    return torch.stack([torch.cat([order, shared[own:]]) for order in orders])


def train_mimo(
    mimo: Mimo,
    train_loader: Iterable[Any],
    *,
    epochs: int = 100,
    batch_repetition: int = 4,
    input_repetition: float = 0.0,
    optimiser: MakeOptimiser = RECIPES["cifar10"].make_optimiser,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> Mimo:
    """Train in place on the mean over rows of the sum over heads of the cross-entropy, and return the same object.

    Args:
        mimo: the network.
        train_loader: training data with labels, read once an epoch. Its shuffling and augmentation should draw from torch's random
            state, as those of `DataLoader` do: then the seed gives the same network, interrupted or not.
        epochs: number of epochs.
        batch_repetition: how often each datum of a batch occurs in a step, for each member.
        input_repetition: share of the rows in which all members get the same datum.
        optimiser: from parameters to an optimiser, by default the paper's for CIFAR-10; its learning rate falls to 0 along a half
            cosine, batch by batch.
        seed: seed of the orders, dropout and augmentation.
        checkpoint: folder for the state after every epoch, from which an interrupted training continues.
        progress: show a progress bar on stderr, if that is a terminal.
    """
    epochs, repetition = whole_number(epochs, "epochs"), whole_number(batch_repetition, "batch_repetition")
    if not 0 <= input_repetition <= 1:
        raise OptionError(
            f"input_repetition must lie between 0 (independent orders) and 1 (the same for all), got {input_repetition!r}."
        )
    seeds = derived_seeds(check_seed(seed), EPOCHS, epochs)
    network = nn.ModuleDict({"trunk": mimo.trunk.network, "heads": mimo.heads})
    with torch.inference_mode(False), torch.enable_grad():
        chosen = optimiser(network.parameters())
        total = epochs * _count_batches(train_loader, network, seed)
        rates = CosineAnnealingLR(chosen, total)
        keeper, done, steps = None, 0, 0
        if checkpoint is not None:
            identity = {
                "members": mimo.members,
                "epochs": epochs,
                "seed": seed,
                "batch_repetition": repetition,
                "input_repetition": input_repetition,
                "steps": total,
                "optimiser": [type(chosen).__name__, _settings(chosen)],
                "network": state_checksum(network),
            }
            keeper = TrainingCheckpoint(Path(checkpoint), "mimo-checkpoint", identity)
            done, steps, _ = keeper.restore(epochs, network, chosen, rates)
        bar = {"desc": "MIMO", "initial": done, "total": epochs, "disable": None if progress else True}
        for epoch in tqdm(range(done, epochs), **bar):
            with seeded(network, seeds[epoch]):
                network.train()
                for index, batch in enumerate(batches(train_loader, "training loader")):
                    place = f"batch {index} of the training loader"
                    inputs, labels = _labelled(batch, place)
                    rows = member_rows(len(inputs), mimo.members, repetition, input_repetition)
                    chosen.zero_grad()
                    loss = _loss(mimo, inputs, labels, rows, place)
                    if not math.isfinite(float(loss.detach())):  # before the step, which would spoil the weights
                        check_inputs(inputs, place)
                        rate = chosen.param_groups[0]["lr"]
                        raise DivergedError(
                            f"MIMO diverged in epoch {epoch + 1} of {epochs} at learning rate {rate:g}. Lower the learning rate."
                        )
                    loss.backward()  # type: ignore[no-untyped-call]
                    chosen.step()
                    rates.step()
                    steps += 1
            if keeper is not None:
                keeper.save(epoch + 1, network, chosen, steps=steps)
        network.eval()
    return mimo


def _loss(mimo: Mimo, inputs: Tensor, labels: Tensor, rows: Tensor, place: str) -> Tensor:
    stacked = stack_inputs([inputs[own.to(inputs.device)] for own in rows])
    features = call(WithGradients(mimo.trunk.network), stacked)
    total = features.new_zeros(())
    for head, own in zip(mimo.heads, labels[rows.to(labels.device)], strict=True):
        logits = head(features)
        total = total - CATEGORICAL.log_likelihood(logits, CATEGORICAL.check_labels(own, logits, place)).mean()
    return total


def _labelled(batch: Batch, place: str) -> tuple[Tensor, Tensor]:
    if not isinstance(batch.inputs, Tensor) or batch.inputs.dim() < 2:
        raise DataError(
            f"{place}: MIMO stacks inputs along dimension 1; expected one tensor (n, channels, ...) as inputs."
        )
    if batch.labels is None or len(batch.labels) != len(batch.inputs):
        raise DataError(f"{place}: expected (inputs, labels) with a label for each of {len(batch.inputs)} inputs.")
    return batch.inputs, batch.labels


def _count_batches(loader: Iterable[Any], network: nn.Module, seed: int) -> int:
    known = batch_count(loader)
    if known:
        return known
    with seeded(network, seed):
        return sum(1 for _ in batches(loader, "training loader"))


def _settings(optimiser: Optimizer) -> str:
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimiser.param_groups]
    return repr(groups)
