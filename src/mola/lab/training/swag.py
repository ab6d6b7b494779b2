"""Fitting of SWAG: SGD with constant learning rate from a trained network, one snapshot per epoch, and draws with their statistics.

The learning rate may be chosen by the mean confidence on validation data: the paper's rule for lambda, applied to SWAG.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from mola.baselines.members import derived_seeds, homoscedastic
from mola.baselines.swag import LearningRateTuning, Moments, MultiSwag, Swag, draw, own_copy
from mola.errors import DataError, OptionError, warn
from mola.fitting import as_networks, ensemble
from mola.lab.training.checkpoint import DivergedError, TrainingCheckpoint
from mola.lab.training.passes import WithGradients, check_inputs, has_statistics, recompute_statistics, seeded
from mola.likelihoods import CATEGORICAL, ClassificationLikelihood, Gaussian, Likelihood
from mola.metrics import accuracy, brier, mean_confidence
from mola.mixture import Mixture
from mola.network import batch_count, batches, call, state_checksum
from mola.numerics import check_seed
from mola.options import is_real, whole_number
from mola.rules import Threshold
from mola.saving.files import DOCUMENT, read_folder, write_folder
from mola.tuning.search import points

EPOCHS, PASSES, MEMBERS = 0, 2, 3  # purposes of seeds: epochs, statistics of the draws, members of MultiSWAG
DRAW_KIND = "swag-draw"

LARGEST_LOSS = 10
"""Largest usable loss, in units of a guess's: above, a network is confident and wrong, and would meet any threshold."""

Made = TypeVar("Made", Swag, MultiSwag, Mixture)


def fit_swag(
    network: nn.Module,
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
    rule: Threshold | None = None,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    likelihood: str | Likelihood = "categorical",
    progress: bool = True,
) -> Swag:
    """Run SGD from a trained network, one snapshot an epoch, and draw networks from the Gaussian of the snapshots.

    Args:
        network: the trained network; a copy is trained, it is not modified.
        train_loader: training data with labels, read once an epoch, and once for every draw if the network has BatchNorm. Its
            shuffling and augmentation should draw from torch's random state, as those of `DataLoader` do.
        val_loader: validation data, to choose among several learning rates.
        learning_rate: one number, or several: the largest whose mean confidence on the validation data meets the threshold is taken.
        epochs: number of snapshots.
        rank: how many of the last deviations are kept, at most one an epoch; 0 is the diagonal form.
        samples: number of draws.
        scale: factor of the covariance; None is 0.5, or 1 for the diagonal form, as in the paper on SWAG.
        momentum: of SGD, without Nesterov's change.
        weight_decay: of SGD.
        rule: the threshold; None is the paper's, a little below the network's own accuracy.
        seed: of the path and of the draws.
        checkpoint: folder for the path after every epoch and the statistics of every draw: an interrupted fit continues from there to
            the same bits, and a complete one if more epochs are requested.
        likelihood: as for `mola.fit`. For regression pass one learning rate, and the noise, or call `scale_noise` afterwards.
        progress: show a progress bar on stderr, if that is a terminal.
    """
    rates, several = _as_rates(learning_rate)
    meaning = homoscedastic(likelihood, "SWAG")
    _check_choice(several, val_loader, rule)
    if several and not meaning.classification:
        raise OptionError("learning rates are compared by mean confidence: pass one learning_rate for regression.")
    paths = {rate: SgdPath(rate, rank, momentum, weight_decay, seed) for rate in rates}
    trainable(network)
    epochs, samples = whole_number(epochs, "epochs", 2), whole_number(samples, "samples")
    factor = (0.5 if rank else 1.0) if scale is None else scale
    if not (is_real(factor) and math.isfinite(factor) and factor >= 0):
        raise OptionError(f"scale must be a finite number, not negative; got {scale!r}.")

    def make(rate: float) -> Swag:
        folder = None if checkpoint is None else Path(checkpoint)
        if folder is not None and several:
            folder = folder / f"learning-rate-{rate:g}"
        with torch.inference_mode(False), torch.enable_grad():
            copied = own_copy(network)
            moments = paths[rate].follow(copied, train_loader, epochs, folder, progress=progress, likelihood=meaning)
        statistics = _statistics(copied, moments, train_loader, samples, factor, seed, folder, progress=progress)
        return Swag(copied, moments, statistics, samples=samples, scale=float(factor), seed=seed, likelihood=meaning)

    if not several:
        return make(rates[0])
    swag, tuning = choose_learning_rate(rates, make, [ensemble(network)], val_loader, rule)
    swag.tuning = tuning
    return swag


def fit_multi_swag(
    networks: Sequence[nn.Module],
    train_loader: Iterable[Any],
    val_loader: Iterable[Any] | None = None,
    *,
    learning_rate: float | Sequence[float] = 1e-2,
    rule: Threshold | None = None,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    **options: Any,
) -> MultiSwag:
    """MultiSWAG: the uniform mixture of one SWAG from each trained network, all with the same learning rate.

    Args:
        networks: K trained networks; they are not modified.
        train_loader: training data with labels.
        val_loader: validation data, to choose among several learning rates.
        learning_rate: one number, or several: the largest with which the mixture's mean confidence meets the threshold is taken.
        rule: the threshold; None is the paper's, a little below the networks' own mean accuracy.
        seed: from which the seed of each SWAG is drawn.
        checkpoint: folder for the paths.
        **options: of `fit_swag`: epochs, rank, samples, ...
    """
    given = as_networks(networks)
    seeds = derived_seeds(seed, MEMBERS, len(given))
    rates, several = _as_rates(learning_rate)
    _check_choice(several, val_loader, rule)

    def make(rate: float) -> MultiSwag:
        members = []
        for index, (network, own) in enumerate(zip(given, seeds, strict=True)):
            folder = None if checkpoint is None else Path(checkpoint) / f"model-{index}-learning-rate-{rate:g}"
            swag = fit_swag(network, train_loader, learning_rate=rate, seed=own, checkpoint=folder, **options)
            members.append(swag)
        return MultiSwag(members)

    if not several:
        return make(rates[0])
    mixture, tuning = choose_learning_rate(rates, make, [ensemble(network) for network in given], val_loader, rule)
    mixture.tuning = tuning
    return mixture


# --- the path


@dataclass(frozen=True)
class SgdPath:
    """SGD with constant learning rate; see `fit_swag` for its options."""

    learning_rate: float
    rank: int = 20
    momentum: float = 0.9
    weight_decay: float = 3e-4
    seed: int = 0

    def __post_init__(self) -> None:
        if not (is_real(self.learning_rate) and math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise OptionError(f"learning_rate must be a finite number above 0, got {self.learning_rate!r}.")
        if whole_number(self.rank, "rank", 0) == 1:
            raise OptionError("rank must be 0 (the diagonal form) or at least 2, got 1.")
        usable = is_real(self.momentum) and is_real(self.weight_decay)
        if not (usable and 0 <= self.momentum < 1 and 0 <= self.weight_decay < math.inf):
            raise OptionError(
                f"momentum must lie in [0, 1) and weight_decay must be finite and not negative, got {self.momentum!r} and "
                f"{self.weight_decay!r}."
            )
        check_seed(self.seed)

    def follow(
        self,
        network: nn.Module,
        loader: Iterable[Any],
        epochs: int,
        checkpoint: Path | None = None,
        *,
        progress: bool = False,
        likelihood: Likelihood = CATEGORICAL,
    ) -> Moments:
        """Train a copy of a network in place and return the moments of the parameters that require gradients.

        Every epoch begins at a random state derived from the seed and its number, so an interrupted path continues to the same bits,
        provided that the loader draws from torch's random state alone.
        """
        weights = trainable(network)
        optimiser = torch.optim.SGD(
            weights.values(), lr=self.learning_rate, momentum=self.momentum, weight_decay=self.weight_decay
        )
        identity = {"path": asdict(self), "batches": batch_count(loader), "network": state_checksum(network)}
        keeper = None if checkpoint is None else TrainingCheckpoint(checkpoint, "swag-checkpoint", identity)
        moments = Moments.start({name: tensor.detach() for name, tensor in weights.items()})
        if keeper is not None:
            done, _, kept = keeper.restore(epochs, network, optimiser)
            if done:
                moments = Moments.from_tensors(done, kept).to(next(iter(weights.values())).device)
        seeds = derived_seeds(self.seed, EPOCHS, epochs)
        bar = {"initial": moments.count, "total": epochs, "disable": None if progress else True, "leave": False}
        for epoch in tqdm(range(moments.count, epochs), desc=f"SWAG at learning rate {self.learning_rate:g}", **bar):
            with seeded(network, seeds[epoch]):
                loss, chance = sgd_epoch(network, loader, optimiser, likelihood)
            snapshot = {name: tensor.detach() for name, tensor in weights.items()}
            finite = math.isfinite(loss) and all(bool(torch.isfinite(tensor).all()) for tensor in snapshot.values())
            if not (finite and loss <= LARGEST_LOSS * chance):
                raise DivergedError(
                    f"SWAG diverged in epoch {epoch + 1} of {epochs} at learning rate {self.learning_rate:g}: the mean loss is "
                    f"{loss:.4g}, a guess's is {chance:.4g}. Lower the learning rate; if none is low enough, the network did not fit "
                    f"these data to begin with."
                )
            moments.add(snapshot, self.rank)
            if keeper is not None:
                keeper.save(moments.count, network, optimiser, more=moments.tensors())
        return moments


def trainable(network: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, by name; `OptionError` if there are none."""
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


# --- statistics of BatchNorm


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
        # Of the parameters alone: the pass overwrites the statistics.
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


# --- the learning rate


def choose_learning_rate(
    rates: Sequence[float],
    make: Callable[[float], Made],
    plain: Sequence[Mixture],
    val_loader: Iterable[Any] | None,
    rule: Threshold | None,
) -> tuple[Made, LearningRateTuning]:
    """Return the predictor with the largest learning rate that meets the threshold on validation data, and the search.

    A larger rate spreads the weights more, as a smaller lambda does: the paper's rule, the smallest lambda that meets the threshold,
    becomes the largest rate. Rates are tried from the largest down, and the first that meets the threshold ends the search.

    Args:
        rates: candidates.
        make: from a rate to the predictor; raises `DivergedError` where there is none.
        plain: the trained networks by themselves, whose accuracy sets the default threshold.
        val_loader: validation data, read once for each rate tried.
        rule: the threshold; None is the paper's.
    """
    rule = rule or Threshold()
    if not rates:
        raise OptionError("learning_rate: expected a number, or at least one number to choose from; got none.")
    if val_loader is None:
        raise OptionError(f"choosing among the learning rates {list(rates)} needs validation data: pass val_loader.")
    if rule.grid is not None:
        raise OptionError("rule: a grid of prior precisions has no learning rates; pass them as learning_rate=[...].")
    if rule.confidence is None:
        own = sum(_score(one, val_loader, labelled=True)["accuracy"] for one in plain) / len(plain)
        target = own - rule.margin
        origin = f"{target:.2%}, the networks' mean accuracy {own:.2%} less {points(rule.margin)}"
    else:
        target, origin = rule.confidence, f"{rule.confidence:.2%} as given"
    scores: dict[float, dict[str, float]] = {}
    made: dict[float, Made] = {}
    notes: list[str] = []
    chosen = None
    for rate in sorted(rates, reverse=True):
        try:
            predictor = make(rate)
        except DivergedError as error:
            notes.append(str(error))
            continue
        found = scores[rate] = _score(predictor, val_loader, labelled=rule.needs_labels)
        if found["confidence"] >= target and (rule.brier is None or found["brier"] <= rule.brier):
            chosen, made = rate, {rate: predictor}
            break
        if all(found["confidence"] > scores[other]["confidence"] for other in made):
            made = {rate: predictor}
    if not made:
        raise DivergedError(f"SWAG diverged at every learning rate of {sorted(rates)}. {notes[-1]}")
    if chosen is None:
        (chosen,) = made
        notes.append(
            f"no learning rate of {sorted(rates)} meets the threshold, a mean confidence of at least {target:.4f}, on the validation "
            f"data; took {chosen:g}, the most confident with {scores[chosen]['confidence']:.4f}. Try smaller rates."
        )
    for note in notes:
        warn(note)
    names = next(iter(scores.values()))
    curve = {"learning_rate": tuple(scores)} | {name: tuple(one[name] for one in scores.values()) for name in names}
    return made[chosen], LearningRateTuning(f"Threshold: target confidence {origin}", chosen, curve, tuple(notes))


def _score(predictor: Mixture, loader: Iterable[Any], *, labelled: bool) -> dict[str, float]:
    probs, labels = [], []
    for index, batch in enumerate(batches(loader, "validation loader")):
        place = f"batch {index} of the validation loader"
        probs.append(predictor(batch.inputs).cpu())
        if batch.labels is not None:
            labels.append(CATEGORICAL.check_labels(batch.labels, probs[-1], place))
        elif labelled:
            raise DataError(
                f"{place} has no labels, which the threshold needs. Yield (inputs, labels), or pass a confidence."
            )
    joined = torch.cat(probs)
    scores = {"confidence": mean_confidence(joined)}
    if labels:
        known = torch.cat(labels)
        scores |= {"accuracy": accuracy(joined, known), "brier": brier(joined, known)}
    return scores


def _as_rates(given: Any) -> tuple[list[float], bool]:
    # Learning rates, also from numpy and torch, and whether there are several to choose from.
    given = given.tolist() if hasattr(given, "tolist") else given
    several = isinstance(given, Iterable) and not isinstance(given, str)
    values = list(given) if several else [given]
    if not all(map(is_real, values)):
        raise OptionError(f"learning_rate must be a finite number above 0, or several to choose from; got {given!r}.")
    return [*map(float, values)], several


def _check_choice(several: bool, val_loader: object, rule: object) -> None:
    if not several and (val_loader is not None or rule is not None):
        raise OptionError("val_loader and rule choose among learning rates: pass several, learning_rate=[...].")
