"""Methods that train: SWAG and MultiSWAG from a suite's networks, MIMO and MIMO-MoLA from its architecture. Trainings resume."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mola.baselines.mimo import Mimo
from mola.baselines.swag import Swag
from mola.compare.activations_file import Stored
from mola.compare.methods import Fitted, LastLayer
from mola.lab.activations import Network, fast_inputs, fast_network, network_checksum
from mola.lab.context import Context, Predictor, StoredPrediction
from mola.lab.suite import MimoBudget, SwagBudget, TrainingData
from mola.lab.training import Recipe, member_seeds, train_mimo
from mola.lab.training import fit_swag as fit_swag_path
from mola.likelihoods import CATEGORICAL
from mola.network import call, evaluating

RESUMED = "fit time is of this command alone: what had been trained before was taken up."


class Shuffled:
    """Training data as a loader: a new order every time, drawn from torch's random state; all images, or some of them in each pass."""

    def __init__(self, training: TrainingData, batch_size: int, images: int | None = None) -> None:
        self.training, self.batch_size = training, batch_size
        self.count = len(training.data) if images is None else min(images, len(training.data))

    def __len__(self) -> int:
        return math.ceil(self.count / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        data = self.training.data
        for rows in torch.split(torch.randperm(len(data))[: self.count], self.batch_size):
            yield fast_inputs(self.training.prepare(data.inputs[rows])), data.labels[rows]


def _example(training: TrainingData) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return training.prepare(training.data.inputs[:2])


def fit_swag(
    network: Network, training: TrainingData, budget: SwagBudget, folder: Path | None, device: str = "cpu"
) -> Swag:
    """Fit SWAG from a trained network, resuming a checkpoint; the seed follows from the network, so that all runs share the result."""
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
    """Train the MIMO form of an architecture by the suite's recipe, resuming a checkpoint."""
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


@dataclass(frozen=True)
class SwagMixture:
    """SWAG of one network, or the mixture of the SWAGs of several."""

    name: str
    budget: SwagBudget
    components: int | None = None
    group: str = "main"

    def settings(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return {"weights": "uniform", "swag": asdict(self.budget)}

    def fit(self, context: Context) -> Fitted:
        """Fit SWAG from every network, or resume."""
        start, swags = time.perf_counter(), dict[str, Swag]()
        for network in context.networks[: self.components]:
            folder = context.folder("swag", network.checksum, asdict(self.budget))
            swags[folder.name] = fit_swag(network, context.training(), self.budget, folder, context.device)
        predictors = {key: partial(_predictors, swag) for key, swag in swags.items()}
        return Fitted(
            lambda name: context.predictions(name, predictors),
            lambda found, scores: StoredPrediction.mean(found).answer(len(found) * self.budget.samples),
            {"notes": [RESUMED]},
            time.perf_counter() - start,
        )


def drawn_networks(swag: Swag) -> Iterator[nn.Module]:
    """Yield a network with the weights of each draw; it is the same object every time, so use it before the next draw."""
    network = copy.deepcopy(swag.network)
    tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    for index in range(swag.samples):
        with torch.no_grad():
            for name, drawn in swag.sample(index).items():
                tensors[name].copy_(drawn)
        yield network


def _predictors(swag: Swag) -> Iterator[Predictor]:
    return (partial(_probabilities, network) for network in drawn_networks(swag))


def _probabilities(network: nn.Module, inputs: Tensor) -> Tensor:
    with evaluating(network):
        return CATEGORICAL.probabilities(call(network, inputs))


@dataclass(frozen=True)
class MimoHeads:
    """MIMO, or MIMO-MoLA: a last-layer method on the heads of a MIMO network, which is trained for it."""

    method: LastLayer
    budget: MimoBudget
    components: int | None = 0
    """None of the suite's networks are used."""

    @property
    def name(self) -> str:
        """Name of the method."""
        return self.method.name

    @property
    def group(self) -> str:
        """Group of the method."""
        return self.method.group

    def settings(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return {**self.method.settings(), "components": self.budget.members, "mimo": asdict(self.budget)}

    def fit(self, context: Context) -> Fitted:
        """Train the network, or resume; then fit the method on its heads."""
        start, recipe, activations = time.perf_counter(), context.suite.recipe, context.activations
        seed = member_seeds(context.run + 1, 0)[context.run]
        identity = ({**recipe.describe(), "epochs": self.budget.epochs}, asdict(self.budget), seed)
        mimo = fit_mimo(
            context.networks[0].build,
            context.training(),
            recipe,
            self.budget,
            seed,
            context.folder("mimo", *identity),
            context.device,
        )
        seconds = time.perf_counter() - start
        key = network_checksum(mimo, context.network)
        heads = [Network(None, partial(mimo.networks.__getitem__, k), f"{key}-{k}") for k in range(self.budget.members)]

        def read(name: str) -> Stored:
            activations.compute(heads, [context.sources[name]], lambda doing, done: None)
            return activations.read(heads, context.sources[name])

        fitted = self.method.fit(replace(context, read=read))
        notes = [*fitted.chosen.get("notes", []), RESUMED]
        return replace(fitted, chosen={**fitted.chosen, "notes": notes}, seconds=seconds + fitted.seconds)
