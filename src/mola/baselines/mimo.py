r"""MIMO (Havasi et al., 2021): one network that takes K inputs at once and has a head for each.

In training each head learns to classify its own input, and each sees the batch in its own order. At test time all K inputs are the
same, and the heads, which share a trunk but little else, are averaged like an ensemble:
:math:`p = \tfrac1K \sum_k \mathrm{softmax}(W_k \phi + b_k)`. MIMO-MoLA puts a Laplace approximation on every head, and mixes them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from tqdm.auto import tqdm

from mola.baselines.mimo_network import HeadNetwork, Trunk, stack_inputs, widen
from mola.baselines.sgd import derived_seeds, seeded
from mola.errors import DataError, OptionError, StorageError
from mola.fitting import fit
from mola.laplace import Structure
from mola.likelihood import CATEGORICAL
from mola.links import Link
from mola.mixture import Mixture
from mola.network import Inputs, as_batch, batch_count, call, check_finite, peek, undisturbed
from mola.network.calling import Differentiable
from mola.network.fingerprint import signature_of
from mola.numerics import check_seed
from mola.options import whole_number
from mola.posterior import MoLA
from mola.saving import storage
from mola.saving.training_checkpoint import DivergedError, TrainingCheckpoint, all_tensors, blame_inputs

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
        identity["network"] = signature_of(network)
        keeper = TrainingCheckpoint(Path(checkpoint), "mimo-checkpoint", identity)
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
            raise DivergedError(
                f"MIMO diverged in epoch {epoch + 1} of {epochs} at learning rate {rate:g}. Lower the learning rate."
            )
        if keeper is not None:
            keeper.save(epoch + 1, network, chosen, rates)
    network.eval()


def _loss(logits: Tensor, labels: Tensor, place: str) -> Tensor:
    total = logits.new_zeros(())
    with torch.enable_grad():
        for own, wanted in zip(logits, labels, strict=True):
            checked = CATEGORICAL.check_labels(wanted, own, place)
            total = total - CATEGORICAL.log_likelihood(own, checked).mean()
    return total


def _labelled(raw: Any, place: str) -> tuple[Tensor, Tensor]:
    batch = as_batch(raw, place)
    if not isinstance(batch.inputs, Tensor) or batch.inputs.dim() < 2:
        raise DataError(
            f"{place}: MIMO stacks inputs along dimension 1; expected one tensor (n, channels, ...) as inputs."
        )
    if batch.labels is None or len(batch.labels) != len(batch.inputs):
        raise DataError(f"{place}: expected (inputs, labels) with a label for each of {len(batch.inputs)} inputs.")
    return batch.inputs, batch.labels


def _batches_in(loader: Iterable[Any], network: nn.Module, seed: int) -> int:
    # Number of batches in an epoch; they are counted where the loader does not know.
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
        raise OptionError(
            f"input_repetition must lie between 0 (independent) and 1 (the same for all), got {input_repetition!r}."
        )
    check_seed(seed)


SCHEMA = {"members": int}


class Mimo(Mixture):
    """The multi-input multi-output form of an architecture: a network of its own, to be trained with `fit`.

    Args:
        model: the architecture, as a network with fresh weights; it is copied, not modified.
        members: number of inputs and heads K.
        example: a batch of inputs, to find the first and the last layer with.
        seed: of the new weights of these two layers.
    """

    def __init__(self, model: nn.Module, members: int = 3, *, example: Tensor, seed: int = 0) -> None:
        if not isinstance(model, nn.Module):
            raise OptionError(
                f"model: expected one nn.Module, whose architecture is widened; got {type(model).__name__}."
            )
        members = whole_number(members, "members")
        if not isinstance(example, Tensor) or example.dim() < 2 or len(example) == 0:
            raise OptionError(
                "example: MIMO stacks inputs along dimension 1; expected one tensor (n, channels, ...) with n > 0."
            )
        super().__init__([partial(_one_member, self, index) for index in range(members)])
        with torch.inference_mode(False):
            trunk, heads = widen(copy.deepcopy(model), members, example, check_seed(seed))
        self.trunk = Trunk(trunk, members)
        self.heads = nn.ModuleList(heads)

    @property
    def members(self) -> int:
        """Number of inputs and heads K."""
        return len(self.heads)

    @property
    def networks(self) -> tuple[HeadNetwork, ...]:
        """K ordinary classifiers: the trunk on K copies of the input, and one head. They share one pass of the trunk.

        `mola.fit(mimo.networks, train_loader, structure="full")` is MIMO-MoLA.
        """
        return tuple(HeadNetwork(self.trunk, head) for head in self.heads)  # type: ignore[arg-type]

    def fit(
        self,
        train_loader: Iterable[Any],
        *,
        epochs: int = 100,
        batch_repetition: int = 4,
        input_repetition: float = 0.0,
        optimiser: MakeOptimiser | None = None,
        schedule: MakeSchedule | None = None,
        seed: int = 0,
        checkpoint: str | Path | None = None,
        progress: bool = True,
    ) -> Mimo:
        """Train in place: every head learns its own input, which comes in an order of its own.

        Args:
            train_loader: training data with labels, read once an epoch. Its shuffling and augmentation should draw from
                torch's random state, as `DataLoader`'s do: then the seed gives the same network, interrupted or not.
            epochs: number of them.
            batch_repetition: how often each datum of a batch occurs in a step, for each member.
            input_repetition: share of the rows in which all members see the same datum.
            optimiser: from parameters to an optimiser; None is the paper's: SGD with Nesterov momentum, rate 0.1.
            schedule: from an optimiser and the number of steps to a schedule, stepped after every batch; None is a half
                cosine down to 0.
            seed: of the orders, dropout and augmentation.
            checkpoint: folder to keep the training in after every epoch, and to take it up again.
            progress: whether to show a progress bar on stderr, if that is a terminal.

        Returns:
            This object; `DataError` if the data cannot be used, or the training diverges.
        """
        with torch.inference_mode(False), torch.enable_grad():
            train_members(
                nn.ModuleDict({"trunk": self.trunk.network, "heads": self.heads}),
                self._training_logits,
                self.members,
                train_loader,
                epochs=epochs,
                batch_repetition=batch_repetition,
                input_repetition=input_repetition,
                optimiser=optimiser,
                schedule=schedule,
                seed=seed,
                checkpoint=checkpoint,
                progress=progress,
            )
        return self

    def _training_logits(self, inputs: list[Tensor]) -> Tensor:
        features = call(Differentiable(self.trunk.network), stack_inputs(inputs))
        return torch.stack([head(features) for head in self.heads])

    # --- predict ----------------------------------------------------------------------------------------------------

    def logits(self, inputs: Tensor | Sequence[Tensor]) -> Tensor:
        """Logits (K, n, C) of every head, in eval mode and without gradients.

        Args:
            inputs: one batch, which all heads see; or K of them, one for each head, as in training.

        Returns:
            Logits.
        """
        batches = [inputs] * self.members if isinstance(inputs, Tensor) else list(inputs)
        if len(batches) != self.members:
            raise DataError(f"expected one batch, or {self.members} (one for each head); got {len(batches)}.")
        with undisturbed(self), torch.no_grad():
            features = call(self.trunk.network, stack_inputs(batches))
            return torch.stack([head(features) for head in self.heads])

    def _member_probs(self, inputs: Inputs, seed: int | None) -> list[Tensor]:
        if not isinstance(inputs, Tensor):
            raise DataError(
                f"MIMO takes one tensor as inputs, which it repeats along dimension 1; got {type(inputs).__name__}."
            )
        logits = self.logits(inputs)
        for own in logits:
            check_finite(own)
        return list(CATEGORICAL.probabilities(logits.to(torch.promote_types(logits.dtype, torch.float32))))

    # --- files ------------------------------------------------------------------------------------------------------

    def save(self, directory: str | Path) -> Path:
        """Save all parameters and buffers.

        Args:
            directory: folder to write to.

        Returns:
            The folder, for `mola.Mimo.load(directory, model, example=...)`.
        """
        return storage.write(directory, {"members": self.members}, all_tensors(self), kind="mimo")

    @classmethod
    def load(cls, directory: str | Path, model: nn.Module, *, example: Tensor) -> Mimo:
        """Load what `save` wrote.

        Args:
            directory: folder that `save` wrote.
            model: the architecture, as for `Mimo` itself; its weights do not matter.
            example: a batch of inputs.

        Returns:
            The trained network.
        """
        document, tensors = storage.read(directory, "mimo", SCHEMA)
        mimo = cls(model, document["members"], example=example)
        own = all_tensors(mimo)
        found, expected = ({name: tuple(tensor.shape) for name, tensor in part.items()} for part in (tensors, own))
        wrong = sorted({name for name, _ in found.items() ^ expected.items()})
        if wrong:
            raise StorageError(
                f"{directory} does not fit {type(model).__name__} with {mimo.members} members: {wrong[0]} and "
                f"{len(wrong) - 1} more are missing, unknown, or of another shape. Pass the same architecture."
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])
        return mimo


def _one_member(mimo: Mimo, index: int, inputs: Tensor) -> Tensor:
    return mimo._member_probs(inputs, None)[index]


def mimo_mola(
    mimo: Mimo,
    train_loader: Iterable[Any],
    val_loader: Iterable[Any] | None = None,
    structure: str | Structure = "full",
    prior_precision: float = 1.0,
    weights: str | Sequence[float] | Tensor = "uniform",
    link: str | Link = "probit",
    progress: bool = True,
) -> MoLA:
    """`mola.fit(mimo.networks, ...)`, with the paper's full covariance for each head and one prior precision.

    Training images are repeated K times, as at test; one pass of the trunk over each batch serves all heads.

    Args:
        mimo: the trained network; it is not modified.
        train_loader: training data.
        val_loader: if given, the prior precision is tuned on it at once, by the paper's rule.
        structure: "full", "kron", "kron-exact", "kron-diag" or "diag", or a `Structure`.
        prior_precision: lambda, one number for all heads.
        weights: "uniform", "evidence", or K numbers that sum to 1.
        link: "probit", "probit-centered", "mean-field", "bridge" or "mc", or a `Link`.
        progress: whether to show a progress bar on stderr, if that is a terminal.

    Returns:
        The posterior, with the same verbs as any other; load it with `mola.load(directory, models=mimo.networks)`.
    """
    return fit(
        mimo.networks,
        train_loader,
        val_loader,
        structure=structure,
        prior_precision=prior_precision,
        weights=weights,
        link=link,
        progress=progress,
    )
