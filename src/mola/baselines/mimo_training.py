"""Training of a multi-input multi-output network: each member sees the batch in an order of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from tqdm.auto import tqdm

from mola import folders
from mola.baselines.keeping import DivergedError, Keeper, blame_inputs
from mola.baselines.seeds import check_seed, derived_seeds, seeded
from mola.choices import whole_number
from mola.errors import DataError, OptionError
from mola.features import batch_count, peek
from mola.likelihood import CATEGORICAL
from mola.networks import as_batch

__all__ = ["MakeOptimiser", "MakeSchedule", "member_rows", "train_members"]

TRAINING = 0
"""Purpose of the seeds of the epochs."""

MakeOptimiser = Callable[[Iterable[nn.Parameter]], Optimizer]
MakeSchedule = Callable[[Optimizer, int], LRScheduler]
"""From an optimiser and the number of steps in all."""


def papers_optimiser(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """SGD with Nesterov momentum 0.9, learning rate 0.1, weight decay 5e-4: the paper's for CIFAR."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)


def member_rows(
    size: int, members: int, batch_repetition: int, input_repetition: float, generator: torch.Generator | None = None
) -> Tensor:
    """Which datum of a batch each member sees in each row.

    The batch is repeated and shuffled; all rows but a share `input_repetition` are then shuffled again, for each member
    by itself. With a share of 0 members see independent orders; with 1 all see the same datum in a row.

    Args:
        size: of the batch.
        members: K.
        batch_repetition: how often each datum occurs for each member.
        input_repetition: share of the rows in which all members see the same datum.
        generator: source of randomness; None draws from torch's own.

    Returns:
        Indices (K, size * batch_repetition) on the CPU.
    """
    total = size * batch_repetition
    shared = torch.randperm(total, generator=generator) % size
    own = int(total * (1 - input_repetition))
    orders = [shared[:own][torch.randperm(own, generator=generator)] for _ in range(members)]
    return torch.stack([torch.cat([order, shared[own:]]) for order in orders])


def train_members(
    network: nn.Module,
    logits: Callable[[list[Tensor]], Tensor],
    members: int,
    loader: Iterable[Any],
    *,
    epochs: int,
    batch_repetition: int,
    input_repetition: float,
    optimiser: MakeOptimiser | None,
    schedule: MakeSchedule | None,
    seed: int,
    checkpoint: str | Path | None,
    progress: bool,
) -> None:
    """Train in place on the mean over rows of the sum over heads of the cross-entropy.

    Args:
        network: with all parameters to train.
        logits: from K batches to logits (K, n, C), with gradients.
        members: K.
        loader: training data with labels, read once an epoch.
        epochs: number of them.
        batch_repetition: how often each datum of a batch occurs in a step, for each member.
        input_repetition: share of the rows in which all members see the same datum.
        optimiser: of the parameters; None is the paper's.
        schedule: of the learning rate, stepped after every batch; None is a half cosine to 0.
        seed: of the orders, dropout and augmentation.
        checkpoint: folder to keep the state in after every epoch; None keeps nothing.
        progress: whether to show a progress bar on stderr, if that is a terminal.

    Raises:
        DivergedError: naming the epoch, if the loss is no longer finite.
    """
    _check(epochs, batch_repetition, input_repetition, seed)
    chosen = (optimiser or papers_optimiser)(network.parameters())
    steps = epochs * _batches_in(loader, network, seed)
    rates = CosineAnnealingLR(chosen, steps) if schedule is None else schedule(chosen, steps)
    keeper = None
    done = 0
    if checkpoint is not None:
        numbers = {"batch_repetition": batch_repetition, "input_repetition": input_repetition, "steps": steps}
        identity = {"members": members, "epochs": epochs, "seed": seed, **numbers, **_described(chosen, rates)}
        identity["network"] = folders.signature_of(network)
        keeper = Keeper(Path(checkpoint), "mimo-checkpoint", identity)
        done, _ = keeper.restore(epochs, network, chosen, rates)
    seeds = derived_seeds(seed, TRAINING, epochs)
    bar = tqdm(range(done, epochs), desc="MIMO", initial=done, total=epochs, disable=None if progress else True)
    for epoch in bar:
        total, count = 0.0, 0
        with seeded(network, seeds[epoch]):
            network.train()
            for index, raw in enumerate(peek(loader, "the training loader")[1]):
                place = f"batch {index} of the training loader"
                inputs, labels = _labelled(raw, place)
                rows = member_rows(len(inputs), members, batch_repetition, input_repetition)
                chosen.zero_grad()
                loss = _loss(
                    logits([inputs[own.to(inputs.device)] for own in rows]), labels[rows.to(labels.device)], place
                )
                total, count = total + float(loss.detach()), count + 1
                if not math.isfinite(total):  # before the step: the weights stay such that one can go on from them
                    blame_inputs(inputs, place)
                    break
                loss.backward()  # type: ignore[no-untyped-call]
                chosen.step()
                rates.step()
        if not math.isfinite(total):
            rate = chosen.param_groups[0]["lr"]
            message = (
                f"MIMO diverged in epoch {epoch + 1} of {epochs} at learning rate {rate:g}. Lower the learning rate."
            )
            raise DivergedError(message)
        if keeper is not None:
            keeper.save(epoch + 1, network, chosen, rates)
    network.eval()


def _loss(logits: Tensor, labels: Tensor, place: str) -> Tensor:
    """Mean over rows of the sum over heads."""
    total = logits.new_zeros(())
    with torch.enable_grad():
        for own, wanted in zip(logits, labels, strict=True):
            checked = CATEGORICAL.check_labels(wanted, own, place)
            total = total - CATEGORICAL.log_likelihood(own, checked).mean()
    return total


def _labelled(raw: Any, place: str) -> tuple[Tensor, Tensor]:
    """Inputs and labels of a batch.

    Raises:
        DataError: if there are no labels, not one for each input, or the inputs are not one tensor.
    """
    batch = as_batch(raw, place)
    if not isinstance(batch.inputs, Tensor) or batch.inputs.dim() < 2:
        message = f"{place}: MIMO stacks inputs along dimension 1; expected one tensor (n, channels, ...) as inputs."
        raise DataError(message)
    if batch.labels is None or len(batch.labels) != len(batch.inputs):
        message = f"{place}: expected (inputs, labels) with a label for each of {len(batch.inputs)} inputs."
        raise DataError(message)
    return batch.inputs, batch.labels


def _batches_in(loader: Iterable[Any], network: nn.Module, seed: int) -> int:
    """Number of batches in an epoch; they are counted where the loader does not know."""
    known = batch_count(loader)
    if known:
        return known
    with seeded(network, seed):
        return sum(1 for _ in peek(loader, "the training loader")[1])


def _described(optimiser: Optimizer, schedule: LRScheduler) -> dict[str, Any]:
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimiser.param_groups]
    return {"optimiser": [type(optimiser).__name__, repr(groups)], "schedule": type(schedule).__name__}


def _check(epochs: int, batch_repetition: int, input_repetition: float, seed: int) -> None:
    whole_number(epochs, "epochs")
    whole_number(batch_repetition, "batch_repetition")
    if not 0 <= input_repetition <= 1:
        message = (
            f"input_repetition must lie between 0 (independent) and 1 (the same for all), got {input_repetition!r}."
        )
        raise OptionError(message)
    check_seed(seed)
