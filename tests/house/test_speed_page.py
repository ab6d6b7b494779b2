"""The page of measurements: every table is what the benchmarks wrote, and what is missed is said."""

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


def test_the_tables_are_those_of_the_measurements(measured):
    page = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- measured: ([^>]+?) -->", page)) == set(measured.TABLES)
    assert measured.fill(page, RESULTS) == page, "run: python docs/measured.py"


def test_a_number_that_was_not_measured_is_noticed(measured):
    page = PAGE.read_text(encoding="utf-8")
    number = re.search(r"\| LeNet / MNIST \| kron \|.*?(\d\.\d\d\d)", page)
    forged = page[: number.start(1)] + "0.999" + page[number.end(1) :]
    assert forged != page
    assert measured.fill(forged, RESULTS) == page


def test_a_bar_that_is_missed_is_said(measured, tmp_path):
    folder = shutil.copytree(RESULTS, tmp_path / "results")
    path = folder / "fit_memory.json"
    document = json.loads(path.read_text())
    row = next(row for row in document["rows"] if row["bar"] is not None)
    row["peak"] = row["bar"] * 2e6
    path.write_text(json.dumps(document))
    text = measured.bars(measured.Results(folder))
    assert re.search(rf"memory of `fit`, {row['structure']}.*{row['bar'] * 2:.1f} MB \| \*\*missed\*\*", text)


def place(name):
    return f"<!-- measured: {name} -->\n<!-- end -->"


def test_what_is_missing_is_named(measured, tmp_path):
    for name in measured.TABLES:
        assert re.search(r"[Nn]ot measured yet: `python benchmarks/\w+\.py`", measured.fill(place(name), tmp_path)), (
            name
        )
    assert measured.bars(measured.Results(tmp_path)).count("**open**") == 6
    with pytest.raises(KeyError, match="there is no table 'nothing'"):
        measured.fill(place("nothing"), RESULTS)
