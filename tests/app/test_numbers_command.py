"""`mola fit --likelihood gaussian` and what follows: arrays in, rows with means and intervals out."""

import csv
import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import mola
from mola.app.cli import app
from mola.training import Recipe, train_mlps
from mola.training.labelled import Labelled

LOCATION, SCALE = 20.0, 4.0


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two networks trained on standardised targets, and three sets in the targets' own units."""
    folder = tmp_path_factory.mktemp("numbers")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 3, generator=generator)
    y = torch.sin(x[:, :1]) + 0.5 * x[:, 1:2] + 0.2 * torch.randn(500, 1, generator=generator)
    recipe = Recipe(epochs=40, batch_size=32, learning_rate=1e-2, optimiser="adam", weight_decay=1e-4)
    nets = train_mlps(3, (16,), 1, Labelled(x[:300], y[:300]), recipe, members=2, seed=0, loss="squared-error")
    for index, net in enumerate(nets):
        save_file(net.state_dict(), folder / f"{index}.safetensors")
    for name, rows in (("train", slice(300)), ("val", slice(300, 400)), ("test", slice(400, 500))):
        np.savez(folder / f"{name}.npz", x=x[rows].numpy(), y=(LOCATION + SCALE * y[rows]).numpy())
    (folder / "numbers_net.py").write_text(
        "from mola.training.mlps import mlp\n\n\ndef build():\n    return mlp(3, (16,), 1)\n", encoding="utf-8"
    )
    return folder


def run(place, *arguments):
    return CliRunner().invoke(app, [str(one) for one in arguments])


def fit(place, monkeypatch, *more):
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.chdir(place)
    return run(
        place, "fit", "0.safetensors", "1.safetensors", "--network", "numbers_net:build", "--train", "train.npz", "--val", "val.npz",
        "--likelihood", "gaussian", "--location", LOCATION, "--scale", SCALE, "--structure", "kron-exact", *more,
    )  # fmt: skip


def test_numbers_from_fit_to_rows_and_scores(place, monkeypatch):
    fitted = fit(place, monkeypatch, "--output", "posterior")
    assert fitted.exit_code == 0, fitted.output
    assert "RMSE" in fitted.output
    told = run(place, "info", "posterior")
    assert told.exit_code == 0, told.output
    assert "likelihood gaussian" in told.output
    assert run(place, "predict", "posterior", "test.npz", "--output", "rows.csv").exit_code == 0
    with open(place / "rows.csv", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    truth = np.load(place / "test.npz")["y"][:, 0]
    mean, lower, upper = (np.array([float(row[name]) for row in rows]) for name in ("mean", "lower", "upper"))
    assert np.sqrt(np.mean((mean - truth) ** 2)) < 0.5 * SCALE
    assert 0.75 < np.mean((truth >= lower) & (truth <= upper)) <= 1
    assert {row["outlying"] for row in rows} <= {"true", "false"}
    assert run(place, "predict", "posterior", "test.npz", "--output", "rows.npz").exit_code == 0
    assert np.allclose(np.load(place / "rows.npz")["mean"], mean, rtol=1e-6)
    evaluated = run(place, "evaluate", "posterior", "--test", "test.npz", "--output", "report")
    assert evaluated.exit_code == 0, evaluated.output
    numbers = json.loads((place / "report" / "numbers.json").read_text(encoding="utf-8"))
    assert list(numbers["methods"]) == ["MAP", "DE", "LLLA", "MoLA"]
    found = numbers["methods"]["MoLA"]["scores"]
    assert found["rmse"] == pytest.approx(np.sqrt(np.mean((mean - truth) ** 2)), rel=1e-5)
    assert found["coverage"] == pytest.approx(np.mean((truth >= lower) & (truth <= upper)))
    exported = run(place, "export", "posterior", "--torch", "posterior.pt2")
    assert exported.exit_code == 0, exported.output
    assert set(mola.load_exported(place / "posterior.pt2", trust=True).outputs) >= {"mean", "variance", "epistemic"}


def test_what_means_nothing_for_numbers_is_refused(place, monkeypatch):
    for options, words in (
        (("--rule", "threshold"), "means nothing for likelihood 'gaussian'"),
        (("--link", "mc"), "mc"),
        (("--noise", "0"), "noise must be"),
    ):
        result = fit(place, monkeypatch, "--output", "refused", *options)
        assert result.exit_code != 0
        assert words in result.output + str(result.exception)
    result = run(
        place, "fit", "0.safetensors", "--network", "numbers_net:build", "--train", "train.npz", "--noise", "1"
    )
    assert result.exit_code != 0
