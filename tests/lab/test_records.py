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
from molaplace_lab.files import write_document
from molaplace_lab.records import Record
from molaplace_lab.report.reading import read_suites
from tests.made_up_results import QUALITY, make_store


def change(path: Path, **entries):
    """As if the runner had written this."""
    write_document(path, {**json.loads(path.read_text()), **entries})


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


@pytest.mark.parametrize("name", ["suite.json", "cost.json", "de/run-1.json"])
@pytest.mark.parametrize("how", ["cut", "edited", "unsealed", "version"])
def test_a_damaged_document_is_named(tmp_path, name, how):
    make_store(tmp_path, runs=2, ablations=False)
    path = tmp_path / "mnist" / name
    damage(path, how)
    with pytest.raises(StorageError, match=re.escape(str(path))):
        read_suites(tmp_path)


def test_the_command_reports_a_damaged_record_and_writes_nothing(tmp_path, capsys, monkeypatch):
    path = make_store(tmp_path, runs=1, ablations=False).path("mnist", "DE", 0)
    damage(path, "cut")
    output = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["molaplace_lab", "report", "--results", str(tmp_path), "--output", str(output)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert str(path) in capsys.readouterr().err
    assert not output.exists()
