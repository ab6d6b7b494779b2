"""Decisions from a posterior's folder: equal to the library's, without further data."""

import math

import pytest
import torch

import molaplace as mola
from molaplace.cli.decisions import make_decisions
from molaplace.cli.export import ExportOptions, run_export
from tests.closeness import assert_close

pytestmark = pytest.mark.usefixtures("_in_workspace")

ASKED = {"false_alarm_rate": 0.25, "error_rate": 0.4, "certainty": 0.7, "coverage": 0.8}


@pytest.fixture
def known(workspace, fitted):
    inputs, labels = workspace.inputs("val")
    return fitted.posterior.predict(inputs), labels


def test_decisions_are_those_of_the_library(fitted, known):
    prediction, labels = known
    found = make_decisions(fitted, **ASKED)
    alarm = mola.alarm_threshold(prediction.ood_score, 0.25)
    gated = torch.where(prediction.ood_score > alarm, -math.inf, prediction.confidence)
    answer = mola.abstain_threshold(prediction, labels, 0.4, 0.7, score=gated)
    assert_close(found.alarm, alarm, "difference", scale=float(prediction.ood_score.abs().max()))
    assert_close(float(found.answer), max(0.0, float(answer)), scale=1.0)
    assert (found.answer.answered, found.answer.errors) == (answer.answered, answer.errors)
    sets = mola.prediction_sets(prediction, labels, 0.8)
    assert_close(found.sets.least_probability, sets.least_probability, scale=1.0)


def test_an_exported_file_decides_alike(workspace, fitted, tmp_path):
    pytest.importorskip("onnxruntime")
    outputs = ["probs", "confidence", "ood_score"]  # by which it decides
    (written,) = run_export(
        fitted, ExportOptions(posterior=fitted.folder, onnx=tmp_path / "model.onnx", outputs=outputs, **ASKED)
    )
    made = make_decisions(fitted, **ASKED)
    loaded = mola.export.load(written.path)
    inputs, _ = workspace.inputs("test")
    said = loaded(inputs)
    found = loaded.decide(said)
    assert torch.equal(found["outlying"], said["ood_score"] > made.alarm)
    assert torch.equal(found["answer"], (said["confidence"] > made.answer) & ~found["outlying"])
    assert torch.equal(found["set"], made.sets(said["probs"]))
