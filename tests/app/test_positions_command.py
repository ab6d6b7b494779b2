"""The commands for networks with outputs at every pixel: fit on label maps, predict maps, compare positions, export."""

from __future__ import annotations

import csv
import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import mola
from mola.app.cli import app
from mola.app.cli.shared_options import LEFT_OUT
from mola.app.jobs.folder import open_posterior
from tests.closeness import assert_close

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


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)  # put back after each test


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
    expected = expected.with_prior_precision(opened.posterior.prior_precision)
    assert_close(opened.posterior.log_evidence(), expected.log_evidence())
    assert opened.posterior.predict(values).probs.shape == (40, 3, 8, 10)
    # All outputs at many positions: tests/library/test_dense.py.
    asked = ("--onnx", tmp_path / "maps.onnx", "--outputs", "probabilities")
    result = run(desk, monkeypatch, "export", tmp_path / "posterior", *asked)
    assert result.exit_code == 0, result.output
    said = mola.load_exported(tmp_path / "maps.onnx")(values)
    assert_close(said["probabilities"], opened.posterior.predict(values).probs)
    assert run(desk, monkeypatch, "info", tmp_path / "posterior").exit_code == 0


def test_what_was_counted_is_named(desk, monkeypatch, tmp_path):
    """70 positions of each of 40 and 30 inputs count: they are no inputs."""
    said = " ".join(fit(desk, monkeypatch, tmp_path / "all").output.split())
    assert "on 2,800 positions:" in said
    assert "2,100 positions, which were tuned on" in said
    assert "2,800 positions" in run(desk, monkeypatch, "info", tmp_path / "all").output
    said = " ".join(fit(desk, monkeypatch, tmp_path / "average", "--positions", "average").output.split())
    assert "on 40 inputs:" in said
    assert "2,100 positions, which were tuned on" in said
    assert "40 inputs" in run(desk, monkeypatch, "info", tmp_path / "average").output
    opened = open_posterior(tmp_path / "all", "cpu", trust=True)
    opened.posterior.save(tmp_path / "python")
    said = run(desk, monkeypatch, "info", tmp_path / "python").output
    assert "2,800 positions, or inputs where positions were averaged" in " ".join(said.split())


@pytest.fixture(scope="module")
def fitted(desk, tmp_path_factory):
    place = tmp_path_factory.mktemp("fitted") / "posterior"
    with pytest.MonkeyPatch.context() as patch:
        result = fit(desk, patch, place, "--positions", "50", "--rule", "nll", "--classes", "dark,grey,bright")
    assert result.exit_code == 0, result.output
    return place


def test_arrays_hold_the_maps_of_the_posterior(desk, fitted, monkeypatch, tmp_path):
    """Every map is that of `posterior.predict`, in batches of any size; an input that cannot be used has empty ones."""
    values, _ = draw(9, 5)
    values[4, 0, 2, 3] = np.nan
    np.savez(tmp_path / "some.npz", x=values)
    result = run(
        desk, monkeypatch, "predict", fitted, tmp_path / "some.npz", "--output", tmp_path / "maps.npz", "--probabilities",
        "--json",
    )  # fmt: skip
    assert result.exit_code == LEFT_OUT, result.output
    told = json.loads(result.stdout)
    assert (told["count"], told["positions"]) == (8, 8 * 80)
    good = [index for index in range(9) if index != 4]
    said = open_posterior(fitted).posterior.predict(torch.tensor(values[good]))
    with np.load(tmp_path / "maps.npz") as maps:
        for name in ("label", "confidence", "entropy", "epistemic", "ood_score", "distance"):
            assert maps[name].shape == (9, 8, 10)
            kind = "difference" if name in ("epistemic", "ood_score") else "float32"
            assert_close(maps[name][good], getattr(said, name), kind, name=name)
        assert_close(maps["probabilities"][good], said.probs)
        assert (maps["label"][4] == -1).all()
        assert np.isnan(maps["confidence"][4]).all()
        assert maps["classes"].tolist() == ["dark", "grey", "bright"]
        assert "nan or infinite" in str(maps["error"][4])
    assert_close(told["confidence"], said.confidence.mean())
    assert told["outlying"] == pytest.approx(float((said.ood_score > told["threshold"]).double().mean()))
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


def test_a_folder_holds_pictures_of_the_maps(desk, fitted, monkeypatch, tmp_path):
    values, _ = draw(5, 6)
    np.savez(tmp_path / "some.npz", x=values)
    for _ in range(2):  # the second run replaces the first
        result = run(desk, monkeypatch, "predict", fitted, tmp_path / "some.npz", "--output", tmp_path / "maps")
        assert result.exit_code == 0, result.output
    said = open_posterior(fitted).posterior.predict(torch.tensor(values))
    with open(tmp_path / "maps" / "predictions.csv", newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    for index, row in enumerate(rows):
        pictures = {
            part: np.asarray(Image.open(tmp_path / "maps" / part / row["picture"]))
            for part in ("label", "confidence", "entropy")
        }
        np.testing.assert_array_equal(pictures["label"], said.label[index])
        np.testing.assert_allclose(pictures["confidence"] / 65535, said.confidence[index], atol=1e-5)
        np.testing.assert_allclose(pictures["entropy"] / 65535 * np.log(3), said.entropy[index], atol=2e-5)
        assert_close(float(row["confidence"]), said.confidence[index].mean())
        assert float(row["share_grey"]) == pytest.approx(float((said.label[index] == 1).double().mean()))
    assert json.loads((tmp_path / "maps" / "maps.json").read_text())["classes"] == ["dark", "grey", "bright"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["maps", "maps.toml", "some.npz"]


def test_tables_hold_averages(desk, fitted, monkeypatch, tmp_path):
    values, _ = draw(4, 8)
    np.savez(tmp_path / "some.npz", x=values)
    result = run(desk, monkeypatch, "predict", fitted, tmp_path / "some.npz", "--output", tmp_path / "rows.jsonl")
    assert result.exit_code == 0, result.output
    said = open_posterior(fitted).posterior.predict(torch.tensor(values))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["positions"] for row in rows] == [80] * 4
    for index, row in enumerate(rows):
        assert_close(row["entropy"], said.entropy[index].mean(), scale=1.0)
        assert_close(row["distance"], said.distance[index].mean())


def test_evaluate_compares_positions_that_count(desk, fitted, monkeypatch, tmp_path):
    values, labels = draw(20, 9)
    np.savez(tmp_path / "test.npz", x=values, y=labels)
    np.savez(tmp_path / "far.npz", x=20 * draw(10, 10)[0])
    result = run(
        desk, monkeypatch, "evaluate", fitted, "--test", tmp_path / "test.npz", "--ood", tmp_path / "far.npz",
        "--output", tmp_path / "report", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["count"], found["inputs"], found["counted"]) == (20 * 70, 20, "position")
    said = open_posterior(fitted).posterior.predict(torch.tensor(values))
    known = torch.tensor(labels) != 255
    right = (said.label == torch.tensor(labels))[known].double().mean()
    assert found["methods"]["LLLA"]["scores"]["accuracy"] == pytest.approx(float(right))
    by_input = torch.stack([(said.label[i] == torch.tensor(labels[i]))[known[i]].double().mean() for i in range(20)])
    assert found["methods"]["LLLA"]["errors"]["accuracy"] == pytest.approx(float(by_input.std()) / 20**0.5)
    assert "MAP-T" in found["methods"]
    truth = torch.tensor(labels)
    for index, name in enumerate(("dark", "grey", "bright")):
        own, called = (truth == index) & known, (said.label == index) & known
        expected = float((own & called).sum() / (own | called).sum())
        assert found["methods"]["LLLA"]["classes"][name]["iou"] == pytest.approx(expected)
    tables = (tmp_path / "report" / "tables.md").read_text()
    assert "1,400 positions of 20 inputs" in tables
    by_class = tables[tables.index("Class by class") :]
    assert "| positions |" in by_class
    assert "| inputs |" not in by_class


@pytest.mark.parametrize(
    ("output", "more", "words"),
    [
        ("maps.png", (), "expected .csv, .jsonl, .npz, or none"),
        ("rows.csv", ("--probabilities",), "written to .npz alone"),
        ("maps.npz", ("--coverage", "0.9"), "--coverage promises something of each input"),
        ("maps.npz", ("--error-rate", "0.1"), "--error-rate promises something of each input"),
        ("taken", (), "does not hold maps of an earlier run"),
    ],
)
def test_what_cannot_be_written_is_named(desk, fitted, monkeypatch, tmp_path, output, more, words):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("mine")
    result = run(desk, monkeypatch, "predict", fitted, "val.npz", "--output", tmp_path / output, *more)
    assert result.exit_code != 0
    assert words in str(result.exception)
    assert (tmp_path / "taken" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--positions", "some"), "positions must be 'all', 'average' or a number"),
        (("--positions", "0"), "positions must be a whole number of at least 1"),
        (("--ignore-index", "7"), "labels must lie in [0, 2]"),
        (("--ignore-index", "7"), "name a label that does not count: ignore_index=255"),
    ],
)
def test_wrong_use_is_named(desk, monkeypatch, tmp_path, more, words):
    result = fit(desk, monkeypatch, tmp_path / "posterior", *more)
    assert result.exit_code != 0
    assert words in str(result.exception)
