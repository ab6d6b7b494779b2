"""The trained networks of a suite: a folder of `00.safetensors`, `01.safetensors`, ... made here or brought along."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mola.distributed import Team
from mola.errors import OptionError, StorageError
from mola.lab.suite import DataOptions, Suite, TrainingData, data_checksum
from mola.lab.training import Labelled, Recipe, TrainingCheckpoint, member_seeds, train
from mola.saving.schema import check, parse
from mola.saving.weights import read_metadata, save_weights

ENDINGS = (".safetensors", ".pt", ".pth", ".th")

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Training:
    """Which networks are to be trained, and how."""

    suite: Suite
    count: int
    recipe: Recipe
    network: str | None = None
    """None is the suite's default."""
    seed: int = 0
    """Of all the networks' seeds; more networks of the same seed begin with the same ones."""
    options: DataOptions = field(default_factory=DataOptions)
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.count < 1:
            raise OptionError(f"expected at least one network to train, got {self.count}.")
        self.suite.builder(self.network)

    def read_data(self) -> TrainingData:
        """What the networks are trained on."""
        if self.suite.training_data is None:
            raise OptionError(
                f"the {self.suite.name} suite does not train networks: bring trained ones with mola bench {self.suite.name} "
                f"--networks DIR."
            )
        return self.suite.training_data(self.options, self.recipe)


def train_networks(training: Training, directory: Path, progress: Progress, team: Team | None = None) -> list[Path]:
    """Train the networks that are not there yet; an interrupted training goes on where it stopped.

    Args:
        training: which, and how.
        directory: where to keep them.
        progress: told what is being done, and which share is done.
        team: the processes that divide the networks among them. None is this one alone.

    Returns:
        The files, in order.
    """
    directory.mkdir(parents=True, exist_ok=True)
    name, build = training.suite.builder(training.network)
    progress(f"reading {training.suite.title}", 0.0)
    data = training.read_data()
    images = data_checksum(data.data.inputs, data.data.labels)
    moved = Labelled(data.data.inputs.to(training.device), data.data.labels.to(training.device))
    together = Team.single() if team is None else team
    paths = [directory / f"{index:02d}.safetensors" for index in range(training.count)]
    for index, (path, seed) in enumerate(zip(paths, member_seeds(training.count, training.seed), strict=True)):
        if index % together.size != together.rank:
            continue
        identity = {
            "data": training.suite.name,
            "model": name,
            "seed": seed,
            "recipe": training.recipe.describe(),
            "normalisation": training.options.normalisation,
            "images": images,
        }
        if path.exists():
            _check_identity(path, identity)
            continue

        def on_epoch(epoch: int, index: int = index) -> None:
            share = epoch / training.recipe.epochs
            doing = f"network {index + 1} of {training.count}, epoch {epoch} of {training.recipe.epochs}"
            progress(doing, (index + share) / training.count)

        checkpoint = TrainingCheckpoint(directory / f"{index:02d}.training", "training-checkpoint", identity)
        network = train(
            build,
            moved,
            training.recipe,
            seed=seed,
            prepare=data.prepare,
            checkpoint=checkpoint,
            on_epoch=on_epoch,
        )
        save_weights(network, path, {"identity": json.dumps(identity, sort_keys=True)})
        checkpoint.remove()
    together.collect(None)  # all networks are written before anybody looks for them
    progress("done", 1.0)
    return paths


def _check_identity(path: Path, identity: dict[str, Any]) -> None:
    kept = read_metadata(path).get("identity")
    if kept is None:
        raise StorageError(f"{path} does not say how it was trained. Train into another folder, or delete it.")
    before, now = _flat(_parsed(kept, path)), _flat(identity)
    if before != now:
        changed = [
            f"{name}: {before.get(name)} there, {now.get(name)} asked" for name in now if before.get(name) != now[name]
        ]
        reason = "; ".join(changed)
        raise StorageError(
            f"{path} is another network than asked for ({reason}). Train into another folder (--output), or delete it."
        )


def _parsed(kept: str, path: Path) -> dict[str, Any]:
    try:
        identity = parse(kept, path)
        check(identity, {"recipe": {}} if isinstance(identity, dict) and "recipe" in identity else {}, "identity")
    except (StorageError, ValueError, TypeError) as error:
        raise StorageError(
            f"{path} is damaged where it says how it was trained ({error}). Train into another folder, or delete it."
        ) from error
    return dict(identity)


def _flat(identity: dict[str, Any]) -> dict[str, Any]:
    return {**{name: value for name, value in identity.items() if name != "recipe"}, **identity.get("recipe", {})}


def check_networks(paths: Sequence[Path], suite: Suite, network: str, options: DataOptions) -> None:
    """Refuse networks that `mola train` made for something else; those made elsewhere do not say what they are for."""
    for path in paths:
        kept = read_metadata(path).get("identity") if path.suffix == ".safetensors" else None
        if kept is None:
            continue
        identity = _parsed(kept, path)
        expected = {"data": suite.name, "model": network, "normalisation": options.normalisation}
        for name, value in expected.items():
            if identity.get(name) != value:
                raise OptionError(
                    f"{path} was trained with {name} {identity.get(name)!r}; this run has {value!r}. Choose the options that "
                    f"the networks were trained with, or other networks."
                )


def find_networks(directory: Path) -> list[Path]:
    """The weights files of a folder, in the order of their names; trainings under way are left out."""
    found = sorted(path for path in directory.iterdir() if path.suffix in ENDINGS) if directory.is_dir() else []
    if not found:
        raise OptionError(
            f"{directory} holds no trained networks ({', '.join(ENDINGS)}). Train some with mola train (--output {directory}), or "
            f"pass --train, or name their folder with --networks."
        )
    return found
