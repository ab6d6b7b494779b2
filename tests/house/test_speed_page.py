"""The page of measurements: every table is that of a record, and a missed bar is shown."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE, RESULTS = ROOT / "docs" / "speed.md", ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def measured():
    found = importlib.util.spec_from_file_location("measured_in_docs", ROOT / "docs" / "measured.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_records(measured):
    page = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- measured: ([^>]+?) -->", page)) == set(measured.TABLES)
    assert measured.fill(page, RESULTS) == page, "run: python docs/measured.py"


def test_a_missed_bar_is_shown(measured, tmp_path):
    folder = shutil.copytree(RESULTS, tmp_path / "results")
    row = {
        "setting": "LeNet",
        "work": "fit",
        "kind": "kron",
        "ratio": 1.4,
        "added": 1.31,
        "seconds": 2.0,
        "limit": None,
    }
    for bar, missed, shown in ((1.3, True, "**missed**"), (1.4, False, "met")):
        (folder / "speed.json").write_text(json.dumps({"rows": [row | {"bar": bar, "missed": missed}]}))
        table = measured.overhead(measured.Results(folder))
        assert f"| LeNet | fit | kron | 1.310 | 1.400 | 2.00 s | at most {bar:g} | {shown} |" in table


def test_what_is_missing_is_named(measured, tmp_path):
    for name in measured.TABLES:
        filled = measured.fill(f"<!-- measured: {name} -->\n<!-- end -->", tmp_path)
        assert re.search(r"[Nn]ot measured yet: `python benchmarks/\w+\.py", filled), name
    with pytest.raises(KeyError, match="there is no table 'nothing'"):
        measured.fill("<!-- measured: nothing -->\n<!-- end -->", RESULTS)
