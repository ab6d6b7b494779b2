"""Methods that train further or anew: SWAG and MultiSWAG from a suite's networks, MIMO and MIMO-MoLA from its architecture.

What was interrupted goes on where it stopped.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mola.baselines.mimo import Mimo
from mola.baselines.swag import Swag
from mola.compare.activations_file import Stored
from mola.compare.methods import Fitted, LastLayer
from mola.compare.tally import Answer
from mola.lab.activations import Network, fast_inputs, fast_network, network_checksum
from mola.lab.suite import MimoBudget, SwagBudget, TrainingData
from mola.lab.training import Recipe, train_mimo
from mola.lab.training import fit_swag as fit_swag_path
from mola.lab.workshop import Context, StoredPrediction, Voice, Workshop
from mola.likelihoods import CATEGORICAL
from mola.network import call, evaluating


class Shuffled:
    """Training data as a loader: a new order every time, drawn from torch's random state.

    Args:
        training: data and what is done to them.
        batch_size: images a batch.
        images: how many of them each time, drawn without replacement; None is all.
    """

    def __init__(self, training: TrainingData, batch_size: int, images: int | None = None) -> None:
        self.training, self.batch_size = training, batch_size
        self.count = len(training.data) if images is None else min(images, len(training.data))

    def __len__(self) -> int:
        return math.ceil(self.count / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        data = self.training.data
        for rows in torch.split(torch.randperm(len(data))[: self.count], self.batch_size):
            yield fast_inputs(self.training.prepare(data.inputs[rows])), data.labels[rows]


def fit_swag(
    network: Network, training: TrainingData, budget: SwagBudget, folder: Path | None, device: str = "cpu"
) -> Swag:
    """SWAG from one trained network; its seed belongs to the network, so that it is the same in whatever run.

    Args:
        network: trained.
        training: what it was trained on.
        budget: how much to train.
        folder: to keep the path and the draws in; what is there already is taken up.
        device: where to train.

    Returns:
        The predictor.
    """
    return fit_swag_path(
        fast_network(network.load().to(device), _example(training)),
        Shuffled(training, budget.batch_size, budget.images),
        learning_rate=budget.learning_rate,
        epochs=budget.snapshots,
        rank=budget.snapshots,
        samples=budget.samples,
        seed=int(network.checksum, 16) % 2**31,
        checkpoint=folder,
        progress=False,
    )


def fit_mimo(
    build: Callable[[], nn.Module],
    training: TrainingData,
    recipe: Recipe,
    budget: MimoBudget,
    seed: int,
    folder: Path | None,
    device: str = "cpu",
) -> Mimo:
    """The MIMO form of an architecture, trained by the suite's own recipe.

    Args:
        build: makes a network with fresh weights.
        training: what to train on.
        recipe: optimiser, schedule and batch size; the number of epochs is the budget's.
        budget: how much to train.
        seed: of weights, orders and augmentation.
        folder: to keep the training in; what is there already is taken up.
        device: where to train.

    Returns:
        The trained network.
    """
    example = _example(training)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = build().to(device, example.dtype)
    mimo = Mimo(network, budget.members, example=example, seed=seed)
    fast_network(mimo, example)
    return train_mimo(
        mimo,
        Shuffled(training, recipe.batch_size),
        epochs=budget.epochs,
        batch_repetition=budget.batch_repetition,
        optimiser=recipe.make_optimiser,
        seed=seed,
        checkpoint=folder,
        progress=False,
    )


def _example(training: TrainingData) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return training.prepare(training.data.inputs[:2])


TAKEN_UP = "fit time is of this command alone: what had been trained before was taken up."


@dataclass(frozen=True)
class SwagMixture:
    """SWAG of one network, or the mixture of the SWAGs of several."""

    name: str
    budget: SwagBudget
    components: int | None = None
    group: str = "main"

    def settings(self) -> dict[str, Any]:
        """What makes it, as plain JSON values."""
        return {"weights": "uniform", "swag": self.budget.describe()}

    def fit(self, context: Context) -> Fitted:
        """Walk from every network, or take up the walks of before."""
        workshop, start = context.workshop, time.perf_counter()
        swags: dict[str, Swag] = {}
        for network in context.networks[: self.components]:
            folder = workshop.folder("swag", network.checksum, self.budget.describe())
            swags[folder.name] = fit_swag(network, workshop.training, self.budget, folder, workshop.device)
        seconds = time.perf_counter() - start

        def batches(name: str) -> Iterator[tuple[list[StoredPrediction], Tensor]]:
            source, opinions = workshop.sources[name], workshop.opinions
            asked = [opinions.ask(key, source, partial(_voices, swag)) for key, swag in swags.items()]
            return context.labelled(name, asked)

        def answer(found: list[StoredPrediction], scores: bool) -> Answer:
            return StoredPrediction.mean(found).answer(len(found) * self.budget.samples)

        return Fitted(batches, answer, {"notes": [TAKEN_UP]}, seconds)


def drawn_networks(swag: Swag) -> Iterator[nn.Module]:
    """Networks with the weights of each draw, one after the other in the same object: a set is run through each at once."""
    network = copy.deepcopy(swag.network)
    tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    for index in range(swag.samples):
        with torch.no_grad():
            for name, drawn in swag.sample(index).items():
                tensors[name].copy_(drawn)
        yield network


def _voices(swag: Swag) -> Iterator[Voice]:
    return (partial(_probabilities, network) for network in drawn_networks(swag))


def _probabilities(network: nn.Module, inputs: Tensor) -> Tensor:
    with evaluating(network):
        return CATEGORICAL.probabilities(call(network, inputs))


class _Head(NamedTuple):
    # One head of a trained MIMO network, as activations know it.

    checksum: str


@dataclass(frozen=True)
class MimoHeads:
    """MIMO, or MIMO-MoLA: a last-layer method on the heads of one network that is trained for it."""

    method: LastLayer
    budget: MimoBudget
    components: int | None = 0
    """It takes none of the suite's networks."""

    @property
    def name(self) -> str:
        """That of the method."""
        return self.method.name

    @property
    def group(self) -> str:
        """That of the method."""
        return self.method.group

    def settings(self) -> dict[str, Any]:
        """What makes it, as plain JSON values."""
        return {**self.method.settings(), "components": self.budget.members, "mimo": self.budget.describe()}

    def fit(self, context: Context) -> Fitted:
        """Train the network, or take it up; then do with its heads what is done with networks."""
        start = time.perf_counter()
        trained = _TrainedMimo(context.workshop, self.budget, context.run)
        trained.mimo  # noqa: B018  (trained now, so that its time is counted)
        seconds = time.perf_counter() - start
        fitted = self.method.fit(replace(context, read=trained.read))
        notes = [*fitted.chosen.get("notes", []), TAKEN_UP]
        return replace(fitted, chosen={**fitted.chosen, "notes": notes}, seconds=seconds + fitted.seconds)


class _TrainedMimo:
    def __init__(self, workshop: Workshop, budget: MimoBudget, run: int) -> None:
        self.workshop, self.budget, self.seed = workshop, budget, workshop.seed(run)

    @cached_property
    def mimo(self) -> Mimo:
        workshop, recipe = self.workshop, self.workshop.suite.recipe
        identity = ({**recipe.describe(), "epochs": self.budget.epochs}, self.budget.describe(), self.seed)
        folder = workshop.folder("mimo", *identity)
        return fit_mimo(workshop.build, workshop.training, recipe, self.budget, self.seed, folder, workshop.device)

    @cached_property
    def heads(self) -> list[_Head]:
        whole = network_checksum(self.mimo, self.workshop.network)
        return [_Head(f"{whole}-{index}") for index in range(self.budget.members)]

    def read(self, name: str) -> Stored:
        """What the heads see of a set, all of the same features."""
        source, activations = self.workshop.sources[name], self.workshop.activations
        activations.compute_together(self.heads, lambda: self.mimo.networks, source)
        return activations.read(self.heads, source)
