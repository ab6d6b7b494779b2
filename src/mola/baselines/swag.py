r"""SWAG (Maddox et al., 2019): a Gaussian fitted to the path of SGD, and the average prediction of draws from it.

A `Swag` owns a copy of the network, whose parameters are the mean; yours is never touched. Drawn weights are made anew
from the moments and a seed for every pass and are not stored; the BatchNorm statistics that belong to each draw are.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from mola.baselines import swag_files
from mola.baselines.draws import draw, statistics_of_draws
from mola.baselines.keeping import all_tensors
from mola.baselines.learning_rates import LearningRateTuning, as_rates, choose_learning_rate
from mola.baselines.seeds import check_seed
from mola.baselines.sgd_path import SgdPath, trainable
from mola.baselines.snapshots import Moments
from mola.choices import is_real, whole_number
from mola.errors import OptionError, located
from mola.features import check_finite
from mola.fitting import ensemble
from mola.heads import check_logits
from mola.likelihood import CATEGORICAL
from mola.mixture import Mixture
from mola.networks import Inputs, call, undisturbed
from mola.networks.passes import WithTensors
from mola.prior import ConfidenceThreshold

__all__ = ["ONE_RATE", "Swag"]

ONE_RATE = "val_loader and rule choose among learning rates: pass several, learning_rate=[...]."


class Swag(Mixture):
    """The average prediction of networks drawn around a path of SGD. Made by `Swag.fit` or `Swag.load`.

    The draws are fixed by `seed`: a prediction depends neither on the batch nor on earlier ones.

    Args:
        network: a network of its own; its parameters become the mean.
        moments: of the parameters that moved.
        statistics: BatchNorm's, by name of the buffer, (samples, ...).
        samples: number of draws.
        scale: of the covariance.
        seed: of the draws.
        tuning: how the learning rate was chosen, if it was.
    """

    def __init__(
        self,
        network: nn.Module,
        moments: Moments,
        statistics: dict[str, Tensor],
        samples: int,
        scale: float,
        seed: int,
        tuning: LearningRateTuning | None = None,
    ) -> None:
        """Bind a network, its moments, and the statistics of the draws."""
        super().__init__([partial(_sampled, self, index) for index in range(samples)])
        parameters = dict(network.named_parameters())
        with torch.no_grad():
            for name, mean in moments.mean.items():
                parameters[name].copy_(mean)
        self.network = network.eval().requires_grad_(False)
        self.moments, self.statistics, self.tuning = moments, statistics, tuning
        self.samples, self.scale, self.seed = samples, scale, seed

    @classmethod
    def fit(
        cls,
        model: nn.Module,
        train_loader: Iterable[Any],
        val_loader: Iterable[Any] | None = None,
        *,
        learning_rate: float | Sequence[float] = 1e-2,
        epochs: int = 40,
        rank: int = 20,
        samples: int = 30,
        scale: float | None = None,
        momentum: float = 0.9,
        weight_decay: float = 3e-4,
        rule: ConfidenceThreshold | None = None,
        seed: int = 0,
        checkpoint: str | Path | None = None,
        progress: bool = True,
    ) -> Swag:
        """Walk from a trained network by SGD with constant learning rate, one snapshot an epoch, and draw.

        Args:
            model: the trained classifier; a copy is trained, it is not modified.
            train_loader: training data with labels, read once an epoch, and once for every draw if the network has
                BatchNorm. Its shuffling and augmentation should draw from torch's random state, as `DataLoader`'s do.
            val_loader: validation data, to choose among several learning rates.
            learning_rate: one number, or several: the largest whose mean confidence on the validation data meets the
                threshold is taken.
            epochs: number of snapshots.
            rank: how many of the last deviations are kept, at most one an epoch; 0 is the diagonal form.
            samples: number of draws.
            scale: of the covariance; None is 0.5, or 1 for the diagonal form, as its authors do.
            momentum: of SGD, without Nesterov's change.
            weight_decay: of SGD.
            rule: the threshold; None is the paper's, a little below the network's own accuracy.
            seed: of the path and of the draws.
            checkpoint: folder to keep the path in after every epoch, and the statistics of every draw; what was
                interrupted goes on from there to the same bits, and what is complete if more epochs are asked for.
            progress: whether to show a progress bar on stderr, if that is a terminal.

        Returns:
            The predictor.

        Raises:
            OptionError: if an option cannot be used; `DataError` if the data cannot, or the path diverges.
        """
        rates, several = as_rates(learning_rate)
        if not several and (val_loader is not None or rule is not None):
            raise OptionError(ONE_RATE)
        paths = {rate: SgdPath(rate, rank, momentum, weight_decay, check_seed(seed)) for rate in rates}
        trainable(model)
        epochs, samples = whole_number(epochs, "epochs", 2), whole_number(samples, "samples")
        own_scale = _checked_scale(scale, rank)

        def make(rate: float) -> Swag:
            folder = None if checkpoint is None else Path(checkpoint)
            if folder is not None and several:
                folder = folder / f"learning-rate-{rate:g}"
            with torch.inference_mode(False), torch.enable_grad():
                network = _own_copy(model)
                moments = paths[rate].follow(network, train_loader, epochs, folder, progress=progress)
            return _drawn(network, moments, train_loader, samples, own_scale, seed, folder, progress=progress)

        if not several:
            return make(rates[0])
        chosen = choose_learning_rate(rates, make, [ensemble(model)], val_loader, rule)
        chosen.predictor.tuning = chosen.tuning
        return chosen.predictor

    def resample(
        self,
        train_loader: Iterable[Any] | None = None,
        *,
        samples: int | None = None,
        scale: float | None = None,
        seed: int | None = None,
        progress: bool = True,
    ) -> Swag:
        """The same moments with other draws.

        Args:
            train_loader: training data, for the BatchNorm statistics; None will do for networks without.
            samples: number of draws; None keeps it.
            scale: of the covariance; None keeps it.
            seed: of the draws; None keeps it.
            progress: whether to show a progress bar on stderr, if that is a terminal.

        Returns:
            A new predictor, which shares the moments.
        """
        samples = self.samples if samples is None else whole_number(samples, "samples")
        scale = self.scale if scale is None else _checked_scale(scale, self.moments.rank)
        chosen = check_seed(self.seed if seed is None else seed)
        network = _own_copy(self.network)
        made = _drawn(network, self.moments, train_loader, samples, scale, chosen, None, progress=progress)
        made.tuning = self.tuning
        return made

    # --- predict ----------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """Set the mode of this module alone: every pass evaluates the network."""
        self.training = mode
        return self

    def extra_repr(self) -> str:
        """Snapshots, rank, draws."""
        return (
            f"snapshots={self.moments.count}, rank={self.moments.rank}, samples={self.samples}, scale={self.scale}, "
            f"seed={self.seed}"
        )

    def sample(self, index: int) -> dict[str, Tensor]:
        """Weights of one draw, and its BatchNorm statistics, where and in the precision the network is.

        Args:
            index: of the draw.

        Returns:
            Tensors by the names the network has for them.

        Raises:
            OptionError: if there is no such draw.
        """
        if not 0 <= index < self.samples:
            message = f"index must be one of the {self.samples} draws, from 0 to {self.samples - 1}; got {index!r}."
            raise OptionError(message)
        own = all_tensors(self.network)
        name, mean = next(iter(self.moments.mean.items()))
        if mean.device != own[name].device:  # the network was moved
            self.moments = self.moments.to(own[name].device)
        drawn = draw(self.moments, self.seed, index, self.scale)
        drawn |= {name: stacked[index] for name, stacked in self.statistics.items()}
        return {name: tensor.to(own[name].device, own[name].dtype) for name, tensor in drawn.items()}

    def _member_probs(self, inputs: Inputs, seed: int | None) -> list[Tensor]:
        with undisturbed(self.network, passes_only=True):
            return super()._member_probs(inputs, seed)

    # --- files ------------------------------------------------------------------------------------------------------

    def save(self, directory: str | Path) -> Path:
        """Save the moments, the statistics of the draws, and what of the network did not move.

        Args:
            directory: folder to write to.

        Returns:
            The folder, for `mola.Swag.load(directory, model)`.
        """
        parts = swag_files.SwagParts(self.moments, self.statistics, self.samples, self.scale, self.seed, self.tuning)
        return swag_files.write(directory, self.network, parts)

    @classmethod
    def load(cls, directory: str | Path, model: nn.Module) -> Swag:
        """Load what `save` wrote.

        Args:
            directory: folder that `save` wrote.
            model: a network of the same architecture, trained or not; a copy is used, it is not modified.

        Returns:
            The predictor; `StorageError` if the files are damaged, or the snapshots are of another network.
        """
        network = _own_copy(model)
        return cls(network, *swag_files.read(directory, network))


def _sampled(swag: Swag, index: int, inputs: Inputs) -> Tensor:
    """Probabilities of one draw."""
    with located(f"draw {index}"):
        logits = call(WithTensors(swag.network, swag.sample(index)), inputs)
        check_logits(logits)
        check_finite(logits)
    return CATEGORICAL.probabilities(logits.to(torch.promote_types(logits.dtype, torch.float32)))


def _own_copy(model: nn.Module) -> nn.Module:
    """A copy that shares nothing with the user's network.

    Raises:
        OptionError: if it cannot be copied.
    """
    try:
        return copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:
        message = (
            f"{type(model).__name__} cannot be copied ({error}), and SWAG trains a copy. Pass a network that "
            f"copy.deepcopy takes: one without locks, open files, or results of earlier passes."
        )
        raise OptionError(message) from error


def _drawn(
    network: nn.Module,
    moments: Moments,
    loader: Iterable[Any] | None,
    samples: int,
    scale: float,
    seed: int,
    checkpoint: Path | None,
    *,
    progress: bool,
) -> Swag:
    statistics = statistics_of_draws(network, moments, loader, samples, scale, seed, checkpoint, progress=progress)
    return Swag(network, moments, statistics, samples, scale, seed)


def _checked_scale(scale: float | None, rank: int) -> float:
    if scale is None:
        return 0.5 if rank else 1.0
    if not (is_real(scale) and math.isfinite(scale) and scale >= 0):
        message = f"scale must be a finite number, not negative; got {scale!r}."
        raise OptionError(message)
    return float(scale)
