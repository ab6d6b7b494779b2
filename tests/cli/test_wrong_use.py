"""Labels and outputs that do not fit together are named by the command, whatever the likelihood."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.cli.fitted_folders import run

pytestmark = pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")

CODE = """
from torch import nn

def rows(outputs):
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, outputs))

def one():
    return rows(1)

def two():
    return rows(2)

def three():
    return rows(3)

def pixels():
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))
"""

COUNT = 60
RANDOM = np.random.default_rng(0)
ROWS = RANDOM.normal(size=(COUNT, 4)).astype(np.float32)
PICTURES = RANDOM.normal(size=(COUNT, 1, 5, 7)).astype(np.float32)
INDICES = RANDOM.integers(3, size=COUNT)

CASES = {
    # name: network, inputs, labels, options of the command, words
    "a label too few": ("three", ROWS, INDICES[:-1], (), "60 rows"),
    "numbers for softmax": ("three", ROWS, ROWS[:, 0], (), "likelihood='gaussian'"),
    "indices for bernoulli": ("three", ROWS, INDICES, ("bernoulli",), "use likelihood='categorical'"),
    "indices for one logit": ("one", ROWS, INDICES, ("bernoulli",), "must be 0 or 1, got"),
    "a label for too few outputs": (
        "three", ROWS, (ROWS[:, :2] > 0).astype(float), ("bernoulli",), "shape (60, 3)"),
    "indices for numbers": ("three", ROWS, INDICES, ("gaussian",), "use likelihood='categorical'"),
    "one output where two are needed": (
        "one", ROWS, ROWS[:, :1], ("gaussian", "--heteroscedastic"), "two outputs for each target"),
    "two outputs where one is needed": (
        "two", ROWS, ROWS[:, :1], ("gaussian",), "heteroscedastic=True"),
    "label maps of another size": (
        "pixels", PICTURES, RANDOM.integers(3, size=(COUNT, 10, 14)), (), "nearest-neighbour"),
    "label maps for bernoulli": (
        "pixels", PICTURES, RANDOM.integers(3, size=(COUNT, 5, 7)), ("bernoulli",), "likelihood='categorical'"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_on_the_command_line(monkeypatch, tmp_path, case):
    name, inputs, labels, options, words = CASES[case]
    (tmp_path / "wrong_networks.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    np.savez(tmp_path / "train.npz", x=inputs, y=labels)
    named = ["fit", "--network", f"wrong_networks:{name}", "--train", tmp_path / "train.npz"]
    told = ["--likelihood", *options] if options else []
    result = run(*named, *told, "--rule", "evidence", "--output", tmp_path / "posterior")
    assert result.exit_code != 0
    assert words in " ".join(f"{result.output} {result.exception}".split())
    assert not (tmp_path / "posterior" / "posterior.json").exists()
