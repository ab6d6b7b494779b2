"""`molaplace export`: from a folder that `molaplace fit` wrote to a file that gives the same predictions."""

from __future__ import annotations

import json

import pytest
import torch

import molaplace as mola
from molaplace.cli.decisions import make_decisions
from molaplace.cli.export import run_export
from tests.cli.fitted_folders import run
from tests.closeness import assert_close
from tests.workspace import CLASSES

pytestmark = pytest.mark.usefixtures("_in_workspace")


def test_a_folder_becomes_both_kinds_of_file_that_take_bytes(fitted, workspace, tmp_path):
    files = tmp_path / "model.onnx", tmp_path / "model.pt2"
    options = ("--onnx", files[0], "--torch", files[1], "--pixels", "--outputs", "probs, ood_score")
    summary = json.loads(run("export", fitted.folder, *options, "--json").stdout)
    assert [file["path"] for file in summary] == [str(path) for path in files]
    assert all(max(file["differences"].values()) < 1e-4 for file in summary)
    pixels, _ = workspace.pixels("test")
    expected = fitted.posterior.predict(pixels.float() / 255)
    for path in files:
        loaded = mola.export.load(path, trust=True)
        assert loaded.classes == list(CLASSES)
        outputs = loaded(pixels)
        assert_close(outputs["probs"], expected.probs)
        assert_close(outputs["ood_score"], expected.ood_score, "difference")


def test_an_exported_file_decides_alike(workspace, fitted, tmp_path):
    pytest.importorskip("onnxruntime")
    rates = {"false_alarm_rate": 0.25, "error_rate": 0.4, "certainty": 0.7, "coverage": 0.8}
    outputs = ["probs", "confidence", "ood_score"]  # by which it decides
    thresholds = make_decisions(fitted, **rates)
    (written,) = run_export(fitted, thresholds, onnx=tmp_path / "model.onnx", outputs=outputs)
    loaded = mola.export.load(written.path)
    prediction = loaded(workspace.inputs("test")[0])
    decisions = loaded.decide(prediction)
    assert torch.equal(decisions["outlying"], prediction["ood_score"] > thresholds.alarm)
    assert torch.equal(decisions["answer"], (prediction["confidence"] > thresholds.answers) & ~decisions["outlying"])
    assert torch.equal(decisions["set"], thresholds.sets(prediction["probs"]))
