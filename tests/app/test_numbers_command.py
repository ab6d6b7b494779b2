"""`mola fit --likelihood gaussian` and what follows: arrays in, rows with means and intervals out."""

import csv
import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import mola
from mola.app.cli import app
from mola.app.jobs.folder import open_posterior
from mola.app.jobs.numbers import networks_alone, noise_factors, untuned_noise
from mola.lab.training import Labelled, Recipe, train_mlps

LOCATION, SCALE = 20.0, 4.0


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two networks trained on standardised targets, and three sets in the targets' own units."""
    folder = tmp_path_factory.mktemp("numbers")
    torch.set_default_dtype(torch.float32)
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
        "from mola.lab.training.mlps import mlp\n\n\ndef build():\n    return mlp(3, (16,), 1)\n", encoding="utf-8"
    )
    return folder


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)  # put back after each test


def run(place, *arguments):
    torch.set_default_dtype(torch.float32)  # fixtures run before it is set for a test
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
    assert list(numbers["methods"]) == ["MAP", "MAP-N", "DE", "DE-N", "LLLA", "MoLA"]
    found = numbers["methods"]["MoLA"]["scores"]
    assert found["rmse"] == pytest.approx(np.sqrt(np.mean((mean - truth) ** 2)), rel=1e-5)
    assert found["coverage_90"] == pytest.approx(np.mean((truth >= lower) & (truth <= upper)))
    assert found["width_90"] == pytest.approx(np.mean(upper - lower), rel=1e-5)
    exported = run(place, "export", "posterior", "--torch", "posterior.pt2")
    assert exported.exit_code == 0, exported.output
    assert set(mola.export.load(place / "posterior.pt2", trust=True).outputs) >= {"mean", "variance", "epistemic"}


def test_what_means_nothing_for_numbers_is_refused(place, monkeypatch):
    for options, words in (
        (("--rule", "threshold"), "does not apply to likelihood 'gaussian'"),
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


@pytest.fixture(scope="module")
def fitted(place):
    """A posterior on 100 validation data, and further data like them, some of them far away."""
    with pytest.MonkeyPatch.context() as patch:
        assert fit(place, patch, "--output", "kept").exit_code == 0
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(2000, 3, generator=generator)
    y = torch.sin(x[:, :1]) + 0.5 * x[:, 1:2] + 0.2 * torch.randn(2000, 1, generator=generator)
    np.savez(place / "more.npz", x=x.numpy(), y=(LOCATION + SCALE * y).numpy())
    np.savez(place / "far.npz", x=(6 * x[:200]).numpy())
    return place


@pytest.mark.parametrize("coverage", [0.5, 0.9])
def test_intervals_hold_what_was_promised(fitted, monkeypatch, coverage):
    """Exactly those of mola.prediction_intervals; and so often, give or take what 100 calibration data leave to chance."""
    monkeypatch.syspath_prepend(str(fitted))
    monkeypatch.chdir(fitted)
    result = run(fitted, "predict", "kept", "more.npz", "--output", "band.npz", "--coverage", coverage, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["decisions"]["intervals"]["coverage"] == coverage
    with np.load(fitted / "band.npz") as rows, np.load(fitted / "more.npz") as more, np.load(fitted / "val.npz") as val:
        truth = more["y"][:, 0]
        held = np.mean((truth >= rows["lower"]) & (truth <= rows["upper"]))
        # A beta distribution of the conformal rank, and the sampling of 2000 data.
        assert abs(held - coverage) < 4 * np.sqrt(coverage * (1 - coverage) * (1 / 101 + 1 / 2000)) + 1 / 101
        posterior = open_posterior(fitted / "kept").posterior
        kind = next(posterior.networks[0].parameters()).dtype
        band = mola.prediction_intervals(posterior.predict(torch.from_numpy(val["x"]).to(kind)), val["y"], coverage)
        lower, upper = band(posterior.predict(torch.from_numpy(more["x"]).to(kind)))
        np.testing.assert_allclose(rows["lower"], lower[:, 0], rtol=1e-4)
        np.testing.assert_allclose(rows["upper"], upper[:, 0], rtol=1e-4)


def test_promises_that_cannot_be_kept_are_refused(fitted, monkeypatch):
    monkeypatch.syspath_prepend(str(fitted))
    monkeypatch.chdir(fitted)
    for options, words in (
        (("--coverage", "0.999"), "too few for a coverage of 0.999"),
        (("--coverage", "1.5"), "coverage must"),
        (("--error-rate", "0.1"), "--error-rate is for classes"),
        (("--coverage", "0.9", "--by-class"), "--by-class is for classes"),
        (("--probabilities",), "--probabilities is for classes"),
    ):
        result = run(fitted, "predict", "kept", "more.npz", "--output", "none.csv", *options)
        assert result.exit_code != 0
        assert words in result.output + str(result.exception)
        assert not (fitted / "none.csv").exists()
    result = run(fitted, "export", "kept", "--torch", "none.pt2", "--coverage", "0.9")
    assert "no calibrated intervals" in result.output + str(result.exception)


@pytest.fixture(scope="module")
def report(fitted):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(fitted))
        patch.chdir(fitted)
        result = run(fitted, "evaluate", "kept", "--test", "more.npz", "--ood", "far.npz", "--output", "page")
        assert result.exit_code == 0, result.output
    return fitted / "page", result.output


def test_the_page_shows_the_numbers_of_the_file(report):
    """Every number in the tables of the page, of Markdown and of the terminal is one of numbers.json, rounded."""
    folder, shown = report
    numbers = json.loads((folder / "numbers.json").read_text(encoding="utf-8"))
    page, tables = ((folder / name).read_text(encoding="utf-8") for name in ("index.html", "tables.md"))
    rows = re.findall(r'<tr><th scope="row"[^>]*>([^<]+)</th>(.*?)</tr>', page)
    cells = {}
    for name, row in rows:
        cells.setdefault(name, []).append(re.findall(r"<td[^>]*>([^<]*)</td>", row))
    scores, errors = (numbers["methods"]["MoLA"][part] for part in ("scores", "errors"))
    first, second = cells["MoLA"][:2]
    for cell, metric in zip(first, ("rmse", "nll", "crps", "std"), strict=True):
        value, error = (float(part) for part in cell.split(" \N{PLUS-MINUS SIGN} "))
        digits = len(cell.split(" ")[0].partition(".")[2])
        assert value == pytest.approx(scores[metric], abs=0.51 * 10**-digits)
        assert error == pytest.approx(errors[metric], abs=0.51 * 10**-digits)
        assert cell in tables
        assert cell.split(" ")[0] in shown
    for cell, level in zip(second, (50, 80, 90, 95), strict=False):
        assert float(cell.split(" ")[0]) == pytest.approx(100 * scores[f"coverage_{level}"], abs=0.051)
    for figure in ("coverage", "spread", "predicted", "scores-0"):
        assert f'id="{figure}"' in page
        assert (folder / "figures" / f"{figure}.png").stat().st_size > 1000
    assert "<script" not in page
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)


def test_the_report_tells_outliers_and_differences(report):
    folder, _ = report
    numbers = json.loads((folder / "numbers.json").read_text(encoding="utf-8"))
    far = numbers["methods"]["MoLA"]["outside"]["far.npz"]
    assert far["scores"]["ood score"]["auroc"] > 0.9
    alone = numbers["methods"]["MAP"]["outside"]["far.npz"]["scores"]
    assert list(alone) == ["variance"]
    assert alone["variance"]["auroc"] == pytest.approx(0.5)  # one network alone has the same variance everywhere
    gap, error = numbers["differences"]["DE"]["nll"]
    methods = {name: one["scores"] for name, one in numbers["methods"].items()}
    assert gap == pytest.approx(methods["DE"]["nll"] - methods["MoLA"]["nll"])
    assert 0 < error < numbers["methods"]["DE"]["errors"]["nll"] * 2
    assert {one["promised"] for one in numbers["decisions"]["intervals"]} == {0.5, 0.8, 0.9, 0.95}
    assert methods["MAP-N"]["rmse"] == methods["MAP"]["rmse"]
    assert numbers["leads"]["nll"]["best"][0] in methods


def test_without_validation_data_no_noise_is_scaled(place, monkeypatch):
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.chdir(place)
    named = ("--network", "numbers_net:build", "--train", "train.npz", "--likelihood", "gaussian", "--rule", "evidence")
    told = ("--location", LOCATION, "--scale", SCALE, "--output", "unseen")
    assert run(place, "fit", "0.safetensors", *named, *told).exit_code == 0
    result = run(place, "evaluate", "unseen", "--test", "test.npz", "--output", "alone")
    assert result.exit_code == 0, result.output
    numbers = json.loads((place / "alone" / "numbers.json").read_text(encoding="utf-8"))
    assert list(numbers["methods"]) == ["MAP", "LLLA"]
    assert any("no scaled noise" in note for note in numbers["notes"])
    refused = run(place, "predict", "unseen", "test.npz", "--coverage", "0.9", "--output", "none.csv")
    assert "fitted without validation data" in refused.output + str(refused.exception)


def test_the_networks_alone_are_the_ensemble_itself(fitted, monkeypatch):
    """MAP and DE have the noise of the training residuals, as mola.ensemble with it, and DE-N is mola.baselines.scale_noise."""
    monkeypatch.syspath_prepend(str(fitted))
    monkeypatch.chdir(fitted)
    posterior = open_posterior(fitted / "kept").posterior
    sets, kind = {}, next(posterior.networks[0].parameters()).dtype
    for name in ("train", "val", "more"):
        with np.load(fitted / f"{name}.npz") as data:
            sets[name] = (torch.from_numpy(data["x"]).to(kind), torch.from_numpy(data["y"]).double())
    plain = mola.fit(
        posterior.networks, [sets["train"]], structure="kron-exact", progress=False,
        likelihood=mola.likelihoods.Gaussian(location=LOCATION, scale=SCALE),
    )  # fmt: skip
    said = posterior.predict(sets["more"][0])
    alone = networks_alone(said, 2, untuned_noise(posterior))
    assert torch.allclose(alone.component_noise[:, 0].double().sqrt(), plain.noise, rtol=1e-4)
    scaled = mola.baselines.scale_noise(
        mola.ensemble(posterior.networks, likelihood=mola.likelihoods.Gaussian(location=LOCATION, scale=SCALE)),
        [sets["val"]],
    )
    one = networks_alone(posterior.predict(sets["val"][0]), 2, untuned_noise(posterior))
    noise = one.component_noise[:, 0].double().sqrt() * noise_factors(one, sets["val"][1])
    # One factor for all networks: the same likelihood to what their different noises leave.
    assert torch.allclose(noise.mean(0), scaled.noise.mean(0), rtol=0.05)


@pytest.mark.filterwarnings("ignore::mola.errors.MolaWarning")  # nobody has trained this network
def test_outputs_that_are_variances_are_no_targets(place, monkeypatch):
    (place / "numbers_and_noise.py").write_text(
        "from torch import nn\n\n\ndef build():\n    return nn.Linear(3, 2)\n", encoding="utf-8"
    )
    save_file(torch.nn.Linear(3, 2).state_dict(), place / "said.safetensors")
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.chdir(place)
    result = run(
        place, "fit", "said.safetensors", "--network", "numbers_and_noise:build", "--train", "train.npz", "--val", "val.npz",
        "--likelihood", "gaussian", "--location", LOCATION, "--scale", SCALE, "--heteroscedastic", "--output", "said",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "1 network with 2 outputs, means and variances of 1 target, on 300 inputs" in " ".join(result.output.split())
    told = " ".join(run(place, "info", "said").output.split())
    assert "3 features, 2 outputs (means and variances of 1 target), likelihood gaussian" in told


def test_numbers_for_networks_that_name_classes_ask_for_their_likelihood(place, monkeypatch):
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.chdir(place)
    result = run(
        place, "fit", "0.safetensors", "--network", "numbers_net:build", "--train", "train.npz", "--val", "val.npz"
    )
    assert result.exit_code != 0
    assert "Numbers to predict are for --likelihood gaussian" in result.output + str(result.exception)
