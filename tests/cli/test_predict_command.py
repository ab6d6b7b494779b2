"""`molaplace predict`: the library's numbers under the library's names, for every kind of outputs, source and format."""

from __future__ import annotations

import csv
import json
import math
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from PIL import Image

import molaplace as mola
from molaplace.cli.decisions import outlier_threshold
from molaplace.cli.folder import open_posterior
from molaplace.cli.predict import summary_sentence
from molaplace.export.graph import OUTPUTS, REGRESSION_OUTPUTS
from tests.cli.fitted_folders import NAMES, draw, run
from tests.closeness import assert_close
from tests.workspace import job_for, run_fit, to_predict

pytestmark = pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")

LEFT_OUT = 3
INTERRUPTED = 130
DIFFERENCES = ("epistemic", "aleatoric", "ood_score")
"""Fields that are differences of larger values."""


def read(path):
    """The columns of a table or an archive, by name; None where there is nothing."""
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    if path.suffix == ".parquet":
        import pandas

        frame = pandas.read_parquet(path)
        rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    elif path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    else:
        with open(path, newline="", encoding="utf-8") as stream:
            rows = [{name: cell or None for name, cell in row.items()} for row in csv.DictReader(stream)]
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def numbers(cells):
    return np.array([np.nan if cell is None else float(cell) for cell in cells])


def column_name(column, names):
    field, _, index = column.rpartition("_")
    return f"{field}_{names[int(index)]}" if index.isdecimal() else column


ENDINGS = [
    "csv",
    "jsonl",
    pytest.param("parquet", marks=pytest.mark.skipif(find_spec("pyarrow") is None, reason="PYARROW IS NOT INSTALLED")),
]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("kind", ["classes", "labels", "regression"], indirect=True)
def test_tables_have_the_columns_of_to_frame(kind, tmp_path, ending):
    output = tmp_path / f"out.{ending}"
    more = ["--probabilities"] if kind.name != "regression" else []
    assert run("predict", "posterior", "test.npz", "--output", output, "--quiet", *more).exit_code == 0
    prediction = kind.open().posterior.predict(kind.data("test")[0])
    columns = read(output)
    expected = prediction.to_frame()
    for column in expected:
        precision = "difference" if column.startswith(DIFFERENCES) else "float32"
        assert_close(numbers(columns[column_name(column, kind.names)]), expected[column], precision, name=column)
    if kind.name == "classes":
        assert columns["class"] == [kind.names[label] for label in prediction.label]
    elif kind.name == "labels":
        rows = [[name for name, yes in zip(kind.names, row, strict=True) if yes] for row in prediction.label]
        assert [cell or "" for cell in columns["class"]] == ["|".join(row) for row in rows]
    else:
        for name, end in zip(("lower", "upper"), prediction.interval(0.9), strict=True):
            assert_close(numbers(columns[f"{name}_{kind.names[1]}"]), end[:, 1])
    outlying = (prediction.ood_score > outlier_threshold(kind.open(), None)).tolist()
    truth = {"csv": ["true" if flag else "false" for flag in outlying]}
    assert columns["outlying"] == truth.get(ending, outlying)


@pytest.mark.parametrize("kind", NAMES, indirect=True)
def test_arrays_have_the_fields_of_the_prediction(kind, tmp_path):
    """In the library's own layout, for rows and for maps; unusable inputs have NaN and -1."""
    x, _ = draw(kind.name, 60, 5)
    x[3].flat[2] = np.nan
    np.savez(tmp_path / "some.npz", x=x)
    more = ["--probabilities"] if kind.name != "regression" else []
    outcome = run("predict", "posterior", tmp_path / "some.npz", "--output", tmp_path / "out.npz", "--json", *more)
    assert outcome.exit_code == LEFT_OUT, outcome.output
    usable = np.arange(len(x)) != 3
    prediction = kind.open().posterior.predict(torch.from_numpy(x[usable]))
    columns = read(tmp_path / "out.npz")
    fields = OUTPUTS if kind.name != "regression" else [name for name in REGRESSION_OUTPUTS if name != "variance"]
    for name in fields:
        precision = "difference" if name in DIFFERENCES else "float32"
        assert_close(columns[name][usable], getattr(prediction, name), precision, name=name)
        assert np.all(columns[name][3] == -1) if name == "label" else np.isnan(columns[name][3]).all()
    assert columns["classes"].tolist() == list(kind.names)
    assert "NaN or infinite" in str(columns["error"][3])
    summary = json.loads(outcome.stdout)
    assert summary["count"] == usable.sum()
    assert_close(summary["outlying"], (columns["outlying"][usable] == 1).mean())
    of = "std" if kind.name == "regression" else "confidence"
    assert_close(summary[of], getattr(prediction, of).double().mean())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.npz", "out.npz.toml", "some.npz"]


@pytest.mark.usefixtures("_in_workspace")
def test_numbers_are_equal_across_sources_and_batch_sizes(workspace, fitted, tmp_path):
    expected = fitted.posterior.predict(workspace.inputs("test")[0])
    for number, (data, size) in enumerate((("test", 1), ("test.npz", 5), ("test.csv", 7), ("test", 100))):
        opened = replace(fitted, preprocessing=replace(fitted.preprocessing, batch_size=size))
        result = to_predict(opened, data, tmp_path / f"{number}.jsonl", probabilities=True)
        columns = read(tmp_path / f"{number}.jsonl")
        for name in ("confidence", "entropy", "epistemic", "ood_score", "distance"):
            precision = "difference" if name in DIFFERENCES else "float32"
            assert_close(numbers(columns[name]), getattr(expected, name), precision, name=name)
        assert_close(np.stack([numbers(columns[f"prob_{name}"]) for name in fitted.classes], 1), expected.probs)
        assert_close(result["confidence"], expected.confidence.mean())


@pytest.mark.usefixtures("_in_workspace")
@pytest.mark.parametrize("ending", [*ENDINGS, "npz"])
def test_unusable_images_have_a_row_in_their_place(workspace, fitted, tmp_path, ending):
    folder = shutil.copytree(workspace.root / "strange", tmp_path / "images")
    (folder / "00-corrupt.png").write_bytes((folder / "03.png").read_bytes()[:50])
    Image.fromarray(np.zeros((9, 9, 3), dtype=np.uint8)).save(folder / "zz-large.png")
    Image.fromarray(np.zeros((6, 6), dtype=np.uint8)).save(folder / "zz-grey.png")
    opened = replace(
        fitted, preprocessing=replace(fitted.preprocessing, batch_size=1)
    )  # the first batch has no usable input
    rates = {"false_alarm_rate": 0.25, "error_rate": 0.4, "certainty": 0.7, "coverage": 0.8}
    result = to_predict(opened, str(folder), tmp_path / f"out.{ending}", **rates)
    rows = read(tmp_path / f"out.{ending}")
    left_out = result["left_out"][str(folder)]
    assert set(left_out) == {"00-corrupt.png", "zz-large.png"}
    for name, word in (("00-corrupt.png", "cannot be decoded"), ("zz-large.png", "9 x 9 pixels")):
        index = list(rows["name"]).index(name)
        assert index == sorted(path.name for path in folder.iterdir()).index(name)
        assert word in str(rows["error"][index])
        for column in ("label", "answer", "outlying"):
            assert rows[column][index] in (None, -1)
    assert result["count"] == 13
    with pytest.raises(mola.errors.DataError, match="00-corrupt"):
        to_predict(opened, str(folder), tmp_path / f"strict.{ending}", strict=True)
    assert not list(tmp_path.glob("*strict*"))


@pytest.mark.usefixtures("_in_workspace")
@pytest.mark.parametrize("ending", ["csv", "jsonl", "npz"])
def test_decisions_in_rows_are_those_of_the_library(workspace, fitted, tmp_path, ending):
    rates = {"false_alarm_rate": 0.25, "error_rate": 0.4, "certainty": 0.7, "coverage": 0.8}
    result = to_predict(fitted, "test.npz", tmp_path / f"out.{ending}", **rates)
    inputs, labels = workspace.inputs("val")
    known = fitted.posterior.predict(inputs)
    limit = mola.alarm_threshold(known.ood_score, 0.25)
    gated = torch.where(known.ood_score > limit, -math.inf, known.confidence)
    threshold = mola.abstain_threshold(known, labels, 0.4, 0.7, score=gated)
    prediction = fitted.posterior.predict(workspace.inputs("test")[0])
    answers = threshold(prediction.confidence) & (prediction.ood_score <= limit)
    sets = mola.prediction_sets(known, labels, 0.8)(prediction)
    columns = read(tmp_path / f"out.{ending}")
    assert result["answer"] == float(answers.double().mean())
    assert result["set_size"] == pytest.approx(float(sets.sum(1).double().mean()))
    assert result["decisions"]["answer"]["certainty"] == 0.7
    assert " % to answer" in summary_sentence(result)
    names = [[name for name, inside in zip(fitted.classes, row, strict=True) if inside] for row in sets.tolist()]
    expected = {
        "csv": (["true" if answered else "false" for answered in answers], ["|".join(row) or None for row in names]),
        "jsonl": (answers.tolist(), names),
        "npz": (answers.int().tolist(), sets.int().tolist()),
    }[ending]
    assert (list(columns["answer"]), [list(row) if ending == "npz" else row for row in columns["set"]]) == expected


@pytest.mark.parametrize("kind", ["regression"], indirect=True)
def test_intervals_are_those_of_the_library(kind, tmp_path):
    """They contain the targets as often as guaranteed, within the sampling error of calibration and test data."""
    x, y = draw("regression", 2000, 7)
    coverage = 0.9
    np.savez(tmp_path / "more.npz", x=x, y=y)
    run("predict", "posterior", tmp_path / "more.npz", "--output", tmp_path / "out.npz", "--coverage", coverage)
    columns = read(tmp_path / "out.npz")
    posterior = kind.open().posterior
    val, targets = kind.data("val")
    intervals = mola.prediction_intervals(posterior.predict(val), targets, coverage)
    for name, end in zip(("lower", "upper"), intervals(posterior.predict(torch.from_numpy(x))), strict=True):
        assert_close(columns[name], end)
    covered = np.mean((y >= columns["lower"]) & (y <= columns["upper"]), 0)
    error = np.sqrt(coverage * (1 - coverage) * (1 / len(val) + 1 / len(x))) + 1 / len(val)
    assert np.all(np.abs(covered - coverage) < 4 * error)


WRONG_USE = {
    "ending": ("classes", ["--output", "out.xlsx"], ".parquet"),
    "folder as output": ("classes", ["--output", "folder.csv"], "is a folder"),
    "output below a file": ("classes", ["--output", "test.npz/a.csv"], "cannot be written"),
    "output is the data": ("classes", ["--output", "./test.npz"], "is the input file"),
    "certainty alone": ("classes", ["--certainty", "0.9"], "--error-rate"),
    "by class alone": ("classes", ["--by-class"], "--coverage"),
    "too few data": ("classes", ["--coverage", "0.999"], "too few"),
    "rate": ("classes", ["--false-alarm-rate", "5"], "above 0 and below 1"),
    "rate of errors": ("classes", ["--error-rate", "0.0001"], "left out first"),
    "answers of labels": ("labels", ["--error-rate", "0.1"], "bernoulli"),
    "answers of a regression": ("regression", ["--error-rate", "0.1"], "one of several classes"),
    "classes of a regression": ("regression", ["--coverage", "0.9", "--by-class"], "one of several classes"),
    "probabilities of a regression": ("regression", ["--probabilities"], "only to classification"),
    "coverage of maps": ("maps", ["--coverage", "0.9"], "dense outputs"),
    "answers of maps": ("maps", ["--error-rate", "0.1"], "dense outputs"),
    "probabilities of maps": ("maps", ["--probabilities"], "only to .npz"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "case"), [(case[0], name) for name, case in WRONG_USE.items()], ids=WRONG_USE, indirect=["kind"]
)
def test_wrong_use_is_refused_in_words_and_leaves_nothing(kind, case):
    (kind.root / "folder.csv").mkdir(exist_ok=True)
    before = {path: path.stat().st_mtime_ns for path in kind.root.rglob("*") if "__pycache__" not in path.parts}
    outcome = run("predict", "posterior", "test.npz", *WRONG_USE[case][1])
    assert outcome.exit_code == 1, outcome.output
    assert WRONG_USE[case][2] in str(outcome.output)
    after = {path: path.stat().st_mtime_ns for path in kind.root.rglob("*") if "__pycache__" not in path.parts}
    assert after == before


@pytest.mark.usefixtures("_in_workspace")
@pytest.mark.parametrize("ending", ["csv", "npz"])
def test_a_file_appears_when_it_is_complete(workspace, fitted, tmp_path, ending, mola_command):
    with pytest.raises(mola.errors.DataError, match="the disk is gone"):
        to_predict(fitted, f"{workspace.module}:failing", tmp_path / f"out.{ending}")
    assert list(tmp_path.iterdir()) == []
    (workspace.root / "stopping.py").write_text("def batches():\n    raise KeyboardInterrupt\n")
    arguments = ["predict", fitted.folder, "stopping:batches", "--output", tmp_path / f"out.{ending}", "--quiet"]
    code, _, message = mola_command(*arguments)
    assert code == INTERRUPTED
    assert "stopped" in message
    assert list(tmp_path.iterdir()) == []


TERMINATED = """
import os
import signal
from MODULE import batches


def data():
    yield batches("train")[0]
    os.kill(os.getpid(), signal.SIGTERM)
    yield batches("train")[1]
"""


def test_a_process_that_is_terminated_removes_its_unfinished_file(workspace, fitted, tmp_path):
    (workspace.root / "terminated.py").write_text(TERMINATED.replace("MODULE", workspace.module))
    command = [sys.executable, "-m", "molaplace", "predict", fitted.folder, "terminated:data", "--trust"]
    outcome = subprocess.run([*command, "-o", tmp_path / "out.csv"], cwd=workspace.root, check=False)
    assert outcome.returncode == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_in_workspace")
def test_networks_that_take_their_inputs_by_name(workspace, tmp_path):
    data = f"{workspace.module}:mappings"
    run_fit(job_for(workspace, train=data, val=data, link="mc", rule="none"), tmp_path / "posterior")
    opened = open_posterior(tmp_path / "posterior", trust=True)
    to_predict(opened, data, tmp_path / "out.npz", probabilities=True)
    assert_close(read(tmp_path / "out.npz")["probs"], opened.posterior.predict(workspace.inputs("train")[0]).probs)
