"""The trained networks of a suite: a folder of `00.safetensors`, `01.safetensors`, ... trained here or elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mola.distributed import Team
from mola.errors import OptionError, StorageError
from mola.lab.suite import DataOptions, Suite, data_checksum
from mola.lab.training import Labelled, Recipe, TrainingCheckpoint, member_seeds, train
from mola.saving.schema import check, parse
from mola.saving.weights import read_metadata, save_weights

ENDINGS = (".safetensors", ".pt", ".pth", ".th")

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Training:
    """Options of `mola train`."""

    suite: Suite
    count: int
    recipe: Recipe
    network: str | None = None
    """None is the suite's default."""
    seed: int = 0
    """Seed of all networks' seeds; more networks of the same seed begin with the same networks."""
    options: DataOptions = field(default_factory=DataOptions)
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.count < 1:
            raise OptionError(f"expected at least one network to train, got {self.count}.")
        self.suite.builder(self.network)
        if self.suite.training_data is None:
            raise OptionError(
                f"the {self.suite.name} suite does not train networks: provide trained networks with mola bench {self.suite.name} "
                f"--networks DIR."
            )


def train_networks(training: Training, directory: Path, progress: Progress, team: Team | None = None) -> list[Path]:
    """Train missing networks, divided among the processes of a team, and return all files; an interrupted training resumes."""
    directory.mkdir(parents=True, exist_ok=True)
    name, build = training.suite.builder(training.network)
    progress(f"reading {training.suite.title}", 0.0)
    assert training.suite.training_data is not None  # checked by `Training`
    data = training.suite.training_data(training.options, training.recipe)
    images = data_checksum(data.data.inputs, data.data.labels)
    moved = Labelled(data.data.inputs.to(training.device), data.data.labels.to(training.device))
    team = team or Team.single()
    paths = [directory / f"{index:02d}.safetensors" for index in range(training.count)]
    seeds = member_seeds(training.count, training.seed)
    for index in range(team.rank, training.count, team.size):
        path = paths[index]
        identity = {
            "data": training.suite.name,
            "model": name,
            "seed": seeds[index],
            "recipe": training.recipe.describe(),
            "normalisation": training.options.normalisation,
            "images": images,
        }
        if path.exists():
            kept = _identity(path)
            reason = "no training options" if kept is None else _differences(kept, identity)
            if reason:
                raise StorageError(
                    f"{path} is another network ({reason}). Train into another folder (--output), or delete it."
                )
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
            seed=seeds[index],
            prepare=data.prepare,
            checkpoint=checkpoint,
            on_epoch=on_epoch,
        )
        save_weights(network, path, {"identity": json.dumps(identity, sort_keys=True)})
        checkpoint.remove()
    team.collect(None)  # all networks are complete before anybody looks for them
    progress("done", 1.0)
    return paths


def _identity(path: Path) -> dict[str, Any] | None:
    # The options of `mola train` in a file; None if the file comes from elsewhere.
    kept = read_metadata(path).get("identity") if path.suffix == ".safetensors" else None
    if kept is None:
        return None
    try:
        identity = parse(kept, path)
        check(identity, {"recipe": {}}, "identity")
    except (StorageError, ValueError, TypeError) as error:
        raise StorageError(
            f"{path} is damaged: its training options are unreadable ({error}). Train into another folder, or delete it."
        ) from error
    return dict(identity)


def _differences(kept: dict[str, Any], wanted: dict[str, Any]) -> str:
    before, now = ({**one, **one.get("recipe", {})} for one in (kept, wanted))
    return "; ".join(
        f"{name}: {before.get(name)!r} in the file, {now[name]!r} requested"
        for name in now
        if name != "recipe" and before.get(name) != now[name]
    )


def check_networks(paths: Sequence[Path], suite: Suite, network: str, options: DataOptions) -> None:
    """Refuse networks that `mola train` made for another suite, architecture or normalisation."""
    wanted = {"data": suite.name, "model": network, "normalisation": options.normalisation}
    for path in paths:
        reason = _differences(_identity(path) or wanted, wanted)
        if reason:
            raise OptionError(f"{path} was trained with other options ({reason}). Choose these, or other networks.")


def find_networks(directory: Path) -> list[Path]:
    """List the weights files of a folder, sorted by name, without unfinished trainings."""
    found = sorted(path for path in directory.iterdir() if path.suffix in ENDINGS) if directory.is_dir() else []
    if not found:
        raise OptionError(
            f"{directory} holds no trained networks ({', '.join(ENDINGS)}). Train some with mola train (--output {directory}), pass "
            f"--train, or choose their folder with --networks."
        )
    return found
