"""Small networks and data of four kinds of outputs, each fitted once: classes, multi-label, regression and label maps."""

from __future__ import annotations

import io
import signal
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from molaplace.__main__ import main
from molaplace.cli.folder import PosteriorFolder, open_posterior

NAMES = {
    "classes": ("low", "middle", "high"),
    "labels": ("bright", "left", "top"),
    "regression": ("sum", "difference"),
    "maps": ("dark", "grey", "bright"),
}
MODULES = {
    "classes": "nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3))",
    "labels": "nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3))",
    "regression": "nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 2))",
    "maps": "nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 3, 1))",
}
LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "classes": nn.functional.cross_entropy,
    "labels": lambda outputs, labels: nn.functional.binary_cross_entropy_with_logits(outputs, labels.nan_to_num()),
    "regression": lambda outputs, labels: nn.functional.mse_loss(outputs, (labels - LOCATION) / SCALE),
    "maps": lambda outputs, labels: nn.functional.cross_entropy(outputs, labels, ignore_index=255),
}
LOCATION = 20.0
SCALE = 4.0
OPTIONS = {
    "classes": (),
    "labels": ("--likelihood", "bernoulli"),
    "regression": ("--likelihood", "gaussian", "--location", LOCATION, "--scale", SCALE),
    "maps": ("--ignore-index", 255),
}
COUNTS = {"train": 300, "val": 120, "test": 60}


@dataclass(frozen=True)
class Outcome:
    """What a command printed, and its exit code."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def run(*arguments: object) -> Outcome:
    """Run a command in this process as a shell would; the functions that a posterior's folder names are the tests' own."""
    trust = ["--trust"] if arguments[0] in ("predict", "evaluate", "export") and "--help" not in arguments else []
    handler = signal.getsignal(signal.SIGTERM)
    argv = ["molaplace", *map(str, arguments), *trust]
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", argv)
        with pytest.raises(SystemExit) as stop, warnings.catch_warnings():
            main()
    signal.signal(signal.SIGTERM, handler)
    return Outcome(stop.value.code or 0, out.getvalue(), err.getvalue())


def draw(kind: str, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels."""
    random = np.random.default_rng(seed)
    if kind == "maps":
        x = random.normal(size=(count // 6, 1, 8, 10)).astype(np.float32)
        y = np.digitize(x[:, 0] + 0.2 * random.normal(size=x[:, 0].shape), [-0.5, 0.5])
        y[:, 0] = 255  # ignored
        return x, y.astype(np.uint8)
    x = random.normal(size=(count, 4)).astype(np.float32)
    noisy = x + 0.3 * random.normal(size=x.shape)
    if kind == "classes":
        return x, np.digitize(noisy[:, 0] + noisy[:, 1], [-0.7, 0.7])
    if kind == "labels":
        y = (noisy[:, :3] > 0).astype(np.float64)
        y[::7, 1] = np.nan  # missing
        y[5] = np.nan  # an input without any label
        return x, y
    return x, LOCATION + SCALE * np.stack([noisy[:, 0] + noisy[:, 1], noisy[:, 0] - noisy[:, 1]], 1)


@dataclass(frozen=True)
class FittedFolder:
    """A folder with networks, data and a posterior."""

    name: str
    root: Path

    @property
    def posterior(self) -> Path:
        return self.root / "posterior"

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES[self.name]

    def open(self) -> PosteriorFolder:
        return open_posterior(self.posterior, trust=True)

    def data(self, split: str) -> tuple[torch.Tensor, torch.Tensor]:
        with np.load(self.root / f"{split}.npz") as stored:
            return torch.from_numpy(stored["x"]), torch.from_numpy(stored["y"])

    def fit(self, *more: object, output: str = "posterior") -> None:
        command = ["fit", "0.safetensors", "1.safetensors", "--network", f"kind_{self.name}:build"]
        command += ["--train", "train.npz", "--val", "val.npz", "--rule", "nll", "--classes", ",".join(self.names)]
        outcome = run(*command, "--output", output, *OPTIONS[self.name], *more)
        assert outcome.exit_code == 0, outcome.output


def make_folder(name: str, root: Path) -> FittedFolder:
    """Train two networks and write the data; `FittedFolder.fit` is for the folder as current one."""
    torch.set_default_dtype(torch.float32)
    (root / f"kind_{name}.py").write_text(f"from torch import nn\n\n\ndef build():\n    return {MODULES[name]}\n")
    for seed, (split, count) in enumerate(COUNTS.items()):
        x, y = draw(name, count, seed)
        np.savez(root / f"{split}.npz", x=x, y=y)
    np.savez(root / "far.npz", x=8 * draw(name, 60, 9)[0])
    x, y = (torch.from_numpy(array) for array in draw(name, COUNTS["train"], 0))
    y = y.float() if y.is_floating_point() else y.long()
    for seed in range(2):
        torch.manual_seed(seed)
        network = eval(MODULES[name], {"nn": nn})
        optimiser = torch.optim.Adam(network.parameters(), 0.02)
        for _ in range(60):
            optimiser.zero_grad()
            LOSSES[name](network(x), y).backward()
            optimiser.step()
        save_file(network.state_dict(), root / f"{seed}.safetensors")
    return FittedFolder(name, root)
