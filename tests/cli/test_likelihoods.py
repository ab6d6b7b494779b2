"""`molaplace fit` of multi-label, regression and dense networks: what the folder holds, labels in a CSV, and options that do not apply."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import molaplace as mola
from molaplace.cli.folder import open_posterior
from tests.cli.fitted_folders import LOCATION, OPTIONS, SCALE, run
from tests.closeness import assert_close

pytestmark = pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")

LEFT_OUT = 3


def fit(kind, *more):
    command = ["fit", "0.safetensors", "1.safetensors", "--network", f"kind_{kind.name}:build", *OPTIONS[kind.name]]
    return run(*command, "--train", "train.npz", "--val", "val.npz", *more)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("labels", "likelihood bernoulli"), ("regression", "likelihood gaussian"), ("maps", "3,500 positions")],
    indirect=["kind"],
)
def test_info_names_the_likelihood_and_what_was_counted(kind, words):
    outcome = run("info", "posterior")
    assert outcome.exit_code == 0, (outcome.output, outcome.output)
    text = " ".join(outcome.output.split())
    assert words in text


@pytest.mark.parametrize("kind", ["labels"], indirect=True)
def test_labels_of_images_in_a_csv(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3))"
    (tmp_path / "csv_networks.py").write_text(f"from torch import nn\n\n\ndef build():\n    return {code}\n")
    save_file(eval(code, {"nn": nn}).state_dict(), "net.safetensors")
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, (40, 3)).astype(float)
    with open("images.csv", "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["path", *kind.names])
        for index, row in enumerate(labels):
            Image.fromarray(random.integers(0, 256, (8, 8), dtype=np.uint8)).save(f"{index}.png")
            writer.writerow([f"{index}.png", int(row[0]), int(row[1]), "" if index % 3 else int(row[2])])
        writer.writerow(["gone.png", 0, 0, 1])
    outcome = run(
        *("fit", "net.safetensors", "--network", "csv_networks:build", "--likelihood", "bernoulli", "--mode", "L"),
        *("--train", "images.csv", "--rule", "evidence", "--output", "posterior"),
    )
    assert outcome.exit_code == LEFT_OUT, (outcome.output, outcome.output)
    assert "gone.png: does not exist" in outcome.output
    folder = open_posterior(tmp_path / "posterior", trust=True)
    assert folder.classes == kind.names
    assert folder.posterior.components[0].layer.sums.count == 40
    labels[np.arange(40) % 3 != 0, 2] = np.nan  # empty cells
    read = torch.cat([rows.labels for rows in folder.open_dataset("images.csv", labelled=True).batches()])
    np.testing.assert_array_equal(read.numpy(), labels)


@pytest.mark.parametrize("kind", ["regression"], indirect=True)
def test_outputs_that_are_variances_are_no_targets(kind, tmp_path):
    (kind.root / "means_and_variances.py").write_text(
        "from torch import nn\n\n\ndef build():\n    return nn.Linear(4, 4)\n"
    )
    save_file(nn.Linear(4, 4).state_dict(), tmp_path / "net.safetensors")
    command = ["fit", tmp_path / "net.safetensors", "--network", "means_and_variances:build", "--train", "train.npz"]
    command += ["--val", "val.npz", "--likelihood", "gaussian", "--location", LOCATION, "--scale", SCALE]
    outcome = run(*command, "--heteroscedastic", "--output", tmp_path / "posterior")
    assert outcome.exit_code == 0, (outcome.output, outcome.output)
    assert "means and variances of 2 targets" in " ".join(outcome.output.split())
    assert run("predict", tmp_path / "posterior", "test.npz", "--output", tmp_path / "out.csv").exit_code == 0
    assert "mean_1" in (tmp_path / "out.csv").read_text().splitlines()[0].split(",")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["maps"], indirect=True)
def test_label_maps_are_averaged_and_exported(kind, tmp_path):
    outcome = fit(kind, "--rule", "nll", "--positions", "average", "--output", tmp_path / "posterior", "--json")
    assert outcome.exit_code == 0, (outcome.output, outcome.output)
    assert json.loads(outcome.stdout)["result"]["train_count"] == 50
    posterior, (values, labels) = open_posterior(tmp_path / "posterior", trust=True).posterior, kind.data("train")
    data = [(values, labels.long())]
    expected = mola.fit(posterior.networks, data, positions="average", ignore_index=255, progress=False)
    expected = expected.with_prior_precision(posterior.prior_precision)
    assert_close(posterior.log_evidence(), expected.log_evidence())
    outcome = run("export", tmp_path / "posterior", "--onnx", tmp_path / "maps.onnx", "--outputs", "probs")
    assert outcome.exit_code == 0, (outcome.output, outcome.output)
    assert_close(mola.export.load(tmp_path / "maps.onnx")(values)["probs"], posterior.predict(values).probs)


WRONG_USE = {
    "a link for classes": ("labels", ["--link", "bridge"], "bernoulli"),
    "one class for each image": ("labels", ["--train", "digits:train"], "a class label for each image"),
    "a rule for classes": ("regression", ["--rule", "threshold"], "gaussian"),
    "noise of classes": ("classes", ["--noise", "1"], "gaussian"),
    "some positions": ("maps", ["--positions", "some"], "positions must be"),
}


@pytest.mark.parametrize(
    ("kind", "case"), [(kind, name) for name, (kind, *_) in WRONG_USE.items()], ids=WRONG_USE, indirect=["kind"]
)
def test_wrong_use_is_refused_in_words(kind, case, tmp_path):
    outcome = fit(kind, "--output", tmp_path / "posterior", *WRONG_USE[case][1])
    assert outcome.exit_code != 0
    assert WRONG_USE[case][2] in f"{outcome.output}{outcome.output}"
    assert not (tmp_path / "posterior" / "posterior.safetensors").exists()
