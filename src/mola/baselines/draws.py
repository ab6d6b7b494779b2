"""Networks drawn from SWAG's Gaussian: their weights, made anew from a seed, and the BatchNorm statistics of each."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from mola import folders
from mola.baselines.batch_statistics import has_statistics, recompute_statistics
from mola.baselines.seeds import derived_seeds, seeded
from mola.baselines.snapshots import Moments
from mola.errors import OptionError
from mola.networks import undisturbed
from mola.storage import DOCUMENT

__all__ = ["draw", "statistics_of_draws"]

KIND = "swag-draw"

DRAWS, PASSES = 1, 2
"""Purposes of the seeds of the draws, and of the passes that make their statistics."""


def draw(moments: Moments, seed: int, index: int, scale: float) -> dict[str, Tensor]:
    """Weights of draw number `index`, by name; more draws of the same seed begin with the same ones."""
    return moments.draw(derived_seeds(seed, DRAWS, index + 1)[index], scale)


def statistics_of_draws(
    network: nn.Module,
    moments: Moments,
    loader: Iterable[Any] | None,
    samples: int,
    scale: float,
    seed: int,
    checkpoint: Path | None,
    *,
    progress: bool,
) -> dict[str, Tensor]:
    """BatchNorm statistics of every draw, each from a pass over the training data.

    Args:
        network: of your own: its parameters are written over.
        moments: of the parameters that moved.
        loader: training data, read once for every draw; None will do for a network without BatchNorm.
        samples: number of draws.
        scale: of the covariance.
        seed: of the draws and of dropout and augmentation in the passes.
        checkpoint: folder to keep the statistics of each draw in, and to take them up from; None keeps nothing.
        progress: whether to show a progress bar on stderr, if that is a terminal.

    Returns:
        Buffers (samples, ...) by name; none where the network keeps no statistics.

    Raises:
        OptionError: if there are statistics to make, and no data.
    """
    if not has_statistics(network):
        return {}
    if loader is None:
        message = "the network has BatchNorm, whose statistics belong to each draw: pass train_loader to make them."
        raise OptionError(message)
    parameters, passes = dict(network.named_parameters()), derived_seeds(seed, PASSES, samples)
    found: list[dict[str, Tensor]] = []
    bar = tqdm(range(samples), desc="BatchNorm statistics", disable=None if progress else True, leave=False)
    for index in bar:
        with torch.no_grad():
            for name, tensor in draw(moments, seed, index, scale).items():
                parameters[name].copy_(tensor)
        identity = {"seed": seed, "scale": scale, "network": folders.signature_of(network)}
        folder = None if checkpoint is None else checkpoint / "draws" / str(index)
        made = None if folder is None else _kept(folder, identity)
        if made is None:
            with undisturbed(network), seeded(network, passes[index]):
                made = recompute_statistics(network, loader)
            if folder is not None:
                folders.save(folder, KIND, {"identity": identity}, made)
        found.append(made)
    return {name: torch.stack([one[name].to(found[0][name].device) for one in found]) for name in found[0]}


def _kept(folder: Path, identity: dict[str, Any]) -> dict[str, Tensor] | None:
    """What was kept of this very draw, if it was."""
    if not (folder / DOCUMENT).exists():
        return None
    document, tensors = folders.load(folder, KIND, {"identity": {}})
    return tensors if document["identity"] == identity else None
