"""The suite of requests in words: from the published file to records and a report, on made-up sentences."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec

import pytest
import torch
from typer.testing import CliRunner

from molaplace.errors import DataError
from molaplace_lab.commands import app
from molaplace_lab.data.clinc150 import WIDTH, embed, load_clinc150
from molaplace_lab.records import Store
from tests.closeness import assert_close

WORDS = ["red", "blue", "east", "west", "pear", "cat", "dog", "sun", "sea", "ice", "ten", "six", "map"]


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)
    if find_spec("wordllama") is None:
        message = "NO WORDLLAMA: nothing here was tried. pip install 'wordllama>=0.4,<0.5'"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)


def requests(count, start=0):
    """Two words are an intent, and the third is chance."""
    pairs = [(first, second) for first in WORDS for second in WORDS if first != second][:150]
    return [
        [f"{first} {second} {WORDS[(start + turn) % len(WORDS)]}", f"{first}_{second}"]
        for turn in range(count)
        for first, second in pairs
    ]


def write_requests(folder):
    strange = [[f"what is the meaning of life {number}", "oos"] for number in range(20)]
    parts = {"train": requests(4), "val": requests(2, 4), "test": requests(2, 6)}
    outside = {"oos_train": strange[:3], "oos_val": strange[3:8], "oos_test": strange[8:]}
    (folder / "clinc150").mkdir(parents=True)
    (folder / "clinc150" / "data_full.json").write_text(json.dumps(parts | outside))
    return folder


@pytest.fixture
def data(tmp_path):
    return write_requests(tmp_path / "data")


@pytest.mark.usefixtures("_blank_figures")
@pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")
def test_from_sentences_to_records_and_a_report(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained = CliRunner().invoke(
        app, ["train", "clinc", "--data", "data", "--networks", "2", "--epochs", "3", "--quiet"]
    )
    assert trained.exit_code == 0, trained.output
    run = ["bench", "clinc", "--data", "data", "--components", "2", "--quiet"]
    done = CliRunner().invoke(app, run)
    assert done.exit_code == 0, done.output
    records = {record.method: record for record in Store("results").records("clinc")}
    assert {"MAP", "DE", "DE-T", "LLLA", "MoLA"} <= set(records)
    for record in records.values():
        assert (record.labelled["test"].count, record.outliers["out of scope"].count) == (300, 12)
        assert set(record.labelled) == {"test"}
        rates = record.measures["rejection"]
        scores = set(record.outliers["out of scope"].scores)
        assert set(rates) == {
            f"{name}, {score}" for name in ("in-scope accuracy", "out-of-scope recall") for score in scores
        }
        assert rates["in-scope accuracy, entropy"] <= record.labelled["test"].metrics["accuracy"]
    outcome = CliRunner().invoke(app, ["report", "clinc", "--output", "report"])
    assert outcome.exit_code == 0, outcome.output
    assert "rejection of out-of-scope requests" in (tmp_path / "report" / "index.html").read_text()


def test_sentences_are_means_of_their_tokens():
    rows = embed(["hello", "world", "hello world", "world hello"])
    assert rows.shape == (4, WIDTH)
    assert_close(rows[2], rows[:2].mean(0))
    assert_close(rows[2], rows[3])
    with pytest.raises(DataError, match="sentence 1 is empty"):
        embed(["hello", ""])


def test_files_that_are_not_there_or_not_whole_are_named(data):
    path = data / "clinc150" / "data_full.json"
    document = json.loads(path.read_text())
    for wrong, words in (
        (document | {"test": [["a b", "unheard_of"]]}, "missing from train: unheard_of"),
        ({name: requests for name, requests in document.items() if name != "oos_val"}, "oos_val"),
        (document | {"train": document["train"][:100]}, "intents"),
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(DataError, match=words):
            load_clinc150(data)
    path.unlink()
    with pytest.raises(DataError, match="Provide:"):
        load_clinc150(data)
