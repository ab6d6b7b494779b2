"""Reports of suites, from a store made by formulas: numbers worked out by hand, every form of a table, pages and figures."""

from __future__ import annotations

import html
import io
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from molaplace.errors import StorageError
from molaplace.report.tables import (
    MISSING,
    as_markdown,
    print_table,
)
from molaplace_lab.__main__ import main
from molaplace_lab.report import paper_numbers
from molaplace_lab.report.figures import suite_figures
from molaplace_lab.report.reading import read_suites
from molaplace_lab.report.tables import suite_tables
from molaplace_lab.report.writing import SuiteReport, suites_page, write_report
from tests.made_up_results import OUTLIERS, QUALITY, SPREAD, make_store, record
from tests.pages import Page

LEVELS = [0.0, 15.0, 30.0, 45.0]
ERROR = float(np.std(SPREAD, ddof=1) / np.sqrt(3))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    directory = tmp_path_factory.mktemp("results")
    make_store(directory, "mnist")
    return directory


@pytest.fixture(scope="module")
def suite(results):
    return read_suites(results)[0]


@pytest.fixture(scope="module")
def written(suite, tmp_path_factory):
    directory = tmp_path_factory.mktemp("report")
    assert write_report([suite], directory) == directory / "index.html"
    return directory


def texts(table):
    return dict(zip(table.texts.index, table.texts.to_numpy().tolist(), strict=True))


# --- tables of a suite ----------------------------------------------------------------------------------------------


def test_outliers_beside_the_paper(suite):
    table = suite_tables(suite)["outliers"]
    rows = texts(table)
    for method, quality in QUALITY.items():
        for index in range(3):
            confidence = 100 * (0.8 - 0.05 * quality + np.mean(SPREAD))
            auroc = 100 * (0.90 + 0.01 * index + 0.005 * quality + np.mean(SPREAD))
            assert rows[method][1 + 2 * index] == f"{confidence:.1f} ± {100 * ERROR:.1f}"
            assert rows[method][2 + 2 * index] == f"{auroc:.1f} ± {100 * ERROR:.1f}"
    paper = paper_numbers.OUTLIERS["mnist"]["MoLA"]
    assert rows["paper: MoLA"] == [mean.text(1) for mean in paper.values()]
    assert sorted(table.best) == [("MoLA", index) for index in range(1, 7)]
    assert list(table.aside) == [f"paper: {name}" for name in paper_numbers.OUTLIERS["mnist"]]
    measured = 100 * (0.8 - 0.05 * 6 + np.mean(SPREAD))
    error = np.hypot(100 * ERROR, paper["FMNIST MMC"].error)
    assert texts(suite_tables(suite)["difference"])["MoLA"][1] == f"{measured - 44.0:.1f} ± {error:.1f}"


def test_in_distribution_and_risk(suite):
    tables = suite_tables(suite)
    inside = tables["in-distribution"].texts.loc["MAP"]
    assert inside["accuracy % ↑"] == "99.00 ± 0.00"
    assert inside["NLL ↓"] == f"{0.1 + np.mean(SPREAD):.4f} ± {ERROR:.4f}"
    # 80 errors of 8000, refused first, are the last 80 predictions.
    least = sum((count - 7920) / count for count in range(7921, 8001)) / 8000
    risk = tables["risk"].texts.loc["MAP"]
    assert risk["excess %", "test ↓"].startswith(f"{100 * (0.001 - least):.3f}")
    assert risk["AURC %, level", "15 ↓"].startswith("0.10")


def test_every_score_of_every_set(suite):
    tables = suite_tables(suite)
    for index, name in enumerate(OUTLIERS):
        rows = texts(tables[f"scores {name}"])
        assert len(rows) == 4 * len(QUALITY)
        auroc = 100 * (0.90 + 0.01 * index + 0.03 + 0.009 + np.mean(SPREAD))
        numbers = [text.split(" ")[0] for text in rows["MoLA, ood score"]]
        assert numbers == [f"{auroc:.1f}", f"{auroc - 1:.1f}", f"{auroc - 2:.1f}", f"{100 - auroc:.1f}"]
    digest = tables["scores"]
    column = [column.name for column in digest.columns].index("DE")
    assert texts(digest)["entropy"][column].startswith(f"{100 * (0.91 + 0.01 + 0.003 + np.mean(SPREAD)):.1f}")
    assert ("ood score", column) in digest.best


def test_near_and_far_outliers_types_and_measures(tmp_path):
    store = make_store(tmp_path, "cifar10", 3, ablations=False)
    for stored in store.records("cifar10"):
        kmnist = stored.outliers["kmnist"]
        outliers = {}
        for index, name in enumerate(("cifar100", "tinyimagenet", "mnist", "svhn")):
            scores = {
                score: {**result, "auroc": result["auroc"] + 0.01 * index, "fpr95_out": 0.1 * index}
                for score, result in kmnist.scores.items()
            }
            outliers[name] = replace(kmnist, scores=scores)
        labelled = {
            name: replace(result, types={kind: {"nll": result.metrics["nll"], "ece": 0.1} for kind in ("a_b", "fog")})
            for name, result in stored.labelled.items()
        }
        measures = {
            "people": {"cross-entropy": 0.3, "divergence": 0.1, "correlation, entropy": 0.5},
            "rejection": {"in-scope accuracy, entropy": 0.9, "out-of-scope recall, entropy": 0.25},
        }
        store.write(replace(stored, outliers=outliers, labelled=labelled, measures=measures))
    tables = suite_tables(read_suites(tmp_path)[0])
    openood = tables["openood"]
    assert {column.group for column in openood.columns} == {"near: cifar100, tinyimagenet", "far: mnist, svhn"}
    rows = texts(openood)
    near = 100 * (0.92 + 0.005 * 6 + np.mean(SPREAD) + 0.005)
    assert rows["MoLA, max probability"][0].startswith(f"{near:.1f}")
    assert rows["MoLA, max probability"][4].startswith(f"{near + 2:.1f}")
    assert (rows["DE, entropy"][1], rows["DE, entropy"][5]) == ("5.0 ± 0.0", "25.0 ± 0.0")
    # Qualities 5 and 6 differ by the same in every run.
    types = texts(tables["types nll"])
    assert list(types) == ["a b", "fog"]
    assert {text for row in types.values() for text in row} == {"0.010 ± 0.000"}
    assert texts(tables["people"])["MoLA"][1:] == ["0.3000 ± 0.0000", "0.1000 ± 0.0000", "50.0 ± 0.0"]
    assert texts(tables["rejection"])["MoLA, entropy"] == ["90.0 ± 0.0", "25.0 ± 0.0"]


def test_cost_and_variants_beside_the_paper(tmp_path, suite):
    rows = texts(suite_tables(suite)["cost"])
    paper = [155.70 / 42.58, 4.04 / 1.17, 58 / 11]
    assert rows["MoLA"] == [f"{number:.2f}" for number in [30, 3, paper[0], 8, 4, paper[1], 6, 6, paper[2]]]
    assert rows["MAP"][:3] == [MISSING] * 3
    make_store(tmp_path, "cifar10", 1)
    variants = texts(suite_tables(read_suites(tmp_path)[0])["variants"])
    assert variants["paper: LLLA kron probit"] == ["-0.159", "-0.427", "-0.704", "-1.066", "-1.283", "-1.448"]
    assert variants["LLLA kron probit"][0] == f"{-(0.1 - 0.01 + SPREAD[0]):.3f}"


def test_one_run_two_methods_and_nothing_else(tmp_path):
    store = make_store(tmp_path, "mine", 1, ablations=False, cost=False)
    for method in set(QUALITY) - {"MAP", "DE"}:
        store.path("mine", method, 0).unlink()
    for method in ("MAP", "DE"):
        stored = store.read("mine", method, 0)
        store.write(replace(stored, outliers={}, examples={}, labelled={"test": stored.labelled["test"]}))
    suite = read_suites(tmp_path, ["mine"])[0]
    assert list(suite_tables(suite)) == ["in-distribution", "risk", "settings"]
    write_report([suite], tmp_path / "report")
    assert "±" not in (tmp_path / "report" / "index.html").read_text()
    assert [path.name for path in (tmp_path / "report" / "figures").glob("*.svg")] == ["mine-reliability.svg"]


def test_unknown_methods_groups_sets_and_scores_appear(tmp_path):
    store = make_store(tmp_path, runs=2, ablations=False)
    for run in range(2):
        unknown = record("mnist", "Dropout <b>", "main", run, 9, LEVELS, components=1)
        kmnist = unknown.outliers["kmnist"]
        strange = replace(kmnist, scores={**kmnist.scores, "typicality": kmnist.scores["entropy"]})
        store.write(replace(unknown, outliers={**unknown.outliers, "cats": strange}))
        store.write(record("mnist", "MoLA cold", "temperatures", run, 3, LEVELS, components=5))
    suite = read_suites(tmp_path)[0]
    tables = suite_tables(suite)
    assert tables["outliers"].texts.index[len(QUALITY)] == "Dropout <b>"
    assert (tables["outliers"].columns[-1].group, texts(tables["outliers"])["MAP"][-1]) == ("cats", MISSING)
    assert "typicality" in texts(tables["scores"])
    assert "ablation temperatures" in tables
    assert "temperatures" in suite_figures(suite)
    page = suites_page([SuiteReport(suite, tables, {})], "")
    assert "Dropout &lt;b&gt;" in page
    assert "Dropout <b>" not in page


# --- forms of a table -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "shows_errors"), [(200, True), (60, False)])
def test_a_terminal_that_is_too_narrow_shows_no_errors(suite, width, shows_errors):
    console = Console(width=width, file=io.StringIO())
    print_table(console, suite_tables(suite)["outliers"])
    text = console.file.getvalue()
    assert ("93.1 ± 0.2" in text, "too narrow" in " ".join(text.split())) == (shows_errors, not shows_errors)
    assert re.search(r"MoLA .* 93\.1 ", text), "a table wider than the terminal is not cropped"


def test_every_form_has_every_cell(suite, written):
    tables = suite_tables(suite)
    markdown = (written / "tables.md").read_text()
    page = (written / "index.html").read_text()
    for table in tables.values():
        assert as_markdown(table) in markdown
        lines = [line for line in as_markdown(table).splitlines() if line.startswith("|")]
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {len(table.columns) + 2}
        for text in table.texts.to_numpy().flat:
            assert html.escape(text) in page
    assert "**93.1 ± 0.2**" in markdown
    assert "*paper: DE*" in markdown


# --- pages and figures ----------------------------------------------------------------------------------------------


def test_the_page_is_well_formed_loads_nothing_and_has_every_figure(written, suite):
    text = (written / "index.html").read_text()
    Page(text)
    assert "prefers-color-scheme: dark" in text
    assert "frost is synthetic &amp; &lt;so&gt; labelled" in text
    names = list(suite_figures(suite))
    assert names == ["histograms", "shift", "reliability", "examples", "variants", "components", "rules"]
    for name in names:
        picture = written / "figures" / f"mnist-{name}"
        assert picture.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        assert ElementTree.fromstring(picture.with_suffix(".svg").read_text()).tag.endswith("svg")
        assert f'id="mnist-{name}"' in text
    svg = (written / "figures" / "mnist-shift.svg").read_text()
    assert all(f">{method}<" in svg for method in QUALITY)


@pytest.mark.usefixtures("_blank_figures")
def test_the_command_prints_and_writes(results, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(
        sys, "argv", ["molaplace_lab", "report", "mnist", "--results", str(results), "--output", str(tmp_path)]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    printed = capsys.readouterr().out
    for words in ("MNIST against outliers", "paper: MoLA", "93.1 ± 0.2", "index.html"):
        assert words in printed
    with pytest.raises(StorageError, match="is a file"):
        write_report(read_suites(results), tmp_path / "index.html")
