"""`molaplace evaluate`: the numbers of a program on the same data, for every kind of outputs, and what the terminal shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import molaplace as mola
from molaplace import metrics
from molaplace.cli.decisions import make_decisions, outlier_threshold
from molaplace.cli.folder import open_posterior
from molaplace.data.opening import open_dataset
from molaplace.data.preprocessing import Preprocessing
from molaplace.errors import MolaWarning
from molaplace.evaluation import baselines, collect
from molaplace.progress import no_progress
from molaplace.report.words import evaluation_findings
from molaplace.report.writing import EVALUATION, PAGE, write_page
from molaplace.saving.files import replacing
from tests.cli.fitted_folders import LOCATION, NAMES, SCALE, run
from tests.closeness import assert_close
from tests.pages import Page
from tests.workspace import evaluated, job_for, run_fit

pytestmark = pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")

CLASS_METHODS = ["MAP", "MAP-T", "DE", "DE-T", "DE-L", "LLLA", "MoLA (paper)", "MoLA"]
REGRESSION_METHODS = ["MAP", "MAP-N", "DE", "DE-N", "LLLA", "MoLA"]


def expected_scores(kind, prediction, labels):
    """The scores of MoLA by the library's own functions."""
    if kind.name == "classes":
        return {
            "accuracy": metrics.accuracy(prediction.probs, labels),
            "nll": metrics.negative_log_likelihood(prediction.probs, labels),
            "ece": metrics.expected_calibration_error(prediction.probs, labels),
        }
    if kind.name == "labels":
        known = ~labels.isnan()
        return {
            "accuracy": ((prediction.probs > 0.5) == labels)[known].double().mean(),
            "auroc": metrics.auroc_of_labels(prediction.probs, labels).mean(),
        }
    if kind.name == "regression":
        lower, upper = prediction.interval(0.9)
        errors = (prediction.mean.double() - labels).square().mean(1)
        return {
            "rmse": errors.mean().sqrt(),
            "coverage_90": ((labels >= lower) & (labels <= upper)).double().mean(),
            "width_90": (upper - lower).mean(),
            "nll": -prediction.log_prob(labels).mean(),
        }
    known = labels != 255
    return {"accuracy": (prediction.label == labels)[known].double().mean()}


@pytest.mark.parametrize("kind", NAMES, indirect=True)
def test_numbers_are_those_of_the_library_and_the_terminal_shows_one_screen(kind, tmp_path):
    outcome = run("evaluate", "posterior", "--test", "test.npz", "--ood", "far.npz", "--output", tmp_path / "report")
    assert outcome.exit_code == 0, (outcome.output, outcome.output)
    lines = [line for line in outcome.stdout.splitlines() if not re.match(r" *\d+ % ", line)]
    assert len(lines) <= 25
    assert "MoLA: " in lines[0], "the finding comes first"
    assert "index.html" in lines[-1]
    document = json.loads((tmp_path / "report" / "numbers.json").read_text())
    assert list(document["methods"]) == (REGRESSION_METHODS if kind.name == "regression" else CLASS_METHODS)
    (inputs, labels), posterior = kind.data("test"), kind.open().posterior
    mine = document["methods"]["MoLA"]["labelled"]["test.npz"]["metrics"]
    for name, value in expected_scores(kind, posterior.predict(inputs), labels).items():
        assert_close(mine[name], value, "difference", scale=max(1.0, abs(float(value))), name=name)
    if kind.name in ("labels", "maps"):  # with several rows for an input; one has no label at all
        assert document["sets"]["test.npz"]["inputs"] == len(inputs)
    far = posterior.predict(torch.from_numpy(np.load("far.npz")["x"])).ood_score
    inside = posterior.predict(inputs).ood_score
    score = document["methods"]["MoLA"]["outliers"]["far.npz"]["scores"]["ood score"]
    if kind.name == "maps":  # positions whose label is ignored are not compared
        inside = inside[labels != 255]
    assert score["auroc"] == pytest.approx(metrics.auroc(inside.flatten(), far.flatten()), abs=1e-3)
    page = (tmp_path / "report" / "index.html").read_text()
    Page(page)
    for name in kind.names:
        assert name in page
    for name in document["methods"]:
        assert name in page
    assert list((tmp_path / "report" / "figures").glob("*.png"))


@pytest.mark.parametrize("kind", ["classes"], indirect=True)
def test_a_report_replaces_an_older_report_as_a_whole(kind, tmp_path):
    def write(*data, progress=no_progress):
        evaluation = evaluated(kind.open(), *data)
        with replacing(tmp_path, EVALUATION, (PAGE,)) as folder:
            write_page(evaluation, folder, progress)

    def stop(words, share):
        if share > 0.3:
            raise KeyboardInterrupt(words)

    write("test.npz")
    (tmp_path / "figures" / "mine.svg").write_text("the user's")
    old = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(KeyboardInterrupt):
        write("test.npz", progress=stop)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == old
    write("test.npz", "far.npz")
    assert (tmp_path / "figures" / "mine.svg").exists()
    assert all((tmp_path / name).read_bytes() != old[tmp_path / name] for name in ("index.html", "numbers.json"))


@pytest.mark.parametrize("kind", NAMES, indirect=True)
def test_the_finding_begins_with_the_posterior_against_the_plain_and_the_scaled_ensemble(kind):
    result = evaluated(kind.open(), "test.npz")
    findings = evaluation_findings(result)
    first = next(iter(findings.values()))
    scaled = "DE-N" if kind.name == "regression" else "DE-T"
    assert first.index("MoLA: ") < first.index("the ensemble (DE") < first.index(f"the scaled ensemble ({scaled}")
    gap, error = result.differences["DE"]["nll"]
    nll = {name: result.methods[name].labelled["test.npz"].metrics["nll"] for name in ("DE", "MoLA")}
    assert gap == pytest.approx(nll["DE"] - nll["MoLA"])
    words = "equal" if max(abs(gap), error) < 1e-6 else "clearly lower" if gap > 0 else "clearly higher"
    words = words if abs(gap) > 2 * error or words == "equal" else f"not {words}"
    assert f", {words} " in first.split(" the ensemble (DE")[0]
    assert len(findings) == 3
    assert "`--ood DATA`" in findings["Outliers"]
    assert "Outliers: far.npz" in evaluation_findings(evaluated(kind.open(), "test.npz", "far.npz"))


@pytest.mark.parametrize("kind", ["maps"], indirect=True)
def test_standard_errors_of_dense_outputs_count_inputs(kind):
    document = evaluated(kind.open(), "test.npz").document()
    inputs, labels = kind.data("test")
    known = labels != 255
    prediction = kind.open().posterior.predict(inputs)
    own_set = document["sets"]["test.npz"]
    mine = document["methods"]["MoLA"]["labelled"]["test.npz"]
    assert [own_set[name] for name in ("count", "inputs", "parts")] == [int(known.sum()), len(inputs), "position"]
    right = [
        (predicted == label)[mask].double().mean()
        for predicted, label, mask in zip(prediction.label, labels, known, strict=True)
    ]
    error = float(torch.stack(right).std()) / len(right) ** 0.5
    assert mine["errors"]["accuracy"] == pytest.approx(error)
    for index, name in enumerate(kind.names):
        in_class = (labels == index) & known
        called = (prediction.label == index) & known
        expected = float((in_class & called).sum() / (in_class | called).sum())
        assert mine["classes"][name]["iou"] == pytest.approx(expected)


@pytest.mark.usefixtures("_in_workspace")
@pytest.mark.parametrize(("count", "mixing"), [(1, "uniform"), (3, "uniform"), (3, "stacking")])
def test_an_evaluation_is_what_a_program_would_have_found(workspace, tmp_path, count, mixing):
    run_fit(
        job_for(workspace, weights=tuple(workspace.weights(count)), rule="nll", mixing=mixing), tmp_path / "posterior"
    )
    opened = open_posterior(tmp_path / "posterior", trust=True)
    result = evaluated(opened, "test.csv", "strange")
    weights = opened.posterior.weights.tolist()
    assert any("weights" in note for note in result.notes) == (mixing == "stacking") == (max(weights) > min(weights))
    train, val = ([workspace.inputs(split)] for split in ("train", "val"))
    networks = workspace.networks(count)
    quiet = {"progress": False}
    scaled = mola.calibration.temperature_scaled
    methods = {
        "MAP": mola.ensemble(networks[0]),
        "MAP-T": scaled(networks[0], val, **quiet),
        "DE": mola.ensemble(networks).with_weights(weights),
        "DE-T": scaled(networks, val, weights=weights, **quiet),
        "DE-L": scaled(networks, val, weights=weights, mean="logits", **quiet),
        "LLLA": mola.fit(networks[0], train, val, rule="nll", **quiet),
        "MoLA (paper)": mola.fit(networks, train, **quiet).with_weights(weights).tune(val, rule="threshold", **quiet),
        "MoLA": mola.fit(networks, train, val, rule="nll", **quiet).with_weights(weights),
    }
    methods["LLLA (paper)"] = methods["MoLA (paper)"]
    expected = CLASS_METHODS if count > 1 else ["MAP", "MAP-T", "LLLA (paper)", "LLLA"]
    assert list(result.methods) == expected
    assert ("LLLA: " in evaluation_findings(result)["Log loss"]) == (count == 1)
    strange = next(open_dataset("strange", Preprocessing(mode="RGB", shape=(3, 6, 6)), labelled=False).batches()).inputs
    test, labels = workspace.inputs("test")
    for name in expected:
        inside = methods[name].predict(test)
        outside = methods[name].predict(strange)
        labelled = result.methods[name].labelled["test.csv"]
        out = result.methods[name].outliers["strange"]
        assert labelled.metrics["nll"] == pytest.approx(metrics.negative_log_likelihood(inside.probs, labels), rel=1e-4)
        assert out.confidence == pytest.approx(metrics.mean_confidence(outside.probs), rel=1e-4)
        scores = {
            "max probability": (-inside.confidence, -outside.confidence),
            "entropy": (inside.entropy, outside.entropy),
            "ood score": (inside.ood_score, outside.ood_score),
        }
        for score, pair in scores.items():
            assert out.scores[score]["auroc"] == pytest.approx(metrics.auroc(*pair), abs=2e-3), score
    if count > 1:
        assert set(result.methods["DE-L"].chosen) == {"temperature"}
    json.dumps(result.document())


@pytest.mark.parametrize("kind", ["classes"], indirect=True)
def test_energies_are_those_of_scaled_logits(kind):
    """Energies of the logits divided by the temperature and, if the method averages logits, of their mean."""
    posterior = kind.open().posterior
    inputs, _ = kind.data("test")
    with torch.no_grad():
        logits = torch.stack([network(inputs) for network in posterior.networks]).double() / 2
    for pooling, expected in ((1.0, -logits.logsumexp(-1).mean(0)), (0.0, -logits.mean(0).logsumexp(-1))):
        method = baselines(posterior)["DE"].with_temperature(2.0).with_pooling(pooling)
        columns = collect({"posterior": posterior, "scaled": method}, [inputs], "data", labelled=False)
        assert_close(columns["scaled"].scores["energy"], expected, "difference")


@pytest.mark.parametrize("kind", ["regression"], indirect=True)
def test_the_networks_of_a_regression_alone_are_the_ensemble(kind):
    """MAP and DE have the noise of the training residuals, as mola.ensemble with it, and DE-N is mola.calibration.scale_noise."""
    posterior = kind.open().posterior
    likelihood = mola.likelihoods.Gaussian(location=LOCATION, scale=SCALE)
    train, (val, targets) = kind.data("train"), kind.data("val")
    plain = mola.fit(posterior.networks, [train], progress=False, likelihood=likelihood)
    methods = baselines(posterior, [(val, targets)], progress=False)
    alone = methods["DE"]
    assert_close(alone.noise, plain.noise, "difference")
    scale_noise = mola.calibration.scale_noise
    scaled = scale_noise(mola.ensemble(posterior.networks, likelihood=likelihood), [(val, targets)])
    noise = methods["DE-N"].noise
    assert_close(noise[0] / alone.noise[0], noise[1] / alone.noise[1], "difference")
    # One factor for all networks, which have different noises: about the same noise on average.
    assert torch.allclose(noise.mean(0), scaled.noise.mean(0), rtol=0.05)


@pytest.mark.usefixtures("_in_workspace")
def test_data_that_were_seen_before_are_named(workspace, fitted):
    for name in (fitted.job.val, str(Path(fitted.job.val).resolve()), f"../{workspace.root.name}/val"):
        with pytest.warns(MolaWarning, match="also the validation data"):
            comparison = evaluated(fitted, name)
        assert any("the validation data" in note for note in comparison.notes)
    with pytest.warns(MolaWarning, match="also the training data"):
        evaluated(fitted, fitted.job.train)


@pytest.mark.usefixtures("_in_workspace")
def test_the_report_shows_guarantees_beside_the_test_data(workspace, fitted, monkeypatch):
    monkeypatch.setattr("molaplace.cli.evaluate.ERROR_RATES", (0.01, 0.4))
    decisions = evaluated(fitted, "test.npz").decisions
    inputs, labels = workspace.inputs("test")
    prediction = fitted.posterior.predict(inputs)
    right = prediction.label == labels
    outlying = prediction.ood_score > outlier_threshold(fitted, None)
    impossible, possible = decisions.answers
    assert (impossible.threshold, impossible.realised) == (None, None)
    assert "299" in impossible.why
    answered = (prediction.confidence > possible.threshold) & ~outlying
    assert possible.answered == pytest.approx(float(answered.double().mean()))
    assert possible.realised == pytest.approx(float((~right[answered]).double().mean()))
    assert decisions.alarms == pytest.approx(float(outlying.double().mean()))
    sets = make_decisions(fitted, coverage=0.9).sets(prediction)
    inside = sets[torch.arange(len(labels)), labels]
    assert decisions.sets.realised == pytest.approx(float(inside.double().mean()))
    assert decisions.sets.size == pytest.approx(float(sets.sum(1).double().mean()))
    assert decisions.sets.empty == pytest.approx(float((~sets.any(1)).double().mean()))
    assert set(decisions.curves) == {"MAP", "DE", "LLLA", "MoLA"}
    assert decisions.curves["MoLA"][-1] == pytest.approx([1, float((~right).double().mean())])
