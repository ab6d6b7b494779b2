"""Training of MIMO networks, in which each head classifies its own inputs: the same data in a separate random order for each head."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from molaplace.errors import DataError, OptionError
from molaplace.likelihoods import CATEGORICAL
from molaplace.network import Batch, batch_count, batches, run, state_checksum
from molaplace.numerics import check_seed
from molaplace.options import whole_number
from molaplace_lab.members import derived_seeds
from molaplace_lab.mimo import Mimo, stack_inputs
from molaplace_lab.training.loop import TrainingCheckpoint, remaining_epochs, seeded, train_epoch
from molaplace_lab.training.recipe import RECIPES

EPOCHS = 0  # tag of the seeds for epochs

MakeOptimiser = Callable[[Iterable[nn.Parameter]], Optimizer]


def member_rows(
    size: int, members: int, batch_repetition: int, input_repetition: float, generator: torch.Generator | None = None
) -> Tensor:
    """Draw the index of an example in the batch for each member and row, as a CPU tensor of shape (K, size * batch_repetition).

    The batch is repeated and shuffled. Then, all but a fraction `input_repetition` of the rows are shuffled again for each member.
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
    """Train the network in place and return it; the loss is the cross-entropy, summed over heads and averaged over rows.

    Args:
        mimo: the network to train.
        train_loader: training data with labels, read once per epoch. The loader's shuffling and augmentation should draw from torch's
            random state, as in a `DataLoader`. The same seed then gives the same network, even after interruptions.
        epochs: number of epochs.
        batch_repetition: number of times that each member receives each example of a batch in one step.
        input_repetition: fraction of the rows in which all members receive the same example.
        optimiser: function that creates an optimiser for the given parameters; by default, the paper's optimiser for CIFAR-10. The
            learning rate falls to 0 along a half cosine, batch by batch.
        seed: seed for shuffling, dropout and augmentation.
        checkpoint: folder in which the state is saved after every epoch, so that interrupted training can be resumed.
        progress: show a progress bar on stderr if stderr is a terminal.
    """
    epochs, repetition = whole_number(epochs, "epochs"), whole_number(batch_repetition, "batch_repetition")
    if not 0 <= input_repetition <= 1:
        raise OptionError(
            f"must be between 0 (independent orders) and 1 (one order for all members); got {input_repetition!r}.",
            argument="input_repetition",
        )
    seeds = derived_seeds(check_seed(seed), EPOCHS, epochs)
    network = nn.ModuleDict({"trunk": mimo.trunk.network, "heads": mimo.heads})
    count = batch_count(train_loader)
    if count is None:
        with seeded(network, seed):
            count = sum(1 for _ in batches(train_loader, "training loader"))
    chosen = optimiser(network.parameters())
    schedule = CosineAnnealingLR(chosen, epochs * count)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in chosen.param_groups]
    identity = {
        "members": mimo.members,
        "epochs": epochs,
        "seed": seed,
        "batch_repetition": repetition,
        "input_repetition": input_repetition,
        "steps": epochs * count,
        "optimiser": [type(chosen).__name__, repr(groups)],
        "network": state_checksum(network),
    }
    keeper = None if checkpoint is None else TrainingCheckpoint(Path(checkpoint), identity)

    def loss_of(batch: Batch, place: str) -> tuple[Tensor, float]:
        inputs, labels = batch
        if not isinstance(inputs, Tensor) or inputs.dim() < 2 or labels is None or len(labels) != len(inputs):
            raise DataError(
                "expected (inputs, labels) with one tensor (n, channels, ...) as inputs and a label for each input.",
                place=place,
            )
        rows = member_rows(len(inputs), mimo.members, repetition, input_repetition)
        features = run(mimo.trunk.network, stack_inputs([inputs[own.to(inputs.device)] for own in rows]))
        total = features.new_zeros(())
        for head, own in zip(mimo.heads, labels[rows.to(labels.device)], strict=True):
            logits = head(features)
            total = total - CATEGORICAL.log_likelihood(logits, CATEGORICAL.check_labels(own, logits, place)).mean()
        return total, math.inf

    for epoch in remaining_epochs(keeper, epochs, network, chosen, schedule, progress="MIMO" if progress else ""):
        where = f"epoch {epoch + 1} of {epochs}"
        train_epoch(network, train_loader, chosen, loss_of, where, schedule=schedule, seed=seeds[epoch])
    network.eval()
    return mimo
