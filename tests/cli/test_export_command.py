"""`molaplace export`: from a folder that `molaplace fit` wrote to a file that gives the same predictions."""

from __future__ import annotations

import json

import pytest
import torch

import molaplace as mola
from molaplace.cli.decisions import make_decisions
from molaplace.cli.export import ExportOptions, run_export
from molaplace.errors import OptionError, StorageError
from tests.cli.fitted_folders import run
from tests.closeness import assert_close
from tests.workspace import CLASSES

pytestmark = pytest.mark.usefixtures("_in_workspace")


def test_a_folder_becomes_both_kinds_of_file_that_take_bytes(fitted, workspace, tmp_path):
    files = tmp_path / "model.onnx", tmp_path / "model.pt2"
    told = ("--onnx", files[0], "--torch", files[1], "--pixels", "--outputs", "probs, ood_score")
    summary = json.loads(run("export", fitted.folder, *told, "--json").stdout)
    assert [one["path"] for one in summary] == [str(path) for path in files]
    assert all(max(one["differences"].values()) < 1e-4 for one in summary)
    pixels, _ = workspace.pixels("test")
    expected = fitted.posterior.predict(pixels.float() / 255)
    for path in files:
        loaded = mola.export.load(path, trust=True)
        assert loaded.classes == list(CLASSES)
        found = loaded(pixels)
        assert_close(found["probs"], expected.probs)
        assert_close(found["ood_score"], expected.ood_score, "difference")


def test_what_is_wrong_is_told(fitted, tmp_path):
    path = tmp_path / "a.pt2"
    assert isinstance(run("export", fitted.folder).exception, OptionError)
    assert isinstance(run("export", tmp_path, "--torch", path).exception, StorageError)
    assert "got risk" in str(run("export", fitted.folder, "--torch", path, "--outputs", "risk").exception)
    assert not path.exists()


def test_an_exported_file_decides_alike(workspace, fitted, tmp_path):
    pytest.importorskip("onnxruntime")
    rates = {"false_alarm_rate": 0.25, "error_rate": 0.4, "certainty": 0.7, "coverage": 0.8}
    outputs = ["probs", "confidence", "ood_score"]  # by which it decides
    options = ExportOptions(posterior=fitted.folder, onnx=tmp_path / "model.onnx", outputs=outputs, **rates)
    (written,) = run_export(fitted, options)
    made = make_decisions(fitted, **rates)
    loaded = mola.export.load(written.path)
    prediction = loaded(workspace.inputs("test")[0])
    found = loaded.decide(prediction)
    assert torch.equal(found["outlying"], prediction["ood_score"] > made.alarm)
    assert torch.equal(found["answer"], (prediction["confidence"] > made.answer) & ~found["outlying"])
    assert torch.equal(found["set"], made.sets(prediction["probs"]))
