"""SWAG (Maddox et al., 2019): a Gaussian fitted to the path of SGD, and the average prediction of draws from it.

A `Swag` owns a copy of the network, whose parameters are the mean; yours is never touched. Weights are drawn again
from the moments and a seed for every pass and are not stored; the BatchNorm statistics that belong to each draw are.

MultiSWAG (Wilson and Izmailov, 2020) is the mixture of several SWAGs, each from a trained network of its own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from mola.baselines.noise import loaded_likelihood, only_means, saved_likelihood
from mola.baselines.sgd import (
    LearningRateTuning,
    as_rates,
    choose_learning_rate,
    derived_seeds,
    has_statistics,
    recompute_statistics,
    seeded,
)
from mola.baselines.swag_path import Moments, SgdPath, trainable
from mola.errors import OptionError, StorageError, located
from mola.fitting import ensemble
from mola.likelihood import CATEGORICAL, Likelihood, as_likelihood
from mola.mixture import Mixture
from mola.network import Inputs, call, check_finite, undisturbed
from mola.network.calling import WithTensors
from mola.network.fingerprint import signature_of
from mola.numerics import check_seed
from mola.options import is_real, whole_number
from mola.saving import storage
from mola.saving.storage import DOCUMENT
from mola.saving.training_checkpoint import all_tensors, below
from mola.schema import Optional
from mola.tuning.rules import ConfidenceThreshold

SCHEMA = {
    "snapshots": int,
    "rank": int,
    "samples": int,
    "scale": float,
    "seed": int,
    "tuning": Optional({"rule": str, "learning_rate": float, "curve": {str: [float]}, "notes": [str]}),
}


class SwagParts(NamedTuple):
    """What a SWAG is made of beside the network."""

    moments: Moments
    statistics: dict[str, Tensor]
    samples: int
    scale: float
    seed: int
    tuning: LearningRateTuning | None
    likelihood: Likelihood


def _rest(network: nn.Module, moved: set[str]) -> dict[str, Tensor]:
    # What of a network did not move: frozen parameters, and buffers.
    named = [*network.named_parameters(), *network.named_buffers()]
    return {name: tensor.detach() for name, tensor in named if name not in moved}


def write_swag(directory: str | Path, network: nn.Module, parts: SwagParts) -> Path:
    """Save the parts, and what of the network did not move."""
    document: dict[str, Any] = {"snapshots": parts.moments.count, "rank": parts.moments.rank}
    document |= {"samples": parts.samples, "scale": parts.scale, "seed": parts.seed}
    document["tuning"] = None if parts.tuning is None else parts.tuning.as_json()
    document |= saved_likelihood(parts.likelihood)
    tensors = {f"moments.{name}": tensor for name, tensor in parts.moments.tensors().items()}
    tensors |= {f"statistics.{name}": tensor for name, tensor in parts.statistics.items()}
    tensors |= {f"network.{name}": tensor for name, tensor in _rest(network, set(parts.moments.mean)).items()}
    return storage.write(directory, document, tensors, kind="swag")


def read_swag(directory: str | Path, network: nn.Module) -> SwagParts:
    """Load the parts, and put back what of the network did not move.

    Args:
        directory: folder that `write` made.
        network: of your own and of the same architecture: what did not move is written over.

    Returns:
        The parts.
    """
    document, tensors = storage.read(directory, "swag", SCHEMA)
    moved = set(below(tensors, "moments.mean."))
    rest = _rest(network, moved)
    expected = _expected_shapes(document, network, moved, rest, set(below(tensors, "statistics.")))
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = sorted({name for name, _ in found.items() ^ expected.items()})
    if (
        wrong
        or not moved
        or min(document["snapshots"], document["samples"]) < 1
        or document["rank"] == 1
        or document["scale"] < 0
    ):
        named = f"{wrong[0]} and {len(wrong) - 1} more" if wrong else "a number"
        raise StorageError(
            f"{directory} does not fit {type(network).__name__}: {named} of the saved SWAG is missing, unknown, or of "
            f"another shape or size. Pass a network of the same architecture as the one it was made from."
        )
    with torch.no_grad():
        for name, tensor in rest.items():
            tensor.copy_(tensors[f"network.{name}"])
    moments = Moments.from_tensors(document["snapshots"], below(tensors, "moments."))
    statistics = below(tensors, "statistics.")
    tuning = None if document["tuning"] is None else LearningRateTuning.from_json(document["tuning"])
    numbers = document["samples"], float(document["scale"]), document["seed"]
    return SwagParts(moments, statistics, *numbers, tuning, loaded_likelihood(document, "SWAG"))


def _expected_shapes(
    document: dict[str, Any], network: nn.Module, moved: set[str], rest: dict[str, Tensor], statistics: set[str]
) -> dict[str, tuple[int, ...]]:
    shapes = {name: tuple(tensor.shape) for name, tensor in network.named_parameters() if name in moved}
    buffers = {name: tuple(tensor.shape) for name, tensor in network.named_buffers() if name in statistics}
    expected = {f"network.{name}": tuple(tensor.shape) for name, tensor in rest.items()}
    for kind, leading in (("mean", ()), ("squares", ()), ("columns", (document["rank"],))):
        expected |= {f"moments.{kind}.{name}": (*leading, *shape) for name, shape in shapes.items()}
    return expected | {f"statistics.{name}": (document["samples"], *shape) for name, shape in buffers.items()}


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
    """
    if not has_statistics(network):
        return {}
    if loader is None:
        raise OptionError(
            "the network has BatchNorm, whose statistics belong to each draw: pass train_loader to make them."
        )
    parameters, passes = dict(network.named_parameters()), derived_seeds(seed, PASSES, samples)
    found: list[dict[str, Tensor]] = []
    bar = tqdm(range(samples), desc="BatchNorm statistics", disable=None if progress else True, leave=False)
    for index in bar:
        with torch.no_grad():
            for name, tensor in draw(moments, seed, index, scale).items():
                parameters[name].copy_(tensor)
        identity = {"seed": seed, "scale": scale, "network": signature_of(network)}
        folder = None if checkpoint is None else checkpoint / "draws" / str(index)
        made = None if folder is None else _kept(folder, identity)
        if made is None:
            with undisturbed(network), seeded(network, passes[index]):
                made = recompute_statistics(network, loader)
            if folder is not None:
                storage.write(folder, {"identity": identity}, made, kind=KIND)
        found.append(made)
    return {name: torch.stack([one[name].to(found[0][name].device) for one in found]) for name in found[0]}


def _kept(folder: Path, identity: dict[str, Any]) -> dict[str, Tensor] | None:
    if not (folder / DOCUMENT).exists():
        return None
    document, tensors = storage.read(folder, KIND, {"identity": {}})
    return tensors if document["identity"] == identity else None


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
        likelihood: what the outputs mean.
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
        likelihood: Likelihood = CATEGORICAL,
    ) -> None:
        super().__init__([partial(_sampled, self, index) for index in range(samples)], likelihood=likelihood)
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
        likelihood: str | Likelihood = "categorical",
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
            likelihood: what the outputs mean, as for `mola.fit`. Of numbers, `mola.Gaussian(noise=...)`, or `mola.scale_noise`
                afterwards; several learning rates are chosen among by confidence, and so for classes alone.

        Returns:
            The predictor.
        """
        rates, several = as_rates(learning_rate)
        if not several and (val_loader is not None or rule is not None):
            raise OptionError(ONE_RATE)
        meaning = only_means(as_likelihood(likelihood), "SWAG")
        if several and not meaning.discrete:
            raise OptionError(
                "SWAG chooses among learning rates by the confidence in classes: for numbers, pass one learning_rate."
            )
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
                moments = paths[rate].follow(
                    network, train_loader, epochs, folder, progress=progress, likelihood=meaning
                )
            made = _drawn(network, moments, train_loader, samples, own_scale, seed, folder, progress=progress)
            return made.of_likelihood(meaning)

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
        return made.of_likelihood(self.likelihood)

    def of_likelihood(self, likelihood: Likelihood) -> Swag:
        """The same draws for outputs that mean something else, such as numbers with another noise."""
        parts = self.moments, self.statistics, self.samples, self.scale, self.seed, self.tuning
        return Swag(self.network, *parts, likelihood)

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
        """
        if not 0 <= index < self.samples:
            raise OptionError(
                f"index must be one of the {self.samples} draws, from 0 to {self.samples - 1}; got {index!r}."
            )
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
        """Save the moments, the statistics of the draws, what the outputs mean, and what of the network did not move.

        Args:
            directory: folder to write to.

        Returns:
            The folder, for `mola.Swag.load(directory, model)`.
        """
        parts = SwagParts(
            self.moments, self.statistics, self.samples, self.scale, self.seed, self.tuning, self.likelihood
        )
        return write_swag(directory, self.network, parts)

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
        return cls(network, *read_swag(directory, network))


def _sampled(swag: Swag, index: int, inputs: Inputs) -> Tensor:
    with located(f"draw {index}"):
        logits = swag.likelihood.check_outputs(call(WithTensors(swag.network, swag.sample(index)), inputs))
        check_finite(logits)
    return swag.likelihood.probabilities(logits.to(torch.promote_types(logits.dtype, torch.float32)))


def _own_copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:
        raise OptionError(
            f"{type(model).__name__} cannot be copied ({error}), and SWAG trains a copy. Pass a network that "
            f"copy.deepcopy takes: one without locks, open files, or results of earlier passes."
        ) from error


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
        raise OptionError(f"scale must be a finite number, not negative; got {scale!r}.")
    return float(scale)


MEMBERS = 3
"""Purpose of the seeds of the members."""


class MultiSwag(Mixture):
    """The uniform mixture of SWAGs. Made by `mola.multi_swag` or `mola.MultiSwag.load`.

    Args:
        swags: one for each trained network.
        tuning: how their learning rate was chosen, if it was.
    """

    def __init__(self, swags: Sequence[Swag], tuning: LearningRateTuning | None = None) -> None:
        super().__init__(swags)
        self.swags, self.tuning = tuple(swags), tuning

    def save(self, directory: str | Path) -> Path:
        """Save every SWAG in a folder of its own inside this one.

        Args:
            directory: folder to write to.

        Returns:
            The folder, for `mola.MultiSwag.load(directory, models)`.
        """
        names = [f"swag-{index}" for index in range(len(self.swags))]
        for name, swag in zip(names, self.swags, strict=True):
            swag.save(Path(directory) / name)
        tuning = None if self.tuning is None else self.tuning.as_json()
        return storage.write(directory, {"swags": names, "tuning": tuning}, {}, kind="multi-swag")

    @classmethod
    def load(cls, directory: str | Path, models: nn.Module | Sequence[nn.Module]) -> MultiSwag:
        """Load what `save` wrote.

        Args:
            directory: folder that `save` wrote.
            models: one network of the same architecture for all, or one for each; copies are used.

        Returns:
            The predictor.
        """
        document, _ = storage.read(directory, "multi-swag", {"swags": [str], "tuning": SCHEMA["tuning"]})
        names = document["swags"]
        networks = ensemble(models).networks
        networks = networks * len(names) if len(networks) == 1 else networks
        if not names or len(networks) != len(names):
            raise StorageError(f"{directory} was saved with {len(names)} SWAGs, got {len(networks)} models.")
        tuning = None if document["tuning"] is None else LearningRateTuning.from_json(document["tuning"])
        return cls(
            [Swag.load(Path(directory) / Path(name).name, own) for name, own in zip(names, networks, strict=True)],
            tuning,
        )


def multi_swag(
    models: Sequence[nn.Module],
    train_loader: Iterable[Any],
    val_loader: Iterable[Any] | None = None,
    *,
    learning_rate: float | Sequence[float] = 1e-2,
    rule: ConfidenceThreshold | None = None,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    **options: Any,
) -> MultiSwag:
    """MultiSWAG: the uniform mixture of one SWAG from each trained network.

    Args:
        models: K trained classifiers; they are not modified.
        train_loader: training data with labels.
        val_loader: validation data, to choose among several learning rates.
        learning_rate: one number, or several: one is chosen for all, the largest with which the mixture's mean
            confidence on the validation data meets the threshold.
        rule: the threshold; None is the paper's, a little below the networks' own mean accuracy.
        seed: from which each SWAG has its own.
        checkpoint: folder to keep the paths in.
        **options: of `Swag.fit`, for each: epochs, rank, samples, ...

    Returns:
        The mixture.
    """
    networks = ensemble(models).networks
    seeds = derived_seeds(seed, MEMBERS, len(networks))

    def make(rate: float) -> MultiSwag:
        members = []
        for index, (network, own) in enumerate(zip(networks, seeds, strict=True)):
            folder = None if checkpoint is None else Path(checkpoint) / f"model-{index}-learning-rate-{rate:g}"
            swag = Swag.fit(network, train_loader, learning_rate=rate, seed=own, checkpoint=folder, **options)
            members.append(swag)
        return MultiSwag(members)

    rates, several = as_rates(learning_rate)
    if not several:
        if val_loader is not None or rule is not None:
            raise OptionError(ONE_RATE)
        return make(rates[0])
    plain = [ensemble(network) for network in networks]
    chosen = choose_learning_rate(rates, make, plain, val_loader, rule)
    chosen.predictor.tuning = chosen.tuning
    return chosen.predictor
