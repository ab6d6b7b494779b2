"""Decisions from a posterior's folder: the same as with the library, without further data, and refused in clear words."""

import csv
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import mola
from mola.app.explore.answers import decision_card
from mola.app.explore.opinions import Opinions
from mola.app.explore.subject import open_subject
from mola.app.jobs import folder as folders
from mola.app.jobs.decisions import decide, kept_calibration, make_decisions
from mola.app.jobs.evaluate import run_evaluate
from mola.app.jobs.export import run_export
from mola.app.jobs.folder import alarm
from mola.app.jobs.predict import run_predict
from mola.compare.evaluation import evaluation_document
from mola.compare.report.curve_figures import evaluation_decisions
from mola.compare.report.single_run_tables import decision_tables
from mola.compare.report.style import NARROW, WIDE
from mola.compare.report.writing import evaluation_figures
from mola.decisions.calibration import Calibration
from mola.errors import DataError, MolaWarning, OptionError, StorageError
from tests.closeness import assert_close

pytestmark = pytest.mark.usefixtures("_at_the_desk")

ASKED = {"false_alarm_rate": 0.25, "error_rate": 0.4, "certainty": 0.7, "coverage": 0.8}


@pytest.fixture
def known(desk, fitted):
    inputs, labels = desk.inputs("val")
    return fitted.posterior.predict(inputs), labels


def test_what_was_kept_is_what_the_validation_data_say(fitted, known):
    prediction, labels = known
    kept, score = kept_calibration(fitted, "--coverage")
    now = Calibration.of(prediction, labels)
    for name, column in now.columns().items():
        assert_close(kept.columns()[name], column, name=name)
    assert_close(score, prediction.ood_score, "difference")


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


@pytest.mark.parametrize("form", ["csv", "jsonl", "npz"])
def test_rows_say_whether_to_answer_and_what_cannot_be_ruled_out(desk, fitted, tmp_path, form):
    path = tmp_path / f"said.{form}"
    result = run_predict(fitted, "test.npz", path, **ASKED)
    made = make_decisions(fitted, **ASKED)
    inputs, _ = desk.inputs("test")
    prediction = fitted.posterior.predict(inputs)
    answered = made.answer(prediction.confidence) & (prediction.ood_score <= made.alarm)
    held = made.sets(prediction)
    assert result.answered == float(answered.double().mean())
    assert result.set_size == pytest.approx(float(held.sum(1).double().mean()))
    assert result.empty == float((held.sum(1) == 0).double().mean())
    names = [[name for name, one in zip(fitted.classes, row, strict=True) if one] for row in held.tolist()]
    if form == "csv":
        rows = list(csv.DictReader(path.read_text().splitlines()))
        assert [row["answer"] for row in rows] == ["true" if one else "false" for one in answered.tolist()]
        assert [row["set"] for row in rows] == ["|".join(one) for one in names]
        assert not any(name.startswith("p_") for name in rows[0])
    elif form == "jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["answer"] for row in rows] == answered.tolist()
        assert [row["set"] for row in rows] == names
        assert "probabilities" not in rows[0]
    else:
        stored = np.load(path)
        assert stored["answer"].tolist() == answered.int().tolist()
        assert np.array_equal(stored["set"], held.numpy())
    assert result.plain()["decisions"]["answer"]["certainty"] == 0.7


def test_rows_are_as_before_where_nothing_is_asked_for(fitted, tmp_path):
    run_predict(fitted, "test.npz", tmp_path / "plain.csv")
    (header, *_) = (tmp_path / "plain.csv").read_text().splitlines()
    assert header == "name,label,class,confidence,entropy,epistemic,ood_score,distance,outlying,error"


def test_inputs_that_cannot_be_used_have_neither_answer_nor_set(fitted, tmp_path, desk):
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "broken.png").write_bytes(b"no picture")
    good = desk.root / "strange" / "00.png"
    (tmp_path / "some" / "good.png").write_bytes(good.read_bytes())
    run_predict(fitted, str(tmp_path / "some"), tmp_path / "a.jsonl", **ASKED)
    rows = {row["name"].split("/")[-1]: row for row in map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())}
    assert "answer" not in rows["broken.png"]
    assert "set" not in rows["broken.png"]
    assert "set" in rows["good.png"]


def test_what_is_done_with_an_input(fitted):
    made = make_decisions(fitted, **ASKED)
    sure, quiet = made.answer + 0.01, made.alarm - 1
    assert decide(made, sure, quiet) == "answer"
    assert decide(made, float(made.answer), quiet) == "hand over"
    assert decide(made, sure, made.alarm + 1) == "strange"


def test_promises_that_cannot_be_given_are_refused_with_what_would_help(fitted):
    with pytest.raises(OptionError, match=r"--error-rate: no threshold can promise .* it takes 299"):
        make_decisions(fitted, error_rate=0.01)
    with pytest.raises(OptionError, match=r"--coverage: 18 labelled data are too few .* at least 99"):
        make_decisions(fitted, coverage=0.99)
    with pytest.raises(OptionError, match="--certainty goes with --error-rate"):
        make_decisions(fitted, certainty=0.9)
    with pytest.raises(OptionError, match="--by-class goes with --coverage"):
        make_decisions(fitted, by_class=True)
    with pytest.warns(MolaWarning, match="labelled data of each class"):
        assert make_decisions(fitted, coverage=0.9, by_class=True).sets.threshold.shape == (3,)


def test_folders_of_older_versions_open_and_say_what_they_lack(fitted, tmp_path):
    scores = kept_calibration(fitted, "--coverage")[1].numpy()
    entry = folders.keep_scores(tmp_path, scores)  # as before: scores alone
    validation = {**fitted.document["result"]["validation"], "scores": entry}
    old = replace(fitted, folder=tmp_path, document={"result": {**fitted.document["result"], "validation": validation}})
    assert make_decisions(old, false_alarm_rate=0.25).alarm == make_decisions(fitted, false_alarm_rate=0.25).alarm
    for name in ("error_rate", "coverage"):
        with pytest.raises(OptionError, match=r"did not keep what decisions need .* Fit again"):
            make_decisions(old, **{name: 0.5})
    without = replace(fitted, document={"result": {**fitted.document["result"], "validation": None}})
    with pytest.raises(OptionError, match="fitted without validation data"):
        make_decisions(without, error_rate=0.5)


def test_damaged_numbers_are_refused(fitted, tmp_path):
    known, score = kept_calibration(fitted, "--coverage")
    for changed in ({"true_rank": known.true_rank + 9}, {"confidence": known.confidence.float()}, {"ood_score": None}):
        columns = {
            name: one for name, one in ({**known.columns(), "ood_score": score} | changed).items() if one is not None
        }
        entry = folders.keep_scores(tmp_path, score.numpy(), columns)
        validation = {**fitted.document["result"]["validation"], "scores": entry}
        damaged = replace(
            fitted, folder=tmp_path, document={"result": {**fitted.document["result"], "validation": validation}}
        )
        with pytest.raises(StorageError, match="invalid"):
            make_decisions(damaged, coverage=0.8)


def test_of_very_many_data_some_are_kept(fitted, tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "MOST_SCORES", 50)
    columns = {"confidence": torch.arange(1000.0).double()}
    entry = folders.keep_scores(tmp_path, np.arange(1000.0), columns)
    kept = folders.read_scores(tmp_path, {"count": 1000, "scores": entry})[3]["confidence"]
    assert len(kept) == 50
    assert (kept[0], kept[-1]) == (0, 999)


@pytest.mark.slow
def test_an_exported_file_decides_alike_and_its_thresholds_can_be_changed(desk, fitted, tmp_path):
    pytest.importorskip("onnxruntime")
    outputs = ["probabilities", "confidence", "ood_score"]  # by which it decides
    (written,) = run_export(fitted, onnx=tmp_path / "model.onnx", outputs=outputs, **ASKED)
    made = make_decisions(fitted, **ASKED)
    loaded = mola.load_exported(written.path)
    inputs, _ = desk.inputs("test")
    said = loaded(inputs)
    found = loaded.decide(said)
    assert torch.equal(found["outlying"], said["ood_score"] > made.alarm)
    assert torch.equal(found["answer"], (said["confidence"] > made.answer) & ~found["outlying"])
    assert torch.equal(found["set"], made.sets(said["probabilities"]))
    # The constants are properties of the file, outside the graph.
    import onnx

    model = onnx.load(str(written.path))
    for one in model.metadata_props:
        if one.key == "mola.answer_threshold":
            one.value = "0.999999"
    onnx.save(model, str(tmp_path / "stricter.onnx"))
    stricter = mola.load_exported(tmp_path / "stricter.onnx")
    assert not stricter.decide(stricter(inputs))["answer"].any()
    loaded.document["answer_threshold"] = None
    assert set(loaded.decide(said)) == {"outlying", "set"}
    del said["probabilities"]
    with pytest.raises(DataError, match="set_threshold, which is for the output 'probabilities'"):
        loaded.decide(said)


def test_the_explorer_says_what_would_be_done(fitted):
    asked = open_subject(fitted.folder, error_rate=0.4, certainty=0.7)
    assert asked.decisions.answer == make_decisions(fitted, error_rate=0.4, certainty=0.7).answer
    quiet, sure = asked.decisions.alarm - 1, 0.5 + float(asked.decisions.answer) / 2

    def said(confidence, score, subject=asked):
        rest = (1 - confidence) / 2
        probs = dict.fromkeys(("MAP", "DE", "MoLA"), (confidence, rest, rest))
        return decision_card(Opinions(probs, 0.1, 0.1, score, ()), subject)

    assert 'data-decision="answer"' in said(sure, quiet)
    assert "Would answer: cat" in said(sure, quiet)
    assert 'data-decision="strange"' in said(sure, asked.decisions.alarm + 1)
    assert 'data-decision="hand over"' in said(0.34, quiet) or asked.decisions.answer < 0.34
    usual = open_subject(fitted.folder)  # 18 data are too few for 5 % with 95 % certainty
    assert usual.decisions is None
    assert "it takes 59" in said(0.9, quiet, usual)
    with pytest.raises(OptionError, match="it takes 299"):
        open_subject(fitted.folder, error_rate=0.01)


def test_the_report_shows_what_became_of_promises(desk, fitted, monkeypatch, tmp_path):
    monkeypatch.setattr("mola.app.jobs.evaluate.ERROR_RATES", (0.01, 0.4))
    comparison = run_evaluate(fitted, "test.npz")
    found = comparison.decisions
    inputs, labels = desk.inputs("test")
    prediction = fitted.posterior.predict(inputs)
    right, rings = prediction.label == labels, prediction.ood_score > alarm(fitted, None)
    impossible, possible = found.answers
    assert (impossible.threshold, impossible.realised) == (None, None)
    assert "it takes 299" in impossible.why
    side = (prediction.confidence > possible.threshold) & ~rings
    assert possible.answered == pytest.approx(float(side.double().mean()))
    assert possible.realised == pytest.approx(float((~right[side]).double().mean()))
    assert found.alarms == pytest.approx(float(rings.double().mean()))
    held = make_decisions(fitted, coverage=0.9).sets(prediction)
    inside = held[torch.arange(len(labels)), labels]
    assert found.sets.realised == pytest.approx(float(inside.double().mean()))
    assert found.sets.size == pytest.approx(float(held.sum(1).double().mean()))
    assert sum(found.sets.sizes.values()) == pytest.approx(1)
    assert found.sets.classes["cat"] == pytest.approx(float(inside[labels == 0].double().mean()))
    assert set(found.curves) == {"MAP", "DE", "LLLA", "MoLA"}
    assert found.curves["MoLA"][-1] == pytest.approx([1, float((~right).double().mean())])
    assert json.loads(json.dumps(evaluation_document(comparison)))["decisions"]["answers"][1]["promised"] == 0.4
    table, by_class = decision_tables(comparison)
    assert [row.name for row in table.rows][1:3] == ["wrong answers, at most 1%", "wrong answers, at most 40%"]
    assert "It takes 299" in table.caption or "it takes 299" in table.caption
    assert len(by_class.rows) == 3
    assert "decisions" in evaluation_figures(comparison)
    old = replace(comparison, decisions=None)
    assert decision_tables(old) == []
    assert "decisions" not in evaluation_figures(old)
    assert "decisions" not in evaluation_document(old)
    for shape in (WIDE, NARROW):
        assert len(evaluation_decisions(comparison, shape).axes) == 1
