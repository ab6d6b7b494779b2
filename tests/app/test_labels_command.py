"""The commands for networks that say yes or no to several labels: from arrays or a CSV of images to predictions and a report."""

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

from mola.app.cli import app
from mola.app.cli.shared_options import LEFT_OUT
from mola.app.explore.subject import open_subject
from mola.app.jobs.folder import open_posterior
from mola.errors import OptionError
from mola.metrics import auroc_of_labels, average_precision_of_labels, calibration_error_of_labels
from tests.closeness import assert_close

pytestmark = pytest.mark.filterwarnings("ignore::mola.errors.MolaWarning")
NAMES = ("bright", "left", "top")
CODE = """
from torch import nn

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))
"""


def draw(count, seed):
    """Images of 8 x 8 pixels, and whether they are bright, brighter on the left, and brighter at the top."""
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, 8, 8), dtype=np.uint8)
    images[: count // 2, :, :4] //= 2
    images[count // 4 : count // 2, :4] //= 2
    mean = images.astype(float)
    labels = np.stack(
        [
            mean.mean((1, 2)) > 110,
            mean[:, :, :4].mean((1, 2)) > mean[:, :, 4:].mean((1, 2)),
            mean[:, :4].mean((1, 2)) > mean[:, 4:].mean((1, 2)),
        ],
        axis=1,
    ).astype(np.float64)
    return images, labels


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    root = tmp_path_factory.mktemp("labels")
    (root / "own_label_networks.py").write_text(CODE)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    for name, count, seed in (("train", 400, 0), ("val", 300, 1), ("test", 300, 2)):
        images, labels = draw(count, seed)
        labels[::7, 1] = np.nan
        np.savez(root / f"{name}.npz", x=images[:, None], y=labels)
    images, labels = draw(40, 3)
    with open(root / "images.csv", "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["path", *NAMES])
        for index, (image, row) in enumerate(zip(images, labels, strict=True)):
            Image.fromarray(image).save(root / f"{index}.png")
            writer.writerow([f"{index}.png", "yes" if row[0] else "no", int(row[1]), "" if index % 3 else int(row[2])])
        writer.writerow(["0.png", "perhaps", 0, 1])
    np.savez(root / "noise.npz", x=np.zeros((50, 1, 8, 8), dtype=np.uint8))
    with np.load(root / "train.npz") as data:
        inputs = torch.from_numpy(data["x"]).float() / 255
        labels = torch.from_numpy(np.nan_to_num(data["y"])).float()
    for seed in range(2):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))
        optimiser = torch.optim.Adam(network.parameters(), 0.01)
        for _ in range(150):
            optimiser.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(network(inputs), labels).backward()
            optimiser.step()
        save_file(network.state_dict(), root / f"{seed}.safetensors")
    torch.set_default_dtype(before)
    return root


@pytest.fixture(scope="module")
def run(desk):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(desk)
        patch.syspath_prepend(str(desk))
        yield lambda *arguments: CliRunner().invoke(app, [str(one) for one in arguments])
        sys.modules.pop("own_label_networks", None)


def fitting(*more):
    return [
        *(
            "fit",
            "0.safetensors",
            "1.safetensors",
            "--network",
            "own_label_networks:build",
            "--likelihood",
            "bernoulli",
        ),
        *("--train", "train.npz", "--val", "val.npz", "--rule", "nll", "--output", "posterior"),
        *("--classes", ",".join(NAMES), "--workers", "0", *more),
    ]


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)  # put back after each test


@pytest.fixture(scope="module")
def fitted(run, desk):
    torch.set_default_dtype(torch.float32)
    outcome = run(*fitting())
    assert outcome.exit_code == 0, (outcome.output, outcome.exception)
    assert "3 outputs" in outcome.output
    return desk / "posterior"


def test_the_folder_says_what_it_is(fitted):
    folder = open_posterior(fitted)
    assert folder.posterior.likelihood.name == "bernoulli"
    assert folder.classes == NAMES
    assert folder.document["result"]["validation"]["count"] == 300
    assert 'likelihood = "bernoulli"' in (fitted / "job.toml").read_text()


@pytest.mark.parametrize("ending", ["csv", "jsonl", "npz"])
def test_a_row_for_each_input(run, desk, fitted, ending):
    outcome = run("predict", fitted, "test.npz", "--output", f"predictions.{ending}", "--quiet")
    assert outcome.exit_code == 0, (outcome.output, outcome.exception)
    with np.load(desk / "test.npz") as data:
        probs = open_posterior(fitted).posterior(torch.from_numpy(data["x"]).float() / 255).numpy()
    path = desk / f"predictions.{ending}"
    if ending == "npz":
        with np.load(path) as found:
            assert_close(found["probabilities"], probs)
            np.testing.assert_array_equal(found["label"], (probs > 0.5).sum(1))
        return
    if ending == "csv":
        with open(path, newline="") as stream:
            rows = list(csv.DictReader(stream))
        given = [[float(row[f"p_{name}"]) for name in NAMES] for row in rows]
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        given = [row["probabilities"] for row in rows]
    assert_close(given, probs)
    expected = ["|".join(name for name, value in zip(NAMES, row, strict=True) if value > 0.5) for row in probs]
    assert [row["class"] for row in rows] == expected


def test_evaluate_measures_label_by_label(run, desk, fitted):
    outcome = run("evaluate", fitted, "--test", "test.npz", "--ood", "noise.npz", "--output", "report", "--json")
    assert outcome.exit_code == 0, (outcome.output, outcome.exception)
    document = json.loads(outcome.stdout)
    found = document["methods"]["MoLA"]
    with np.load(desk / "test.npz") as data:
        probs = open_posterior(fitted).posterior(torch.from_numpy(data["x"]).float() / 255)
        labels = torch.from_numpy(data["y"])
    measures = {
        "auroc": auroc_of_labels(probs, labels),
        "average_precision": average_precision_of_labels(probs, labels),
        "ece": calibration_error_of_labels(probs, labels),
    }
    for place, name in enumerate(NAMES):
        for measure, values in measures.items():
            assert found["classes"][name][measure] == pytest.approx(float(values[place]), abs=1e-4)
    assert found["scores"]["auroc"] == pytest.approx(float(measures["auroc"].mean()), abs=1e-4)
    known = ~labels.isnan()
    right = ((probs > 0.5) == labels)[known].double().mean()
    assert found["scores"]["accuracy"] == pytest.approx(float(right), abs=1e-6)
    assert (desk / "report").exists()


def test_info_names_the_likelihood_and_the_explorer_refuses_it(run, fitted):
    outcome = run("info", fitted)
    assert outcome.exit_code == 0, (outcome.output, outcome.exception)
    assert "3 outputs, likelihood bernoulli" in outcome.output
    with pytest.raises(OptionError, match="one of several classes"):
        open_subject(fitted)


def test_labels_in_a_csv_of_images(run, desk):
    outcome = run(*fitting("--train", "images.csv", "--output", "from-csv", "--mode", "L"))
    assert outcome.exit_code == LEFT_OUT, (outcome.output, outcome.exception)
    assert "perhaps" in outcome.output
    folder = open_posterior(desk / "from-csv")
    assert folder.classes == NAMES
    assert folder.posterior.components[0].curvature.count == 40
    found = folder.open_set("images.csv", labelled=True)
    expected = draw(40, 3)[1]
    expected[np.arange(40) % 3 != 0, 2] = np.nan  # empty cells
    np.testing.assert_array_equal(torch.cat([rows.labels for rows in found]).numpy(), expected)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--link", "bridge"], "bernoulli"),
        (["--likelihood", "bernouli"], "Did you mean 'bernoulli'"),
        (["--train", "digits:train"], "one class for each image"),
    ],
)
def test_what_does_not_fit_is_named(run, more, words):
    outcome = run(*fitting(*more))
    assert outcome.exit_code != 0
    assert words in f"{outcome.output}{outcome.exception}"
