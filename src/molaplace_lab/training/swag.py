"""Fitting SWAG: run SGD from a trained network at a constant learning rate, take one snapshot per epoch, and draw networks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves
from tqdm.auto import tqdm

from molaplace.errors import DataError, OptionError
from molaplace.fitting import as_networks
from molaplace.likelihoods import CATEGORICAL, ClassificationLikelihood, Gaussian, Likelihood
from molaplace.network import Batch, batch_count, batches, call, run, state_checksum
from molaplace.numerics import check_seed
from molaplace.options import is_real, whole_number
from molaplace_lab.members import derived_seeds, homoscedastic
from molaplace_lab.swag import Moments, MultiSwag, Swag, draw, holding
from molaplace_lab.training.loop import TrainingCheckpoint, remaining_epochs, seeded, train_epoch

EPOCHS, PASSES, MEMBERS = 0, 2, 3  # tags of the seeds for epochs, BatchNorm statistics and MultiSWAG members

LARGEST_LOSS = 10
"""Largest acceptable mean loss over an epoch, as a multiple of the loss of a constant prediction; above it, SGD is considered to have
diverged."""


def fit_swag(
    network: nn.Module,
    train_loader: Iterable[Any],
    *,
    learning_rate: float = 1e-2,
    epochs: int = 40,
    rank: int = 20,
    samples: int = 30,
    scale: float | None = None,
    momentum: float = 0.9,
    weight_decay: float = 3e-4,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    likelihood: str | Likelihood = "categorical",
    progress: bool = True,
) -> Swag:
    """Run SGD from a trained network, take one snapshot per epoch, and draw networks from the Gaussian fitted to the snapshots.

    Args:
        network: the trained network; a copy is trained, and the network itself is not modified.
        train_loader: training data with labels, read once per epoch, and also once per draw if the network has BatchNorm. The loader's
            shuffling and augmentation should draw from torch's random state, as in a `DataLoader`.
        learning_rate: constant learning rate of SGD.
        epochs: number of snapshots.
        rank: maximum number of deviations to keep (the most recent ones, one per epoch); 0 gives the diagonal form.
        samples: number of draws.
        scale: factor by which the covariance is multiplied; by default, 0.5, or 1 for the diagonal form, as in the SWAG paper.
        momentum: momentum of SGD (without Nesterov acceleration).
        weight_decay: weight decay of SGD.
        seed: random seed for the SGD path and the draws.
        checkpoint: folder in which the state is saved after every epoch. An interrupted fit continues from this state and gives
            identical results. A completed fit is continued if more epochs are requested.
        likelihood: likelihood of the outputs, as in `mola.fit`. For regression, specify the noise, or call `scale_noise` afterwards.
        progress: show a progress bar on stderr if stderr is a terminal.

    Raises:
        DivergedError: the learning rate is too high.
    """
    meaning = homoscedastic(likelihood, "SWAG")
    if not isinstance(network, nn.Module) or not any(one.requires_grad for one in network.parameters()):
        raise OptionError(
            f"expected one trained nn.Module with parameters that require gradients; got {type(network).__name__}. For several "
            f"networks, use molaplace_lab.training.fit_multi_swag; for a frozen network, call network.requires_grad_(True)."
        )
    epochs, samples = whole_number(epochs, "epochs", 2), whole_number(samples, "samples")
    if not (is_real(learning_rate) and math.isfinite(learning_rate) and learning_rate > 0):
        raise OptionError(f"must be a finite number above 0, got {learning_rate!r}.", argument="learning_rate")
    if whole_number(rank, "rank", 0) == 1:
        raise OptionError("must be 0 (for the diagonal form) or at least 2; got 1.", argument="rank")
    factor = (0.5 if rank else 1.0) if scale is None else scale
    if not (is_real(factor) and math.isfinite(factor) and factor >= 0):
        raise OptionError(f"must be a finite number of at least 0, got {scale!r}.", argument="scale")
    # Each epoch's random state depends only on the seed and the epoch's index, so interruptions do not change the result.
    seeds = derived_seeds(check_seed(seed), EPOCHS, epochs)
    settings = {"learning_rate": learning_rate, "momentum": momentum, "weight_decay": weight_decay}
    identity = {
        "path": {**settings, "rank": rank, "seed": seed},
        "batches": batch_count(train_loader),
        "network": state_checksum(network),
    }
    keeper = None if checkpoint is None else TrainingCheckpoint(Path(checkpoint), identity)
    copied, moments = copy.deepcopy(network), Moments()
    weights = {name: tensor for name, tensor in copied.named_parameters() if tensor.requires_grad}
    optimiser = torch.optim.SGD(weights.values(), lr=learning_rate, momentum=momentum, weight_decay=weight_decay)

    def resume(done: int, kept: dict[str, Tensor]) -> None:
        nonlocal moments
        moments = Moments.from_tensors(done, kept)

    options: dict[str, Any] = {"state": lambda: moments.tensors(), "resume": resume}
    for epoch in remaining_epochs(keeper, epochs, copied, optimiser, progress="SWAG" if progress else "", **options):
        where = f"epoch {epoch + 1} of {epochs}"
        train_epoch(copied, train_loader, optimiser, swag_loss(copied, meaning), where, seed=seeds[epoch])
        moments.add(weights, rank)
    statistics = _statistics(copied, moments, train_loader, samples, factor, seed, progress=progress)
    return Swag(copied, moments, statistics, samples=samples, scale=float(factor), seed=seed, likelihood=meaning)


def fit_multi_swag(
    networks: Sequence[nn.Module],
    train_loader: Iterable[Any],
    *,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    **options: Any,
) -> MultiSwag:
    """Fit MultiSWAG, a uniform mixture with one SWAG for each trained network.

    Args:
        networks: K trained networks, which are not modified.
        train_loader: training data with labels.
        seed: random seed from which the seed of each SWAG is drawn.
        checkpoint: folder that contains a checkpoint for each network.
        **options: options for `fit_swag`, such as learning_rate, epochs, rank and samples.
    """
    given = as_networks(networks)
    return MultiSwag(
        [
            fit_swag(
                network,
                train_loader,
                seed=own,
                checkpoint=None if checkpoint is None else Path(checkpoint) / f"model-{index}",
                **options,
            )
            for index, (network, own) in enumerate(zip(given, derived_seeds(seed, MEMBERS, len(given)), strict=True))
        ]
    )


def swag_loss(network: nn.Module, likelihood: Likelihood = CATEGORICAL) -> Callable[[Batch, str], tuple[Tensor, float]]:
    """Return a function that maps a batch to its mean loss and to the largest acceptable loss (see `LARGEST_LOSS`)."""

    def loss_of(batch: Batch, place: str) -> tuple[Tensor, float]:
        if batch.labels is None:
            raise DataError(f"{place} has no labels. Yield (inputs, labels), or a mapping with 'labels'.")
        outputs = likelihood.check_outputs(run(network, batch.inputs))
        labels = likelihood.check_labels(batch.labels, outputs, place)
        if isinstance(likelihood, ClassificationLikelihood):
            questions = 1 if likelihood.mutually_exclusive else outputs.shape[1]
            guess = questions * math.log(likelihood.num_choices(outputs.shape[1]))
            return -likelihood.log_likelihood(outputs, labels).mean(), LARGEST_LOSS * guess
        assert isinstance(likelihood, Gaussian)
        location, scale = (one.to(labels) for one in likelihood.units(labels.shape[1]))
        targets = (labels - location) / scale
        errors = (targets.to(outputs) - likelihood.means(outputs)).square()
        guess = 0.5 * max(float(targets.square().mean()), 1.0) * labels.shape[1]
        return 0.5 * errors.sum(1).mean(), LARGEST_LOSS * guess

    return loss_of


def _statistics(
    network: nn.Module,
    moments: Moments,
    loader: Iterable[Any],
    samples: int,
    scale: float,
    seed: int,
    *,
    progress: bool,
) -> dict[str, Tensor]:
    # Return the BatchNorm statistics (samples, ...) of all draws, keyed by name; each draw requires one pass over the training data.
    if not norm_layers(network):
        return {}
    network, found, passes = copy.deepcopy(network), [], derived_seeds(seed, PASSES, samples)
    for index in tqdm(range(samples), desc="BatchNorm statistics", disable=None if progress else True, leave=False):
        with holding(network, draw(moments, seed, index, scale)), seeded(network, passes[index]):
            found.append(recompute_statistics(network, loader))
    return {name: torch.stack([one[name] for one in found]) for name in found[0]}


def norm_layers(network: nn.Module) -> dict[str, _NormBase]:
    """Return the layers that keep running statistics of their inputs, such as BatchNorm, keyed by name."""
    return {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, _NormBase) and module.running_mean is not None
    }


def recompute_statistics(network: nn.Module, loader: Iterable[Any]) -> dict[str, Tensor]:
    """Average the BatchNorm statistics over all batches, weighted by batch size, in one training-mode pass (with dropout active).

    The network's statistics are overwritten. The result contains copies of the running means and variances, keyed by buffer name.
    """
    norms = norm_layers(network)
    momenta = {name: module.momentum for name, module in norms.items()}
    seen = 0
    network.train()
    try:
        for module in norms.values():
            module.reset_running_stats()
        for batch in batches(loader, "training loader"):
            size = next(len(one) for one in tree_leaves(batch.inputs) if isinstance(one, Tensor))
            seen += size
            for module in norms.values():
                module.momentum = size / seen
            call(network, batch.inputs)
    finally:
        for name, module in norms.items():
            module.momentum = momenta[name]
        network.eval()
    buffers = dict(network.named_buffers())
    names = [f"{name}.{kind}" if name else kind for name in norms for kind in ("running_mean", "running_var")]
    return {name: buffers[name].detach().clone() for name in names}
