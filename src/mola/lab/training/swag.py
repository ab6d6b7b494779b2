"""Fitting of SWAG: SGD with a constant learning rate from a trained network, one snapshot an epoch, and draws."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from mola.baselines.members import derived_seeds, homoscedastic
from mola.baselines.swag import Moments, MultiSwag, Swag, draw, own_copy
from mola.errors import DataError, OptionError
from mola.fitting import as_networks
from mola.lab.training.checkpoint import DivergedError, TrainingCheckpoint
from mola.lab.training.passes import WithGradients, check_inputs, has_statistics, recompute_statistics, seeded
from mola.likelihoods import CATEGORICAL, ClassificationLikelihood, Gaussian, Likelihood
from mola.network import batch_count, batches, call, state_checksum
from mola.numerics import check_seed
from mola.options import is_real, whole_number
from mola.saving.files import DOCUMENT, read_folder, write_folder

EPOCHS, PASSES, MEMBERS = 0, 2, 3  # purposes of seeds: epochs, statistics of the draws, members of MultiSWAG
DRAW_KIND = "swag-draw"

LARGEST_LOSS = 10
"""Largest mean loss of an epoch, as a multiple of the loss of a guess; beyond it, SGD has diverged."""


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
    """Run SGD from a trained network, one snapshot an epoch, and draw networks from the Gaussian of the snapshots.

    Args:
        network: the trained network; a copy is trained, the network itself is not modified.
        train_loader: training data with labels, read once an epoch, and once for every draw if the network has BatchNorm. Its
            shuffling and augmentation should draw from torch's random state, as those of `DataLoader` do.
        learning_rate: constant learning rate of SGD.
        epochs: number of snapshots.
        rank: how many of the last deviations are kept, at most one an epoch; 0 is the diagonal form.
        samples: number of draws.
        scale: factor of the covariance; None is 0.5, or 1 for the diagonal form, as in the paper on SWAG.
        momentum: momentum of SGD, without Nesterov's modification.
        weight_decay: weight decay of SGD.
        seed: seed of the path and of the draws.
        checkpoint: folder for the path after every epoch and the statistics of every draw. An interrupted fit continues from there to
            the same bits, and a complete fit if more epochs are requested.
        likelihood: as for `mola.fit`. For regression pass the noise, or call `scale_noise` afterwards.
        progress: show a progress bar on stderr, if that is a terminal.

    Raises:
        DivergedError: the learning rate is too high.
    """
    meaning = homoscedastic(likelihood, "SWAG")
    _trainable(network)
    epochs, samples = whole_number(epochs, "epochs", 2), whole_number(samples, "samples")
    if not (is_real(learning_rate) and math.isfinite(learning_rate) and learning_rate > 0):
        raise OptionError(f"learning_rate must be a finite number above 0, got {learning_rate!r}.")
    if whole_number(rank, "rank", 0) == 1:
        raise OptionError("rank must be 0 (the diagonal form) or at least 2, got 1.")
    factor = (0.5 if rank else 1.0) if scale is None else scale
    if not (is_real(factor) and math.isfinite(factor) and factor >= 0):
        raise OptionError(f"scale must be a finite number, not negative; got {scale!r}.")
    check_seed(seed)
    folder = None if checkpoint is None else Path(checkpoint)
    with torch.inference_mode(False), torch.enable_grad():
        copied = own_copy(network)
        optimiser = torch.optim.SGD(
            _trainable(copied).values(), lr=learning_rate, momentum=momentum, weight_decay=weight_decay
        )
        moments = _follow(copied, train_loader, optimiser, epochs, rank, seed, folder, meaning, progress)
    statistics = _statistics(copied, moments, train_loader, samples, factor, seed, folder, progress=progress)
    return Swag(copied, moments, statistics, samples=samples, scale=float(factor), seed=seed, likelihood=meaning)


def fit_multi_swag(
    networks: Sequence[nn.Module],
    train_loader: Iterable[Any],
    *,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    **options: Any,
) -> MultiSwag:
    """Fit MultiSWAG: the uniform mixture of one SWAG from each trained network.

    Args:
        networks: K trained networks; they are not modified.
        train_loader: training data with labels.
        seed: seed from which the seed of each SWAG is drawn.
        checkpoint: folder with a checkpoint for each network.
        **options: options of `fit_swag`: learning_rate, epochs, rank, samples, ...
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


def _follow(
    network: nn.Module,
    loader: Iterable[Any],
    optimiser: torch.optim.SGD,
    epochs: int,
    rank: int,
    seed: int,
    checkpoint: Path | None,
    likelihood: Likelihood,
    progress: bool,
) -> Moments:
    # Train in place and return the moments of the parameters that require gradients. Every epoch begins at a random state derived
    # from the seed and its number, so that an interrupted path continues to the same bits.
    weights, group = _trainable(network), optimiser.param_groups[0]
    settings = {name: group[key] for name, key in (("learning_rate", "lr"), ("momentum",) * 2, ("weight_decay",) * 2)}
    identity = {
        "path": {**settings, "rank": rank, "seed": seed},
        "batches": batch_count(loader),
        "network": state_checksum(network),
    }
    keeper = None if checkpoint is None else TrainingCheckpoint(checkpoint, "swag-checkpoint", identity)
    moments = Moments.start({name: tensor.detach() for name, tensor in weights.items()})
    if keeper is not None:
        done, _, kept = keeper.restore(epochs, network, optimiser)
        if done:
            moments = Moments.from_tensors(done, kept).to(next(iter(weights.values())).device)
    seeds = derived_seeds(seed, EPOCHS, epochs)
    bar = {"initial": moments.count, "total": epochs, "disable": None if progress else True, "leave": False}
    for epoch in tqdm(range(moments.count, epochs), desc="SWAG", **bar):
        with seeded(network, seeds[epoch]):
            loss, chance = sgd_epoch(network, loader, optimiser, likelihood)
        snapshot = {name: tensor.detach() for name, tensor in weights.items()}
        finite = math.isfinite(loss) and all(bool(torch.isfinite(tensor).all()) for tensor in snapshot.values())
        if not (finite and loss <= LARGEST_LOSS * chance):
            raise DivergedError(
                f"SWAG diverged in epoch {epoch + 1} of {epochs} at learning rate {group['lr']:g}: the mean loss is {loss:.4g}, "
                f"that of a guess {chance:.4g}. Lower the learning rate; if none is low enough, the network did not fit these data "
                f"to begin with."
            )
        moments.add(snapshot, rank)
        if keeper is not None:
            keeper.save(moments.count, network, optimiser, more=moments.tensors())
    return moments


def _trainable(network: nn.Module) -> dict[str, nn.Parameter]:
    if not isinstance(network, nn.Module):
        raise OptionError(
            f"expected one trained nn.Module, got {type(network).__name__}. For several, use mola.lab.training.fit_multi_swag."
        )
    found = {name: tensor for name, tensor in network.named_parameters() if tensor.requires_grad}
    if not found:
        raise OptionError(
            f"no parameter of {type(network).__name__} requires gradients. Call network.requires_grad_(True), or leave at least the "
            f"last layer free."
        )
    return found


def sgd_epoch(
    network: nn.Module,
    loader: Iterable[Any],
    optimiser: torch.optim.Optimizer,
    likelihood: Likelihood = CATEGORICAL,
) -> tuple[float, float]:
    """Train for one epoch; return the mean loss of its batches, and the loss of a guess that ignores the inputs."""
    network.train()
    differentiable = WithGradients(network)
    total, count, chance = 0.0, 0, math.inf
    for index, batch in enumerate(batches(loader, "training loader")):
        place = f"batch {index} of the training loader"
        if batch.labels is None:
            raise DataError(f"{place} has no labels. Yield (inputs, labels), or a mapping with 'labels'.")
        outputs = likelihood.check_outputs(call(differentiable, batch.inputs))
        labels = likelihood.check_labels(batch.labels, outputs, place)
        optimiser.zero_grad()
        with torch.enable_grad():
            loss, chance = _losses(likelihood, outputs, labels)
            loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        total, count = total + float(loss.detach()), count + 1
        if not math.isfinite(total):
            check_inputs(batch.inputs, place)
            break
    return total / count, chance


def _losses(likelihood: Likelihood, outputs: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    # The mean loss, and the loss of a guess: equal probabilities, or the standardised mean of the targets.
    if isinstance(likelihood, ClassificationLikelihood):
        questions = 1 if likelihood.mutually_exclusive else outputs.shape[1]
        chance = questions * math.log(likelihood.num_choices(outputs.shape[1]))
        return -likelihood.log_likelihood(outputs, labels).mean(), chance
    assert isinstance(likelihood, Gaussian)
    location, scale = (one.to(labels) for one in likelihood.units(labels.shape[1]))
    targets = (labels - location) / scale
    errors = (targets.to(outputs) - likelihood.means(outputs)).square()
    return 0.5 * errors.sum(1).mean(), 0.5 * max(float(targets.square().mean()), 1.0) * labels.shape[1]


def _statistics(
    network: nn.Module,
    moments: Moments,
    loader: Iterable[Any],
    samples: int,
    scale: float,
    seed: int,
    checkpoint: Path | None,
    *,
    progress: bool,
) -> dict[str, Tensor]:
    # BatchNorm statistics (samples, ...) of every draw by name, each from a pass over the training data.
    if not has_statistics(network):
        return {}
    network = own_copy(network)
    parameters, passes = dict(network.named_parameters()), derived_seeds(seed, PASSES, samples)
    found: list[dict[str, Tensor]] = []
    for index in tqdm(range(samples), desc="BatchNorm statistics", disable=None if progress else True, leave=False):
        with torch.no_grad():
            for name, tensor in draw(moments, seed, index, scale).items():
                parameters[name].copy_(tensor)
        # A checksum of the parameters alone: the pass overwrites the statistics.
        drawn = state_checksum(nn.ParameterList(parameters.values()))
        identity = {"seed": seed, "scale": scale, "draw": drawn}
        folder = None if checkpoint is None else checkpoint / "draws" / str(index)
        made = None if folder is None else _kept(folder, identity)
        if made is None:
            with seeded(network, passes[index]):
                made = recompute_statistics(network, loader)
            if folder is not None:
                write_folder(folder, {"kind": DRAW_KIND, "identity": identity}, made)
        found.append(made)
    return {name: torch.stack([one[name].to(found[0][name].device) for one in found]) for name in found[0]}


def _kept(folder: Path, identity: dict[str, Any]) -> dict[str, Tensor] | None:
    if not (folder / DOCUMENT).exists():
        return None
    document, tensors = read_folder(folder, DRAW_KIND, {"identity": {}})
    return tensors if document["identity"] == identity else None
