r"""SWAG (Maddox et al., 2019): average the predictions of networks drawn from a Gaussian fitted to SGD snapshots.

From snapshots :math:`\theta_1, \dots, \theta_T`, SWAG keeps the mean, the variance of each weight, and the last K deviations
:math:`d_t = \theta_t - \bar\theta_t` from the mean of the snapshots so far. A draw is

.. math:: \theta = \bar\theta + \sqrt{s}\, \bigl(\sigma \odot z_1 + D z_2 / \sqrt{K - 1}\bigr), \qquad z_1, z_2 \sim \mathcal N(0, I).

A `Swag` holds a copy of the network whose parameters are set to the mean. Each pass redraws the weights from the moments with a fixed
seed; only the BatchNorm statistics of the draws are stored. MultiSWAG (Wilson and Izmailov, 2020) is a mixture of several SWAGs, each
of which starts from a different trained network. `molaplace_lab.training` fits both methods.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from molaplace.errors import OptionError, StorageError, located
from molaplace.fitting import as_networks
from molaplace.likelihoods import CATEGORICAL, LIKELIHOODS, Gaussian, Likelihood
from molaplace.mixture import Mixture
from molaplace.network import Inputs, evaluating
from molaplace.numerics import check_seed
from molaplace.options import whole_number
from molaplace.saving.files import read_folder, write_folder
from molaplace.saving.posterior import describe, rebuild
from molaplace_lab.members import (
    all_tensors,
    below,
    derived_seeds,
    homoscedastic,
    member_output,
    shape_differences,
)

OPTIONS: dict[str, Any] = {"samples": int, "scale": float, "seed": int}
SCHEMA = {"snapshots": int, "rank": int, **OPTIONS, "likelihood": {"name": str}}
SMALLEST_VARIANCE = 1e-30  # variance assigned to a weight that did not change
DRAWS = 1  # the `purpose` that makes the seeds for weights independent of other seeds

_lock = threading.RLock()  # one pass at a time, because the network holds the weights of a single draw


@dataclass
class Moments:
    """Means, squared deviations and most recent deviations of the weights over the snapshots, all kept in main memory."""

    count: int = 0
    """Number of snapshots."""
    mean: dict[str, Tensor] = field(default_factory=dict)
    squares: dict[str, Tensor] = field(default_factory=dict)
    """For each weight, the sum of squared deviations from the mean; Welford's method avoids cancellation in float32."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """The last K deviations, of shape (K, ...), oldest first."""

    def add(self, weights: Mapping[str, Tensor], rank: int) -> None:
        """Add one snapshot in place, keeping only the last `rank` deviations."""
        self.count += 1
        for name, tensor in weights.items():
            # Use at least float32, since a mean in half precision would lose small steps.
            theta = tensor.detach().to("cpu", torch.promote_types(tensor.dtype, torch.float32))
            mean = self.mean.setdefault(name, torch.zeros_like(theta))
            before = theta - mean
            mean.add_(before / self.count)
            after = theta - mean
            self.squares.setdefault(name, torch.zeros_like(theta)).addcmul_(before, after)
            columns = self.columns.setdefault(name, theta.new_zeros((0, *theta.shape)))
            if rank:
                self.columns[name] = torch.cat([columns[1 - rank :], after[None]])

    @property
    def rank(self) -> int:
        """Number of stored deviations."""
        return len(next(iter(self.columns.values())))

    def variance(self, name: str) -> Tensor:
        """Return the variance of each weight over all snapshots."""
        return (self.squares[name] / self.count).clamp_min(SMALLEST_VARIANCE)

    def draw(self, seed: int, scale: float) -> dict[str, Tensor]:
        """Draw weights from the Gaussian after multiplying its covariance by `scale`."""
        generator = torch.Generator("cpu").manual_seed(seed)
        shared = torch.randn(self.rank, generator=generator, dtype=torch.float64, device="cpu")
        drawn = {}
        for name in sorted(self.mean):  # sorted, since files do not preserve the order
            mean = self.mean[name]
            noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device="cpu")
            step = self.variance(name).sqrt() * noise
            if self.rank:
                step = step + torch.tensordot(shared.to(mean) / (self.rank - 1) ** 0.5, self.columns[name], dims=1)
            drawn[name] = mean + scale**0.5 * step
        return drawn

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors, keyed by name, for saving."""
        parts = {"mean": self.mean, "squares": self.squares, "columns": self.columns}
        return {f"{kind}.{name}": tensor for kind, part in parts.items() for name, tensor in part.items()}

    @staticmethod
    def from_tensors(count: int, tensors: Mapping[str, Tensor]) -> Moments:
        """Rebuild the moments from the output of `tensors`."""
        return Moments(count, *(below(tensors, f"{kind}.") for kind in ("mean", "squares", "columns")))


class Swag(Mixture):
    """A predictor that averages the predictions of networks drawn from a Gaussian fitted to SGD snapshots.

    It is returned by `molaplace_lab.training.fit_swag` and `Swag.load`. `seed` determines the draws, so a prediction depends
    neither on the rest of its batch nor on earlier predictions.

    Args:
        network: a copy of the network, used by this object only; its parameters are set to the mean.
        moments: moments of the parameters that SGD changed.
        statistics: BatchNorm statistics (samples, ...) of all draws, keyed by buffer name.
        samples: number of draws.
        scale: factor by which the covariance is multiplied.
        seed: random seed for the draws.
        likelihood: likelihood of the outputs, as in `mola.fit`.
    """

    def __init__(
        self,
        network: nn.Module,
        moments: Moments,
        statistics: Mapping[str, Tensor],
        *,
        samples: int,
        scale: float = 0.5,
        seed: int = 0,
        likelihood: str | Likelihood = CATEGORICAL,
    ) -> None:
        meaning = homoscedastic(likelihood, "SWAG")
        samples = whole_number(samples, "samples")
        super().__init__([partial(self._draw, index) for index in range(samples)], likelihood=meaning)
        parameters = dict(network.named_parameters())
        with torch.no_grad():
            for name, mean in moments.mean.items():
                parameters[name].copy_(mean)
        self.network: nn.Module = network.eval().requires_grad_(False)
        self.moments: Moments = moments
        self.statistics: dict[str, Tensor] = dict(statistics)
        self.samples: int = samples
        self.scale: float = scale
        self.seed: int = check_seed(seed)

    def with_likelihood(self, likelihood: Likelihood) -> Swag:
        """Return a copy with the same draws but a different likelihood, for example one with a different noise level."""
        options = {name: getattr(self, name) for name in OPTIONS}
        return Swag(self.network, self.moments, self.statistics, likelihood=likelihood, **options)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of this module only; the network stays in eval mode."""
        self.training = mode
        return self

    def extra_repr(self) -> str:
        """Return the text that `repr` shows: the numbers of snapshots and draws, the rank, the scale and the seed."""
        kept = f"snapshots={self.moments.count}, rank={self.moments.rank}"
        return f"{kept}, samples={self.samples}, scale={self.scale}, seed={self.seed}"

    def sample(self, index: int) -> dict[str, Tensor]:
        """Return the weights and BatchNorm statistics of one draw, keyed by name, on the network's device and in its precision."""
        if not 0 <= index < self.samples:
            raise OptionError(
                f"must be between 0 and {self.samples - 1} (the last draw); got {index!r}.", argument="index"
            )
        own, drawn = all_tensors(self.network), draw(self.moments, self.seed, index, self.scale)
        drawn |= {name: stacked[index] for name, stacked in self.statistics.items()}
        return {name: tensor.to(own[name].device, own[name].dtype) for name, tensor in drawn.items()}

    def _member_outputs(self, inputs: Inputs, seed: int | None) -> list[Tensor]:
        return [self._draw(index, inputs) for index in range(self.samples)]

    def _draw(self, index: int, inputs: Inputs) -> Tensor:
        tensors = self.sample(index)
        with _lock, located(f"draw {index}"), evaluating(self.network), holding(self.network, tensors):
            return member_output(self.network, inputs, self.likelihood)

    def save(self, directory: str | Path) -> Path:
        """Save what `Swag.load` needs: the moments, the BatchNorm statistics and the weights that SGD did not change."""
        document = {
            "kind": "swag",
            "snapshots": self.moments.count,
            "rank": self.moments.rank,
            **{name: getattr(self, name) for name in OPTIONS},
            "likelihood": describe(self.likelihood, LIKELIHOODS, "likelihood"),
        }
        parts = {
            "moments": self.moments.tensors(),
            "statistics": self.statistics,
            "network": _unmoved(self.network, self.moments.mean),
        }
        tensors = {f"{part}.{name}": tensor for part, own in parts.items() for name, tensor in own.items()}
        return write_folder(directory, document, tensors)

    @classmethod
    def load(cls, directory: str | Path, network: nn.Module) -> Swag:
        """Load a SWAG from a folder written by `save`.

        Args:
            directory: the folder.
            network: a network of the same architecture, trained or not; it is copied, not modified.
        """
        document, tensors = read_folder(directory, "swag", SCHEMA)
        own = copy.deepcopy(network)
        moved = below(tensors, "moments.mean.")
        rest = _unmoved(own, moved)
        wrong = shape_differences(tensors, _expected_shapes(document, own, moved, below(tensors, "statistics.")))
        if wrong or not moved or document["snapshots"] < 1 or document["rank"] == 1 or document["scale"] < 0:
            named = f"{wrong[0]} and {len(wrong) - 1} more" if wrong else "a number"
            raise StorageError(
                f"{directory} does not match {type(network).__name__}: in the saved SWAG, {named} is missing or unexpected, or has "
                f"the wrong shape or size. Pass a network with the same architecture as the saved one."
            )
        with torch.no_grad():
            for name, tensor in rest.items():
                tensor.copy_(tensors[f"network.{name}"])
        try:
            return cls(
                own,
                Moments.from_tensors(document["snapshots"], below(tensors, "moments.")),
                below(tensors, "statistics."),
                likelihood=rebuild(document["likelihood"], LIKELIHOODS, "likelihood"),
                **{name: document[name] for name in OPTIONS},
            )
        except (OptionError, TypeError, ValueError) as error:
            raise StorageError(f"{directory} contains an invalid value: {error}") from error


def draw(moments: Moments, seed: int, index: int, scale: float) -> dict[str, Tensor]:
    """Return the weights of draw number `index`, keyed by name. The weights do not depend on the total number of draws."""
    return moments.draw(derived_seeds(seed, DRAWS, index + 1)[index], scale)


@contextmanager
def holding(network: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace the named parameters and buffers of a network, and restore the originals on exit."""
    own = all_tensors(network)
    kept = {name: own[name].clone() for name in tensors}
    with torch.no_grad():
        try:
            for name, tensor in tensors.items():
                own[name].copy_(tensor)
            yield
        finally:
            for name, tensor in kept.items():
                own[name].copy_(tensor)


def _unmoved(network: nn.Module, moved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in all_tensors(network).items() if name not in moved}


def _expected_shapes(
    document: Mapping[str, Any], network: nn.Module, moved: Mapping[str, Tensor], statistics: Mapping[str, Tensor]
) -> dict[str, tuple[int, ...]]:
    shapes = {name: tuple(tensor.shape) for name, tensor in all_tensors(network).items()}
    buffers = dict(network.named_buffers())
    expected = {f"network.{name}": shape for name, shape in shapes.items() if name not in moved}
    for name in moved.keys() & shapes.keys() - buffers.keys():
        for kind, leading in (("mean", ()), ("squares", ()), ("columns", (document["rank"],))):
            expected[f"moments.{kind}.{name}"] = (*leading, *shapes[name])
    for name in statistics.keys() & buffers.keys():
        expected[f"statistics.{name}"] = (document["samples"], *shapes[name])
    return expected


class MultiSwag(Mixture):
    """A uniform mixture of SWAGs. It is returned by `molaplace_lab.training.fit_multi_swag` and `MultiSwag.load`.

    Args:
        swags: one SWAG for each trained network.
    """

    def __init__(self, swags: Sequence[Swag]) -> None:
        super().__init__(swags)
        self.swags: tuple[Swag, ...] = tuple(swags)

    def with_likelihood(self, likelihood: Gaussian) -> MultiSwag:
        """Return a copy with the same draws but a different likelihood, for example one with a different noise level."""
        return MultiSwag([swag.with_likelihood(likelihood) for swag in self.swags])

    def save(self, directory: str | Path) -> Path:
        """Save each SWAG to a subfolder, for loading with `MultiSwag.load(directory, networks)`."""
        names = [f"swag-{index}" for index in range(len(self.swags))]
        for name, swag in zip(names, self.swags, strict=True):
            swag.save(Path(directory) / name)
        return write_folder(directory, {"kind": "multi-swag", "swags": names}, {})

    @classmethod
    def load(cls, directory: str | Path, networks: nn.Module | Sequence[nn.Module]) -> MultiSwag:
        """Load a MultiSWAG from a folder written by `save`.

        Args:
            directory: the folder.
            networks: one network for all SWAGs, or one for each; they are copied, not modified.
        """
        document, _ = read_folder(directory, "multi-swag", {"swags": [str]})
        names, given = document["swags"], as_networks(networks)
        given = given * len(names) if len(given) == 1 else given
        if not names or len(given) != len(names):
            raise StorageError(
                f"{directory} holds {len(names)} SWAGs, got {len(given)} networks. Pass one network for all SWAGs, or one for each."
            )
        pairs = zip(names, given, strict=True)
        swags = [Swag.load(Path(directory) / Path(name).name, network) for name, network in pairs]
        return cls(swags)
