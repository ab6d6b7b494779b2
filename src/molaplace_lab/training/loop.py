"""The training loop for networks, SWAG and MIMO. The same seed gives the same weights, even after interruptions."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves
from tqdm.auto import tqdm

from molaplace.errors import DataError, StorageError
from molaplace.network import Batch, batches
from molaplace.saving.files import DOCUMENT, read_folder, write_folder
from molaplace_lab.members import all_tensors, below, shape_differences
from molaplace_lab.training.recipe import Labelled, Recipe, Shuffled

KIND = "training-checkpoint"


class DivergedError(DataError):
    """Raised when the loss is infinite, NaN or far too large, usually because the learning rate is too high."""


@dataclass(frozen=True)
class TrainingCheckpoint:
    """A folder that contains the state of a training run after its last complete epoch: network, optimiser and other tensors."""

    folder: Path
    identity: Mapping[str, Any]
    """JSON values that identify the training run; a checkpoint with different values is rejected."""

    def save(
        self, epochs: int, network: nn.Module, optimiser: Optimizer, steps: int, more: Mapping[str, Tensor]
    ) -> None:
        """Save the state after an epoch. Even if saving is interrupted, the folder contains a complete state."""
        tensors = {f"network.{name}": tensor for name, tensor in all_tensors(network).items()}
        for index, state in optimiser.state_dict()["state"].items():
            known = {name: value for name, value in state.items() if value is not None}
            tensors |= {f"optimiser.{index}.{name}": torch.as_tensor(value) for name, value in known.items()}
        tensors |= {f"more.{name}": tensor for name, tensor in more.items()}
        document = {"kind": KIND, "epochs": epochs, "steps": steps, "identity": dict(self.identity)}
        write_folder(self.folder, document, tensors)

    def restore(
        self, epochs: int, network: nn.Module, optimiser: Optimizer, schedule: LRScheduler | None
    ) -> tuple[int, dict[str, Tensor]]:
        """Load the state into a new network, optimiser and schedule; return the number of completed epochs and the other tensors.

        Raises:
            StorageError: the folder is damaged, belongs to another training run, or contains more than `epochs` epochs.
        """
        if not (self.folder / DOCUMENT).exists():
            return 0, {}
        try:
            document, tensors = read_folder(self.folder, KIND, {"epochs": int, "steps": int, "identity": {}})
        except StorageError as error:
            raise StorageError(f"{error} To train from scratch, delete this folder or choose another one.") from error
        own, kept = all_tensors(network), below(tensors, "network.")
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        identity = json.loads(json.dumps(self.identity))
        if document["identity"] != identity or shape_differences(kept, shapes):
            raise StorageError(
                f"{self.folder} is the checkpoint of another training run or another network: expected {identity}, got "
                f"{document['identity']}. Delete it, or use another folder."
            )
        if document["epochs"] > epochs:
            raise StorageError(
                f"{self.folder} contains {document['epochs']} epochs, which is more than the {epochs} requested. Request at least as "
                f"many epochs, or use another folder."
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(kept[name])
        if schedule is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns if the schedule is stepped before the optimiser
                for _ in range(document["steps"]):
                    schedule.step()
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in sorted(
            below(tensors, "optimiser.").items()
        ):  # sort, because files do not preserve the order
            index, key = name.split(".", 1)
            state.setdefault(int(index), {})[key] = tensor
        optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
        return document["epochs"], below(tensors, "more.")

    def remove(self) -> None:
        """Delete the checkpoint after training has finished."""
        shutil.rmtree(self.folder, ignore_errors=True)


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
        done, found = checkpoint.restore(epochs, network, optimiser, schedule)
        if done:
            resume(done, found)
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
    cards = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    with torch.random.fork_rng(devices=cards):
        # Seed the devices one by one, since torch.manual_seed would also seed devices whose state is not restored.
        torch.default_generator.manual_seed(seed)
        for card in cards:
            with torch.cuda.device(card):
                torch.cuda.manual_seed(seed)
        yield


def train_epoch(
    network: nn.Module,
    loader: Iterable[Any],
    optimiser: Optimizer,
    loss_of: Callable[[Batch, str], tuple[Tensor, float]],
    where: str,
    *,
    schedule: LRScheduler | None = None,
    seed: int | None = None,
) -> None:
    """Take one optimiser step for every batch from a loader.

    `loss_of` takes a batch and its name, which appears in error messages. It returns the loss of the batch, and the mean loss above
    which training is considered to have diverged. The seed, if given, determines shuffling, augmentation and dropout; otherwise,
    torch's current random state does.
    """
    losses, largest = [], math.inf
    with nullcontext() if seed is None else seeded(network, seed), torch.enable_grad():
        network.train()
        for index, batch in enumerate(batches(loader, "training loader")):
            place = f"batch {index} of the training loader"
            optimiser.zero_grad()
            loss, largest = loss_of(batch, place)
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):  # stop before a step that would corrupt the weights
                if any(isinstance(x, Tensor) and not bool(torch.isfinite(x).all()) for x in tree_leaves(batch.inputs)):
                    raise DataError(
                        "expected finite inputs, got NaN or infinite values. Remove or repair these inputs.",
                        place=place,
                    )
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
    data: Labelled,
    recipe: Recipe,
    *,
    seed: int,
    prepare: Callable[[Tensor], Tensor] = lambda inputs: inputs,
    on_epoch: Callable[[int], None] = lambda epoch: None,
    checkpoint: TrainingCheckpoint | None = None,
) -> nn.Module:
    """Build a network, train it with the cross-entropy loss, and return it in evaluation mode.

    Torch's global random state is restored afterwards. The seed determines the initial weights, the order of the data, dropout and
    augmentation. `prepare` turns a batch of stored inputs into network inputs and may draw from torch's random state. The network is
    moved to the device of these inputs and converted to their precision. `on_epoch` is called after every epoch with the number of
    completed epochs.
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
        network = network.to(example.device, example.dtype)
        optimiser = recipe.make_optimiser(network.parameters())
        schedule = recipe.make_schedule(optimiser, len(data))
        loader = Shuffled(data, recipe.batch_size, prepare)

        def state() -> dict[str, Tensor]:
            return {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state(example.device)} if cuda else {})

        def resume(done: int, kept: dict[str, Tensor]) -> None:
            torch.set_rng_state(kept["cpu"])
            if cuda:
                torch.cuda.set_rng_state(kept["cuda"], example.device)

        def loss_of(batch: Batch, place: str) -> tuple[Tensor, float]:
            assert batch.labels is not None
            return functional.cross_entropy(network(batch.inputs), batch.labels), math.inf

        options: dict[str, Any] = {"state": state, "resume": resume, "on_epoch": on_epoch}
        for epoch in remaining_epochs(checkpoint, recipe.epochs, network, optimiser, schedule, **options):
            where = f"epoch {epoch + 1} of {recipe.epochs}"
            train_epoch(network, loader, optimiser, loss_of, where, schedule=schedule)
    return network.eval()


def train_ensemble(
    build: Callable[[], nn.Module],
    data: Labelled,
    recipe: Recipe,
    *,
    members: int,
    seed: int,
    on_epoch: Callable[[int, int], None] = lambda member, epoch: None,
) -> list[nn.Module]:
    """Train a deep ensemble of `members` networks that differ only in their seeds; see `train`.

    `on_epoch` is called after every epoch with the member's index and its number of completed epochs.
    """
    return [
        train(build, data, recipe, seed=own, on_epoch=partial(on_epoch, member))
        for member, own in enumerate(member_seeds(members, seed))
    ]
