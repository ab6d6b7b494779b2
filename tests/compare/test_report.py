"""Reports of suites, from a store made by formulas: numbers, marks, files, pages, and everything that can be wrong."""

from __future__ import annotations

import io
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import mola.compare.report.rendering as rendering
from mola.__main__ import main
from mola.compare.measured import Lead
from mola.compare.record import ClassResult, Comparison, Record, SetInfo
from mola.compare.report import paper_numbers
from mola.compare.report.confidence_figures import draw_histograms
from mola.compare.report.estimate import Estimate, at_level, ranking, shifted
from mola.compare.report.page import SuiteReport, _prose, evaluation_page, suites_page
from mola.compare.report.reading import read_suites
from mola.compare.report.single_run_tables import evaluation_tables
from mola.compare.report.style import NARROW, WIDE, crossed_strokes, drawing, strokes
from mola.compare.report.suite_tables import suite_tables
from mola.compare.report.tables import (
    MISSING,
    Cell,
    Column,
    Row,
    Table,
    as_latex,
    as_markdown,
    escape_latex,
    fitting,
    for_terminal,
    latex_document,
    make_table,
)
from mola.compare.report.words import suite_findings
from mola.compare.report.writing import suite_figures, write_report
from mola.compare.store import Store
from mola.errors import OptionError, StorageError
from tests.made_up_results import OUTLIERS, QUALITY, SPREAD, make_store, record

LEVELS = [0.0, 15.0, 30.0, 45.0]


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


def quick_page(suite):
    return suites_page([SuiteReport(suite, suite_tables(suite), {})], "made by a test")


def change(path: Path, **entries):
    document = {**json.loads(path.read_text()), **entries}
    document.pop("sha256", None)  # as older versions wrote it: what is inside is looked at
    path.write_text(json.dumps(document))


# --- numbers --------------------------------------------------------------------------------------------------------


def test_an_estimate_is_mean_and_standard_error():
    values = [0.3, 0.9, 0.1, 0.4]
    found = Estimate.of([None, *values])
    assert found.mean == pytest.approx(np.mean(values))
    assert found.error == pytest.approx(np.std(values, ddof=1) / 2)
    assert found.runs == 4
    assert Estimate.of([0.5]) == Estimate(0.5, None, 1)
    assert Estimate.of([None]) is None
    assert found.scaled(-100).error == pytest.approx(100 * found.error)
    assert Estimate(-0.0001, 0.04, 2).text(1) == "0.0 ± 0.0"


def test_the_outlier_table_shows_means_errors_and_the_paper(suite):
    table = suite_tables(suite)["outliers"]
    assert [(column.group, column.name) for column in table.columns] == [
        ("test", "MMC"),
        *[(title, kind) for title in OUTLIERS.values() for kind in ("MMC", "AUROC")],
    ]
    error = 100 * np.std(SPREAD, ddof=1) / np.sqrt(3)
    rows = {row.name: [cell.text for cell in row.cells] for row in table.rows}
    for method, quality in QUALITY.items():
        for place in range(3):
            confidence = 100 * (0.8 - 0.05 * quality + np.mean(SPREAD))
            auroc = 100 * (0.90 + 0.01 * place + 0.005 * quality + np.mean(SPREAD))
            assert rows[method][1 + 2 * place] == f"{confidence:.1f} ± {error:.1f}"
            assert rows[method][2 + 2 * place] == f"{auroc:.1f} ± {error:.1f}"
    assert rows["paper: MoLA"] == [
        "98.3 ± 0.0",
        "44.0 ± 0.5",
        "99.5 ± 0.0",
        "67.4 ± 0.2",
        "95.7 ± 0.1",
        "56.8 ± 0.4",
        "98.5 ± 0.0",
    ]
    assert "LeNet" in table.caption
    assert "paper" in table.caption


def test_the_best_is_bold_and_the_paper_does_not_compete(suite):
    table = suite_tables(suite)["outliers"]
    for row in table.rows:
        bold = [cell.best for cell in row.cells]
        assert bold == [False, *[row.name == "MoLA"] * 6]
        assert row.aside == row.name.startswith("paper: ")


def test_only_a_clear_lead_is_bold():
    values = {
        "a": [Estimate(0.95, 0.001, 4), Estimate(0.95, 0.01, 4), 0.95],
        "b": [Estimate(0.94, 0.002, 4), Estimate(0.94, 0.02, 4), 0.90],
        "c": [Estimate(0.90, None, 1), Estimate(0.94, 0.00, 4), 0.10],
        "d": [None, None, None],
    }
    columns = [Column(name, better="high", digits=2) for name in ("clear", "by chance", "without errors")]
    table = make_table("t", "", columns, values, aside={"e": [Estimate(2.0, None, 1)] * 3})
    assert [[cell.best for cell in row.cells] for row in table.rows] == [[True, False, False], *[[False] * 3] * 4]


def test_the_difference_from_the_paper_has_the_error_of_a_difference(suite):
    table = suite_tables(suite)["difference"]
    rows = {row.name: row.cells for row in table.rows}
    assert set(rows) == {"MAP", "DE", "LLLA", "MoLA"}
    ours = 100 * (0.8 - 0.05 * 6 + np.mean(SPREAD))
    error = np.hypot(100 * np.std(SPREAD, ddof=1) / np.sqrt(3), 0.5)
    assert rows["MoLA"][1].text == f"{ours - 44.0:.1f} ± {error:.1f}"


def test_in_distribution_has_every_metric(suite):
    table = suite_tables(suite)["in-distribution"]
    row = dict(zip([column.name for column in table.columns], table.rows[0].cells, strict=True))
    assert table.rows[0].name == "MAP"
    assert row["accuracy %"].text.startswith("99.00")
    assert row["NLL"].text.startswith(f"{0.1 + np.mean(SPREAD):.4f}")
    assert {"Brier", "ECE % (15 bins)", "ECE % (100)", "ECE % (legacy)"} <= set(row)


def test_every_score_of_every_set(suite):
    tables = suite_tables(suite)
    for place, name in enumerate(OUTLIERS):
        rows = {row.name: [cell.text for cell in row.cells] for row in tables[f"scores {name}"].rows}
        assert len(rows) == 4 * len(QUALITY)
        auroc = 100 * (0.90 + 0.01 * place + 0.03 + 0.009 + np.mean(SPREAD))
        shown = [text.split(" ")[0] for text in rows["MoLA, ood score"]]
        assert shown == [f"{auroc:.1f}", f"{auroc - 1:.1f}", f"{auroc - 2:.1f}", f"{100 - auroc:.1f}"]
    digest = {row.name: row.cells for row in tables["scores"].rows}
    column = [column.name for column in tables["scores"].columns].index("DE")
    assert digest["entropy"][column].text.startswith(f"{100 * (0.91 + 0.01 + 0.003 + np.mean(SPREAD)):.1f}")
    assert digest["ood score"][column].best
    assert not digest["entropy"][column].best


def test_risk_and_coverage_are_told_with_the_excess_over_what_errors_force(suite):
    table = suite_tables(suite)["risk"]
    row = {
        f"{column.group} {column.name}": cell.text
        for column, cell in zip(table.columns, table.rows[0].cells, strict=True)
    }
    assert row["AURC %, level 15"].startswith("0.10")
    # 80 errors of 8000: refused first, they are all among the last 80 predictions.
    least = sum((count - 7920) / count for count in range(7921, 8001)) / 8000
    assert row["excess % test"].startswith(f"{100 * (0.001 - least):.3f}")
    assert list(row)[-1] == "excess % shifted"


BENCHMARK = {"cifar100": "CIFAR-100", "tinyimagenet": "TinyImageNet", "mnist": "MNIST", "svhn": "SVHN"}
TYPES = ("gaussian_noise", "fog")


def openood_store(directory, old=()):
    """CIFAR-10 with four sets of outliers and two types of shift; `old` methods were run before there were so many."""
    store = make_store(directory, "cifar10", 3, ablations=True)
    for one in store.records("cifar10"):
        before = one.method in old or one.group != "main"
        names = ["cifar100", "svhn"] if before else list(BENCHMARK)
        outliers = {}
        for place, name in enumerate(names):
            given = one.outliers["kmnist"]
            scores = {
                score: {**numbers, "auroc": numbers["auroc"] + 0.01 * place}
                | ({} if before else {"fpr95_out": 0.1 * place})
                for score, numbers in given.scores.items()
            }
            outliers[name] = replace(given, scores=scores)
        labelled = {
            name: replace(
                result,
                types={}
                if before or name == "test"
                else {
                    kind: {"nll": result.metrics["nll"] + place, "ece": 0.1, "accuracy": 0.5}
                    for place, kind in enumerate(TYPES)
                },
            )
            for name, result in one.labelled.items()
        }
        data = {name: f"data-{name}" for name in (*labelled, *names)}
        store.write(replace(one, data=data, outliers=outliers, labelled=labelled))
    (document,) = [store.read_document("cifar10", "suite.json")]
    sets = {name: about for name, about in document["sets"].items() if name not in OUTLIERS}
    sets |= {name: {"title": title, "role": "outlier", "count": 1} for name, title in BENCHMARK.items()}
    entries = {name: value for name, value in document.items() if name not in ("format", "version", "sha256")}
    store.write_document("cifar10", "suite.json", {**entries, "sets": sets, "examples": {}})
    return store


def test_near_and_far_outliers_as_openood_has_them(tmp_path):
    openood_store(tmp_path)
    table = suite_tables(read_suites(tmp_path)[0])["openood"]
    groups = [name for name, _ in table.groups]
    assert groups == ["near: CIFAR-100, TinyImageNet", "far: MNIST, SVHN"]
    assert [column.name for column in table.columns] == ["AUROC", "FPR95", "AUPR in", "AUPR out"] * 2
    rows = {row.name: [cell.text for cell in row.cells] for row in table.rows}
    assert len(rows) == 4 * len(QUALITY)
    # The mean over the two sets of a group, of the mean over runs.
    near = 100 * (0.92 + 0.005 * 6 + np.mean(SPREAD) + 0.005)
    assert rows["MoLA, max probability"][0].startswith(f"{near:.1f}")
    assert rows["MoLA, max probability"][4].startswith(f"{near + 2:.1f}")
    assert rows["DE, entropy"][1] == "5.0 ± 0.0"
    assert rows["DE, entropy"][5] == "25.0 ± 0.0"
    for words in (
        "lenet, not ResNet-18",
        "10,000 of TinyImageNet",
        "a list of our own",
        "Textures, Places365 are not here",
    ):
        assert words in table.caption
    assert "outliers where 95 % of the outliers are found" in table.caption


def test_records_made_before_have_empty_cells_and_their_means_are_over_what_all_have(tmp_path):
    openood_store(tmp_path, old=("MIMO", "DE"))
    suite = read_suites(tmp_path)[0]
    tables = suite_tables(suite)
    rows = {row.name: [cell.text for cell in row.cells] for row in tables["openood"].rows}
    assert "DE, entropy" not in rows, "no cell of it is known"
    assert MISSING not in rows["MoLA, entropy"]
    rows = {row.name: [cell.text for cell in row.cells] for row in tables["scores svhn"].rows}
    assert tables["scores svhn"].columns[-1].name == "FPR95 out"
    assert rows["DE, entropy"][-1] == MISSING
    assert MISSING not in rows["DE, entropy"][:-1]
    # The digest compares methods on the same sets, and says which.
    assert "mean over CIFAR-100, SVHN." in tables["scores"].caption
    assert all(cell.text != MISSING for row in tables["scores"].rows for cell in row.cells)
    table = tables["ablation components"]
    assert "Outliers: mean over CIFAR-100, SVHN, told apart" in table.caption
    assert all(cell.text != MISSING for row in table.rows for cell in row.cells)
    assert "not evaluated on mnist, tinyimagenet" in " ".join(suite.warnings)


def test_types_of_shift_are_compared_with_the_papers_rule(tmp_path):
    openood_store(tmp_path)
    suite = read_suites(tmp_path)[0]
    table = suite_tables(suite)["types nll"]
    assert [row.name for row in table.rows] == ["gaussian noise", "fog"]
    assert [column.name for column in table.columns] == ["1", "2", "3", "4", "5"]
    # Qualities 5 and 6 differ by the same in every run.
    assert {cell.text for row in table.rows for cell in row.cells} == {"0.010 ± 0.000"}
    assert "of MoLA (NLL) minus that of MoLA" in table.caption
    assert {cell.text for row in suite_tables(suite)["types ece"].rows for cell in row.cells} == {"0.0 ± 0.0"}
    with drawing():
        for shape in (WIDE, NARROW):
            figure = suite_figures(suite)["types"](shape)
            drawn = [text.get_text() for text in figure.axes[0].texts]
            assert drawn == ["+0.010"] * 10
    store = Store(tmp_path)
    distance = [
        replace(one, method="MoLA (distance)") for one in store.records("cifar10") if one.method == "MoLA (NLL)"
    ]
    for one in distance:
        store.write(one)
    assert "MoLA (distance) minus MoLA" in suite_tables(read_suites(tmp_path)[0])["types nll"].title


def test_the_own_score_of_posteriors_is_named_where_records_name_it(tmp_path, suite):
    assert "The ood score is" not in suite_tables(suite)["scores"].caption
    store = make_store(tmp_path, runs=2, ablations=False)
    for one in store.records("mnist"):
        if one.method in ("LLLA", "MoLA"):
            name = "far-field" if one.method == "LLLA" else "far-field + distance"
            store.write(replace(one, chosen={**one.chosen, "ood_score": name}))
    caption = suite_tables(read_suites(tmp_path)[0])["scores"].caption
    assert caption.endswith("The ood score is: far-field of LLLA; far-field + distance of MoLA.")


def test_without_types_or_a_benchmark_there_is_no_table_of_them(suite):
    assert not {"openood", "types nll", "types ece"} & set(suite_tables(suite))
    assert "types" not in suite_figures(suite)


def test_cost_is_told_relative_to_map_beside_the_paper(suite):
    table = suite_tables(suite)["cost"]
    rows = {row.name: [cell.text for cell in row.cells] for row in table.rows}
    assert list(rows) == ["MAP", "LLLA", "MoLA"]
    paper = [155.70 / 42.58, 4.04 / 1.17, 58 / 11]
    expected = [30, 3, paper[0], 8, 4, paper[1], 6, 6, paper[2]]
    assert rows["MoLA"] == [f"{number:.2f}" for number in expected]
    assert rows["MAP"][:3] == [MISSING] * 3


def test_variants_stand_beside_the_papers_figure(tmp_path):
    make_store(tmp_path, "cifar10", 1)
    suite = read_suites(tmp_path, ["cifar10"])[0]
    table = suite_tables(suite)["variants"]
    rows = {row.name: row for row in table.rows}
    assert [cell.text for cell in rows["paper: LLLA kron probit"].cells] == [
        "-0.159",
        "-0.427",
        "-0.704",
        "-1.066",
        "-1.283",
        "-1.448",
    ]
    assert rows["paper: LLLA kron probit"].aside
    assert rows["LLLA kron probit"].cells[0].text == f"{-(0.1 - 0.01 + SPREAD[0]):.3f}"
    assert "WRN-16-4" in table.caption
    assert "±" not in "".join(cell.text for row in table.rows for cell in row.cells)
    assert "One run" in quick_page(suite)


def test_numbers_of_the_same_level_are_averaged():
    one = record("mnist", "MAP", "main", 0, 0, LEVELS)
    twin = replace(one.labelled["shift 15"], metrics={**one.labelled["shift 15"].metrics, "ece": 0.35})
    both = replace(one, labelled={**one.labelled, "another at 15": twin})
    assert at_level(15.0, "ece")(both).mean == pytest.approx((0.05 + 0.35) / 2)
    assert shifted("ece")(both).mean == pytest.approx(np.mean([(0.05 + 0.35) / 2, 0.08, 0.11]))
    assert at_level(99.0, "ece")(both) is None
    assert shifted("unheard of")(both) is None


def test_a_lead_is_measured_run_by_run():
    values = {"a": [0.9, 0.8, 0.7], "b": [0.8, 0.85, 0.4], "c": [0.1, 0.1, 0.1]}
    methods = {name: Estimate.over(dict(enumerate(found))) for name, found in values.items()}
    found = ranking({name: one.scaled(100) for name, one in methods.items()} | {"d": None}, "high", 2)
    assert (found.best, found.second, found.wins, found.level) == ("a", "b", 2, ())
    gaps = [10, -5, 30]
    assert found.ahead.mean == pytest.approx(np.mean(gaps))
    assert found.ahead.error == pytest.approx(np.std(gaps, ddof=1) / np.sqrt(3))
    lowest = ranking(methods, "low", 2)
    assert (lowest.best, lowest.second, lowest.wins) == ("c", "b", 3)
    level = ranking(methods, "high", 0)
    assert (level.level, level.second) == (("b",), "c")
    assert ranking({"d": None}, "high", 0) is None


def test_the_words_say_who_leads_and_name_what_is_far_from_the_paper(suite):
    told = {finding.title: finding.text for finding in suite_findings(suite)}
    assert "MoLA 93.1 ± 0.2, ahead of MoLA (NLL) by 0.5 ± 0.0 in 3 of 3 runs" in told["Outliers by confidence"]
    assert "MoLA by ood score" in told["Outliers by any score"]
    # Of 4 methods x 3 sets x 2 numbers, by hand: those that lie more than 3 points away.
    far = 0
    for method in ("MAP", "DE", "LLLA", "MoLA"):
        for place, title in enumerate(OUTLIERS.values()):
            ours = (
                100 * (0.8 - 0.05 * QUALITY[method] + np.mean(SPREAD)),
                100 * (0.90 + 0.01 * place + 0.005 * QUALITY[method] + np.mean(SPREAD)),
            )
            theirs = [paper_numbers.OUTLIERS["mnist"][method][f"{title} {kind}"].mean for kind in ("MMC", "AUROC")]
            far += sum(abs(mine - other) > 3 for mine, other in zip(ours, theirs, strict=True))
    assert f"{far} differ by more than 3 points" in told["Beside the paper"]
    assert "Of 24 numbers" in told["Beside the paper"]


# --- formats --------------------------------------------------------------------------------------------------------


def test_rotations_of_a_cross_fit_are_not_told_as_runs_with_networks_of_their_own(suite, tmp_path):
    make_store(tmp_path, runs=3, ablations=False)
    path = tmp_path / "mnist" / "suite.json"
    sets = json.loads(path.read_text())["sets"]
    for name, count in {"test": 2000, "train": 2000, "validation": 1000}.items():
        sets[name] = {"title": name, "role": name, "count": count}
    change(path, sets=sets, experiment={"options": {"cross_fit": True}})
    rotated = read_suites(tmp_path)[0]
    assert {record.overlap for record in rotated.records} == {2 / 3}
    plain, shown = (suite_tables(one)["in-distribution"] for one in (suite, rotated))
    assert "over 3 rotations of a cross-fit, enlarged for the images that rotations share" in shown.caption
    assert "over 3 runs" in plain.caption

    def error(table):
        return next(float(cell.text.split("± ")[1]) for row in table.rows for cell in row.cells if "±" in cell.text)

    # Of the log loss, rounded to four digits.
    assert error(shown) == pytest.approx(error(plain) * 3**0.5, abs=2e-4)
    told = {finding.title: finding.text for finding in suite_findings(rotated)}
    assert "Networks and outliers are the same in all of them" in told["How sure this is"]
    assert "whose networks differ" not in told["How sure this is"]
    assert "of 3 rotations" in told["In distribution"]
    # The records themselves are as they were.
    assert all("overlap" not in record.to_json() for record in rotated.records)
    del sets["train"]["count"]
    change(path, sets=sets)
    with pytest.raises(StorageError, match="expected how many data test, train and validation have"):
        read_suites(tmp_path)


def test_latex_escapes_everything_special():
    assert escape_latex(r"50% & $x_1$ #2 {a} ~^\ |<>") == (
        r"50\% \& \$x\_1\$ \#2 \{a\} \textasciitilde{}\textasciicircum{}\textbackslash{} \textbar{}\textless{}\textgreater{}"
    )
    assert escape_latex("1 ± 2 \N{MULTIPLICATION SIGN} 3° λ") == r"1 $\pm$ 2 $\times$ 3$^\circ$ $\lambda$"


def latex_rows(tabular: str):
    return [line for line in tabular.splitlines() if line.endswith(r"\\") and not line.startswith(r"\caption")]


def columns_of(row: str) -> int:
    cells = re.split(r"(?<!\\)&", row.removesuffix(r"\\"))
    return sum(int(found[1]) if (found := re.search(r"\\multicolumn\{(\d+)\}", cell)) else 1 for cell in cells)


def check_latex(text: str):
    """Every environment is closed, braces and dollars pair up, each row has as many cells as there are columns."""
    assert text.isascii()
    open_environments = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        if kind == "begin":
            open_environments.append(name)
        else:
            assert open_environments.pop() == name
    assert open_environments == []
    plain = re.sub(r"(?<!\\)%.*", "", text)
    bare = re.sub(r"\\[\\{}$%&#_]", "", plain)
    assert bare.count("{") == bare.count("}")
    assert all(line.count("$") % 2 == 0 for line in bare.splitlines())
    assert "_" not in re.sub(r"\\usepackage.*", "", bare)
    assert "#" not in bare
    for layout, body in re.findall(r"\\begin\{(?:tabular|longtable)\}\{(l r*|lr*)\}(.*?)\\end", text, re.S):
        rows = latex_rows(body)
        assert rows
        assert {columns_of(row) for row in rows} == {len(layout)}


def test_latex_is_sound(written, suite):
    text = (written / "tables.tex").read_text()
    check_latex(text)
    tables = suite_tables(suite)
    assert text.count(r"\toprule") == text.count(r"\midrule") - sum(
        any(row.aside for row in table.rows) for table in tables.values()
    )
    assert text.count(r"\begin{tabular}") + text.count(r"\begin{longtable}") == len(tables)
    assert r"\textbf{93.1 $\pm$ 0.2}" in text
    assert r"\textit{paper: MoLA}" in text
    assert text.startswith("%")
    assert r"\usepackage{booktabs" in text


def test_long_and_strange_tables_are_sound_latex_too():
    rows = tuple(Row(f"method_{index} & {{co}}", (Cell("-0.5", index == 3), Cell("a|b"))) for index in range(60))
    table = Table("100% #1", "see $ and _", (Column("x", "g_1", "low"), Column("y", "", "high")), rows)
    text = latex_document([("A & B", [table])])
    check_latex(text)
    assert r"\textbf{$-$0.5}" in text
    assert r"\begin{longtable}{lrr}" in text
    assert as_latex(replace(table, rows=rows[:3])).count(r"\begin{table}") == 1


def test_markdown_rows_have_equal_columns(suite):
    for table in suite_tables(suite).values():
        lines = [line for line in as_markdown(table).splitlines() if line.startswith("|")]
        assert len(lines) == 2 + len(table.rows)
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {len(table.columns) + 2}
    assert "**93.1 ± 0.2**" in as_markdown(suite_tables(suite)["outliers"])
    assert "*paper: DE*" in as_markdown(suite_tables(suite)["outliers"])


@pytest.mark.parametrize("width", [60, 80, 100, 300])
def test_tables_are_parted_to_fit_the_terminal(suite, width):
    for name in ("outliers", "in-distribution", "scores", "cost"):
        table = suite_tables(suite)[name]
        parts = fitting(table, width)
        assert [column for part in parts for column in part.columns] == list(table.columns)
        console = Console(width=width, file=io.StringIO())
        console.print(for_terminal(table))
        shown = console.file.getvalue()
        assert max(map(len, shown.splitlines())) <= width
        assert "…" not in shown
        for row in table.rows:
            for cell in row.cells:
                assert cell.text in shown


def test_captions_count_the_runs_behind_their_table(tmp_path):
    store = make_store(tmp_path, "cifar10", 3)
    sweep = {one.method for one in store.records("cifar10") if one.group == "components"}
    for method in sweep:
        store.path("cifar10", method, 2).unlink()
    store.path("cifar10", "LLLA kron probit", 2).unlink()
    tables = suite_tables(read_suites(tmp_path)[0])
    assert "over 3 runs." in tables["outliers"].caption
    assert "over 2 runs." in tables["ablation components"].caption
    assert "over 2 to 3 runs." in tables["variants"].caption
    assert tables["variants"].caption.startswith("Log-likelihood.")


def test_the_same_network_is_not_told_apart_by_its_spelling(suite):
    for name, same in (("lenet", True), ("Le-Net", True), ("lenet-300", False)):
        told = {finding.title: finding.text for finding in suite_findings(replace(suite, network=name))}[
            "Beside the paper"
        ]
        assert ("(also with LeNet)" in told) == same
        assert (f"LeNet there, {name} here" in told) != same


def test_what_tuning_remarked_of_a_main_method_is_a_finding(suite):
    def noted(*notes):
        records = [
            replace(one, chosen={"notes": [note] if note else []})
            for one, note in zip(suite.runs["LLLA"], notes, strict=True)
        ]
        groups = {**suite.groups, "main": {"LLLA": tuple(records)}}
        return {one.title: one.text for one in suite_findings(replace(suite, groups=groups))}.get("Remarks of tuning")

    assert noted("nothing to add: took 1e+10", "", "nothing to add: took 1e+11") == (
        "LLLA, in 2 of 3 runs (numbers of the first): nothing to add: took 1e+10"
    )
    assert noted("", "", "") is None
    # A search that left its grid and found what it sought is small print.
    assert noted(*["the search reached the end of its grid [1, 2] and went on to [1, 3]."] * 3) is None


# --- files and the page ---------------------------------------------------------------------------------------------


def test_every_figure_is_written_in_every_form(written, suite):
    names = list(suite_figures(suite))
    assert names == ["histograms", "shift", "reliability", "examples", "variants", "components", "rules", "weights"]
    for name in names:
        picture = written / "figures" / f"mnist-{name}"
        assert picture.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        for kind in ("", "-narrow"):
            text = (written / "figures" / f"mnist-{name}{kind}.svg").read_text()
            assert ElementTree.fromstring(text).tag.endswith("svg")
    shown = (written / "figures" / "mnist-shift.svg").read_text()
    assert all(f">{method}<" in shown for method in QUALITY)
    assert shown.count("PolyCollection") >= len(QUALITY)  # bands
    assert "MoLA</text>" in (written / "figures" / "mnist-components.svg").read_text()


class Reader(HTMLParser):
    """Checks that elements are closed in order, and collects ids and attributes."""

    VOID = {"meta", "br", "link", "img", "hr", "input"}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.attributes, self.tags = [], [], [], set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_needs_nothing_else(written):
    text = (written / "index.html").read_text()
    page = Reader()
    page.feed(text)
    page.close()
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert {"script", "link", "img", "iframe", "base"}.isdisjoint(page.tags)
    assert "http" not in text
    assert "@import" not in text
    for name, value in page.attributes:
        if name in ("href", "xlink:href"):
            assert value.startswith(("#", "data:")), value
            assert not value.startswith("#") or value[1:] in page.ids
        assert name not in ("src", "srcset", "onload", "onclick")
    assert not re.search(r"url\((?!#)", text)
    assert "prefers-color-scheme: dark" in text
    assert "scroll sideways" in text
    assert "frost is synthetic &amp; &lt;so&gt; labelled" in text
    assert "MoLA: the grid was long" in text
    assert "torch 2.6" in text
    assert "Compare with care" not in text


@pytest.mark.parametrize(
    ("columns", "kind"),
    [(1, None), (3, "below-700"), (5, "below-900"), (6, "below-1100"), (7, "always"), (20, "always")],
)
def test_broad_tables_hint_at_scrolling_on_screens_that_cut_them(suite, columns, kind):
    cells = tuple(Cell("-0.159 ± 0.002") for _ in range(columns))
    table = Table("t", "", tuple(Column(f"{index}") for index in range(columns)), (Row("LLLA kron probit", cells),))
    page = suites_page([SuiteReport(suite, {**suite_tables(suite), "outliers": table}, {})], "")
    shown = re.search(r'<h3>t</h3>\s*(?:<p class="hint ([^"]*)")?', page)
    assert shown[1] == kind
    assert kind in (None, "always") or f"(max-width: {kind.removeprefix('below-')}px)" in page


@pytest.mark.parametrize("columns", [2, 5, 11])
def test_on_every_page_a_table_scrolls_in_its_own_box_with_a_sign_where_it_is_cut(suite, columns):
    """One template and one style sheet for the demo, evaluations and suites."""
    cells = tuple(Cell("99.12 ± 0.10") for _ in range(columns))
    table = Table("t", "", tuple(Column(f"score {index}") for index in range(columns)), (Row("MAP-T", cells),))
    page = suites_page([SuiteReport(replace(suite, groups={}), {"outliers": table}, {})], "")
    assert page.count("<table>") == len(re.findall(r'<div class="scroll"[^>]*>\s*<table>', page)) == 1
    assert ('<p class="hint' in page) is (columns > 2)
    assert re.search(r"\.scroll \{[^}]*overflow-x: auto;[^}]*local,[^}]*scroll;", page), (
        "shadows where there is more to see"
    )
    phone = page[page.index("@media (max-width: 700px)") :]
    assert ".hint.below-700 { display: block; }" in phone


@pytest.mark.parametrize(
    ("text", "page"),
    [
        ("MAP-T at 72.3 % & <more>", '<span class="unbroken">MAP-T</span> at 72.3\xa0% &amp; &lt;more&gt;'),
        ("93.1 ± 0.2 on CIFAR-10-C", '93.1\xa0±\xa00.2 on <span class="unbroken">CIFAR-10-C</span>'),
        ("log-likelihood, a 5 or %", "log-likelihood, a 5 or %"),
    ],
)
def test_names_and_numbers_in_running_text_are_not_broken_over_lines(text, page):
    assert _prose(text) == page


# --- one run, with errors over its data -----------------------------------------------------------------------------


def one_run() -> Comparison:
    """Three methods on a test set and a set of outliers with hostile names; MoLA leads clearly by log loss and one score."""
    test, outside = "<i>test</i>", "a/<b>&.npz"
    records = []
    for place, method in enumerate(("MAP", "DE", "MoLA")):
        one = record("", method, "main", 0, 2 * place, [0.0])
        errors = dict.fromkeys(("accuracy", "nll", "brier", "ece", "confidence"), 0.003)
        classes = {name: ClassResult(20, 0.9 + place / 100, 0.95) for name in ("cat", "<u>", "dog")}
        found = one.outliers["kmnist"]
        outlier = replace(
            found,
            scores={score: found.scores[score] for score in ("max probability", "entropy")},
            confidence_error=0.01,
            errors={score: {"auroc": 0.004, "fpr95": None} for score in ("max probability", "entropy")},
        )
        labelled = replace(one.labelled["test"], errors=errors, classes=classes)
        records.append(replace(one, labelled={test: labelled}, outliers={outside: outlier}))
    by_method = Lead(("MoLA",), 0.04, (), ("DE",), 0.02, 0.003, (("MoLA",),))
    by_score = Lead(("MoLA", "entropy"), 0.95, (), ("DE", "entropy"), 0.01, 0.002, (("MoLA", "entropy"),))
    chance = replace(by_method, clear=())
    return Comparison(
        title="one",
        sets={
            test: SetInfo(test, test, "test", 8000),
            outside: SetInfo(outside, "<b>&.npz", "outlier", 10000),
        },
        records=tuple(records),
        leads={
            test: {"nll": by_method, "accuracy": chance, "brier": chance, "ece": chance},
            outside: {"confidence": chance, "auroc": by_score, "fpr95": chance, "max probability": chance},
        },
        notes=("<script>alert(1)</script>",),
        made={"components": 5, "rule": "nll", "posterior": "<p>", "seconds": 3.0, "versions": {"mola": "1.0"}},
    )


def test_in_one_run_errors_are_of_the_data_and_bold_is_what_leads_on_them():
    inside, apart, passing = evaluation_tables(one_run())
    rows = {row.name: dict(zip([one.name for one in inside.columns], row.cells, strict=True)) for row in inside.rows}
    assert rows["DE"]["NLL"] == Cell(f"{0.08 + SPREAD[0]:.4f} ± 0.0030")
    assert [(name, column) for name, row in rows.items() for column, cell in row.items() if cell.best] == [
        ("MoLA", "NLL")
    ]
    assert [column.name for column in apart.columns] == ["MMC %", "max prob.", "entropy"]
    bold = [(row.name, place) for row in apart.rows for place, cell in enumerate(row.cells) if cell.best]
    assert bold == [("MoLA", 2)]
    assert apart.rows[0].cells[1].text == f"{100 * (0.92 + SPREAD[0]):.1f} ± 0.4"
    assert passing.rows[0].cells[0].text == f"{100 * (0.08 - SPREAD[0]):.1f}", "no error is known"


def test_the_page_of_one_run_escapes_every_name():
    text = evaluation_page(one_run(), {})
    page = Reader()
    page.feed(text)
    page.close()
    assert page.open == []
    assert {"script", "i", "b", "u"}.isdisjoint(page.tags)
    assert "&lt;i&gt;test&lt;/i&gt;" in text
    assert "Outliers: &lt;b&gt;&amp;.npz" in text
    assert '<th scope="row">&lt;u&gt;</th>' in text
    assert "mola evaluate &lt;p&gt;" in text


# --- figures are kept -------------------------------------------------------------------------------------------------


def test_a_second_report_draws_nothing_and_is_the_same(results, written, monkeypatch):
    before = {path: path.read_bytes() for path in sorted(written.rglob("*.*"))}

    def refuse(*_):
        raise AssertionError("drawn again")

    monkeypatch.setattr(rendering, "render", refuse)
    write_report(read_suites(results, ["mnist", "mnist"]), written)
    assert {path: path.read_bytes() for path in sorted(written.rglob("*.*"))} == before
    changed = replace(read_suites(results)[0], fingerprint="another")
    with pytest.raises(AssertionError, match="drawn again"):
        write_report([changed], written)


def test_a_changed_record_changes_the_fingerprint(tmp_path):
    store = make_store(tmp_path, runs=1, ablations=False)
    before = read_suites(tmp_path)[0].fingerprint
    assert read_suites(tmp_path)[0].fingerprint == before
    change(store.path("mnist", "MAP", 0), seconds={"fit": 3.0})
    assert read_suites(tmp_path)[0].fingerprint != before


def test_a_figure_cut_short_is_drawn_again(written, suite, monkeypatch):
    drawn = []
    real = rendering.render

    def watched(name, make):
        drawn.append(name)
        return real(name, make)

    monkeypatch.setattr(rendering, "render", watched)
    path = written / "figures" / "mnist-rules.svg"
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    write_report([suite], written)
    assert drawn == ["mnist-rules"]
    assert path.read_text() == whole


@pytest.mark.parametrize(("shape", "count"), [(WIDE, 11), (NARROW, 2), (NARROW, 11)])
def test_legends_of_reliability_are_inside_and_apart(suite, shape, count):
    records = suite.runs["MoLA (NLL)"]
    many = {f"MIMO-MoLA {index}": records for index in range(count)}
    with drawing():
        figure = suite_figures(replace(suite, groups={"main": many}))["reliability"](shape)
        figure.draw_without_rendering()
        boxes = [panel.get_legend().get_window_extent() for panel in figure.axes]
        titles = [panel.title.get_window_extent() for panel in figure.axes]
        labels = [panel.xaxis.label.get_window_extent() for panel in figure.axes]
        panels = [panel.get_window_extent() for panel in figure.axes]
    assert len(boxes) == 3
    for place, box in enumerate(boxes):
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert not any(box.overlaps(other) for other in [*titles, *labels, *panels, *boxes[:place]])
    # Room for the legend is not taken from the panels.
    assert min(panel.width for panel in panels) > 0.2 * figure.bbox.width


def test_words_in_histograms_cover_no_bars(suite):
    with drawing():
        figure = draw_histograms(suite, suite.of_role("outlier"), WIDE)
        figure.draw_without_rendering()
        for panel in figure.axes:
            (words,) = panel.texts
            box = words.get_window_extent()
            assert "AUROC" in words.get_text()
            assert not any(box.overlaps(other.get_window_extent()) for other in figure.axes)
            assert not box.overlaps(panel.title.get_window_extent()) or not panel.get_title()


def test_methods_can_be_told_apart_by_their_lines():
    kinds = {f"{one} {two}": (one, two) for one in ("diag", "kron", "full") for two in ("mc", "probit", "bridge")}
    crossed = crossed_strokes(kinds)
    assert len({str(stroke) for stroke in crossed.values()}) == 9
    for method, (one, two) in kinds.items():
        assert crossed[method]["color"] == crossed[f"{one} mc"]["color"]
        assert crossed[method]["linestyle"] == crossed[f"diag {two}"]["linestyle"]
    plain = strokes([*QUALITY, "SWAG", "MultiSWAG", "MIMO", "MIMO-MoLA", "one", "two", "three", "four", "five"])
    assert len({str(stroke) for stroke in plain.values()}) == len(plain)
    many = strokes([f"method {index}" for index in range(40)])
    assert len({str(stroke) for stroke in many.values()}) == 40


# --- what may be missing --------------------------------------------------------------------------------------------


def test_one_run_two_methods_and_nothing_else(tmp_path):
    store = make_store(tmp_path, "mine", 1, ablations=False, cost=False)
    for method in set(QUALITY) - {"MAP", "DE"}:
        store.path("mine", method, 0).unlink()
    for method in ("MAP", "DE"):
        one = store.read("mine", method, 0)
        store.write(replace(one, outliers={}, examples={}, labelled={"test": one.labelled["test"]}))
    suite = read_suites(tmp_path, ["mine"])[0]
    assert list(suite_tables(suite)) == ["in-distribution", "risk", "settings"]
    assert list(suite_figures(suite)) == ["reliability"]
    write_report([suite], tmp_path / "report")
    text = (tmp_path / "report" / "index.html").read_text()
    assert "±" not in text
    assert "no spread is known" in text
    check_latex((tmp_path / "report" / "tables.tex").read_text())


def test_unknown_methods_groups_sets_and_scores_appear(tmp_path):
    store = make_store(tmp_path, runs=2, ablations=False)
    for run in range(2):
        one = record("mnist", "Dropout <b>", "main", run, 9, LEVELS, components=1)
        found = one.outliers["kmnist"]
        strange = replace(found, scores={**found.scores, "typicality": found.scores["entropy"]})
        store.write(replace(one, outliers={**one.outliers, "cats": strange}))
        store.write(record("mnist", "MoLA cold", "temperatures", run, 3, LEVELS, components=5))
    suite = read_suites(tmp_path)[0]
    tables, text = suite_tables(suite), quick_page(suite)
    assert tables["outliers"].rows[len(QUALITY)].name == "Dropout <b>"
    assert tables["outliers"].columns[-1].group == "cats"
    assert tables["outliers"].rows[0].cells[-1].text == MISSING
    assert "typicality" in [row.name for row in tables["scores"].rows]
    assert "ablation temperatures" in tables
    assert "temperatures" in suite_figures(suite)
    assert "Dropout &lt;b&gt;" in text
    assert "Dropout <b>" not in text
    assert "not evaluated on cats" in text


def test_a_metric_that_is_missing_is_a_dash(tmp_path):
    store = make_store(tmp_path, runs=1, ablations=False)
    one = store.read("mnist", "DE", 0)
    test = replace(one.labelled["test"], metrics={"accuracy": 0.5})
    store.write(replace(one, labelled={**one.labelled, "test": test}))
    table = suite_tables(read_suites(tmp_path)[0])["in-distribution"]
    row = next(row for row in table.rows if row.name == "DE")
    assert [cell.text for cell in row.cells] == ["50.00", *[MISSING] * (len(table.columns) - 1)]


# --- what may be wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"data": {"test": "other"}}, "Run 1: DE saw other data than the rest in the set .*test"),
        ({"networks": ["stranger"]}, "Run 1: DE used networks that .* did not"),
        ({"suite": "another"}, "Records of another suite lie in this folder: DE"),
        ({"run": 7}, "has 2 of 3 runs"),
    ],
)
def test_records_that_disagree_are_warned_of(tmp_path, entries, words):
    store = make_store(tmp_path, runs=2, ablations=False)
    assert read_suites(tmp_path)[0].warnings == ()
    change(store.path("mnist", "DE", 1), **entries)
    suite = read_suites(tmp_path)[0]
    assert any(re.search(words, warning) for warning in suite.warnings)
    assert 'class="warning"' in quick_page(suite)


def test_methods_with_weights_of_their_own_are_no_disagreement(tmp_path):
    store = make_store(tmp_path, runs=1, ablations=False)
    store.write(replace(record("mnist", "MultiSWAG", "main", 0, 1, LEVELS, components=5), networks=["own"]))
    assert read_suites(tmp_path)[0].warnings == ()


def broken(path: Path, how: str):
    document = json.loads(path.read_text())
    if how == "cut":
        path.write_text(path.read_text()[:100])
    elif how == "version":
        change(path, version=99)
    elif how == "garbled":
        change(path, labelled={"test": {**document["labelled"]["test"], "count": "many"}})
    elif how == "histogram":
        change(path, labelled={"test": {**document["labelled"]["test"], "histogram": [1, 2]}})
    elif how == "reliability":
        change(path, labelled={"test": {**document["labelled"]["test"], "reliability": [[1.0, 2.0]]}})


BROKEN = pytest.mark.parametrize("how", ["cut", "version", "garbled", "histogram", "reliability"])


def command(monkeypatch, results: Path, output: Path) -> int:
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(sys, "argv", ["mola", "report", "--results", str(results), "--output", str(output)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0


@BROKEN
def test_a_broken_record_is_left_out_and_named(tmp_path, how):
    store = make_store(tmp_path, runs=3, ablations=False)
    whole = read_suites(tmp_path)[0]
    path = store.path("mnist", "DE", 1)
    broken(path, how)
    suite = read_suites(tmp_path)[0]
    assert [one.run for one in suite.runs["DE"]] == [0, 2]
    assert {**suite.runs, "DE": None} == {**whole.runs, "DE": None}
    assert any(str(path) in warning and "Left out" in warning for warning in suite.warnings)
    assert any("DE has 2 of 3 runs" in warning for warning in suite.warnings)
    assert "over 2 to 3 runs." in suite_tables(suite)["outliers"].caption
    page = quick_page(suite)
    assert str(path) in page[page.index("Compare with care") : page.index("<h3>")]


def test_the_command_warns_of_a_broken_record(tmp_path, capsys, monkeypatch):
    blank = "<svg ></svg>\n"  # what figures show is looked at elsewhere
    monkeypatch.setattr(rendering, "render", lambda name, _: rendering.Drawn(name, blank, blank, b""))
    store = make_store(tmp_path, runs=1, ablations=False, cost=False)
    path = store.path("mnist", "DE", 0)
    broken(path, "cut")
    assert command(monkeypatch, tmp_path, tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert str(path) in said[said.index("Compare with care") :]
    assert str(path) in (tmp_path / "out" / "tables.md").read_text()


@BROKEN
def test_nothing_but_broken_records_is_an_error(tmp_path, how, capsys, monkeypatch):
    store = make_store(tmp_path, runs=1, ablations=False)
    paths = [store.path("mnist", method, 0) for method in QUALITY]
    for path in paths:
        broken(path, how)
    with pytest.raises(StorageError, match=f"none of {len(paths)} records can be read"):
        read_suites(tmp_path)
    assert command(monkeypatch, tmp_path, tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert said.startswith("mola: ")
    assert str(min(paths)) in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "entries", "words"),
    [
        ("suite.json", {"sets": 3}, "sets"),
        ("suite.json", {"version": 2}, "version 2"),
        ("suite.json", {"examples": {"test": {"shape": [8, 1, 28, 28], "pixels": "!"}}}, "base64"),
        ("suite.json", {"examples": {"test": {"shape": [8, 1, 28, 28], "pixels": "AAAA"}}}, "3 bytes"),
        ("cost.json", {"rows": [{"method": "MAP"}]}, "fit_seconds"),
    ],
)
def test_a_broken_document_is_named(tmp_path, name, entries, words):
    make_store(tmp_path, runs=1, ablations=False)
    change(tmp_path / "mnist" / name, **entries)
    with pytest.raises(StorageError, match=words) as caught:
        read_suites(tmp_path)
    assert str(tmp_path / "mnist" / name) in str(caught.value)


def test_an_unknown_suite_lists_the_known_ones(results, tmp_path):
    with pytest.raises(OptionError, match=r"'mnist'; got 'mnits'. Did you mean 'mnist'"):
        read_suites(results, ["mnits"])
    with pytest.raises(StorageError, match="holds no results"):
        read_suites(tmp_path)
    make_store(tmp_path, runs=0)
    with pytest.raises(StorageError, match="holds no records yet"):
        read_suites(tmp_path)


def test_an_output_that_cannot_be_written_is_told(suite, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="choose another output folder"):
        write_report([suite], tmp_path / "file")


def test_the_command_prints_and_writes(results, written, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "argv", ["mola", "report", "mnist", "--results", str(results), "--output", str(written)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    shown = capsys.readouterr().out
    assert "MNIST against outliers" in shown
    assert "paper: MoLA" in shown
    assert "93.1 ± 0.2" in shown
    assert "index.html" in shown


def test_a_record_survives_the_store(results, suite):
    stored = suite.runs["MoLA"][1]
    assert asdict(Record.from_json(json.loads(json.dumps(stored.to_json())))) == asdict(stored)
    assert stored.run == 1


def test_a_group_of_columns_that_is_too_wide_is_parted():
    """Numbers of a narrow terminal are never cut off: a group that fits on no line is shown in parts, under its name in each."""
    columns = [
        Column(name, "FPR95 %", digits=2) for name in ("max prob.", "entropy", "energy", "max logit", "ood_score")
    ]
    values = {name: [Estimate(100.0, 0.0, 1)] * 5 for name in ("MAP", "MoLA")}
    console = Console(width=60, file=io.StringIO(), highlight=False)
    console.print(for_terminal(make_table("Outliers that pass", "", columns, values)))
    said = console.file.getvalue()
    assert "\N{HORIZONTAL ELLIPSIS}" not in said
    assert said.count("100.00 \N{PLUS-MINUS SIGN} 0.00") == 10
    assert "(2 of 2)" in said
    assert said.count("FPR95") == 2


def test_commands_in_running_text_are_code():
    assert _prose("`mola predict --coverage 0.9` writes <such>.") == (
        "<code>mola predict --coverage 0.9</code> writes &lt;such&gt;."
    )
