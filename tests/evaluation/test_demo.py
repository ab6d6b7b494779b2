"""The demo, run for real at a reduced size: what it finds, and what it leaves on disk."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from molaplace.demo.run import ANGLES, NOISE, PATCHES, DemoSettings, rotated_by, run_demo, write_demo
from tests.cli.fitted_folders import run
from tests.pages import Page

SMALL = DemoSettings(seed=0, members=3, epochs=60, outliers=200)
TINY = DemoSettings(seed=1, members=2, epochs=2, outliers=20)
PAPER = "MoLA (paper)"


@pytest.fixture(scope="module")
def runs():
    """A demo that shows something, and a tiny demo twice."""
    # All here, because only here do they see the same default precision: other tests run in float64.
    return run_demo(SMALL), run_demo(TINY), run_demo(TINY)


@pytest.fixture(scope="module")
def result(runs):
    return runs[0].evaluation


# --- what it finds --------------------------------------------------------------------------------------------------


def labelled(result, name, metric):
    """A metric by method on a set of digits."""
    return {method: result[method, name][metric].value for method in result.methods}


def outliers(result, kind):
    """Mean confidence and AUROC by method."""
    results = {method: record.outliers[kind] for method, record in result.methods.items()}
    areas = {method: on_set.scores["max probability"]["auroc"] for method, on_set in results.items()}
    return {method: on_set.confidence for method, on_set in results.items()}, areas


def test_on_digits_laplace_costs_nothing(result):
    accuracy, nll, ece = (labelled(result, "test", metric) for metric in ("accuracy", "nll", "ece"))
    assert list(accuracy) == ["MoLA", "MAP", "MAP-T", "DE", "DE-T", "DE-L", "LLLA", PAPER]
    assert min(accuracy.values()) > 0.93
    assert accuracy[PAPER] > accuracy["MAP"] - 0.01
    assert nll[PAPER] < nll["MAP"]
    assert nll["MoLA"] < nll["DE-T"] + 0.005
    assert ece[PAPER] < ece["MAP"] + 0.02


@pytest.mark.parametrize("kind", [PATCHES, NOISE])
def test_mola_is_less_sure_of_outliers_and_tells_them_apart_better(result, kind):
    confidence, area = outliers(result, kind)
    assert confidence[PAPER] < confidence["MAP"] - 0.1
    assert area[PAPER] > area["MAP"] + 0.05
    assert confidence["MoLA"] < confidence[PAPER] < confidence["DE-T"]


def test_rotation_hurts_mola_less(result):
    for angle in ANGLES[1:]:
        nll, confidence = (labelled(result, rotated_by(angle), metric) for metric in ("nll", "confidence"))
        assert nll[PAPER] < nll["MAP"]
        assert confidence[PAPER] < confidence["MAP"]
        if angle >= 60:
            assert nll["MoLA"] < nll["DE-T"]
    accuracy = {angle: labelled(result, rotated_by(angle), "accuracy")["MAP"] for angle in ANGLES}
    assert accuracy[45] < accuracy[15] < 0.96


def test_the_same_seed_gives_the_same_numbers(runs):
    _, tiny, again = runs
    assert tiny.evaluation.methods == again.evaluation.methods


# --- what it leaves on disk -----------------------------------------------------------------------------------------


def test_the_page_holds_every_figure_and_loads_nothing(runs, tmp_path):
    assert write_demo(runs[0], tmp_path) == tmp_path / "index.html"
    page = Page((tmp_path / "index.html").read_text(encoding="utf-8"))
    figures = ("reliability", "confidence")
    assert page.tags.count("svg") == len(figures)
    for name in figures:
        assert any(identifier.startswith(f"{name}-") for identifier in page.ids), name
        assert (tmp_path / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "networks").iterdir())) == SMALL.members


@pytest.mark.usefixtures("_blank_figures")
def test_the_command_prints_the_main_numbers_and_writes_the_page(runs, tmp_path, monkeypatch):
    made = {**runs[0].evaluation.made, "by": "molaplace demo --seed 7"}
    evaluation = replace(runs[0].evaluation, made=made)
    monkeypatch.setattr("molaplace.demo.run.run_demo", lambda settings, *_: replace(runs[0], evaluation=evaluation))
    outcome = run("demo", "--seed", "7", "--output", tmp_path / "deep" / "out")
    assert outcome.exit_code == 0, outcome.output
    for accuracy in labelled(evaluation, "test", "accuracy").values():
        assert f"{100 * accuracy:.2f}" in outcome.stdout
    assert "drawing reliability" in outcome.stderr
    stored = json.loads((tmp_path / "deep" / "out" / "numbers.json").read_text(encoding="utf-8"))
    rotated = stored["methods"]["DE-T"]["labelled"][rotated_by(45)]
    assert rotated["metrics"]["nll"] == labelled(evaluation, rotated_by(45), "nll")["DE-T"]
    assert "molaplace demo --seed 7" in (tmp_path / "deep" / "out" / "index.html").read_text(encoding="utf-8")
