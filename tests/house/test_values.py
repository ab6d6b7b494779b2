"""Every measured number on the pages comes from a record."""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
import sys
from pathlib import Path

import pytest

from mola.compare.store import Store

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FILLED = [page for page in PAGES if re.search("<!-- (= |table:)", page.read_text(encoding="utf-8"))]
MEASURED = [
    DOCS / f"{name}.md"
    for name in ("calibrated", "default", "index", "laplace-torch", "links", "method", "outliers", "results/default")
]
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
        r"\A---.*?^---$|<!--.*?-->|^```.*?^```|`[^`]*`|\$\$.*?\$\$|\$[^$\n]*\$|<[^>]*>|\]\([^)]*\)",
        "",
        page,
        flags=re.M | re.S,
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


def test_the_table_of_readme_is_that_of_the_records():
    """README is also read as plain text, so its numbers have no marks."""
    shown = {
        "deep ensemble": "DE",
        "deep ensemble, temperature-scaled": "DE-T",
        "mean of logits, temperature-scaled": "DE-L",
        "MoLA, the paper's rule": "MoLA",
        "MoLA, the default": DEFAULT,
    }
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("**", "")
    found = {
        cells[0]: cells[1:]
        for cells in ([cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\|.*\|$", text, re.M))
    }
    records = _records("cifar10")
    for name, method in shown.items():
        runs = [one for (known, _), one in records.items() if known == method]
        assert len(runs) == 4

        def mean(quantity, runs=runs):
            return sum(quantity(one) for one in runs) / len(runs)

        areas = [mean(lambda one, place=place: _area(one, place)) for place in ("svhn", "cifar100")]
        assert found[name] == [
            f"{mean(lambda one: one.labelled['test'].metrics['nll']):.3f}",
            f"{100 * mean(lambda one: one.labelled['test'].metrics['ece']):.1f}",
            f"{mean(lambda one: one.labelled['severity 5'].metrics['nll']):.2f}",
            *(f"{100 * area:.1f}" for area in areas),
        ]
    moons = {name: 100 * value for name, value in _record("two_moons")["mean_far_confidence"].items()}
    told = (
        f"one network {moons['MAP']:.0f} %, the ensemble {moons['DE']:.0f} %, MoLA by the paper's rule {moons['MoLA']:.0f} %, "
        f"MoLA by the default rule {moons[DEFAULT]:.0f} %"
    )
    assert told in " ".join(text.split())


DEFAULT = "MoLA (calibrated)"


def _area(record, outliers):
    return record.outliers[outliers].scores["max probability"]["auroc"]


@pytest.mark.parametrize("suite", ["mnist", "cifar10", "clinc", "imagenet"])
def test_the_default_is_ahead_of_the_temperature_scaled_ensemble_in_every_run(suite):
    """Claims of docs/default.md about every run; the log loss on test data may tie. ImageNet: no claim under shift."""
    found = _records(suite)
    runs = [run for method, run in found if method == DEFAULT]
    assert len(runs) >= 4
    gaps = []
    for run in runs:
        ours, theirs = found[DEFAULT, run], found["DE-T", run]
        gaps.append(ours.labelled["test"].metrics["nll"] - theirs.labelled["test"].metrics["nll"])
        for name in set(ours.labelled) - {"test"} if suite != "imagenet" else ():
            assert ours.labelled[name].metrics["nll"] < theirs.labelled[name].metrics["nll"], (run, name)
        for name in ours.outliers:
            assert _area(ours, name) > max(_area(theirs, name), _area(found["DE-L", run], name)), (run, name)
    assert statistics.mean(gaps) <= 2 * statistics.stdev(gaps) / len(gaps) ** 0.5


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


def test_a_forged_number_is_noticed():
    page = PAGE.read_text(encoding="utf-8")
    in_text, in_table = re.search(r"-->(0\.\d+)<!-- /=", page), re.search(r"^\| MAP \|.*?(\d+\.\d+)", page, re.M)
    for number in (in_text, in_table):
        forged = page[: number.start(1)] + "0.1234" + page[number.end(1) :]
        assert forged != page
        assert VALUES.fill(forged) == page


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
