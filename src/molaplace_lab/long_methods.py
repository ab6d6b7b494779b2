"""Slow methods whose fits can be resumed: SWAG, MultiSWAG, Laplace approximations of whole networks, MIMO and MIMO-MoLA."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import molaplace as mola
from molaplace.errors import collect_warnings
from molaplace.progress import no_progress
from molaplace_lab import swag
from molaplace_lab.activations import Network, fast_inputs, fast_network
from molaplace_lab.activations_file import StoredActivations
from molaplace_lab.checksums import network_checksum
from molaplace_lab.context import Context, Predictor, StoredPrediction
from molaplace_lab.files import read_tensors, write_tensors
from molaplace_lab.methods import RULES, FittedMethod, LastLayerMethod
from molaplace_lab.mimo import Mimo, train_mimo
from molaplace_lab.suite import MimoBudget, SwagBudget, TrainingData
from molaplace_lab.training import Recipe, Shuffled, member_seeds

RESUMED = "the fit time covers only this command, not any earlier training that it resumed."


def _loader(training: TrainingData, batch_size: int, images: int | None = None) -> Shuffled:
    return Shuffled(training.data, batch_size, lambda inputs: fast_inputs(training.prepare(inputs)), images)


def _example(training: TrainingData) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return training.prepare(training.data.inputs[:2])


def fit_swag(
    network: Network, training: TrainingData, budget: SwagBudget, folder: Path | None, device: str = "cpu"
) -> list[nn.Module]:
    """Fit SWAG to a trained network, or resume an interrupted fit, and return the drawn networks.

    The seed is derived from the network, so all runs share the result.
    """
    model = fast_network(network.load().to(device), _example(training))
    draws_path = None if folder is None else folder / "draws.safetensors"
    if draws_path is not None and draws_path.exists():
        return _read_draws(model, draws_path, budget.samples)
    draws = swag.fit_swag(
        model,
        _loader(training, budget.batch_size, budget.images),
        learning_rate=budget.learning_rate,
        epochs=budget.snapshots,
        rank=budget.snapshots,
        samples=budget.samples,
        seed=int(network.checksum, 16) % 2**31,
        checkpoint=None if folder is None else folder / "training.safetensors",
        progress=False,
    )
    if draws_path is not None:
        states = [draw.state_dict() for draw in draws]
        stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
        write_tensors(draws_path, stacked, {})
    return draws


def _read_draws(model: nn.Module, path: Path, samples: int) -> list[nn.Module]:
    tensors, _ = read_tensors(path)
    draws = [copy.deepcopy(model) for _ in range(samples)]
    for index, draw in enumerate(draws):
        draw.load_state_dict({name: stacked[index] for name, stacked in tensors.items()})
    return draws


def fit_mimo(
    build: Callable[[], nn.Module],
    training: TrainingData,
    recipe: Recipe,
    budget: MimoBudget,
    seed: int,
    folder: Path | None,
    device: str = "cpu",
) -> Mimo:
    """Train the MIMO version of an architecture with the suite's recipe, or resume from a checkpoint."""
    example = _example(training)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = build().to(device, example.dtype)
    mimo = Mimo(network, budget.members, example=example, seed=seed)
    fast_network(mimo, example)
    return train_mimo(
        mimo,
        _loader(training, recipe.batch_size),
        epochs=budget.epochs,
        batch_repetition=budget.batch_repetition,
        optimiser=recipe.make_optimiser,
        seed=seed,
        checkpoint=None if folder is None else folder / "training.safetensors",
        progress=False,
    )


@dataclass(frozen=True)
class SwagMixture:
    """SWAG for one network, or MultiSWAG (a mixture of SWAGs) for several networks."""

    name: str
    budget: SwagBudget
    components: int | None = None
    group: str = "main"

    def settings(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return {"weights": "uniform", "swag": asdict(self.budget)}

    def fit(self, context: Context) -> FittedMethod:
        """Fit SWAG for every network, or resume an interrupted fit."""
        start = time.perf_counter()
        predictors: dict[str, list[Predictor]] = {}
        for network in context.networks[: self.components]:
            folder = context.folder("swag", network.checksum, asdict(self.budget))
            draws = fit_swag(network, context.training(), self.budget, folder, context.device)
            predictors[folder.name] = [partial(swag.class_probabilities, draw) for draw in draws]
        return FittedMethod(
            lambda name: context.predictions(name, predictors),
            lambda members, _: StoredPrediction.mean(members).with_scores(len(members) * self.budget.samples),
            {"notes": [RESUMED]},
            time.perf_counter() - start,
        )


@dataclass(frozen=True)
class MimoHeads:
    """A last-layer method applied to the heads of a MIMO network: either MIMO itself or MIMO-MoLA.

    The network is trained specifically for this method.
    """

    method: LastLayerMethod
    budget: MimoBudget
    components: int | None = 0
    """Number of the suite's networks that the method uses: always 0, because it trains a MIMO network of its own."""

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

    def fit(self, context: Context) -> FittedMethod:
        """Train the network or resume its training, and then fit the method to the network's heads."""
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

        def read(name: str) -> StoredActivations:
            activations.compute(heads, [context.sources[name]], no_progress)
            return activations.read(heads, context.sources[name])

        fitted = self.method.fit(replace(context, read=read))
        notes = [*fitted.chosen.get("notes", []), RESUMED]
        return replace(fitted, chosen={**fitted.chosen, "notes": notes}, seconds=seconds + fitted.seconds)


@dataclass(frozen=True)
class WholeNetworks:
    """A mixture of Laplace approximations for all or some of the weights of the run's networks, with linearised predictions."""

    name: str
    structure: str | None = None
    subnetwork: int | None = None
    """Maximum number of weights that the approximation covers; a smaller network is covered completely."""
    components: int | None = None
    group: str = "main"

    def settings(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        covered = "all layers" if self.subnetwork is None else f"{self.subnetwork} weights"
        structure = self.structure or ("kron" if self.subnetwork is None else "full")
        return {"weights": "uniform", "structure": structure, "covers": covered, "link": "probit", "rule": "threshold"}

    def fit(self, context: Context) -> FittedMethod:
        """Fit a posterior on all training images and tune it on the validation images, or load a saved posterior."""
        start, networks = time.perf_counter(), context.networks[: self.components]
        models = [network.load().to(context.device) for network in networks]
        held_out = context.sources["validation"].checksum
        identity = ([network.checksum for network in networks], self.settings(), held_out, context.threshold)
        folder = context.folder("whole", *identity)
        with collect_warnings() as notes:
            if (folder / "posterior.json").exists():
                posterior = mola.whole.load(folder, models)
            else:
                sizes = [
                    sum(weight.numel() for weight in model.parameters() if weight.requires_grad) for model in models
                ]
                posterior = mola.whole.fit(
                    models,
                    context.sources["train"],
                    context.sources["validation"],
                    rule=RULES["threshold"](context.threshold),
                    structure=self.structure,
                    subnetwork=None if self.subnetwork is None else min(self.subnetwork, *sizes),
                    progress=False,
                )
                posterior.save(folder)
        chosen = {"prior_precision": list(posterior.prior_precision), "notes": [*notes, RESUMED]}
        return FittedMethod(
            lambda name: context.predictions(name, {folder.name: [posterior]}),
            lambda members, _: members[0].with_scores(predictors=1),
            chosen,
            time.perf_counter() - start,
        )
