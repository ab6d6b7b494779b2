"""The commands for networks with outputs at every pixel: fit on label maps and export; what writes rows is refused in words."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import mola
from mola.app.cli import app
from mola.app.jobs.folder import open_posterior

pytestmark = pytest.mark.filterwarnings("ignore::mola.errors.MolaWarning")
CODE = """
from torch import nn

def build():
    return nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 3, 1))
"""


def draw(count, seed):
    """Images of 8 x 10 numbers, and their three brightnesses, with a margin that does not count."""
    values = np.random.default_rng(seed).normal(size=(count, 1, 8, 10)).astype(np.float32)
    labels = np.digitize(values[:, 0], [-0.5, 0.5]).astype(np.uint8)
    labels[:, 0] = 255
    return values, labels


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    root = tmp_path_factory.mktemp("maps")
    (root / "own_pixel_networks.py").write_text(CODE)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    for name, count, seed in (("train", 40, 0), ("val", 30, 1)):
        values, labels = draw(count, seed)
        np.savez(root / f"{name}.npz", x=values, y=labels)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 3, 1))
    optimiser, (values, labels) = torch.optim.Adam(network.parameters(), lr=0.02), draw(40, 0)
    for _ in range(60):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(network(torch.tensor(values)), torch.tensor(labels).long(), ignore_index=255)
        loss.backward()
        optimiser.step()
    save_file(network.state_dict(), root / "a.safetensors")
    torch.set_default_dtype(before)
    return root


def run(desk, monkeypatch, *words):
    monkeypatch.chdir(desk)
    monkeypatch.setattr(sys, "path", [str(desk), *sys.path])
    torch.set_default_dtype(torch.float32)
    return CliRunner().invoke(app, [str(word) for word in words])


def fit(desk, monkeypatch, output, *more):
    named = ["--network", "own_pixel_networks:build", "--train", "train.npz", "--val", "val.npz", "--ignore-index", 255]
    return run(desk, monkeypatch, "fit", "a.safetensors", *named, "--output", output, *more)


@pytest.mark.slow
def test_label_maps_are_fitted_and_exported(desk, monkeypatch, tmp_path):
    result = fit(desk, monkeypatch, tmp_path / "posterior", "--positions", "average", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["result"]
    assert found["outputs"] == 3
    values, labels = (torch.tensor(one) for one in draw(40, 0))
    opened = open_posterior(tmp_path / "posterior", "cpu", trust=True)
    network = opened.posterior.networks[0]
    expected = mola.fit(network, [(values, labels.long())], positions="average", ignore_index=255, progress=False)
    assert opened.posterior.components[0].curvature.count == 40
    assert torch.allclose(
        opened.posterior.log_evidence(), expected.with_prior_precision(opened.posterior.prior_precision).log_evidence()
    )
    assert opened.posterior.predict(values).probs.shape == (40, 3, 8, 10)
    # All outputs at many positions: tests/library/test_dense.py.
    asked = ("--onnx", tmp_path / "maps.onnx", "--outputs", "probabilities")
    result = run(desk, monkeypatch, "export", tmp_path / "posterior", *asked)
    assert result.exit_code == 0, result.output
    said = mola.load_exported(tmp_path / "maps.onnx")(values)
    assert torch.allclose(said["probabilities"], opened.posterior.predict(values).probs, atol=1e-5)
    assert run(desk, monkeypatch, "info", tmp_path / "posterior").exit_code == 0
    for words in (
        ("predict", tmp_path / "posterior", "val.npz", "--output", tmp_path / "rows.csv"),
        ("evaluate", tmp_path / "posterior", "--test", "val.npz", "--output", tmp_path / "report"),
    ):
        result = run(desk, monkeypatch, *words)
        assert result.exit_code != 0
        assert "outputs at many positions" in str(result.exception)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--positions", "some"), "positions must be 'all', 'average' or a number"),
        (("--positions", "0"), "positions must be a whole number of at least 1"),
        (("--ignore-index", "7"), "labels must lie in [0, 2]"),
    ],
)
def test_wrong_use_is_named(desk, monkeypatch, tmp_path, more, words):
    result = fit(desk, monkeypatch, tmp_path / "posterior", *more)
    assert result.exit_code != 0
    assert words in str(result.exception)
