"""The trained networks of a suite, from a folder or listed individually, and training, which writes a folder of networks.

A folder contains `00.safetensors`, `01.safetensors`, ..., written by the command `train` or another program. Architectures from timm
and torchvision, and user functions, are listed individually by name:

| name | network |
|---|---|
| `package.module:function` | the function's return value, with its own weights |
| `package.module:function=FILE` | the function's return value, with weights from a file |
| `timm:NAME=FILE` | an architecture from timm, with weights from a file |
| `torchvision:NAME=FILE` | an architecture from torchvision, with weights from a file |

Nothing is downloaded. The networks in a mixture may expect images of different sizes. All networks receive the same images, with pixel
values from 0 to 1. Networks from timm and torchvision resize and normalise images as these libraries do. A user's function must return
a network that resizes and normalises its images itself, such as a `mola.network.Resized`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from molaplace.distributed import Team
from molaplace.errors import OptionError, StorageError, importing
from molaplace.imported import import_builder
from molaplace.network import Resized
from molaplace.saving.schema import check
from molaplace.saving.weights import read_metadata, save_weights
from molaplace_lab.activations import Network, Progress
from molaplace_lab.checksums import data_checksum, network_checksum
from molaplace_lab.suite import DataOptions, Suite
from molaplace_lab.training import Labelled, Recipe, TrainingCheckpoint, member_seeds, train

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
        if self.count < 1:
            raise OptionError(f"expected at least one network to train; got {self.count}.")
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
        options: dict[str, Any] = {"prepare": data.prepare, "checkpoint": checkpoint, "on_epoch": on_epoch}
        network = train(build, moved, training.recipe, seed=seeds[index], **options)
        save_weights(network, path, {"identity": json.dumps(identity, sort_keys=True)})
        checkpoint.remove()
    team.collect(None)  # wait until all networks are complete
    progress("done", 1.0)
    return paths


def _identity(path: Path) -> dict[str, Any] | None:
    # Return the `python -m molaplace_lab train` options stored in a file, or None if another program wrote the file.
    text = read_metadata(path).get("identity") if path.suffix == ".safetensors" else None
    if text is None:
        return None
    try:
        identity: dict[str, Any] = json.loads(text)
        check(identity, {"recipe": {}}, "identity")
    except (StorageError, ValueError, TypeError) as error:
        raise StorageError(
            f"the training options in {path} are damaged ({error}). Delete the file and train again."
        ) from error
    return identity


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

TIMM, TORCHVISION = "timm:", "torchvision:"


def are_names(text: str) -> bool:
    """Return True if the text lists individual networks by name, and False if it is the path of a folder."""
    return ":" in text and not Path(text).expanduser().is_dir()


def open_named(text: str, classes: int) -> list[Network]:
    """Open a comma-separated list of networks (see the module docstring); networks from libraries have `classes` outputs."""
    networks = []
    for entry in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, file = entry.partition("=")
        path = Path(file).expanduser() if file else None
        if path is not None and not path.is_file():
            raise OptionError(
                f"the file {path} with the weights of {name} does not exist. Expected a file in safetensors or torch.save format."
            )
        library = name.startswith((TIMM, TORCHVISION))
        if path is None and library:
            raise OptionError(f"{name} has no trained weights. Specify a weight file: {name}=FILE.")
        build = partial(_resized, name, classes) if library else import_builder(name)
        networks.append(Network(path, build, network_checksum(Network(path, build, "").load(), name), entry))
    return networks


def timm_builder(name: str) -> Callable[[int], nn.Module]:
    """Return a function that builds an untrained network from timm for a given number of classes."""
    if ":" in name:
        raise OptionError(
            f"timm:{name} would be downloaded. Expected the plain name of an architecture, such as resnet18."
        )
    return partial(_made, TIMM + name)


def _made(name: str, classes: int) -> nn.Module:
    library, _, architecture = name.partition(":")
    with importing(f"the network {name}", library, "hub"):
        timm = name.startswith(TIMM)
        module: Any = importlib.import_module("timm" if timm else "torchvision.models")
    options = {"pretrained": False} if timm else {"weights": None}
    try:
        network: nn.Module = (module.create_model if timm else module.get_model)(
            architecture, num_classes=classes, **options
        )
    except (RuntimeError, ValueError) as error:
        raise OptionError(
            f"{library} cannot build {architecture!r}: {error}. The library's list_models() returns the available names."
        ) from error
    return network


def _resized(name: str, classes: int) -> nn.Module:
    # The network resizes and normalises images as the library does for evaluation.
    if name.startswith(TIMM):
        network = timm_builder(name.removeprefix(TIMM))(classes)
        settings = getattr(network, "pretrained_cfg", None) or {}
        size = (settings.get("input_size") or (224,))[-1]
        mean = settings.get("mean") or 0.0
        std = settings.get("std") or 1.0
        crop = 1.0 if settings.get("crop_mode") == "squash" else float(settings.get("crop_pct") or 0.875)
        bicubic = settings.get("interpolation") == "bicubic"
    else:
        network = _made(name, classes)
        weights: Any = importlib.import_module("torchvision.models").get_model_weights(name.removeprefix(TORCHVISION))
        evaluated = weights.DEFAULT.transforms()
        size, mean, std = evaluated.crop_size[0], evaluated.mean, evaluated.std
        crop, bicubic = size / evaluated.resize_size[0], evaluated.interpolation.value == "bicubic"
    return Resized(
        network, int(size), crop=crop, mean=mean, std=std, interpolation="bicubic" if bicubic else "bilinear"
    )
