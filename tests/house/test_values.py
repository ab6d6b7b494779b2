"""Every measured number on the pages comes from a record."""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
from functools import cache
from pathlib import Path

import pytest

from molaplace.report.numbers import BY_CONFIDENCE, Quantity
from molaplace_lab.report.reading import read_suites

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FILLED = [page for page in PAGES if re.search("<!-- (= |table:)", page.read_text(encoding="utf-8"))]
MEASURED = [
    DOCS / f"{name}.md"
    for name in ("calibrated", "default", "index", "laplace-torch", "links", "method", "outliers", "results/default")
]
"""Pages on which every decimal and every percentage must come from a record."""


SPEC = importlib.util.spec_from_file_location("values_of_docs", DOCS / "values.py")
VALUES = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(VALUES)


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


DEFAULT = "MoLA (calibrated)"


@cache
def numbers(suite):
    return read_suites(ROOT / "results", [suite])[0].numbers()


def area(name):
    return Quantity(name, "auroc", BY_CONFIDENCE)


def gaps(suite, quantity, method, other):
    """Differences between two methods by run."""
    estimates = numbers(suite)(quantity)
    return list(estimates[method].minus(estimates[other]).by_run.values())


def test_the_table_of_readme_is_that_of_the_records():
    """README is also read as plain text, so its numbers have no marks."""
    methods = {
        "deep ensemble": "DE",
        "deep ensemble, temperature-scaled": "DE-T",
        "mean of logits, temperature-scaled": "DE-L",
        "MoLA, the paper's rule": "MoLA",
        "MoLA, the default": DEFAULT,
    }
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("**", "")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\|.*\|$", text, re.M)]
    cells_of_row = {cells[0]: cells[1:] for cells in lines}
    columns = [
        (Quantity("test", "nll"), 1, 3),
        (Quantity("test", "ece"), 100, 1),
        (Quantity("severity 5", "nll"), 1, 2),
        (area("svhn"), 100, 1),
        (area("cifar100"), 100, 1),
    ]
    for name, method in methods.items():
        estimates = [(numbers("cifar10")(on, factor)[method], digits) for on, factor, digits in columns]
        assert all(estimate.runs == 4 for estimate, _ in estimates)
        assert cells_of_row[name] == [f"{estimate.value:.{digits}f}" for estimate, digits in estimates]
    record = json.loads((ROOT / "benchmarks" / "results" / "two_moons.json").read_text(encoding="utf-8"))
    moons = {name: 100 * value for name, value in record["mean_far_confidence"].items()}
    sentence = (
        f"one network {moons['MAP']:.0f} %, the ensemble {moons['DE']:.0f} %, MoLA with the paper's rule {moons['MoLA']:.0f} %, "
        f"and MoLA with the default rule {moons[DEFAULT]:.0f} %"
    )
    assert sentence in " ".join(text.split())


@pytest.mark.parametrize("suite", ["mnist", "cifar10", "clinc", "imagenet"])
def test_the_default_is_ahead_of_the_temperature_scaled_ensemble_in_every_run(suite):
    """Claims of docs/default.md about every run; the log loss on test data may tie. ImageNet: no claim under shift."""
    sets = read_suites(ROOT / "results", [suite])[0]
    inside = gaps(suite, Quantity("test", "nll"), DEFAULT, "DE-T")
    assert len(inside) >= 4
    assert statistics.mean(inside) <= 2 * statistics.stdev(inside) / len(inside) ** 0.5
    for shifted in sets.of_role("shift") if suite != "imagenet" else ():
        assert max(gaps(suite, Quantity(shifted.name, "nll"), DEFAULT, "DE-T")) < 0, shifted.name
    for outliers in sets.of_role("outlier"):
        for other in ("DE-T", "DE-L"):
            assert min(gaps(suite, area(outliers.name), DEFAULT, other)) > 0, (outliers.name, other)


def test_the_claims_about_cifar10_and_mnist_hold():
    """Sentences of docs/results about every run; scaling by distance is compared with the paper's rule."""
    for name in ("svhn", "cifar100"):
        for other in ("MAP", "DE", "LLLA", "MAP-T", "DE-T"):
            assert min(gaps("cifar10", area(name), "MoLA", other)) > 0, (name, other)
    distance = ("MoLA (distance)", "MoLA")
    for level in (3, 4, 5):
        for metric in ("nll", "ece"):
            assert max(gaps("cifar10", Quantity(f"severity {level}", metric), *distance)) < 0, (level, metric)
    assert min(gaps("cifar10", Quantity("test", "nll"), *distance)) >= 0
    for angle in range(45, 136, 15):
        assert max(gaps("mnist", Quantity(f"rotation {angle}", "nll"), *distance)) < 0, angle
    for angle in (15, 30, 180):
        assert min(gaps("mnist", Quantity(f"rotation {angle}", "nll"), *distance)) >= 0, angle


PAGE = DOCS / "results" / "cifar10.md"


def test_a_forged_number_is_noticed():
    page = PAGE.read_text(encoding="utf-8")
    in_text = re.search(r"-->(0\.\d+)<!-- /=", page)
    in_table = re.search(r"^\| MAP \|.*?(\d+\.\d+)", page, re.M)
    for number in (in_text, in_table):
        forged = page[: number.start(1)] + "0.1234" + page[number.end(1) :]
        assert forged != page
        assert VALUES.fill(forged) == page


@pytest.mark.parametrize(
    ("comment", "message"),
    [
        ("<!-- = cifar10 nothing; MoLA; NLL -->?<!-- /= -->", "has no table 'nothing'"),
        ("<!-- table: cifar10 in-distribution; MoLA; nil -->\n<!-- end -->", "nil"),
        ("<!-- = benchmarks/results/speed.json; rows; kind=krom; added; .2f -->?<!-- /= -->", "kind=krom"),
    ],
)
def test_a_place_without_a_record_is_an_error(comment, message):
    with pytest.raises(KeyError, match=message):
        VALUES.fill(comment)
