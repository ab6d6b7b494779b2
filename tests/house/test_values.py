"""Numbers on the pages: each comes from a record."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from mola.compare.store import Store

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FILLED = [page for page in PAGES if re.search("<!-- (= |table:)", page.read_text(encoding="utf-8"))]
MEASURED = [DOCS / f"{name}.md" for name in ("default", "index", "laplace-torch", "links", "method", "outliers")]
"""Pages on which every decimal and every percentage must come from a record."""


def _module(name, path):
    found = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


VALUES = _module("values_of_docs", DOCS / "values.py")
TABLES = sys.modules["tables"]


def _record(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def _written_by_hand(page: str) -> list[str]:
    """Decimals and percentages without a record; code and formulas are not measurements."""
    page = VALUES.TABLE.sub("", VALUES.VALUE.sub("", page))
    page = re.sub(
        r"<!--.*?-->|^```.*?^```|`[^`]*`|\$\$.*?\$\$|\$[^$\n]*\$|<[^>]*>|\]\([^)]*\)", "", page, flags=re.M | re.S
    )
    return re.findall(r"\d*\.\d+|\d+(?= ?%)", page)


@pytest.mark.parametrize("page", FILLED, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_numbers_are_those_of_the_records(page):
    text = page.read_text(encoding="utf-8")
    assert VALUES.fill(text) == text, f"run: python docs/values.py {page.relative_to(ROOT)}"
    # To Markdown, a comment at the start of a line ends the paragraph.
    assert re.findall(r"^ *<!-- = .*", text, re.M) == []


@pytest.mark.parametrize("page", MEASURED, ids=lambda page: page.name)
def test_no_number_is_written_by_hand(page):
    assert _written_by_hand(page.read_text(encoding="utf-8")) == []


def test_the_table_of_readme_is_that_of_the_record():
    """README is also read as plain text, so its numbers are written without marks."""
    rows = _record("real_cifar10")["rows"]
    shown = {
        "one network (MAP)": "MAP",
        "one network, temperature-scaled": "MAP, temperature",
        "one network, Laplace (LLLA)": "LLLA kron, threshold",
        "deep ensemble": "DE",
        "deep ensemble, temperature-scaled": "DE, temperature",
        "MoLA (default rule)": "MoLA kron, threshold",
        "MoLA, tuned for log loss": "MoLA kron, NLL",
        "MoLA, cooled by distance": "MoLA kron, distance",
    }
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("**", "")
    found = {
        cells[0]: cells[1:]
        for cells in ([cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\|.*\|$", text, re.M))
    }
    for name, row in shown.items():
        one = rows[row]
        percent = [f"{100 * one[field]:.1f}" for field in ("ece", "SVHN auroc", "CIFAR-100 auroc")]
        assert found[name] == [f"{one['nll']:.3f}", *percent]
    scores = [f"{100 * rows['MoLA kron, threshold'][f'{name} auroc, ood_score']:.1f}" for name in ("SVHN", "CIFAR-100")]
    assert found["`ood_score` of any MoLA"] == ["", "", *scores]
    moons = {name: 100 * value for name, value in _record("two_moons")["mean_far_confidence"].items()}
    said = (
        f"one network is {moons['MAP']:.0f} % sure, the ensemble {moons['DE']:.0f} %, MoLA by the paper's rule "
        f"{moons['MoLA']:.0f} %, by distance {moons['MoLA (distance)']:.0f} %"
    )
    assert said in " ".join(text.split())
    far = {name: 100 * values[-1] for name, values in _record("leaving")["mean_confidence"].items()}
    assert (
        "one network stays at {MAP:.0f} %, the ensemble at {DE:.0f} %, MoLA falls to {MoLA:.0f} %".format(**far) in text
    )


def _records(suite):
    return {(one.method, one.run): one for one in Store(ROOT / "results").records(suite) if one.group == "main"}


def _worse(suite, name, metric):
    """Number of runs in which scaling by distance does not lower the loss of the paper's rule."""
    found = _records(suite)
    runs = [run for method, run in found if method == "MoLA"]
    losses = [
        [found[method, run].labelled[name].metrics[metric] for method in ("MoLA (distance)", "MoLA")] for run in runs
    ]
    return sum(ours >= paper for ours, paper in losses)


def test_the_claims_about_cifar10_hold():
    """Sentences of docs/results/cifar10.md that speak of every run."""
    found = _records("cifar10")
    for run in [run for method, run in found if method == "MoLA"]:
        for name in ("svhn", "cifar100"):
            area = {
                method: found[method, run].outliers[name].scores["max probability"]["auroc"]
                for method in ("MoLA", "MAP", "DE", "LLLA", "MAP-T", "DE-T")
            }
            assert max(area, key=area.get) == "MoLA", (run, name)
    assert [_worse("cifar10", f"severity {level}", metric) for level in (3, 4, 5) for metric in ("nll", "ece")] == [
        0
    ] * 6
    assert _worse("cifar10", "test", "nll") == 4


def test_the_claims_about_mnist_hold():
    """Sentences of docs/results/mnist.md about scaling by distance."""
    assert [_worse("mnist", f"rotation {angle}", "nll") for angle in range(45, 136, 15)] == [0] * 7
    assert [_worse("mnist", f"rotation {angle}", "nll") for angle in (15, 30, 180)] == [5] * 3


PAGE = DOCS / "results" / "cifar10.md"


def test_a_number_that_is_written_by_hand_is_noticed():
    page = PAGE.read_text(encoding="utf-8")
    assert _written_by_hand(page + "\nIt is better by 3.1 points, or 12 %.\n") == ["3.1", "12"]
    assert _written_by_hand(page + "\n| `kron` | 0.17 |\n") == ["0.17"]


def test_a_forged_number_is_noticed():
    page = PAGE.read_text(encoding="utf-8")
    in_text, in_table = re.search(r"-->(0\.\d+)<!-- /=", page), re.search(r"^\| MAP \|.*?(\d+\.\d+)", page, re.M)
    for number in (in_text, in_table):
        forged = page[: number.start(1)] + "0.1234" + page[number.end(1) :]
        assert forged != page
        assert VALUES.fill(forged) == page


@pytest.mark.parametrize("ending", ["<!-- /= -->", "<!-- end -->"])
def test_a_place_that_is_not_closed_takes_no_text_with_it(ending):
    page = PAGE.read_text(encoding="utf-8")
    for place in (page.index(ending), page.rindex(ending)):
        with pytest.raises(ValueError, match="is not closed"):
            VALUES.fill(page[:place] + page[place + len(ending) :])


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("<!-- = cifar10 nothing; MoLA; NLL -->?<!-- /= -->", "has no table 'nothing'"),
        ("<!-- = cifar10 in-distribution; MOLA; NLL -->?<!-- /= -->", "MOLA"),
        ("<!-- table: cifar10 in-distribution; MoLA; nil -->\n<!-- end -->", "nil"),
        ("<!-- = benchmarks/results/modes.json; weigths; d -->?<!-- /= -->", "weigths"),
        ("<!-- = benchmarks/results/speed.json; rows; kind=krom; added; .2f -->?<!-- /= -->", "kind=krom"),
    ],
)
def test_a_place_without_a_record_is_an_error(place, message):
    with pytest.raises(KeyError, match=message):
        VALUES.fill(place)


def test_a_missed_bar_is_shown():
    assert TABLES.verdict({"missed": True}, "at most 1.3") == ["at most 1.3", "**missed**"]
    assert TABLES.verdict({"missed": False}, "at most 1.3") == ["at most 1.3", "met"]
