"""Training of networks, of SWAG and of MIMO: recipes, data in random order, checkpoints and the loop over epochs.

The same seed gives the same weights, even after interruptions.
"""

from __future__ import annotations

import json
import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from tqdm.auto import tqdm

from molaplace import perceptrons
from molaplace.demo import LabelledData
from molaplace.errors import DataError, OptionError, StorageError
from molaplace.options import one_of
from molaplace_lab.files import read_tensors, write_tensors

Loader = Iterable[tuple[Tensor, Tensor]]
"""Batches of inputs and labels, which can be read several times."""

OPTIMISERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
}
"""Optimisers: Adam with decoupled weight decay, Adam with weight decay in the gradient, and SGD with Nesterov momentum 0.9."""


@dataclass(frozen=True)
class Shuffled:
    """A loader that yields training data in a new random order on every pass; the order is drawn from torch's random state."""

    data: LabelledData
    batch_size: int
    prepare: Callable[[Tensor], Tensor] = lambda inputs: inputs
    """Function that turns a batch of stored inputs into network inputs."""
    images: int | None = None
    """Number of examples in each pass; all examples if None."""

    def __len__(self) -> int:
        return math.ceil(min(len(self.data), self.images or len(self.data)) / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.split(torch.randperm(len(self.data))[: self.images], self.batch_size):
            yield self.prepare(self.data.inputs[rows]), self.data.labels[rows]


@dataclass(frozen=True)
class Recipe:
    """An optimiser and its settings. The learning rate falls to 0 along a half cosine, batch by batch."""

    epochs: int
    batch_size: int = 64
    learning_rate: float = 3e-3
    """Initial learning rate."""
    weight_decay: float = 1e-2
    optimiser: str = "adamw"
    """Name of the optimiser, one of `OPTIMISERS`."""
    augment: bool = False
    """True to flip training images at random and shift them by up to 4 pixels."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "learning_rate"):
            if not getattr(self, name) > 0:
                raise OptionError(f"must be above 0, got {getattr(self, name):g}.", argument=name)
        if not self.weight_decay >= 0:
            raise OptionError(f"must be at least 0, got {self.weight_decay:g}.", argument="weight_decay")
        one_of(self.optimiser, OPTIMISERS, "optimiser")

    def describe(self) -> dict[str, Any]:
        """Return the recipe as JSON values, including the name of the schedule, to store in records and with trained networks."""
        return {**asdict(self), "schedule": "cosine", "drops": []}

    def make_optimiser(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Create the optimiser for the given parameters."""
        return OPTIMISERS[self.optimiser](parameters, lr=self.learning_rate, weight_decay=self.weight_decay)

    def make_schedule(self, optimiser: Optimizer, count: int) -> LRScheduler:
        """Create the learning-rate schedule for `count` training examples; it must be stepped after each batch."""
        return CosineAnnealingLR(optimiser, self.epochs * math.ceil(count / self.batch_size))


RECIPES: dict[str, Recipe] = {
    "mnist": Recipe(epochs=100, batch_size=128, learning_rate=1e-3, weight_decay=5e-4, optimiser="adam"),
    "cifar10": Recipe(epochs=100, batch_size=128, learning_rate=0.1, weight_decay=5e-4, optimiser="sgd", augment=True),
}
"""The paper's recipes, keyed by data set."""


class DivergedError(DataError):
    """Raised when the loss is infinite, NaN or far too large, usually because the learning rate is too high."""


def derived_seeds(seed: int, purpose: int, count: int) -> list[int]:
    """Derive `count` seeds from one seed. A larger `count` only appends seeds; different purposes give independent seeds."""
    generator = torch.Generator("cpu").manual_seed(seed)
    base = int(torch.randint(2**62, (purpose + 1,), generator=generator)[-1])
    return torch.randint(2**62, (count,), generator=generator.manual_seed(base)).tolist()


def _network_tensors(network: nn.Module) -> dict[str, Tensor]:
    # All trained parameters and all buffers, including buffers that a state dict omits.
    trained = [(name, parameter) for name, parameter in network.named_parameters() if parameter.requires_grad]
    tensors = [*trained, *network.named_buffers()]
    return {f"network.{name}": tensor.detach() for name, tensor in tensors}


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class TrainingCheckpoint:
    """A file that contains the state of a training run after its last complete epoch: network, optimiser and other tensors."""

    path: Path
    identity: Mapping[str, Any]
    """JSON values that identify the training run; a checkpoint with different values is rejected."""

    def save(
        self, epochs: int, network: nn.Module, optimiser: Optimizer, steps: int, more: Mapping[str, Tensor]
    ) -> None:
        """Save the state after an epoch. Even if saving is interrupted, the file contains a complete state."""
        tensors = _network_tensors(network)
        for index, state in optimiser.state_dict()["state"].items():
            known = {name: value for name, value in state.items() if value is not None}
            tensors |= {f"optimiser.{index}.{name}": torch.as_tensor(value) for name, value in known.items()}
        tensors |= {f"more.{name}": tensor for name, tensor in more.items()}
        # Copies, because a safetensors file cannot hold two names of the same memory.
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        write_tensors(self.path, tensors, {"epochs": epochs, "steps": steps, "identity": dict(self.identity)})

    def restore(
        self, epochs: int, network: nn.Module, optimiser: Optimizer, schedule: LRScheduler | None
    ) -> tuple[int, dict[str, Tensor]]:
        """Load the state into a new network, optimiser and schedule; return the number of completed epochs and the other tensors.

        Raises:
            StorageError: the file is damaged, belongs to another training run, or contains more than `epochs` epochs.
        """
        if not self.path.exists():
            return 0, {}
        tensors, document = read_tensors(self.path)
        targets = _network_tensors(network)
        shapes = {name: tensor.shape for name, tensor in targets.items()}
        saved_shapes = {name: tensor.shape for name, tensor in tensors.items() if name.startswith("network.")}
        if document["identity"] != json.loads(json.dumps(self.identity)) or saved_shapes != shapes:
            raise StorageError(
                f"{self.path} is the checkpoint of another training run or another network: expected {self.identity}, got "
                f"{document['identity']}. Delete it, or use another file."
            )
        if document["epochs"] > epochs:
            raise StorageError(
                f"{self.path} contains {document['epochs']} epochs, which is more than the {epochs} requested. Request at least as "
                f"many epochs, or use another file."
            )
        with torch.no_grad():
            for name, tensor in targets.items():
                tensor.copy_(tensors[name])
        if schedule is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns if the schedule is stepped before the optimiser
                for _ in range(document["steps"]):
                    schedule.step()
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in sorted(_part(tensors, "optimiser.").items()):  # files do not preserve the order
            index, key = name.split(".", 1)
            state.setdefault(int(index), {})[key] = tensor
        optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
        return document["epochs"], _part(tensors, "more.")

    def remove(self) -> None:
        """Delete the checkpoint after training has finished."""
        self.path.unlink(missing_ok=True)


def remaining_epochs(
    checkpoint: TrainingCheckpoint | None,
    epochs: int,
    network: nn.Module,
    optimiser: Optimizer,
    schedule: LRScheduler | None = None,
    *,
    state: Callable[[], Mapping[str, Tensor]] = dict,
    resume: Callable[[int, dict[str, Tensor]], None] = lambda done, state: None,
    on_epoch: Callable[[int], None] = lambda epoch: None,
    progress: str = "",
) -> Iterator[int]:
    """Yield the indices of the remaining epochs, counted from 0, and save the state after each epoch.

    `state` returns additional tensors to save with the network and the optimiser, and `resume` restores them. `on_epoch` is called
    with the number of completed epochs, after every epoch and once when training resumes.
    """
    done = 0
    if checkpoint is not None:
        done, tensors = checkpoint.restore(epochs, network, optimiser, schedule)
        if done:
            resume(done, tensors)
            on_epoch(done)
    bar = {"desc": progress, "initial": done, "total": epochs, "disable": None if progress else True, "leave": False}
    for epoch in tqdm(range(done, epochs), **bar):
        yield epoch
        if checkpoint is not None:
            checkpoint.save(epoch + 1, network, optimiser, 0 if schedule is None else schedule.last_epoch, state())
        on_epoch(epoch + 1)


@contextmanager
def seeded(network: nn.Module, seed: int) -> Iterator[None]:
    """Seed torch's random state on the CPU and on the network's devices, and restore the previous state on exit."""
    devices = {tensor.device for tensor in network.parameters()}
    gpu_indices = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    with torch.random.fork_rng(devices=gpu_indices):
        # Seed the devices one by one, since torch.manual_seed would also seed devices whose state is not restored.
        torch.default_generator.manual_seed(seed)
        for gpu_index in gpu_indices:
            with torch.cuda.device(gpu_index):
                torch.cuda.manual_seed(seed)
        yield


def train_epoch(
    network: nn.Module,
    loader: Loader,
    optimiser: Optimizer,
    loss_of: Callable[[Tensor, Tensor], tuple[Tensor, float]],
    where: str,
    *,
    schedule: LRScheduler | None = None,
    seed: int | None = None,
) -> None:
    """Take one optimiser step for every batch from a loader.

    `loss_of` takes a batch of inputs and labels. It returns the loss of the batch, and the mean loss above which training is
    considered to have diverged. The seed, if given, determines shuffling, augmentation and dropout; otherwise, torch's current
    random state does. Error messages refer to the epoch as `where`.
    """
    losses: list[float] = []
    largest = math.inf
    with nullcontext() if seed is None else seeded(network, seed), torch.enable_grad():
        network.train()
        for inputs, labels in loader:
            optimiser.zero_grad()
            loss, largest = loss_of(inputs, labels)
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):  # stop before a step that would corrupt the weights
                if not bool(torch.isfinite(inputs).all()):
                    raise DataError(f"{where}: expected finite inputs, got NaN or infinite values.")
                break
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            if schedule is not None:
                schedule.step()
    mean = statistics.fmean(losses)
    if not mean <= largest or math.isinf(mean):
        raise DivergedError(
            f"training diverged in {where} at learning rate {optimiser.param_groups[0]['lr']:g}: the mean loss is {mean:.4g}. "
            f"Use a lower learning rate. If this does not help, check that the network is suitable for these data."
        )


def member_seeds(members: int, seed: int) -> list[int]:
    """Draw a seed for each network of an ensemble; the seeds of a larger ensemble begin with those of a smaller one.

    The seeds are drawn at random, so that ensembles with consecutive seeds share no member.
    """
    return torch.randint(2**31, (members,), generator=torch.Generator().manual_seed(seed)).tolist()


def train(
    build: Callable[[], nn.Module],
    data: LabelledData,
    recipe: Recipe,
    *,
    seed: int,
    prepare: Callable[[Tensor], Tensor] = lambda inputs: inputs,
    loader: Callable[[LabelledData, int, Callable[[Tensor], Tensor]], Loader] = Shuffled,
    on_epoch: Callable[[int], None] = lambda epoch: None,
    checkpoint: TrainingCheckpoint | None = None,
) -> nn.Module:
    """Build a network, train it with the cross-entropy loss, and return it in evaluation mode.

    Torch's global random state is restored afterwards. The seed determines the initial weights, the order of the data, dropout and
    augmentation. `prepare` turns a batch of stored inputs into network inputs and may draw from torch's random state. The network is
    moved to the device of these inputs and, unless they are integers, converted to their precision. `loader` divides the data into
    the batches of an epoch. `on_epoch` is called after every epoch with the number of completed epochs.
    """
    if not len(data):
        raise DataError("expected at least one row of training data, got none.")
    cuda = data.inputs.device.type == "cuda"
    with torch.random.fork_rng(devices=[data.inputs.device.index or 0] if cuda else []):
        torch.manual_seed(seed)
        network = build()
        random = torch.get_rng_state()
        example = prepare(data.inputs[:1])
        torch.set_rng_state(random)
        network = network.to(example.device, example.dtype if example.is_floating_point() else None)
        optimiser = recipe.make_optimiser(network.parameters())
        schedule = recipe.make_schedule(optimiser, len(data))
        batches = loader(data, recipe.batch_size, prepare)

        def state() -> dict[str, Tensor]:
            return {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state(example.device)} if cuda else {})

        def resume(done: int, tensors: dict[str, Tensor]) -> None:
            torch.set_rng_state(tensors["cpu"])
            if cuda:
                torch.cuda.set_rng_state(tensors["cuda"], example.device)

        def loss_of(inputs: Tensor, labels: Tensor) -> tuple[Tensor, float]:
            return functional.cross_entropy(network(inputs), labels), math.inf

        options: dict[str, Any] = {"state": state, "resume": resume, "on_epoch": on_epoch}
        for epoch in remaining_epochs(checkpoint, recipe.epochs, network, optimiser, schedule, **options):
            where = f"epoch {epoch + 1} of {recipe.epochs}"
            train_epoch(network, batches, optimiser, loss_of, where, schedule=schedule)
    return network.eval()


LOSSES: dict[str, perceptrons.Loss] = {
    "cross-entropy": partial(functional.cross_entropy, reduction="none"),
    "squared-error": lambda outputs, targets: 0.5 * (outputs - targets).square().sum(1),
}
"""Loss functions, keyed by name: each maps outputs and labels to the losses (n,) of the individual examples. Up to a constant, half
the squared error is the negative log-likelihood under Gaussian noise with variance 1."""


def train_mlps(
    inputs: int,
    hidden: Sequence[int],
    classes: int,
    data: LabelledData,
    recipe: Recipe,
    *,
    members: int,
    seed: int,
    loss: str = "cross-entropy",
) -> list[nn.Sequential]:
    """Train `members` perceptrons in parallel, with different seeds; `loss` is the name of one of `LOSSES`."""
    return perceptrons.train_mlps(
        data.inputs.reshape(len(data), inputs),
        data.labels,
        classes,
        LOSSES[one_of(loss, LOSSES, "loss")],
        hidden=hidden,
        members=members,
        seed=seed,
        epochs=recipe.epochs,
        batch_size=recipe.batch_size,
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        optimiser=OPTIMISERS[recipe.optimiser],
    )
