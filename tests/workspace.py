"""A user's workspace in a folder: small trained networks and the same pictures in every form that the commands read."""

from __future__ import annotations

import csv
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from molaplace.cli import fit
from molaplace.cli.decisions import make_decisions
from molaplace.cli.evaluate import run_evaluate
from molaplace.cli.folder import PosteriorFolder, open_posterior
from molaplace.cli.job import Job
from molaplace.cli.predict import run_predict
from molaplace.images import NORMALISATIONS, Preparation
from molaplace.saving.weights import save_weights
from tests import saved_files


def with_job(folder: Path, text: str) -> Path:
    """A posterior's folder with another job in both of its files, sealed, as anyone who makes a folder can write it."""
    made = tomllib.loads(text)

    def change(document, _):
        document["bundle"]["made"].update(made)
        for source, name in zip(document["bundle"]["networks"], 3 * made["options"]["network"], strict=False):
            source["build"] = name

    saved_files.edit(folder / "posterior.safetensors", change)
    (folder / "job.toml").write_text(text)
    return folder


CLASSES = ("cat", "dog", "fox")
SIDE = 6
SIZES = {"train": 36, "val": 18, "test": 18}

MODULE = """
import numpy as np
import pytest
import torch
from torch import nn


def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, 12), nn.ReLU(), nn.Linear(12, 3)).to(torch.float32)


def half():
    return build().to(torch.bfloat16)


def wide():
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 20), nn.ReLU(), nn.Linear(20, 3)).to(torch.float32)


def broken():
    raise KeyError("no such thing")


def nothing():
    return 3


def batches(name):
    stored = np.load(name + ".npz")
    inputs = torch.from_numpy(stored["x"]).permute(0, 3, 1, 2).float() / 255
    labels = torch.from_numpy(stored["y"])
    return list(zip(inputs.split(10), labels.split(10)))


def train():
    return batches("train")


def val():
    return batches("val")


def mappings():
    return [{"input": inputs, "labels": labels} for inputs, labels in batches("train")]


def failing():
    yield batches("train")[0]
    raise RuntimeError("the disk is gone")


number = 7
"""


@dataclass(frozen=True)
class Workspace:
    """Paths of the folder, and its networks and pictures as tensors."""

    root: Path
    module: str
    side: int = SIDE
    """Of the images, as the networks take them."""

    def weights(self, count: int = 3) -> list[str]:
        return [str(self.root / "weights" / f"{index}.safetensors") for index in range(count)]

    def pixels(self, split: str) -> tuple[torch.Tensor, torch.Tensor]:
        stored = np.load(self.root / f"{split}.npz")
        return torch.from_numpy(stored["x"]).permute(0, 3, 1, 2), torch.from_numpy(stored["y"])

    def inputs(self, split: str) -> tuple[torch.Tensor, torch.Tensor]:
        """What the networks were trained on: the pictures as they are, or resized and normalised as for CIFAR-10."""
        pixels, labels = self.pixels(split)
        if self.side == SIDE:
            return pixels.float() / 255, labels
        prepare = Preparation((self.side, self.side))
        normalise = NORMALISATIONS["cifar10"]
        larger = [prepare(Image.fromarray(pixel.permute(1, 2, 0).numpy())) for pixel in pixels]
        return normalise(torch.stack(larger)), labels

    def networks(self, count: int = 3) -> list[nn.Module]:
        from safetensors.torch import load_file

        networks = []
        for path in self.weights(count):
            network = build(side=self.side)
            network.load_state_dict(load_file(path))
            networks.append(network.eval())
        return networks


def build(width: int = 12, side: int = SIDE) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * side**2, width), nn.ReLU(), nn.Linear(width, 3)).to(torch.float32)


def make_workspace(root: Path, module: str, side: int = SIDE) -> Workspace:
    """Pictures in a colour for each class, with enough noise to be mistaken now and then."""
    draw = np.random.default_rng(0)
    (root / f"{module}.py").write_text(MODULE.replace("INPUTS", str(3 * side**2)))
    colours = np.array([[200, 90, 80], [90, 190, 90], [80, 100, 200]])
    for split, count in SIZES.items():
        labels = np.repeat(np.arange(3), count // 3)
        noise = draw.normal(0, 60, (count, SIDE, SIDE, 3)) + draw.normal(0, 35, (count, 1, 1, 3))
        pixels = np.clip(colours[labels][:, None, None] + noise, 0, 255).astype(np.uint8)
        np.savez(root / f"{split}.npz", x=pixels, y=labels)
        rows = []
        for index, (picture, label) in enumerate(zip(pixels, labels, strict=True)):
            folder = root / split / CLASSES[label]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(folder / f"{index:03d}.png")
            rows.append((f"{split}/{CLASSES[label]}/{index:03d}.png", CLASSES[label]))
        with open(root / f"{split}.csv", "w", newline="") as stream:
            csv.writer(stream).writerows([("path", "label"), *rows])
    (root / "strange").mkdir()
    for index in range(12):
        picture = draw.integers(0, 256, (SIDE, SIDE, 3)).astype(np.uint8)
        Image.fromarray(picture).save(root / "strange" / f"{index:02d}.png")
    workspace = Workspace(root, module, side)
    inputs, labels = workspace.inputs("train")
    (root / "weights").mkdir()
    for seed, path in enumerate(workspace.weights()):
        torch.manual_seed(seed)
        network = build(side=side)
        optimiser = torch.optim.Adam(network.parameters(), lr=0.01)
        for _ in range(60):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(inputs), labels).backward()
            optimiser.step()
        save_weights(network, path)
    return workspace


def job_for(workspace: Workspace, **changes) -> Job:
    """What a user at this workspace would ask for."""
    options = {
        "network": (f"{workspace.module}:build",),
        "weights": tuple(workspace.weights()),
        "train": "train",
        "val": "val",
        "batch_size": 7,
    }
    return Job(**(options | changes))


def run_fit(job: Job, output: Path, **more) -> dict[str, Any]:
    """Fit a posterior into a folder; return the summary."""
    return fit.run_fit(replace(job, output=output, **more))


def to_predict(fitted: PosteriorFolder, inputs: str, output: Path, **more: Any) -> dict[str, Any] | None:
    """Predict as the command does; further arguments are its options."""
    rates = {name: more.pop(name) for name in list(more) if name not in ("probabilities", "strict")}
    return run_predict(fitted, inputs, output, make_decisions(fitted, **rates), **more)


def evaluated(fitted: PosteriorFolder, test: str, *ood: str, **more: Any) -> Any:
    """Evaluate as the command does."""
    return run_evaluate(fitted, test, ood, **more)


def fit_at(workspace: Workspace, folder: Path) -> PosteriorFolder:
    """A posterior, made and opened where the user sits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace.root)
        patch.syspath_prepend(str(workspace.root))
        run_fit(job_for(workspace), folder)
        return open_posterior(folder, trust=True)
