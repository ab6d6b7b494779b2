"""Records and the store: what is written is read again, and what is damaged or cannot be compared is named."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from molaplace.errors import StorageError
from molaplace_lab.__main__ import main
from molaplace_lab.files import write_json
from molaplace_lab.record import Record
from molaplace_lab.report.reading import read_suites
from molaplace_lab.report.tables import suite_tables
from molaplace_lab.report.writing import SuiteReport, suites_page
from tests.made_up_results import QUALITY, make_store


def change(path: Path, **entries):
    """As if the runner had written this."""
    write_json(path, {**json.loads(path.read_text()), **entries})


def damage(path: Path, how: str):
    if how == "cut":
        path.write_text(path.read_text()[:100])
    elif how == "edited":
        path.write_text(path.read_text().replace("1", "2", 1))
    elif how == "unsealed":
        path.write_text(path.read_text().replace('"sha256"', '"sum"'))
    else:
        change(path, version=99)


def test_a_record_survives_the_store(tmp_path):
    store = make_store(tmp_path, runs=2, ablations=False)
    stored = replace(store.read("mnist", "MoLA", 1), measures={"people": {"divergence": 0.25}})
    store.write(stored)
    assert store.read("mnist", "MoLA", 1) == stored
    assert asdict(Record.from_json(json.loads(json.dumps(stored.to_json())))) == asdict(stored)
    assert len(store.records("mnist")) == 2 * len(QUALITY)
    assert store.read("mnist", "MoLA", 2) is None
    store.forget("mnist")
    with pytest.raises(StorageError, match="no results"):
        store.suites()


@pytest.mark.parametrize("how", ["cut", "edited", "unsealed", "version"])
def test_a_damaged_record_is_left_out_and_named(tmp_path, how):
    store = make_store(tmp_path, runs=3, ablations=False)
    whole = read_suites(tmp_path)[0]
    path = store.path("mnist", "DE", 1)
    damage(path, how)
    suite = read_suites(tmp_path)[0]
    assert [one.run for one in suite.runs["DE"]] == [0, 2]
    assert {**suite.runs, "DE": None} == {**whole.runs, "DE": None}
    assert any(str(path) in warning and "left out" in warning for warning in suite.warnings)
    assert "over 2 to 3 runs." in suite_tables(suite)["outliers"].caption
    page = suites_page([SuiteReport(suite, {}, {})], "")
    assert str(path) in page[page.index("Compare with care") :]


def test_only_damaged_records_are_an_error(tmp_path, capsys, monkeypatch):
    store = make_store(tmp_path, runs=1, ablations=False)
    paths = [store.path("mnist", method, 0) for method in QUALITY]
    for path in paths:
        damage(path, "cut")
    with pytest.raises(StorageError, match=f"none of the {len(paths)} records"):
        read_suites(tmp_path)
    output = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["molaplace_lab", "report", "--results", str(tmp_path), "--output", str(output)])
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert str(min(paths)) in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize("name", ["suite.json", "cost.json"])
@pytest.mark.parametrize("how", ["cut", "edited", "unsealed", "version"])
def test_a_damaged_document_is_named(tmp_path, name, how):
    make_store(tmp_path, runs=1, ablations=False)
    path = tmp_path / "mnist" / name
    damage(path, how)
    with pytest.raises(StorageError, match=re.escape(str(path))):
        read_suites(tmp_path)


def test_records_that_cannot_be_compared_are_warned_of(tmp_path):
    store = make_store(tmp_path, runs=2, ablations=False)
    assert read_suites(tmp_path)[0].warnings == ()
    change(store.path("mnist", "DE", 1), data={"test": "other"})
    (warning,) = read_suites(tmp_path)[0].warnings
    assert re.search("Run 1: DE used different data .* 'test'", warning)
