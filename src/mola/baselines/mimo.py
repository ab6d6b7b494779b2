r"""MIMO (Havasi et al., 2021): one network that takes K inputs at once and has a head for each.

In training each head learns to classify its own input. At test all K inputs are the same, and the heads, which share a
trunk but little else, are averaged like an ensemble: :math:`p = \tfrac1K \sum_k \mathrm{softmax}(W_k \phi + b_k)`.
MIMO-MoLA puts a Laplace approximation on every head, and mixes them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mola import folders
from mola.baselines.keeping import all_tensors
from mola.baselines.mimo_training import MakeOptimiser, MakeSchedule, train_members
from mola.baselines.seeds import check_seed
from mola.baselines.trunk import HeadNetwork, Trunk
from mola.baselines.widening import stack_inputs, widen
from mola.choices import whole_number
from mola.errors import DataError, OptionError, StorageError
from mola.features import check_finite
from mola.fitting import fit
from mola.laplace import Structure
from mola.likelihood import CATEGORICAL
from mola.links import Link
from mola.mixture import Mixture
from mola.networks import Inputs, call, undisturbed
from mola.networks.passes import Differentiable
from mola.posterior import MoLA

__all__ = ["Mimo", "mimo_mola"]

SCHEMA = {"members": int}


class Mimo(Mixture):
    """The multi-input multi-output form of an architecture: a network of its own, to be trained with `fit`.

    Args:
        model: the architecture, as a network with fresh weights; it is copied, not modified.
        members: number of inputs and heads K.
        example: a batch of inputs, to find the first and the last layer with.
        seed: of the new weights of these two layers.

    Raises:
        OptionError: if the architecture cannot be widened.
    """

    def __init__(self, model: nn.Module, members: int = 3, *, example: Tensor, seed: int = 0) -> None:
        """Widen a copy of the network.

        Raises:
            OptionError: if it cannot be.
        """
        if not isinstance(model, nn.Module):
            message = f"model: expected one nn.Module, whose architecture is widened; got {type(model).__name__}."
            raise OptionError(message)
        members = whole_number(members, "members")
        if not isinstance(example, Tensor) or example.dim() < 2 or len(example) == 0:
            message = (
                "example: MIMO stacks inputs along dimension 1; expected one tensor (n, channels, ...) with n > 0."
            )
            raise OptionError(message)
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

        Raises:
            DataError: if there are not K batches.
        """
        batches = [inputs] * self.members if isinstance(inputs, Tensor) else list(inputs)
        if len(batches) != self.members:
            message = f"expected one batch, or {self.members} (one for each head); got {len(batches)}."
            raise DataError(message)
        with undisturbed(self), torch.no_grad():
            features = call(self.trunk.network, stack_inputs(batches))
            return torch.stack([head(features) for head in self.heads])

    def _member_probs(self, inputs: Inputs, seed: int | None) -> list[Tensor]:
        if not isinstance(inputs, Tensor):
            message = (
                f"MIMO takes one tensor as inputs, which it repeats along dimension 1; got {type(inputs).__name__}."
            )
            raise DataError(message)
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
        return folders.save(directory, "mimo", {"members": self.members}, all_tensors(self))

    @classmethod
    def load(cls, directory: str | Path, model: nn.Module, *, example: Tensor) -> Mimo:
        """Load what `save` wrote.

        Args:
            directory: folder that `save` wrote.
            model: the architecture, as for `Mimo` itself; its weights do not matter.
            example: a batch of inputs.

        Returns:
            The trained network.

        Raises:
            StorageError: if the files are damaged, or the architecture is another.
        """
        document, tensors = folders.load(directory, "mimo", SCHEMA)
        mimo = cls(model, document["members"], example=example)
        own = all_tensors(mimo)
        found, expected = ({name: tuple(tensor.shape) for name, tensor in part.items()} for part in (tensors, own))
        wrong = sorted({name for name, _ in found.items() ^ expected.items()})
        if wrong:
            message = (
                f"{directory} does not fit {type(model).__name__} with {mimo.members} members: {wrong[0]} and "
                f"{len(wrong) - 1} more are missing, unknown, or of another shape. Pass the same architecture."
            )
            raise StorageError(message)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])
        return mimo


def _one_member(mimo: Mimo, index: int, inputs: Tensor) -> Tensor:
    """Probabilities of one head."""
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
