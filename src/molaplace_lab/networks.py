"""The trained networks of a suite, from a folder or listed individually, and training, which writes a folder of networks.

A folder contains `00.safetensors`, `01.safetensors`, ..., written by the command `train` or another program. Networks of user functions
are listed individually: `package.module:function` stands for the function's return value, with its own weights, and
`package.module:function=FILE` for the same network with weights from a file.

Nothing is downloaded. The networks in a mixture may expect images of different sizes. All networks receive the same images, with pixel
values from 0 to 1. A user's function must therefore return a network that resizes and normalises its images itself, such as a
`mola.network.Resized`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from molaplace.demo import LabelledData
from molaplace.distributed import Team
from molaplace.errors import OptionError, StorageError
from molaplace.imported import import_builder
from molaplace.progress import Progress
from molaplace.saving.weights import read_metadata, save_weights
from molaplace_lab.activations import Network
from molaplace_lab.checksums import data_checksum, network_checksum
from molaplace_lab.suite import DataOptions, Suite
from molaplace_lab.training import Recipe, TrainingCheckpoint, member_seeds, train

ENDINGS = (".safetensors", ".pt", ".pth", ".th")


@dataclass(frozen=True)
class Training:
    """Options for `python -m molaplace_lab train`."""

    suite: Suite
    count: int
    recipe: Recipe
    network: str | None = None
    """Architecture of the networks; the suite's default if None."""
    seed: int = 0
    """Seed from which the networks' seeds are drawn; training more networks leaves the first ones unchanged."""
    options: DataOptions = field(default_factory=DataOptions)
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.suite.builder(self.network)
        if self.suite.training_data is None:
            raise OptionError(
                f"the {self.suite.name} suite does not train networks. Provide trained networks: "
                f"python -m molaplace_lab bench {self.suite.name} --networks DIR."
            )


def train_networks(training: Training, directory: Path, progress: Progress, team: Team | None = None) -> list[Path]:
    """Train the missing networks, dividing them among the processes of a team, and return the paths of all networks.

    Interrupted training resumes from its checkpoint.
    """
    directory.mkdir(parents=True, exist_ok=True)
    name, build = training.suite.builder(training.network)
    progress(f"reading {training.suite.title}", 0.0)
    assert training.suite.training_data is not None  # checked by `Training`
    data = training.suite.training_data(training.options, training.recipe)
    images = data_checksum(data.data.inputs, data.data.labels)
    labelled = LabelledData(data.data.inputs.to(training.device), data.data.labels.to(training.device))
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
            trained_with = _identity(path)
            reason = "no training options" if trained_with is None else _differences(trained_with, identity)
            if reason:
                raise StorageError(
                    f"{path} was trained with other options ({reason}). Choose another folder (--output), or delete this file."
                )
            continue

        def on_epoch(epoch: int, index: int = index) -> None:
            share = epoch / training.recipe.epochs
            doing = f"network {index + 1} of {training.count}, epoch {epoch} of {training.recipe.epochs}"
            progress(doing, (index + share) / training.count)

        checkpoint = TrainingCheckpoint(directory / f"{index:02d}.training", identity)
        options: dict[str, Any] = {"prepare": data.prepare, "loader": data.loader, "checkpoint": checkpoint}
        network = train(build, labelled, training.recipe, seed=seeds[index], on_epoch=on_epoch, **options)
        facts = {"identity": identity, **data.describe(network)}
        save_weights(network, path, {name: json.dumps(value, sort_keys=True) for name, value in facts.items()})
        checkpoint.remove()
    team.collect(None)  # wait until all networks are complete
    progress("done", 1.0)
    return paths


def _identity(path: Path) -> dict[str, Any] | None:
    # Return the `python -m molaplace_lab train` options stored in a file, or None if another program wrote the file.
    text = read_metadata(path).get("identity") if path.suffix == ".safetensors" else None
    return None if text is None else json.loads(text)


def _differences(stored: dict[str, Any], wanted: dict[str, Any]) -> str:
    before, now = ({**options, **options.get("recipe", {})} for options in (stored, wanted))
    return "; ".join(
        f"{name}: {before.get(name)!r} in the file, {now[name]!r} requested"
        for name in now
        if name != "recipe" and before.get(name) != now[name]
    )


def check_networks(paths: Sequence[Path], suite: Suite, network: str, options: DataOptions) -> None:
    """Raise an error if the command `train` trained a network for another suite or architecture, or with another normalisation."""
    wanted = {"data": suite.name, "model": network, "normalisation": options.normalisation}
    for path in paths:
        reason = _differences(_identity(path) or wanted, wanted)
        if reason:
            raise OptionError(
                f"{path} was trained with other options ({reason}). Use the options stored in the file, or choose other networks."
            )


def find_networks(directory: Path) -> list[Path]:
    """List the weight files in a folder, sorted by name and excluding unfinished networks."""
    paths = sorted(path for path in directory.iterdir() if path.suffix in ENDINGS) if directory.is_dir() else []
    if not paths:
        raise OptionError(
            f"{directory} contains no trained networks ({', '.join(ENDINGS)}). Train networks "
            f"(python -m molaplace_lab train --output {directory}), pass --train, or choose another folder with --networks."
        )
    return paths


# --- networks listed individually


def are_names(text: str) -> bool:
    """Return True if the text lists individual networks by name, and False if it is the path of a folder."""
    return ":" in text and not Path(text).expanduser().is_dir()


def open_named(text: str) -> list[Network]:
    """Open a comma-separated list of networks (see the module docstring)."""
    networks = []
    for entry in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, file = entry.partition("=")
        path = Path(file).expanduser() if file else None
        build = import_builder(name)
        networks.append(Network(path, build, network_checksum(Network(path, build, "").load(), name), entry))
    return networks
